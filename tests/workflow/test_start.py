"""Starting runs: one transaction, one statement, the same id the same run, errors as values."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from horsies import (
    Horsies,
    OnError,
    TaskError,
    TaskResult,
    WorkflowHandle,
    WorkflowSpec,
    WorkflowStartError,
    WorkflowStartErrorCode,
    WorkflowStatus,
    from_node,
    start_many,
    start_many_async,
    start_workflow,
    start_workflow_async,
)
from horsies.ids import new_id
from tests.support.applications import Call, app_at, run_closing
from tests.support.callers import CALLERS, Caller
from tests.support.database import Database
from tests.support.proxy import Proxy
from tests.support.statements import counted
from tests.support.turns import Hands, Tasks, define_tasks

MOMENT = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


def diamond(app: Horsies, tasks: Tasks, n: int = 1, **options: Any) -> WorkflowSpec[int]:
    """One root, two branches, one join that is the output."""
    root = tasks.number.node(node_id="root")(n=n)
    left = tasks.add.node(node_id="left")(first=from_node(root))
    right = tasks.add.node(node_id="right")(first=from_node(root))
    join = tasks.add.node(node_id="join")(first=from_node(left), second=from_node(right))
    options = {"name": "diamond", "definition_key": "start.diamond", **options}
    return app.workflow(tasks=[root, left, right, join], output=join, **options)


def runs(connection: Database) -> list[tuple[Any, ...]]:
    return connection.execute(
        "SELECT id::text, name, status, workflow_key, sent_at FROM horsies_workflows ORDER BY created_at"
    ).fetchall()


def refusal(result: Any, code: WorkflowStartErrorCode) -> WorkflowStartError:
    error = result.unwrap_err()
    assert isinstance(error, WorkflowStartError)
    assert error.code is code, error
    assert "\n" not in error.message
    assert error.workflow_id
    return error


def test_a_start_stores_the_run_its_nodes_and_the_tasks_of_its_roots(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, call: Call
) -> None:
    handle = call(app, diamond(app, tasks), "start").unwrap()
    assert isinstance(handle, WorkflowHandle)
    ((run_id, name, status, key, sent_at),) = runs(connection)
    assert (run_id, name, status, key) == (handle.workflow_id, "diamond", "RUNNING", None)
    assert abs((datetime.now(UTC) - sent_at).total_seconds()) < 60
    assert hands.statuses(handle.workflow_id) == {
        "root": "ENQUEUED",
        "left": "PENDING",
        "right": "PENDING",
        "join": "PENDING",
    }
    stored = connection.execute("SELECT id::text, task_name, kwargs FROM horsies_tasks").fetchall()
    assert stored == [(hands.task_id(handle.workflow_id, "root"), "number", '{"n":1}')]


def test_a_start_that_fails_in_the_middle_leaves_nothing(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, call: Call
) -> None:
    connection.execute("ALTER TABLE horsies_tasks ADD CONSTRAINT refuse CHECK (priority <> 42)")
    try:
        nodes = [tasks.number.node()(), tasks.number.node(priority=42)()]
        spec = app.workflow("pair", nodes, definition_key="start.pair")
        error = refusal(call(app, spec, "start"), WorkflowStartErrorCode.ENQUEUE_FAILED)
    finally:
        connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT refuse")
    assert not error.retryable
    assert error.exception is not None
    assert error.workflow_name == "pair"
    for table in ("horsies_workflows", "horsies_workflow_tasks", "horsies_tasks"):
        assert hands.count(table) == 0


# The same id, the same run


def test_the_same_id_and_workflow_is_the_same_run(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, call: Call
) -> None:
    workflow_id = new_id()
    first = diamond(app, tasks).start(workflow_id).unwrap()
    hands.complete(workflow_id, "root")
    again = call(app, diamond(app, tasks), "start", workflow_id.upper()).unwrap()
    assert first.workflow_id == again.workflow_id == workflow_id
    assert len(runs(connection)) == 1
    assert hands.statuses(workflow_id)["root"] == "COMPLETED"


def test_the_same_workflow_written_in_another_order_is_the_same_run(
    app: Horsies, tasks: Tasks, connection: Database, call: Call
) -> None:
    @app.task("label")
    def label(words: set[str], value: dict[str, Any]) -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    def build(order: int, last: int = 2) -> WorkflowSpec[Any]:
        first, second = tasks.number.node(node_id="first")(), tasks.number.node(node_id="second")()
        words, value = ["a", "b", "c"][::order], [("x", 1), ("y", last)][::order]
        third = label.node(node_id="third", waits_for=[first, second][::order])(
            words=set(words), value=dict(value)
        )
        return app.workflow("order", [first, second, third], definition_key="start.order")

    workflow_id = build(1).start(workflow_key="order-7").unwrap().workflow_id
    assert call(app, build(-1), "start", workflow_id).unwrap().workflow_id == workflow_id
    again = call(app, build(-1), "start", workflow_key="order-7").unwrap()
    assert again.workflow_id == workflow_id
    other = call(app, build(-1, last=3), "start", workflow_id)
    refusal(other, WorkflowStartErrorCode.PAYLOAD_MISMATCH)
    assert len(runs(connection)) == 1


def test_an_id_taken_by_another_workflow_is_refused(
    app: Horsies, tasks: Tasks, connection: Database, call: Call
) -> None:
    workflow_id = new_id()
    diamond(app, tasks).start(workflow_id).unwrap()
    other = app.workflow("other", [tasks.number.node()()], definition_key="start.other")
    started = call(app, other, "start", workflow_id)
    error = refusal(started, WorkflowStartErrorCode.VALIDATION_FAILED)
    assert error.workflow_id == workflow_id
    assert "'diamond'" in error.message
    assert "'other'" in error.message
    assert len(runs(connection)) == 1


@pytest.mark.parametrize("changed", [{"n": 2}, {"on_error": OnError.PAUSE}])
def test_an_id_taken_by_another_request_is_refused(
    app: Horsies, tasks: Tasks, connection: Database, call: Call, changed: dict[str, Any]
) -> None:
    workflow_id = new_id()
    diamond(app, tasks).start(workflow_id).unwrap()
    started = call(app, diamond(app, tasks, **changed), "start", workflow_id)
    error = refusal(started, WorkflowStartErrorCode.PAYLOAD_MISMATCH)
    assert not error.retryable
    assert len(runs(connection)) == 1


def test_many_starts_at_once_with_one_id_make_one_run(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    spec, workflow_id = diamond(app, tasks), new_id()
    at_once = threading.Barrier(8)

    def start(_: int) -> str:
        at_once.wait()
        return spec.start(workflow_id).unwrap().workflow_id

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(start, range(8))) == {workflow_id}
    assert len(runs(connection)) == 1
    assert hands.count("horsies_workflow_tasks") == 4
    assert hands.count("horsies_tasks") == 1


@pytest.mark.parametrize("workflow_id", ["order-7", "not a uuid", 7])
def test_an_id_that_is_no_uuid_is_refused(
    app: Horsies, tasks: Tasks, connection: Database, call: Call, workflow_id: Any
) -> None:
    started = call(app, diamond(app, tasks), "start", workflow_id)
    error = refusal(started, WorkflowStartErrorCode.VALIDATION_FAILED)
    assert error.workflow_id == str(workflow_id)
    assert "HRS-032" in str(error.exception)
    assert runs(connection) == []


# Keys of the caller's own


def test_a_key_is_held_until_its_run_ends(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, call: Call
) -> None:
    spec = diamond(app, tasks)
    first = call(app, spec, "start", workflow_key="order-7").unwrap()
    assert (
        call(app, spec, "start", workflow_key="order-7").unwrap().workflow_id == first.workflow_id
    )
    assert runs(connection)[0][3] == "order-7"
    first.pause().unwrap()
    assert (
        call(app, spec, "start", workflow_key="order-7").unwrap().workflow_id == first.workflow_id
    )
    assert (
        call(app, spec, "start", workflow_key="order-8").unwrap().workflow_id != first.workflow_id
    )
    first.cancel().unwrap()
    assert (
        call(app, spec, "start", workflow_key="order-7").unwrap().workflow_id != first.workflow_id
    )
    assert len(runs(connection)) == 3


def test_a_key_held_by_another_request_is_refused(
    app: Horsies, tasks: Tasks, connection: Database, call: Call
) -> None:
    diamond(app, tasks).start(workflow_key="order-7").unwrap()
    started = call(app, diamond(app, tasks, n=2), "start", workflow_key="order-7")
    error = refusal(started, WorkflowStartErrorCode.PAYLOAD_MISMATCH)
    assert error.workflow_key == "order-7"
    other = diamond(app, tasks, name="other")
    started = call(app, other, "start", workflow_key="order-7")
    refusal(started, WorkflowStartErrorCode.VALIDATION_FAILED)
    assert len(runs(connection)) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "nul\0", 7])
def test_a_key_that_cannot_be_stored_is_refused(
    app: Horsies, tasks: Tasks, connection: Database, key: Any
) -> None:
    started = diamond(app, tasks).start(workflow_key=key)
    assert "1 to 255" in refusal(started, WorkflowStartErrorCode.VALIDATION_FAILED).message
    assert runs(connection) == []


# Without an application, during imports


def test_a_workflow_without_an_application_cannot_be_started(
    app: Horsies, tasks: Tasks, connection: Database, call: Call
) -> None:
    spec: WorkflowSpec[Any] = WorkflowSpec(
        "lonely", [tasks.number.node()()], definition_key="start.lonely"
    )
    refusal(call(app, spec, "start"), WorkflowStartErrorCode.BROKER_NOT_CONFIGURED)
    started = start_workflow(spec, app.get_broker())
    error = refusal(started, WorkflowStartErrorCode.VALIDATION_FAILED)
    assert "HRS-014" in str(error.exception)


def test_starts_are_suppressed_like_sends(
    app: Horsies, tasks: Tasks, connection: Database, call: Call
) -> None:
    spec = diamond(app, tasks)
    with app.sends_suppressed():
        refusal(call(app, spec, "start"), WorkflowStartErrorCode.SEND_SUPPRESSED)
        refusal(start_many([spec]), WorkflowStartErrorCode.SEND_SUPPRESSED)
        refusal(start_workflow(spec, app.get_broker()), WorkflowStartErrorCode.SEND_SUPPRESSED)
    assert runs(connection) == []
    spec.start().unwrap()


# On a broker of one's choice


def test_the_functions_start_on_the_broker_they_are_given(
    app: Horsies, tasks: Tasks, connection: Database
) -> None:
    spec, broker = diamond(app, tasks), app.get_broker()
    first = start_workflow(spec, broker, new_id(), MOMENT, workflow_key="a").unwrap()
    second = run_closing(
        app, start_workflow_async(spec, broker, sent_at=MOMENT, workflow_key="b")
    ).unwrap()
    found = {row[0]: row[3:] for row in runs(connection)}
    assert found == {
        first.workflow_id: ("a", MOMENT),
        second.workflow_id: ("b", MOMENT),
    }


# A database that is away


def test_a_database_that_is_away_is_an_error_value_and_the_start_can_be_repeated(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    spec = diamond(distant_app, define_tasks(distant_app))
    proxy.stop()
    started = call(distant_app, spec, "start", workflow_key="order-7")
    error = refusal(started, WorkflowStartErrorCode.ENQUEUE_FAILED)
    assert error.retryable
    assert error.workflow_key == "order-7"
    proxy.start()
    handle = call(distant_app, spec, "retry_start", error).unwrap()
    assert [row[0] for row in runs(connection)] == [handle.workflow_id] == [error.workflow_id]
    assert runs(connection)[0][3] == "order-7"
    assert call(distant_app, spec, "retry_start", error).unwrap().workflow_id == error.workflow_id
    assert len(runs(connection)) == 1


def test_a_start_whose_answer_was_lost_is_stored_once(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    spec = diamond(distant_app, define_tasks(distant_app))
    distant_app.get_broker().ensure_schema_initialized().unwrap()
    proxy.swallow_answer_with(b"fingerprint")
    started = call(distant_app, spec, "start")
    assert proxy.swallowed.is_set()
    error = refusal(started, WorkflowStartErrorCode.ENQUEUE_FAILED)
    assert error.retryable
    assert [row[0] for row in runs(connection)] == [error.workflow_id]
    handle = call(distant_app, spec, "retry_start", error).unwrap()
    assert [row[0] for row in runs(connection)] == [handle.workflow_id]


def test_only_a_failed_start_of_this_workflow_can_be_repeated(
    app: Horsies, tasks: Tasks, connection: Database, call: Call
) -> None:
    spec = diamond(app, tasks)
    codes = WorkflowStartErrorCode
    foreign = WorkflowStartError(codes.ENQUEUE_FAILED, "away", True, "other", new_id())
    lent = WorkflowStartError(
        codes.ENQUEUE_FAILED, "away", True, "diamond", new_id(), in_transaction=True
    )
    wrong = WorkflowStartError(codes.PAYLOAD_MISMATCH, "other", False, "diamond", new_id())
    for error, reason in [
        (foreign, "'other'"),
        (lent, "with that transaction"),
        (wrong, "PAYLOAD_MISMATCH"),
        ("nonsense", "WorkflowStartError"),
    ]:
        refused = refusal(call(app, spec, "retry_start", error), codes.VALIDATION_FAILED)
        assert reason in refused.message
    assert runs(connection) == []


def test_a_passing_failure_is_outlasted_when_the_application_asks_for_it(
    proxy: Proxy, connection: Database, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def mend_after_two(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            proxy.start()

    async def mend_after_two_async(seconds: float) -> None:
        mend_after_two(seconds)

    application = app_at(proxy.url, resend_on_transient_err=True)
    try:
        spec = diamond(application, define_tasks(application))
        proxy.stop()
        monkeypatch.setattr("horsies.tasks.broker.time.sleep", mend_after_two)
        monkeypatch.setattr("horsies.tasks.broker.asyncio.sleep", mend_after_two_async)
        handle = call(application, spec, "start").unwrap()
    finally:
        monkeypatch.undo()
        application.close()
    assert waits == [0.2, 0.4]
    assert [row[0] for row in runs(connection)] == [handle.workflow_id]


def test_a_start_without_resending_fails_at_once_and_one_with_it_gives_up_after_three(
    proxy: Proxy, distant_app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    spec, broker = diamond(distant_app, define_tasks(distant_app)), distant_app.get_broker()
    proxy.stop()
    monkeypatch.setattr("horsies.tasks.broker.time.sleep", waits.append)
    refusal(start_workflow(spec, broker), WorkflowStartErrorCode.ENQUEUE_FAILED)
    assert waits == []
    started = start_workflow(spec, broker, resend_on_transient_err=True)
    refusal(started, WorkflowStartErrorCode.ENQUEUE_FAILED)
    assert waits == [0.2, 0.4, 0.8]
    started = start_workflow(spec, broker, "nonsense", resend_on_transient_err=True)
    refusal(started, WorkflowStartErrorCode.VALIDATION_FAILED)
    assert len(waits) == 3


# The caller's transaction


@pytest.fixture(params=CALLERS, ids=str)
def caller(request: pytest.FixtureRequest) -> Caller:
    caller: Caller = request.param
    return caller


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_run_lives_and_dies_with_the_transaction(
    app: Horsies,
    tasks: Tasks,
    hands: Hands,
    connection: Database,
    process_url: str,
    caller: Caller,
    end: str,
) -> None:
    spec = diamond(app, tasks)

    async def work() -> Any:
        async with caller.open(process_url, end) as (transaction, execute):
            await execute("SELECT 1")
            handle = (await caller.call(spec, "start", transaction=transaction)).unwrap()
            assert runs(connection) == []
            return handle

    handle = caller.run(app, work())
    kept = end == "commit"
    assert [row[0] for row in runs(connection)] == [handle.workflow_id] * kept
    assert hands.count("horsies_workflow_tasks") == 4 * kept
    assert hands.count("horsies_tasks") == kept


def test_a_refused_start_leaves_the_transaction_usable(
    app: Horsies, tasks: Tasks, connection: Database, process_url: str, caller: Caller
) -> None:
    diamond(app, tasks).start(workflow_key="order-7").unwrap()
    other = diamond(app, tasks, n=2)

    async def work() -> Any:
        async with caller.open(process_url, "commit") as (transaction, execute):
            started = await caller.call(
                other, "start", workflow_key="order-7", transaction=transaction
            )
            await execute("SELECT 1")
            (await caller.call(other, "start", transaction=transaction)).unwrap()
            return started

    error = refusal(caller.run(app, work()), WorkflowStartErrorCode.PAYLOAD_MISMATCH)
    assert error.in_transaction
    assert len(runs(connection)) == 2


def test_a_start_refuses_what_is_no_connection(
    app: Horsies, tasks: Tasks, connection: Database, call: Call
) -> None:
    started = call(app, diamond(app, tasks), "start", transaction=object())
    error = refusal(started, WorkflowStartErrorCode.ENQUEUE_FAILED)
    assert "transaction= takes an open psycopg" in error.message
    assert runs(connection) == []


def test_a_key_is_fought_for_by_transactions_and_one_wins(
    app: Horsies, tasks: Tasks, connection: Database, process_url: str
) -> None:
    spec = diamond(app, tasks)
    with psycopg.connect(process_url) as caller, ThreadPoolExecutor(1) as threads:
        first = spec.start(workflow_key="order-7", transaction=caller).unwrap()
        second = threads.submit(spec.start, workflow_key="order-7")
        caller.commit()
        assert second.result(20).unwrap().workflow_id == first.workflow_id
    assert len(runs(connection)) == 1


# Many


@pytest.mark.parametrize("face", ["sync", "async"])
def test_many_runs_start_in_one_statement(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, face: str
) -> None:
    specs = [diamond(app, tasks, n=number) for number in range(50)]
    app.get_broker().ensure_schema_initialized().unwrap()
    with counted() as statements:
        if face == "sync":
            handles = start_many(specs).unwrap()
        else:
            handles = run_closing(app, start_many_async(specs)).unwrap()
    assert len([text for text in statements if "horsies_" in text]) == 1
    assert len({handle.workflow_id for handle in handles}) == len(runs(connection)) == 50
    assert hands.count("horsies_tasks") == 50
    hands.complete(handles[7].workflow_id, "root")
    stored = connection.execute(
        "SELECT kwargs FROM horsies_tasks WHERE workflow_id = %s AND workflow_node_index = 0",
        (handles[7].workflow_id,),
    ).fetchone()
    assert stored == ('{"n":7}',)


def test_one_specification_may_be_started_many_times(
    app: Horsies, tasks: Tasks, connection: Database
) -> None:
    handles = start_many([diamond(app, tasks)] * 3).unwrap()
    assert sorted(row[0] for row in runs(connection)) == sorted(one.workflow_id for one in handles)
    assert start_many([]).unwrap() == []


def test_many_runs_start_together_or_not_at_all(
    app: Horsies, tasks: Tasks, connection: Database, process_url: str
) -> None:
    stranger = app_at(process_url)
    try:
        foreign = diamond(stranger, define_tasks(stranger))
        started = start_many([diamond(app, tasks), foreign])
        assert (
            "one application" in refusal(started, WorkflowStartErrorCode.VALIDATION_FAILED).message
        )
    finally:
        stranger.close()
    lonely: WorkflowSpec[Any] = WorkflowSpec("lonely", [tasks.number.node()()])
    refusal(start_many([lonely]), WorkflowStartErrorCode.BROKER_NOT_CONFIGURED)
    with psycopg.connect(process_url) as caller:
        start_many([diamond(app, tasks)] * 2, transaction=caller).unwrap()
        caller.rollback()
    assert runs(connection) == []


# Cost


def wide(app: Horsies, tasks: Tasks, width: int) -> WorkflowSpec[Any]:
    root = tasks.number.node(node_id="root")()
    leaves = [
        tasks.add.node(node_id=f"leaf-{number}")(first=from_node(root)) for number in range(width)
    ]
    return app.workflow("wide", [root, *leaves], definition_key="start.wide")


@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_thousand_nodes_start_with_as_few_statements_as_ten(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, face: str
) -> None:
    counts = []
    for width in (10, 999):
        spec = wide(app, tasks, width)
        with counted() as statements:
            if face == "sync":
                spec.start().unwrap()
            else:
                run_closing(app, spec.start_async()).unwrap()
        counts.append(len(statements))
    # The first start prepares its session and checks the schema, waiting at most two seconds for its locks.
    assert counts[0] <= 6
    assert counts[1] == 1 if face == "sync" else counts[1] <= 6
    assert hands.count("horsies_workflow_tasks") == 11 + 1000


def test_a_start_is_heard_by_monitors_and_workers(
    app: Horsies, tasks: Tasks, connection: Database, process_url: str
) -> None:
    spec = diamond(app, tasks)
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute("LISTEN horsies_workflow_status")
        listener.execute("LISTEN task_queue_default")
        handle = spec.start().unwrap()
        heard = {note.channel: note.payload for note in listener.notifies(timeout=30, stop_after=2)}
    assert heard["horsies_workflow_status"] == f"{handle.workflow_id} RUNNING"
    assert set(heard) == {"horsies_workflow_status", "task_queue_default"}
    assert handle.status().unwrap() is WorkflowStatus.RUNNING


def test_starting_does_not_block_the_event_loop(
    app: Horsies, tasks: Tasks, connection: Database
) -> None:
    spec = diamond(app, tasks)

    async def main() -> int:
        started = await asyncio.gather(*(spec.start_async() for _ in range(5)))
        await app.close_async()
        return len({one.unwrap().workflow_id for one in started})

    assert asyncio.run(main()) == 5
