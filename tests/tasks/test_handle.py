"""Reading results: the result of a handle for each kind of row."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from pydantic import BaseModel

from horsies import Horsies, RetrievalCode, TaskError, TaskResult
from horsies.codec.results import encode_task_error
from horsies.db.statements.tasks import OutcomeRow
from horsies.error_codes import ContractCode, OperationalErrorCode, OutcomeCode
from horsies.errors import ResultUnavailable, TaskWatchFailed
from horsies.ids import new_id
from horsies.tasks.handle import TaskHandle, result_of
from horsies.tasks.recovery import EXPIRED_RESULT
from tests.support.applications import UNREACHABLE, Call, Task, app_at, run_closing
from tests.support.database import Database
from tests.support.red_states import RED_STATES
from tests.support.rows import add_worker, finish
from tests.support.wait import interrupted_when

# The others concern schedules.
TASK_STATES = [code for code in RED_STATES if code not in ("NO_SCHEDULER", "NOT_SERVED")]
BAD_IDS = ["x", "", None, 7, "0" * 31, "not-a-uuid-at-all", "01900000-0000-7000-8000-00000000000g"]


class Invoice(BaseModel):
    number: int
    lines: list[str]


def bill(number: int) -> TaskResult[Invoice, TaskError]:
    return TaskResult(ok=Invoice(number=number, lines=[]))


def outcome(
    app: Horsies, connection: Database, call: Call, task: Task, **row: Any
) -> TaskResult[Any, TaskError]:
    """Send a task, end it with this row, and read it through the face under test."""
    handle = task.send(1).unwrap()
    finish(connection, handle.task_id, **row)
    result: TaskResult[Any, TaskError] = call(app, handle, "get", timeout_ms=30_000)
    return result


def test_a_value_comes_back_as_the_type_its_task_declares(
    app: Horsies, connection: Database, call: Call
) -> None:
    stored = '{"ok":{"number":7,"lines":["a"]}}'
    result = outcome(app, connection, call, app.task("bill")(bill), result=stored)
    assert result.ok_value == Invoice(number=7, lines=["a"])


def test_none_is_a_value(app: Horsies, connection: Database, call: Call) -> None:
    def tick(a: int) -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    result = outcome(app, connection, call, app.task("tick")(tick), result='{"ok":null}')
    assert result.is_ok()
    assert result.ok_value is None


def test_an_error_comes_back_with_its_code(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    error = TaskError(error_code="DECLINED", message="no", data={"card": 1})
    text = encode_task_error(error)
    assert outcome(app, connection, call, add, status="FAILED", result=text).err_value == error


def test_a_built_in_code_comes_back_as_the_same_member(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    text = encode_task_error(TaskError(error_code=OutcomeCode.TASK_TIMEOUT))
    error = outcome(app, connection, call, add, status="FAILED", result=text).err_value
    assert error.error_code is OutcomeCode.TASK_TIMEOUT


def test_a_cancelled_task(app: Horsies, add: Task, connection: Database, call: Call) -> None:
    result = outcome(app, connection, call, add, status="CANCELLED", result=None)
    assert result.err_value.error_code is OutcomeCode.TASK_CANCELLED


@pytest.mark.parametrize(
    "text", [None, encode_task_error(TaskError(error_code=OutcomeCode.TASK_EXPIRED))]
)
def test_an_expired_task_with_or_without_stored_result(
    app: Horsies, add: Task, connection: Database, call: Call, text: str | None
) -> None:
    result = outcome(app, connection, call, add, status="EXPIRED", result=text)
    assert result.err_value.error_code is OutcomeCode.TASK_EXPIRED


@pytest.mark.parametrize(
    ("reason", "message"),
    [("killed by SIGKILL", "killed by SIGKILL"), (None, "The process running the task vanished.")],
)
def test_a_failure_nobody_could_store_a_result_for_is_a_crash(
    app: Horsies,
    add: Task,
    connection: Database,
    call: Call,
    reason: str | None,
    message: str,
) -> None:
    result = outcome(app, connection, call, add, status="FAILED", result=None, failed_reason=reason)
    assert result.err_value.error_code is OperationalErrorCode.WORKER_CRASHED
    assert result.err_value.message == message


def test_a_completed_task_without_result(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    result = outcome(app, connection, call, add, result=None)
    assert result.err_value.error_code is RetrievalCode.RESULT_NOT_AVAILABLE


@pytest.mark.parametrize(
    "text", ["not json", "", "[]", "{}", "null", '{"ok":1,"err":2}', '{"ok":', '{"value":1}']
)
def test_text_that_is_no_result_is_said_to_be_unreadable(
    app: Horsies, add: Task, connection: Database, call: Call, text: str
) -> None:
    error = outcome(app, connection, call, add, result=text).err_value
    assert error.error_code is OperationalErrorCode.RESULT_DESERIALIZATION_ERROR
    assert "cannot be read" in str(error.message)


def test_a_value_that_no_longer_fits_its_type_is_named_by_its_place(
    app: Horsies, connection: Database, call: Call
) -> None:
    stored = '{"ok":{"number":"seven","lines":[]}}'
    error = outcome(app, connection, call, app.task("bill")(bill), result=stored).err_value
    assert error.error_code is ContractCode.PYDANTIC_HYDRATION_ERROR
    assert error.data == {"path": "ok.number"}


# Ids


def test_a_task_that_does_not_exist(app: Horsies, connection: Database, call: Call) -> None:
    handle = app.handle(new_id())
    error = call(app, handle, "get", timeout_ms=30_000).err_value
    assert error.error_code is RetrievalCode.TASK_NOT_FOUND
    assert error.data == {"task_id": handle.task_id}


def test_a_task_that_is_committed_later_is_found_later(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle: TaskHandle[Any] = app.handle(new_id())
    assert call(app, handle, "get", timeout_ms=30_000).is_err()
    real = add.send(1).unwrap()
    connection.execute("UPDATE horsies_tasks SET id = %s", (handle.task_id,))
    finish(connection, handle.task_id)
    assert call(app, handle, "get", timeout_ms=30_000).ok_value == 1
    assert real.get(timeout_ms=0).err_value.error_code is RetrievalCode.TASK_NOT_FOUND


@pytest.mark.parametrize("task_id", BAD_IDS)
def test_what_is_no_id_is_no_task(app: Horsies, call: Call, task_id: Any) -> None:
    handle = app.handle(task_id)
    error = call(app, handle, "get").err_value
    assert error.error_code is RetrievalCode.TASK_NOT_FOUND
    assert call(app, app, "get_task_info", task_id).unwrap() is None


def test_an_id_is_recognised_in_every_spelling(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    task_id = add.send(1).unwrap().task_id
    finish(connection, task_id)
    for spelling in (task_id.upper(), task_id.replace("-", ""), f"{{{task_id}}}"):
        assert call(app, app, "get_result", spelling, timeout_ms=30_000).ok_value == 1
        assert call(app, app, "get_task_info", spelling).unwrap().task_id == task_id


def test_a_result_by_id_is_plain_json_and_typed_when_the_task_is_named(
    app: Horsies, connection: Database, call: Call
) -> None:
    task_id = app.task("bill")(bill).send(7).unwrap().task_id
    finish(connection, task_id, '{"ok":{"number":7,"lines":[]}}')
    by_id = call(app, app, "get_result", task_id, timeout_ms=30_000)
    assert by_id.ok_value == {"number": 7, "lines": []}
    by_name = app.handle(task_id, "bill").get(timeout_ms=30_000)
    assert by_name.ok_value == Invoice(number=7, lines=[])
    by_unknown_name = app.handle(task_id, "unknown").get(timeout_ms=30_000)
    assert by_unknown_name.ok_value == {"number": 7, "lines": []}


# Waiting or not, and what is remembered


@pytest.fixture
def maintained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own maintenance may lock a table for a short time."""
    monkeypatch.setattr("horsies.tasks.waiters._OBSTACLE_LOCK_MS", 10_000)


@pytest.mark.usefixtures("maintained")
def test_an_unfinished_task_times_out_and_can_be_asked_again(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle = add.send(1).unwrap()
    error = call(app, handle, "get", timeout_ms=50).err_value
    assert error.error_code is RetrievalCode.WAIT_TIMEOUT
    assert error.data == {"task_id": handle.task_id, "timeout_ms": 50}
    assert error.message.endswith(
        "within 50 ms: no live worker serves queue 'default'; no worker is running (QUEUE_UNSERVED); "
        f"see `horsies explain {handle.task_id}`."
    )
    finish(connection, handle.task_id)
    assert call(app, handle, "get", timeout_ms=30_000).ok_value == 1


@pytest.mark.usefixtures("maintained")
def test_a_timeout_names_the_obstacle_of_a_waiting_task(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle = add.send(1).unwrap()

    def message() -> str:
        return str(call(app, handle, "get", timeout_ms=10).err_value.message)

    worker_id = add_worker(connection, known_tasks='{"tasks": {"other": "1"}}')
    assert "no live worker of queue 'default' knows task 'add'" in message()
    connection.execute("UPDATE horsies_workers SET known_tasks = NULL")
    assert "10 ms; see" in message()
    connection.execute("UPDATE horsies_workers SET seen_at = now() - interval '1 minute'")
    assert "no live worker serves queue 'default'" in message()
    connection.execute("UPDATE horsies_workers SET lock_key = 77")
    connection.execute("SELECT pg_advisory_lock(77)")
    assert "10 ms; see" in message()
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('default', now())"
    )
    assert "queue 'default' was paused" in message()
    connection.execute(
        "UPDATE horsies_tasks SET status = 'RUNNING', claimed_by_worker_id = %s", (worker_id,)
    )
    assert "but is still connected (SILENT); see" in message()


@pytest.mark.usefixtures("maintained")
@pytest.mark.parametrize("code", TASK_STATES)
def test_a_timeout_names_the_first_obstacle_of_the_explanation(
    app: Horsies, connection: Database, call: Call, code: str
) -> None:
    task_id = RED_STATES[code](connection).task_id
    assert task_id is not None
    handle: TaskHandle[Any] = app.handle(task_id)
    obstacles = [one for one in app.explain(task_id).unwrap().reasons if one.blocks]
    error = call(app, handle, "get", timeout_ms=10).err_value
    found = re.findall(r" \(([A-Z_]+)\); see `horsies explain", error.message)
    assert found == [one.code for one in obstacles[:1]]


def test_a_timeout_comes_without_an_obstacle_if_the_database_does_not_answer(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle = add.send(1).unwrap()
    assert call(app, handle, "get", timeout_ms=10).err_value.message
    with connection.transaction():
        connection.execute("LOCK TABLE horsies_workers")
        error = call(app, handle, "get", timeout_ms=10).err_value
    assert error.error_code is RetrievalCode.WAIT_TIMEOUT
    assert "10 ms; see" in error.message
    finish(connection, handle.task_id)
    assert call(app, handle, "get", timeout_ms=30_000).ok_value == 1


def test_a_timeout_of_zero_looks_once(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle = add.send(1).unwrap()
    error = call(app, handle, "get", timeout_ms=0).err_value
    assert error.error_code is RetrievalCode.RESULT_NOT_READY
    assert error.data == {"task_id": handle.task_id, "status": "PENDING"}
    finish(connection, handle.task_id)
    assert call(app, handle, "get", timeout_ms=0).ok_value == 1


def test_a_negative_timeout_is_refused(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle = add.send(1).unwrap()
    error = call(app, handle, "get", timeout_ms=-5).err_value
    assert error.error_code is OperationalErrorCode.BROKER_ERROR
    assert error.message == "timeout_ms must not be negative; it is -5, and None sets no limit."
    with pytest.raises(TaskWatchFailed, match="must not be negative"):
        next(handle.watch(timeout_ms=-5))
    for wrong in (True, 1.5, float("nan")):
        message = call(app, handle, "get", timeout_ms=wrong).err_value.message
        assert message == f"timeout_ms must be a whole number of milliseconds or None, not {wrong}."


@pytest.mark.parametrize("text", ['{"ok":1}', "unreadable"])
def test_a_result_is_read_once(
    app: Horsies, add: Task, connection: Database, call: Call, text: str
) -> None:
    handle = add.send(1).unwrap()
    finish(connection, handle.task_id, text)
    first = call(app, handle, "get", timeout_ms=30_000)
    connection.execute("DELETE FROM horsies_tasks")
    assert call(app, handle, "get", timeout_ms=30_000) is first
    assert handle.get(timeout_ms=0) is first


def test_a_handle_without_broker_has_no_result(call: Call) -> None:
    app = app_at("postgresql://127.0.0.1:1/shop")
    handle: TaskHandle[int] = TaskHandle(new_id(), None)
    error = call(app, handle, "get").err_value
    assert error.error_code is RetrievalCode.RESULT_NOT_AVAILABLE
    app.close()


def test_a_blocking_get_inside_a_running_loop_says_what_to_do_instead(
    app: Horsies, add: Task, connection: Database
) -> None:
    handle = add.send(1).unwrap()

    async def main() -> tuple[TaskResult[Any, TaskError], TaskResult[Any, TaskError]]:
        with pytest.raises(
            ResultUnavailable, match=r"result\(\) would .*`await handle\.result_async"
        ):
            handle.result(timeout_ms=30_000)
        return handle.get(timeout_ms=30_000), handle.get(timeout_ms=0)

    blocked, looked = run_closing(app, main())
    assert blocked.err_value.error_code is RetrievalCode.EVENT_LOOP_RUNNING
    assert "await handle.get_async()" in blocked.err_value.message
    assert looked.err_value.error_code is RetrievalCode.RESULT_NOT_READY


@pytest.mark.parametrize("timeout_ms", ["5", 2.5, float("nan")])
def test_a_timeout_that_is_no_number_of_milliseconds_is_refused(
    app: Horsies, add: Task, call: Call, timeout_ms: Any
) -> None:
    error = call(app, add.send(1).unwrap(), "get", timeout_ms=timeout_ms).err_value
    assert error.error_code is OperationalErrorCode.BROKER_ERROR
    assert "timeout_ms must be a whole number of milliseconds or None" in error.message
    assert app.get_broker().waiters._watches == {}


@pytest.mark.parametrize("timeout_ms", [10**13, 10**400], ids=["long", "endless"])
def test_a_timeout_may_be_longer_than_anybody_can_wait(
    app: Horsies, add: Task, connection: Database, call: Call, timeout_ms: int
) -> None:
    handle = add.send(1).unwrap()
    finish(connection, handle.task_id)
    assert call(app, handle, "get", timeout_ms=timeout_ms).ok_value == 1


class SoftLimit(Exception):
    """What a program raises in a signal handler of its own."""


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SoftLimit, TimeoutError])
def test_what_a_signal_handler_raises_ends_the_wait_and_leaves_nothing_behind(
    app: Horsies, add: Task, raised: type[BaseException]
) -> None:
    handle = add.send(1).unwrap()
    watches = app.get_broker().waiters._watches
    is_seen = lambda: any(watch.was_read for watch in list(watches.values()))  # noqa: E731
    with pytest.raises(raised), interrupted_when(is_seen, raised):
        handle.get(timeout_ms=30_000)
    assert watches == {}


@pytest.mark.parametrize("kind", ["task", "workflow"])
def test_get_in_a_running_event_loop_has_a_code_of_its_own(kind: str) -> None:
    app = Horsies(UNREACHABLE)
    handle: Any = app.handle(new_id()) if kind == "task" else app.workflow_handle(new_id())

    async def main() -> TaskResult[Any, TaskError]:
        result: TaskResult[Any, TaskError] = handle.get()
        return result

    error = asyncio.run(main()).err_value
    assert error.error_code is RetrievalCode.EVENT_LOOP_RUNNING
    assert "_async" in str(error.message)


@pytest.mark.parametrize(
    ("status", "stored", "code"),
    [
        ("CANCELLED", None, "TASK_CANCELLED"),
        ("EXPIRED", EXPIRED_RESULT, "TASK_EXPIRED"),
        ("EXPIRED", None, "TASK_EXPIRED"),
        ("COMPLETED", None, "RESULT_NOT_AVAILABLE"),
    ],
)
def test_an_error_in_place_of_a_result_carries_the_id_of_its_task(
    status: str, stored: str | None, code: str
) -> None:
    task_id = new_id()
    row = OutcomeRow(task_id, "work", status, stored, failed_reason=None, error_code=None)
    error = result_of(row, None).err_value
    assert error.error_code == code
    assert error.data == {"task_id": task_id}
