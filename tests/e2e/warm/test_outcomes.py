"""Every way a task can end, from the call to the row, the attempt and the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import psycopg
import pytest

from horsies import TaskError, TaskHandle, TaskResult
from horsies.ids import new_id
from horsies.testing.database import empty_tables
from tests.support.database import Database
from tests.support.pooled_workers import pooled
from tests.support.routes import FLEETS
from tests.support.rows import insert_raw
from tests.support.tables import attempts, task
from tests.support.wait import wait_until
from tests.support.workers import Fleet, RunningWorker

CONFIG = {
    "payload": {"warn_bytes": 500, "max_result_bytes": 2_000},
    "recovery": {"unknown_task_grace_ms": 1_000},
}


@pytest.fixture(scope="module", params=["direct", "pgbouncer"])
def outcomes_fleet(
    process_url: str,
    programs: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Fleet]:
    """A worker straight at the database, and one whose turns go through a transaction pooler."""
    with psycopg.connect(process_url, autocommit=True) as connection:
        empty_tables(connection)
    fleet = Fleet(process_url, tmp_path_factory.mktemp("outcomes"))
    if request.param == "direct":
        fleet.start("--log-format", "json", config=CONFIG)
        yield fleet
    else:
        with pooled(process_url) as (pooled_url, broker):
            config = CONFIG | {"broker": broker}
            fleet.start("--log-format", "json", config=config, database_url=pooled_url)
            yield fleet
            fleet.destroy()
    fleet.destroy()
    # Its connection for results would be in the way of tests that count connections.
    programs.app.close()


@pytest.fixture
def connection(process_url: str) -> Iterator[Database]:
    """The tables as they are: emptying them under a working worker can end in a deadlock."""
    with psycopg.connect(process_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def worker(outcomes_fleet: Fleet, request: pytest.FixtureRequest) -> RunningWorker:
    """One worker for all tests of this file; none of them harms it."""
    request.node.stash.setdefault(FLEETS, []).append(outcomes_fleet)
    return outcomes_fleet.workers[0]


def result_of(sent: TaskHandle[Any]) -> TaskResult[Any, TaskError]:
    result = sent.get(timeout_ms=30_000)
    assert result.is_ok() or result.err_value.error_code != "WAIT_TIMEOUT"
    return result


def wait_for_failure(programs: ModuleType, task_id: str) -> TaskError:
    result = programs.app.get_result(task_id, timeout_ms=30_000)
    assert result.is_err()
    return result.err_value  # type: ignore[no-any-return]


def test_a_success_is_stored_with_one_attempt(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.add.send(2, 3).unwrap()
    assert result_of(sent).ok_value == 5
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code, row.failed_reason) == ("COMPLETED", None, None)
    assert (row.retry_count, row.generation) == (0, 1)
    assert row.completed_at is not None
    assert row.failed_at is None
    (attempt,) = attempts(connection, sent.task_id)
    assert (attempt.attempt, attempt.outcome, attempt.will_retry) == (1, "COMPLETED", False)
    assert (attempt.error_code, attempt.error_message, attempt.failed_reason) == (None, None, None)
    assert attempt.worker_pid in worker.family()
    assert attempt.worker_process_name == f"worker-{attempt.worker_pid}"
    assert attempt.worker_id == row.claimed_by_worker_id
    assert attempt.started_at <= attempt.finished_at


def test_a_worker_runs_an_async_task_like_any_other(
    worker: RunningWorker, programs: ModuleType
) -> None:
    assert result_of(programs.add_async.send(2, 3).unwrap()).ok_value == 5
    assert result_of(programs.add_async.send(4, 5).unwrap()).ok_value == 9


def test_a_success_may_have_no_value(worker: RunningWorker, programs: ModuleType) -> None:
    result = result_of(programs.noop.send().unwrap())
    assert result.is_ok()
    assert result.ok is None


def test_models_arrive_and_come_back_as_models(worker: RunningWorker, programs: ModuleType) -> None:
    order = programs.Order(number=1, items=["saddle"])
    packed = result_of(programs.pack.send(order).unwrap()).ok_value
    assert packed == programs.Order(number=2, items=["saddle", "receipt"])


def test_a_task_can_send_another(worker: RunningWorker, programs: ModuleType) -> None:
    task_id = result_of(programs.send_another.send(20, 22).unwrap()).ok_value
    result = programs.app.get_result(task_id, timeout_ms=30_000)
    assert result.ok_value == 42


@pytest.mark.parametrize(
    ("name", "args", "code", "message"),
    [
        ("refuse", (), "OUT_OF_STOCK", "nothing left"),
        ("explode", (), "UNHANDLED_EXCEPTION", "raised ValueError: boom"),
        ("exit_politely", (), "UNHANDLED_EXCEPTION", "raised SystemExit: 5"),
        ("recurse", (), "UNHANDLED_EXCEPTION", "raised RecursionError"),
        ("lose_connection", ("exact",), "GATEWAY_DOWN", "raised ConnectionError: gone"),
        ("lose_connection", ("subclass",), "GATEWAY_DOWN", "raised ConnectionResetError"),
        ("lose_connection", ("other",), "SOMETHING_ELSE", "raised OSError: gone"),
        ("return_nothing", (), "TASK_EXCEPTION", "returned NoneType instead of a TaskResult"),
        ("return_wrong_type", (), "RETURN_TYPE_MISMATCH", "does not fit its annotation"),
        ("return_unstorable", (), "WORKER_SERIALIZATION_ERROR", "cannot be stored"),
        ("make_text", (5_000,), "PAYLOAD_TOO_LARGE", "payload.max_result_bytes=2000"),
    ],
)
def test_a_failure_is_stored_with_its_code_and_one_attempt(
    worker: RunningWorker,
    programs: ModuleType,
    connection: Database,
    name: str,
    args: tuple[Any, ...],
    code: str,
    message: str,
) -> None:
    sent = programs.app.get_task(name).send(*args).unwrap()
    error = result_of(sent).err_value
    assert error.error_code == code
    assert error.message is not None
    assert message in error.message
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code, row.failed_reason) == ("FAILED", code, None)
    assert row.failed_at is not None
    assert row.completed_at is None
    (attempt,) = attempts(connection, sent.task_id)
    assert (attempt.attempt, attempt.outcome, attempt.will_retry) == (1, "FAILED", False)
    assert (attempt.error_code, attempt.error_message) == (code, error.message)
    assert attempt.failed_reason is None


def test_an_error_keeps_the_data_the_task_gave_it(
    worker: RunningWorker, programs: ModuleType
) -> None:
    assert result_of(programs.refuse.send("SOLD_OUT").unwrap()).err_value.data == {"left": 0}


def test_a_message_the_database_cannot_hold_is_escaped(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    task_id = insert_raw(connection, "explode", '["a\\u0000b"]')
    assert wait_for_failure(programs, task_id).error_code is not None
    assert task(connection, task_id).status == "FAILED"


def test_a_large_result_below_the_limit_is_stored_and_warned_about(
    worker: RunningWorker, programs: ModuleType
) -> None:
    assert result_of(programs.make_text.send(1_000).unwrap()).ok_value == "x" * 1_000
    wait_until(lambda: "more than payload.warn_bytes=500" in worker.log())


def test_a_task_the_worker_does_not_know_fails_with_a_resolution_error(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    task_id = insert_raw(connection, "from_another_release", "[]")
    error = wait_for_failure(programs, task_id)
    assert error.error_code == "WORKER_RESOLUTION_ERROR"
    assert "'from_another_release'" in (error.message or "")
    (attempt,) = attempts(connection, task_id)
    assert (attempt.outcome, attempt.error_code) == ("FAILED", "WORKER_RESOLUTION_ERROR")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ("[1, 2", "{}"),
        ('{"not": "a list"}', "{}"),
        ("[1]", "{}"),
        ('["one", "two"]', "{}"),
        ("[1, 2]", '{"c": 3}'),
    ],
)
def test_arguments_that_cannot_be_read_fail_with_a_serialization_error(
    worker: RunningWorker, programs: ModuleType, connection: Database, args: str, kwargs: str
) -> None:
    task_id = insert_raw(connection, "add", args, kwargs)
    error = wait_for_failure(programs, task_id)
    assert error.error_code == "WORKER_SERIALIZATION_ERROR"
    (attempt,) = attempts(connection, task_id)
    assert (attempt.outcome, attempt.error_code) == ("FAILED", "WORKER_SERIALIZATION_ERROR")


@pytest.mark.parametrize(
    ("name", "args", "how"),
    [
        ("exit_at_once", (3,), "exit code 3"),
        ("exit_at_once", (0,), "exit code 0"),
        ("segfault", (), "signal 11 (SIGSEGV)"),
        ("kill_itself", (6,), "signal 6 (SIGABRT)"),
        ("kill_itself", (9,), "signal 9 (SIGKILL)"),
    ],
)
def test_a_process_that_dies_leaves_a_crash_with_its_status(
    worker: RunningWorker,
    programs: ModuleType,
    connection: Database,
    name: str,
    args: tuple[Any, ...],
    how: str,
) -> None:
    sent = programs.app.get_task(name).send(*args).unwrap()
    error = result_of(sent).err_value
    assert error.error_code == "WORKER_CRASHED"
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code) == ("FAILED", "WORKER_CRASHED")
    assert row.failed_reason is not None
    assert how in row.failed_reason
    (attempt,) = attempts(connection, sent.task_id)
    assert (attempt.attempt, attempt.outcome) == (1, "WORKER_FAILURE")
    assert (attempt.error_code, attempt.will_retry) == ("WORKER_CRASHED", False)
    assert attempt.failed_reason == row.failed_reason
    assert result_of(programs.add.send(1, 1).unwrap()).ok_value == 2


def test_a_crash_is_tried_again_when_its_policy_lists_it(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.crash_then_work.send().unwrap()
    assert result_of(sent).ok_value == "done"
    row = task(connection, sent.task_id)
    assert (row.status, row.retry_count, row.generation) == ("COMPLETED", 1, 2)
    assert (row.error_code, row.failed_reason) == (None, None)
    first, second = attempts(connection, sent.task_id)
    assert (first.attempt, first.outcome, first.will_retry) == (1, "WORKER_FAILURE", True)
    assert "exit code 7" in (first.failed_reason or "")
    assert (second.attempt, second.outcome, second.will_retry) == (2, "COMPLETED", False)


def test_a_retried_error_leaves_no_code_on_the_task(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.fail_then_work.send().unwrap()
    wait_until(lambda: task(connection, sent.task_id).retry_count == 1)
    waiting = task(connection, sent.task_id)
    assert (waiting.status, waiting.error_code) == ("PENDING", None)
    assert waiting.claimed_by_worker_id is None
    assert waiting.next_retry_at == waiting.enqueued_at
    assert result_of(sent).ok_value == "done"
    first, second = attempts(connection, sent.task_id)
    assert (first.outcome, first.will_retry, first.error_code) == ("FAILED", True, "FLAKY")
    assert (second.outcome, second.will_retry, second.error_code) == ("COMPLETED", False, None)
    assert task(connection, sent.task_id).next_retry_at is None


def entries(worker: RunningWorker, text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in worker.log().splitlines() if text in line]
    return [entry for entry in found if text in entry["message"]]


def test_log_lines_of_a_task_name_it(worker: RunningWorker, programs: ModuleType) -> None:
    text = new_id()
    sent = programs.log_lines.send(text).unwrap()
    result_of(sent)
    wait_until(lambda: len(entries(worker, text)) == 3, 30, worker.log)
    lines = {entry["message"].split()[0]: entry for entry in entries(worker, text)}
    for first_word in ("plain", "thread"):
        entry = lines[first_word]
        assert (entry["task_id"], entry["task_name"]) == (sent.task_id, "log_lines")
        assert (entry["attempt"], entry["level"]) == (1, "WARNING")
    assert lines["own"]["task_id"] == "my own"


def test_log_lines_of_async_tasks_name_each_its_own(
    worker: RunningWorker, programs: ModuleType
) -> None:
    texts = [new_id() for _ in range(6)]
    sent = {text: programs.log_line_async.send(text).unwrap() for text in texts}
    for text, handle in sent.items():
        result_of(handle)
        (entry,) = wait_until(partial(entries, worker, text))
        assert entry["task_id"] == handle.task_id


def test_every_line_of_a_json_log_is_json(worker: RunningWorker, programs: ModuleType) -> None:
    result_of(programs.explode.send("said so").unwrap())
    wait_until(lambda: entries(worker, "said so"))
    (entry,) = entries(worker, "said so")
    assert "Traceback" in entry["exception"]
    lines = [line for line in worker.log().splitlines() if line.startswith("{")]
    assert all(
        {"time", "level", "logger", "pid", "message"} <= set(json.loads(line)) for line in lines
    )
