from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.errors import (
    ConfigurationError,
    ErrorCode,
    HorsiesError,
    MultipleValidationErrors,
    ValidationReport,
)
from horsies.modules import MissingModuleFile
from horsies.retry import RetryPolicy
from horsies.task import TaskDecorator
from horsies.task_result import TaskError, TaskResult
from horsies.tasks import check
from horsies.tasks.check import import_errors, live_errors, policy_errors

BROKER = PostgresConfig(database_url="postgresql://app:hunter2@127.0.0.1:1/shop")


@pytest.fixture
def silent_server() -> Iterator[int]:
    """A port that nothing listens on."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def codes(errors: list[HorsiesError]) -> list[ErrorCode]:
    return [error.code for error in errors]


def errors_of(app: Horsies) -> list[HorsiesError]:
    return policy_errors(app.config, [task.definition for task in app.tasks().values()])


def app_with_task(config: AppConfig | None = None, **options: Any) -> Horsies:
    app = Horsies(config or AppConfig(broker=BROKER))

    decorate: TaskDecorator = app.task("charge", **options)

    @decorate
    def charge() -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    return app


def test_sound_policies_have_no_errors() -> None:
    policy = RetryPolicy.fixed([1, 2], auto_retry_for=["GATEWAY_DOWN"])
    mapper = {ConnectionError: "GATEWAY_DOWN"}
    assert errors_of(app_with_task(retry_policy=policy, exception_mapper=mapper)) == []


def test_a_built_in_code_in_the_mapper_of_the_app_is_refused() -> None:
    config = AppConfig(broker=BROKER, exception_mapper={ValueError: "WORKER_CRASHED"})
    (error,) = errors_of(app_with_task(config))
    assert error.code is ErrorCode.CHECK_RESERVED_CODE_COLLISION
    assert "AppConfig" in error.message
    assert "WORKER_CRASHED" in error.message


def test_built_in_codes_of_a_task_are_refused_at_its_own_line() -> None:
    app = app_with_task(
        exception_mapper={ValueError: "TASK_EXPIRED"},
        default_unhandled_error_code="TASK_CANCELLED",
    )
    errors = errors_of(app)
    assert codes(errors) == [ErrorCode.CHECK_RESERVED_CODE_COLLISION] * 2
    assert all("'charge'" in error.message for error in errors)
    assert {error.location.file for error in errors if error.location} == {__file__}


def test_the_default_code_may_stay_unhandled_exception() -> None:
    assert errors_of(app_with_task(default_unhandled_error_code="UNHANDLED_EXCEPTION")) == []


def test_codes_changed_behind_the_validation_are_found() -> None:
    config = AppConfig(broker=BROKER).model_copy(
        update={"exception_mapper": {ValueError: "no code"}, "default_unhandled_error_code": "x"}
    )
    assert codes(errors_of(app_with_task(config))) == [
        ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER,
        ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER,
    ]


def test_a_retry_policy_copied_into_a_contradiction_is_found() -> None:
    policy = RetryPolicy.fixed([1, 2], auto_retry_for=["GATEWAY_DOWN"])
    app = app_with_task(retry_policy=policy.model_copy(update={"max_retries": 5}))
    (error,) = errors_of(app)
    assert error.code is ErrorCode.TASK_INVALID_OPTIONS
    assert "one interval per retry" in error.message


def failing(error: BaseException | None) -> Any:
    def import_entry(_entry: str) -> None:
        if error is not None:
            raise error

    return import_entry


def test_every_entry_is_tried_and_every_failure_reported() -> None:
    tried = []

    def import_entry(entry: str) -> None:
        tried.append(entry)
        raise {"a": MissingModuleFile("a"), "b": ValueError("b"), "c": SystemExit(0)}[entry]

    errors = import_errors(["a", "b", "c"], import_entry)
    assert tried == ["a", "b", "c"]
    assert codes(errors)[0] is ErrorCode.CLI_INVALID_ARGS
    assert set(codes(errors)[1:]) == {ErrorCode.MODULE_EXEC_ERROR}


def test_an_interrupt_is_not_an_import_error() -> None:
    with pytest.raises(KeyboardInterrupt):
        import_errors(["a"], failing(KeyboardInterrupt()))


def test_one_broken_line_met_through_two_modules_is_reported_once() -> None:
    broken = ConfigurationError("wrong", code=ErrorCode.CONFIG_INVALID_QUEUE_MODE)
    assert import_errors(["a", "b"], failing(broken)) == [broken]


def test_collected_errors_of_a_module_are_reported_one_by_one() -> None:
    report = ValidationReport("AppConfig")
    report.add(ConfigurationError("one", code=ErrorCode.CONFIG_INVALID_QUEUE_MODE))
    report.add(ConfigurationError("two", code=ErrorCode.CONFIG_INVALID_PREFETCH))
    assert import_errors(["a"], failing(MultipleValidationErrors(report))) == report.errors


def test_sends_are_possible_again_after_a_failed_import(
    tmp_path: Path,
) -> None:
    module = tmp_path / "fails_at_import.py"
    module.write_text("raise RuntimeError('no')")
    app = app_with_task()
    app.discover_tasks([str(module)])
    assert codes(app.check()) == [ErrorCode.MODULE_EXEC_ERROR]
    assert not app.are_sends_suppressed()


def test_sends_are_possible_again_when_checks_that_overlapped_are_over() -> None:
    app = app_with_task()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(app.sends_suppressed())
        second.enter_context(app.sends_suppressed())
        first.close()
        assert app.are_sends_suppressed(), "the second is not over"
    assert not app.are_sends_suppressed()


def test_suppressing_sends_during_a_check_outlasts_it() -> None:
    app = app_with_task()
    with app.sends_suppressed():
        app.suppress_sends()
    assert app.are_sends_suppressed()


def test_a_phase_with_errors_ends_the_check(tmp_path: Path) -> None:
    app = app_with_task(exception_mapper={ValueError: "TASK_EXPIRED"})
    assert codes(app.check(live=True)) == [ErrorCode.CHECK_RESERVED_CODE_COLLISION]
    app.discover_tasks([str(tmp_path / "missing.py")])
    assert codes(app.check(live=True)) == [ErrorCode.CLI_INVALID_ARGS]


def test_a_database_that_answers_and_notifies_has_no_errors(broker_config: PostgresConfig) -> None:
    assert live_errors(broker_config) == []


def test_a_database_that_is_down_is_reported_without_its_password(silent_server: int) -> None:
    url = f"postgresql://app:hunter2@127.0.0.1:{silent_server}/shop"
    (error,) = live_errors(PostgresConfig(database_url=url))
    assert error.code is ErrorCode.BROKER_INVALID_URL
    assert "No server listens" in error.message
    assert "hunter2" not in str(error)


def test_a_missing_database_is_named(broker_config: PostgresConfig) -> None:
    url = urlsplit(broker_config.database_url)._replace(path="/not_there").geturl()
    (error,) = live_errors(PostgresConfig(database_url=url))
    assert error.code is ErrorCode.BROKER_INVALID_URL
    assert "does not exist" in error.message


def test_a_session_url_that_does_not_answer_is_named(
    broker_config: PostgresConfig, silent_server: int
) -> None:
    session_url = f"postgresql://app:hunter2@127.0.0.1:{silent_server}/shop"
    config = PostgresConfig(
        database_url=broker_config.database_url, session_database_url=session_url
    )
    (error,) = live_errors(config)
    assert error.code is ErrorCode.BROKER_INVALID_URL
    assert "session_database_url" in error.message
    assert "hunter2" not in str(error)


def test_a_pooler_that_swallows_notifications_is_found_out(
    broker_config: PostgresConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "receives_own_notification", lambda _connect: False)
    (error,) = live_errors(broker_config)
    assert error.code is ErrorCode.BROKER_INVALID_URL
    assert "session_database_url" in (error.help_text or "")


CHARGE = """
from enum import StrEnum

from horsies import Horsies, RetryPolicy, TaskError, TaskResult

app = Horsies("postgresql://nobody@127.0.0.1:1/nothing")
BANK_AWAY = "THE_BANK_IS_AWAY"


class Code(StrEnum):
    SLOW = "BANK_SLOW"


def bank_is_busy() -> TaskError:
    return TaskError(error_code="BANK_BUSY", message="later")


@app.task(
    "charge",
    exception_mapper={ConnectionError: "GATEWAY_DOWN"},
    default_unhandled_error_code="CHARGE_FAILED",
    retry_policy=RetryPolicy.exponential(1, max_retries=2, auto_retry_for=[
        *("GATEWAY_DOWN", "CHARGE_FAILED", "WORKER_CRASHED", "TASK_TIMEOUT"),
        *("BANK_BUSY", BANK_AWAY, Code.SLOW),
        *(OSError, "builtins.OSError", "horsies.errors.RetryLater"),
        *("GATEWY_DOWN", "NEVER_MENTIONED", "TASK_CANCELLED", "STEP_TIMEOUT", "shop.Missing", "away.Missing"),
    ]),
)
def charge() -> TaskResult[int, TaskError]:
    return TaskResult(err=bank_is_busy())
"""


def test_check_warns_of_codes_that_nothing_produces(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(CHARGE)
    command = [sys.executable, "-m", "horsies", "check", "shop:app"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, "ok: all validations passed" in checked.stdout) == (0, True)
    warnings = [line.partition("auto_retry_for lists ")[2] for line in checked.stderr.splitlines()]
    unproduced = "but no exception mapper, default code or function produces it"
    unloaded = "but no loaded module has an exception class of that name"
    assert warnings == [
        f"GATEWY_DOWN, {unproduced}; did you mean GATEWAY_DOWN?",
        f"NEVER_MENTIONED, {unproduced}; correct the code or remove it",
        "TASK_CANCELLED, a built-in code that no failed attempt has; remove it",
        "STEP_TIMEOUT, which only steps have; list it in the policy of the step, ctx.with_options(retry=...)",
        f"shop.Missing, {unloaded}; list the class itself",
        f"away.Missing, {unloaded}; list the class itself",
    ]
    assert f"In task 'charge' ({tmp_path / 'shop.py'}:" in checked.stderr
