"""An application inside a child: one assignment in, one report out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from horsies import (
    AppConfig,
    Batch,
    FernetCodec,
    Horsies,
    PostgresConfig,
    TaskError,
    TaskResult,
)
from horsies.config.app import PayloadConfig
from horsies.error_codes import error_code_text
from horsies.errors import RetryLater
from horsies.worker.child.execute import AppProgram, execute, execute_async, execute_batch
from horsies.worker.pool.events import Reported, Stopped
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.protocol import Assignment, ChildReport
from tests.support.applications import NOWHERE
from tests.support.apps.pool_app import app
from tests.support.pool import BOOT, MakePool, assignment, collect_until, next_event

APP_BOOT = replace(
    BOOT,
    app_locator="tests.support.apps.pool_app:app",
    program="horsies.worker.child.execute:load_program",
)


def run(name: str, *args: Any, kwargs_json: str = "{}") -> ChildReport:
    given = Assignment("task-1", 3, name, 1, json.dumps(args), kwargs_json, None)
    report = execute(app, given)
    assert (report.task_id, report.generation) == ("task-1", 3)
    return report


class BrokenHandler(logging.Handler):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self.error


@pytest.fixture(params=[RuntimeError("the log is full"), SystemExit(5)], ids=["raises", "exits"])
def _broken_log(request: pytest.FixtureRequest) -> Iterator[None]:
    handler = BrokenHandler(request.param)
    logger = logging.getLogger("horsies")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def test_a_result_is_reported_as_stored_text() -> None:
    report = run("add", 1, 2)
    assert report == ChildReport("task-1", 3, True, '{"ok":3}', None, None)
    assert run("add", 4, kwargs_json='{"b": 5}').result_json == '{"ok":9}'


def test_a_warm_up_takes_the_path_of_all_tasks_and_runs_none_of_them() -> None:
    given = Assignment("task-1", 3, "add", 1, "[]", "{}", None)
    report = AppProgram(app).warm_up(given)
    assert report == ChildReport("task-1", 3, True, '{"ok":null}', None, None)


class StockError(TaskError):
    """An error type of an application's own."""

    left: int


def sell_from_stock(kind: str) -> TaskResult[int, StockError]:
    match kind:
        case "raise":
            raise LookupError("no such article")
        case "wrong value":
            return TaskResult(ok=cast(int, "none"))
        case "wrong error":
            return TaskResult(err=cast(StockError, TaskError(error_code="NO_STOCK")))
        case _:
            return TaskResult(err=StockError(error_code="NO_STOCK", left=0))


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("raise", "UNHANDLED_EXCEPTION"),
        ("wrong value", "RETURN_TYPE_MISMATCH"),
        ("wrong error", "RETURN_TYPE_MISMATCH"),
        ("own error", "NO_STOCK"),
    ],
)
def test_a_task_with_an_error_type_of_its_own_reports_what_went_wrong(kind: str, code: str) -> None:
    shop = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/unused")))
    sell = shop.task("sell")(sell_from_stock)
    report = execute(shop, Assignment("task-1", 3, "sell", 1, json.dumps([kind]), "{}", None))
    assert (report.ok, report.error_code) == (False, code)
    direct = sell(kind)
    assert error_code_text(direct.err_value.error_code) == code


class BrokenCodec:
    """A codec whose key service cannot be reached."""

    key_id, key_ids = "r1", ("r1",)

    def encode(self, data: bytes) -> str:
        raise ConnectionError(f"no key service for {data!r}")

    def decode(self, key_id: str, text: str) -> bytes:
        raise ConnectionError("no key service")


@pytest.mark.parametrize("is_async", [False, True], ids=["child", "async child"])
@pytest.mark.parametrize(
    ("args", "code", "was_called"),
    [
        ('["ada"]', "WORKER_SERIALIZATION_ERROR", True),
        ('{"__horsies_encrypted__":"r1:00"}', "PAYLOAD_UNREADABLE", False),
    ],
    ids=["encode", "decode"],
)
def test_a_codec_that_raises_fails_or_holds_the_task_and_the_child_goes_on(
    args: str, code: str, was_called: bool, is_async: bool
) -> None:
    broker = PostgresConfig(database_url=NOWHERE, codec=BrokenCodec())
    shop, called = Horsies(AppConfig(broker=broker)), []

    @shop.task("greet")
    def greet(name: str) -> str:
        called.append(name)
        return f"Hello {name}"

    given = Assignment("task-1", 3, "greet", 1, args, "{}", None)
    report = asyncio.run(execute_async(shop, given)) if is_async else execute(shop, given)
    assert (report.ok, report.error_code, report.was_called) == (False, code, was_called)
    assert called == (["ada"] if was_called else [])
    assert "ada" not in report.result_json
    assert "codec" in str(report.error_message)


@pytest.mark.parametrize("encrypts", [True, False])
def test_why_a_call_does_not_fit_is_stored_only_if_errors_are_readable(
    caplog: pytest.LogCaptureFixture, encrypts: bool
) -> None:
    broker = PostgresConfig(database_url=NOWHERE, codec=BrokenCodec(), encrypt_errors=encrypts)
    shop = Horsies(AppConfig(broker=broker))

    @shop.task("count")
    def count(ages: dict[str, int]) -> None: ...

    report = execute(shop, Assignment("task-1", 3, "count", 1, '[{"ada":"x"}]', "{}", None))
    assert (report.error_code, report.was_called) == ("WORKER_SERIALIZATION_ERROR", False)
    assert ("ada" in f"{report.result_json}{report.error_message}") is not encrypts
    assert ("ages.ada was stored in a form" in caplog.text) is encrypts


@pytest.mark.parametrize("encrypts", [True, False])
def test_an_item_that_does_not_fit_fails_alone_and_its_batch_runs(encrypts: bool) -> None:
    codec = FernetCodec([FernetCodec.new_key()])
    broker = PostgresConfig(database_url=NOWHERE, codec=codec, encrypt_errors=encrypts)
    shop = Horsies(AppConfig(broker=broker))
    called = []

    @shop.task("count", batch=Batch(size=5))
    def count(ages: list[dict[str, int]]) -> list[int]:
        called.append(ages)
        return [sum(one.values()) for one in ages]

    stored = ['[{"ada":1}]', '[{"secret":"x"}]', '[{"eve":2}]']
    reports = execute_batch(
        shop,
        [
            Assignment(f"task-{number}", 3, "count", 1, args, "{}", None)
            for number, args in enumerate(stored)
        ],
    )
    assert called == [[{"ada": 1}, {"eve": 2}]]
    assert [one.task_id for one in reports] == ["task-0", "task-1", "task-2"]
    assert [one.ok for one in reports] == [True, False, True]
    assert [one.was_called for one in reports] == [True, False, True]
    assert ("secret" in f"{reports[1].result_json}{reports[1].error_message}") is not encrypts
    assert not {'{"ok":1}', '{"ok":2}'} & {one.result_json for one in reports}


def test_an_async_task_runs_like_any_other() -> None:
    assert run("add_later", 1, 2).result_json == '{"ok":3}'
    assert run("add_later", 3, 4).result_json == '{"ok":7}'


def test_an_error_result_carries_its_code_and_message() -> None:
    report = run("refuse")
    assert not report.ok
    assert (report.error_code, report.error_message) == ("NO_STOCK", "nothing left")
    assert json.loads(report.result_json)["err"]["error_code"] == "NO_STOCK"


class GatewayBusy(RetryLater):
    pass


FAILURES: dict[str, Callable[[], TaskResult[int, TaskError]]] = {
    "raised": lambda: _raise(ConnectionResetError("the cable")),
    "returned": lambda: TaskResult(
        err=TaskError(error_code="AWAY", exception=ConnectionResetError("the cable"))
    ),
    "too large": lambda: _raise(ConnectionResetError("x" * 5_000)),
    "later": lambda: _raise(RetryLater(1.5, "busy")),
    "later and too large": lambda: _raise(RetryLater(1.5, "x" * 5_000)),
    "mapped": lambda: _raise(GatewayBusy(2)),
    "without seconds": lambda: _raise(RetryLater.__new__(RetryLater)),
    "only a code": lambda: TaskResult(err=TaskError(error_code="AWAY", message="gone")),
}


def _raise(error: BaseException) -> TaskResult[int, TaskError]:
    raise error


@pytest.mark.parametrize(
    ("failure", "code", "nearest", "retry_after"),
    [
        ("raised", "OOPS", "builtins.ConnectionResetError", None),
        ("returned", "AWAY", "builtins.ConnectionResetError", None),
        ("too large", "OOPS", "builtins.ConnectionResetError", None),
        ("later", "RETRY_LATER", "horsies.errors.RetryLater", 1.5),
        ("later and too large", "RETRY_LATER", "horsies.errors.RetryLater", 1.5),
        ("mapped", "BUSY", f"{__name__}.GatewayBusy", 2.0),
        ("without seconds", "TASK_EXCEPTION", "builtins.AttributeError", None),
        ("only a code", "AWAY", None, None),
    ],
)
def test_a_failure_is_reported_with_the_facts_that_decide_about_a_retry(
    failure: str,
    code: str,
    nearest: str | None,
    retry_after: float | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop = Horsies(
        AppConfig(
            broker=PostgresConfig(database_url="postgresql://localhost/unused"),
            payload=PayloadConfig(warn_bytes=4_000, reject_bytes=4_000),
            exception_mapper={GatewayBusy: "BUSY"},
            default_unhandled_error_code="OOPS",
        )
    )

    @shop.task("fail")
    def fail() -> TaskResult[int, TaskError]:
        return FAILURES[failure]()

    with caplog.at_level(logging.INFO, "horsies"):
        report = execute(shop, Assignment("task-1", 3, "fail", 1, "[]", "{}", None))
    assert (report.ok, report.error_code, report.retry_after) == (False, code, retry_after)
    names = report.exception_names
    assert names[:1] == (() if nearest is None else (nearest,))
    assert ("builtins.BaseException" in names) is (nearest is not None)
    assert "builtins.object" not in names
    if retry_after is not None and "large" not in failure:
        assert [(one.levelname, one.exc_info) for one in caplog.records] == [("INFO", None)]


@pytest.mark.parametrize("name", ["fail", "leave", "recurse", "interrupt"])
def test_what_a_task_raises_is_its_failure(name: str) -> None:
    report = run(name)
    assert not report.ok
    assert report.error_code == "UNHANDLED_EXCEPTION"
    assert json.loads(report.result_json)["err"]["message"]


def test_a_task_nobody_registered_is_a_resolution_error() -> None:
    report = run("unheard_of")
    assert report.error_code == "WORKER_RESOLUTION_ERROR"
    assert "unheard_of" in (report.error_message or "")


@pytest.mark.parametrize("args", [("one", 2), (), (1, 2, 3)])
def test_stored_arguments_that_do_not_fit_are_a_serialization_error(args: tuple[Any, ...]) -> None:
    report = run("add", *args)
    assert not report.ok
    assert report.error_code == "WORKER_SERIALIZATION_ERROR"


def test_a_result_that_is_too_large_is_refused_with_the_limit() -> None:
    assert run("return_text", 900).ok
    report = run("return_text", 1000)
    assert report.error_code == "PAYLOAD_TOO_LARGE"
    assert "payload.max_result_bytes=1000" in (report.error_message or "")


def test_an_error_that_is_too_large_keeps_its_code() -> None:
    report = run("fail_at_length", 2000)
    assert report.error_code == "TOO_MUCH"
    assert "payload.max_result_bytes=1000" in report.result_json
    assert (report.error_message or "").startswith("xxx")


def test_a_result_that_cannot_be_stored_is_an_error() -> None:
    assert not run("return_strange_value").ok


@pytest.mark.usefixtures("_broken_log")
def test_a_log_that_cannot_be_written_changes_no_outcome() -> None:
    assert run("fail").error_code == "UNHANDLED_EXCEPTION"
    assert run("add", "one").error_code == "WORKER_SERIALIZATION_ERROR"
    assert run("return_text", 900).ok


def test_what_fails_around_the_task_is_reported_with_the_place() -> None:
    report = run("take_exiting", {"number": 1})
    assert not report.ok
    assert report.error_code == "TASK_EXCEPTION"
    assert "'take_exiting'" in (report.error_message or "")
    assert "SystemExit: 4" in (report.error_message or "")


def test_a_coroutine_that_stopped_its_loop_does_not_go_on_in_the_next(tmp_path: Path) -> None:
    report = run("stop_loop", str(tmp_path / "went on"))
    assert report.error_code == "UNHANDLED_EXCEPTION"
    assert run("add_later", 1, 2).ok
    assert not (tmp_path / "went on").exists()


@pytest.mark.parametrize("method", list(StartMethod))
def test_a_child_loads_the_application_and_executes_its_tasks(
    make_pool: MakePool, method: StartMethod
) -> None:
    pool = make_pool(1, boot=APP_BOOT, start_method=method)
    pool.dispatch(assignment("describe_child"))
    event = next_event(pool)
    assert isinstance(event, Reported)
    assert json.loads(event.report.result_json) == {
        "ok": ["current", "sending", "child", "1", "note_start"]
    }


def test_a_report_with_half_a_character_arrives(make_pool: MakePool) -> None:
    pool = make_pool(1, boot=APP_BOOT)
    pool.dispatch(assignment("fail_strangely"))
    event = next_event(pool)
    assert isinstance(event, Reported)
    assert event.report.error_code == "UNHANDLED_EXCEPTION"
    assert "half a character" in (event.report.error_message or "")


def test_a_child_without_standard_error_tells_the_outcome_and_lives_on(make_pool: MakePool) -> None:
    pool = make_pool(1, boot=APP_BOOT, start_method=StartMethod.SPAWN)
    pid = pool.dispatch(assignment("close_stderr"))
    first = next_event(pool)
    assert isinstance(first, Reported)
    assert (first.pid, first.report.error_code) == (pid, "MINE")
    assert pool.dispatch(assignment("add", 1, 2)) == pid
    second = next_event(pool)
    assert isinstance(second, Reported)
    assert second.report.ok


def test_an_alarm_left_behind_does_not_ring_while_the_result_is_stored(make_pool: MakePool) -> None:
    pool = make_pool(1, boot=APP_BOOT)
    pool.dispatch(assignment("leave_alarm"))
    event = next_event(pool)
    assert isinstance(event, Reported)
    assert json.loads(event.report.result_json) == {"ok": {"number": 1}}


@pytest.mark.parametrize(
    "name",
    [
        "wait",
        "wait_async",
        "wait_and_wrap",
        "wait_for_group",
        "wait_beside_background",
        "wait_beside_callbacks",
        "block_in_coroutine",
    ],
)
def test_a_running_task_of_an_application_can_be_stopped(
    make_pool: MakePool, tmp_path: Path, name: str
) -> None:
    pool = make_pool(1, boot=APP_BOOT)
    given = assignment(name, str(tmp_path / "started"))
    pid = pool.dispatch(given)
    collect_until(pool, (tmp_path / "started").exists)
    pool.stop_task(given.task_id, "cancelled")
    assert next_event(pool) == Stopped(given, pid, forced=False, reason="cancelled")


@pytest.mark.parametrize(
    "name", ["wait_beside_background", "wait_beside_callbacks", "block_in_coroutine"]
)
def test_a_stopped_coroutine_cleans_up_whatever_the_loop_was_doing(
    make_pool: MakePool, tmp_path: Path, name: str
) -> None:
    pool = make_pool(1, boot=APP_BOOT)
    given = assignment(name, str(tmp_path / "started"))
    pool.dispatch(given)
    collect_until(pool, (tmp_path / "started").exists)
    pool.stop_task(given.task_id, "cancelled")
    assert isinstance(next_event(pool), Stopped)
    assert (tmp_path / "started.cleaned").exists()


def test_a_task_that_still_returns_a_result_when_it_is_stopped_has_finished(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1, boot=APP_BOOT)
    given = assignment("finish_when_stopped", str(tmp_path / "started"))
    pool.dispatch(given)
    collect_until(pool, (tmp_path / "started").exists)
    pool.stop_task(given.task_id, "cancelled")
    event = next_event(pool)
    assert isinstance(event, Reported)
    assert json.loads(event.report.result_json) == {"ok": "as far as it came"}


@pytest.mark.parametrize(
    ("data", "stored"),
    [((1, 2), '"data":[1,2]'), ({1}, "err.data is of type set and would come back as list")],
)
def test_the_code_of_an_error_outlives_data_that_cannot_be_stored(data: Any, stored: str) -> None:
    app = Horsies(NOWHERE)

    @app.task("pay")
    def pay() -> TaskResult[None, TaskError]:
        return TaskResult(err=TaskError(error_code="NO_MONEY", message="empty", data=data))

    report = execute(app, Assignment("id", 1, "pay", 1, "[]", "{}", None))
    assert (report.error_code, report.error_message) == ("NO_MONEY", "empty")
    assert stored in report.result_json


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (PayloadConfig(), None),
        (PayloadConfig(warn_bytes=10, reject_bytes=10), None),
        (PayloadConfig(max_result_bytes=1_000_000), "PAYLOAD_TOO_LARGE"),
    ],
    ids=["default", "limited sends", "limited results"],
)
def test_a_large_result_is_kept_unless_results_have_a_limit(
    limits: PayloadConfig, code: str | None
) -> None:
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=NOWHERE), payload=limits))

    @app.task("export")
    def export(size: int) -> TaskResult[str, TaskError]:
        return TaskResult(ok="x" * size)

    size = 17_000_000
    report = execute(app, Assignment("task-1", 1, "export", 1, json.dumps([size]), "{}", None))
    assert report.error_code == code
    assert report.ok is (code is None)
    assert (len(report.result_json) > size) is (code is None)


RUN_WRONG: dict[str, tuple[str, str]] = {
    "plain value for a TaskResult": (
        "def run() -> TaskResult[int, TaskError]:\n    return 3\n",
        "returned int instead of a TaskResult; return TaskResult(ok=...) or TaskResult(err=...).",
    ),
    "value of another type": (
        "def run() -> int:\n    return 'x'\n",
        "returned a value of type str, but is annotated int",
    ),
    "text for an error": (
        "def run() -> TaskResult[int, TaskError]:\n    return TaskResult(err='text')\n",
        "err must be TaskError",
    ),
    "exception": ("def run() -> int:\n    raise ValueError('no stock')\n", "ValueError: no stock"),
    "exit": ("def run() -> int:\n    raise SystemExit(3)\n", "SystemExit: 3"),
    "parameter added while calls wait": (
        "def run(a: int) -> int:\n    return a\n",
        "keep its old parameters and give new ones a default while calls are pending",
    ),
}


@pytest.mark.parametrize("mistake", RUN_WRONG)
def test_a_mistake_in_a_running_task_is_its_error(mistake: str) -> None:
    body, answer = RUN_WRONG[mistake]
    names: dict[str, Any] = {}
    exec("from horsies import *\n" + body, names)
    app = Horsies("postgresql://localhost/unused")
    app.task("run")(names["run"])
    report = execute(app, Assignment("task-1", 1, "run", 1, "[]", "{}", None))
    assert not report.ok
    assert answer in f"{report.error_message} {json.loads(report.result_json)}"
