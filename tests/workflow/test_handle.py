"""WorkflowHandle: results typed by their nodes, waits that end, truthful codes, runs found by id."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from horsies import (
    AnyNode,
    ContractCode,
    HandleErrorCode,
    Horsies,
    MapNode,
    NodeKey,
    OnError,
    OperationalErrorCode,
    OutcomeCode,
    ResultUnavailable,
    RetrievalCode,
    SignalNode,
    SleepNode,
    SubWorkflowError,
    SubWorkflowNode,
    SubWorkflowSummary,
    SuccessCase,
    SuccessPolicy,
    TaskError,
    TaskResult,
    WorkflowDefinition,
    WorkflowHandle,
    WorkflowSpec,
    WorkflowStatus,
    WorkflowTaskStatus,
    from_node,
)
from horsies.ids import new_id
from horsies.tasks.waiters import Subject
from tests.support.applications import Call, never_poll, run_closing
from tests.support.database import Database, terminate
from tests.support.proxy import Proxy
from tests.support.rows import UNKNOWN_ID
from tests.support.turns import Hands, Tasks, define_tasks
from tests.support.wait import interrupted_when, wait_until

# The same in every test process, or they would not agree on the names of the tests.

Result = TaskResult[Any, TaskError]


class Order(BaseModel):
    """Something that comes back as itself only when the types are known."""

    number: int
    lines: tuple[str, ...]


ORDER = Order(number=7, lines=("hay", "oats"))


def order_workflow(app: Horsies) -> WorkflowSpec[Order]:
    @app.task("order")
    def order() -> TaskResult[Order, TaskError]:
        return TaskResult(ok=ORDER)

    only = order.node(node_id="order")()
    return app.workflow("orders", [only], output=only, definition_key="handle.orders")


def chain(app: Horsies, tasks: Tasks, **options: Any) -> WorkflowSpec[int]:
    first = tasks.number.node(node_id="first")()
    last = tasks.add.node(node_id="last")(first=from_node(first))
    return app.workflow(
        "chain", [first, last], output=last, definition_key="handle.chain", **options
    )


def code_of(result: Result) -> Any:
    return result.err_value.error_code


class Waiting:
    """A thread that waits for a run, known to be waiting."""

    def __init__(self, handle: WorkflowHandle[Any], method: str = "get", **options: Any) -> None:
        self._future: Future[Any] = Future()
        self._thread = threading.Thread(target=self._wait, args=(handle, method, options))
        self._thread.start()
        wait_until(lambda: is_seen(handle))

    def _wait(self, handle: WorkflowHandle[Any], method: str, options: dict[str, Any]) -> None:
        self._future.set_result(getattr(handle, method)(timeout_ms=20_000, **options))

    def result(self) -> Any:
        self._thread.join(60)
        return self._future.result(0)

    def is_over(self) -> bool:
        return self._future.done()


def is_seen(handle: WorkflowHandle[Any]) -> bool:
    assert handle.broker is not None
    watch = handle.broker.waiters._watches.get((Subject.RUN, handle.workflow_id))
    return watch is not None and watch.was_read


# The result


def test_the_result_is_that_of_the_output_node(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    hands.complete(handle.workflow_id, "first", 1)
    hands.complete(handle.workflow_id, "last", 5)
    assert call(app, handle, "get", timeout_ms=30_000) == TaskResult(ok=5)
    assert call(app, handle, "get") == TaskResult(ok=5)


def test_the_result_has_the_type_of_the_output_node(
    app: Horsies, hands: Hands, connection: Database, call: Call
) -> None:
    handle = order_workflow(app).start().unwrap()
    hands.complete(handle.workflow_id, "order", ORDER.model_dump(mode="json"))
    assert call(app, handle, "get", timeout_ms=30_000).ok_value == ORDER
    found = app.workflow_handle(handle.workflow_id)
    assert call(app, found, "get", timeout_ms=30_000).ok_value == ORDER
    by_hand: WorkflowHandle[Any] = WorkflowHandle(handle.workflow_id, app.get_broker())
    assert call(app, by_hand, "get").ok_value == {"number": 7, "lines": ["hay", "oats"]}
    typed: WorkflowHandle[Order] = WorkflowHandle(handle.workflow_id, app.get_broker(), Order)
    assert call(app, typed, "get").ok_value == ORDER


def test_without_an_output_the_result_is_that_of_every_end(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    root = tasks.number.node(node_id="root")()
    good = tasks.add.node(node_id="good")(first=from_node(root))
    bad = tasks.add.node(node_id="bad")(first=from_node(root))
    late = tasks.add.node(node_id="late")(first=from_node(bad))
    policy = SuccessPolicy([SuccessCase([good])])
    spec = app.workflow(
        "ends", [root, good, bad, late], success_policy=policy, definition_key="handle.ends"
    )
    handle = spec.start().unwrap()
    hands.complete(handle.workflow_id, "root")
    hands.complete(handle.workflow_id, "good", 2)
    hands.fail(handle.workflow_id, "bad")
    for one in (handle, app.workflow_handle(handle.workflow_id)):
        ends = call(app, one, "get", timeout_ms=30_000).ok_value
        assert list(ends) == ["good", "late"]
        assert ends["good"] == TaskResult(ok=2)
        assert code_of(ends["late"]) is OutcomeCode.UPSTREAM_SKIPPED


def test_a_failed_run_gives_the_error_of_its_first_node_by_index(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    nodes = [tasks.number.node(node_id=name)() for name in ("first", "second")]
    spec = app.workflow("pair", nodes, definition_key="handle.pair")
    handle = spec.start().unwrap()
    hands.fail(handle.workflow_id, "second", "LATER")
    hands.fail(handle.workflow_id, "first", "EARLIER")
    result = call(app, handle, "get", timeout_ms=30_000)
    assert (code_of(result), result.err_value.message) == ("EARLIER", "first broke")


def test_a_failed_run_without_an_error_says_so(
    app: Horsies, tasks: Tasks, connection: Database, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    for status, code in [
        ("FAILED", OutcomeCode.WORKFLOW_FAILED),
        ("CANCELLED", OutcomeCode.WORKFLOW_CANCELLED),
        ("EXPIRED", OutcomeCode.WORKFLOW_EXPIRED),
    ]:
        connection.execute("UPDATE horsies_workflows SET status = %s", (status,))
        assert code_of(call(app, handle, "get", timeout_ms=30_000)) is code


def test_a_run_completed_in_spite_of_its_output_gives_the_error_of_the_output(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    good, output = tasks.number.node(node_id="good")(), tasks.number.node(node_id="output")()
    spec = app.workflow(
        "policy",
        [good, output],
        output=output,
        success_policy=SuccessPolicy([SuccessCase([good])]),
        definition_key="handle.policy",
    )
    handle = spec.start().unwrap()
    hands.fail(handle.workflow_id, "output")
    hands.complete(handle.workflow_id, "good")
    assert handle.status().unwrap() is WorkflowStatus.COMPLETED
    assert code_of(call(app, handle, "get", timeout_ms=30_000)) == "BOOM"


def test_a_look_without_waiting_finds_the_run_unfinished(
    app: Horsies, tasks: Tasks, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    result = call(app, handle, "get", timeout_ms=0)
    assert code_of(result) is RetrievalCode.RESULT_NOT_READY
    assert result.err_value.data["status"] == "RUNNING"


def test_a_wait_ends_in_time_and_the_run_goes_on(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    result = call(app, handle, "get", timeout_ms=30)
    assert code_of(result) is RetrievalCode.WAIT_TIMEOUT
    assert "30 ms" in (result.err_value.message or "")
    assert app.get_broker().waiters._watches == {}
    assert hands.status(handle.workflow_id) == "RUNNING"


@pytest.mark.parametrize("workflow_id", [UNKNOWN_ID, "no uuid at all", ""])
def test_an_unknown_run_is_not_found_by_anything(
    app: Horsies, tasks: Tasks, connection: Database, workflow_id: str
) -> None:
    handle = app.workflow_handle(workflow_id)
    assert code_of(handle.get()) is RetrievalCode.WORKFLOW_NOT_FOUND
    assert code_of(handle.result_for(NodeKey("first"))) is RetrievalCode.WORKFLOW_NOT_FOUND
    for answer in (
        handle.status(),
        handle.info(),
        handle.wait(timeout_ms=30_000),
        handle.results(),
        handle.tasks(),
        handle.pause(),
        handle.resume(),
        handle.resume(retry_failed=True),
        handle.retry(),
        handle.retry("first"),
        handle.cancel(),
        handle.signal("go"),
    ):
        error = answer.unwrap_err()
        assert error.code is HandleErrorCode.WORKFLOW_NOT_FOUND
        assert (error.workflow_id, error.retryable) == (workflow_id, False)


# Waiting


@pytest.mark.parametrize("end", ["complete", "fail"])
def test_the_end_of_a_run_wakes_the_waiter(
    app: Horsies, tasks: Tasks, hands: Hands, end: str
) -> None:
    never_poll(app)
    only = tasks.number.node(node_id="only")()
    spec = app.workflow("one", [only], output=only, definition_key="handle.one")
    handle = spec.start().unwrap()
    waiting = Waiting(handle)
    getattr(hands, end)(handle.workflow_id, "only")
    assert waiting.result().is_ok() == (end == "complete")
    assert app.get_broker().waiters._watches == {}


def test_the_end_of_a_run_wakes_the_coroutine(app: Horsies, tasks: Tasks, hands: Hands) -> None:
    never_poll(app)
    handle = chain(app, tasks).start().unwrap()
    hands.complete(handle.workflow_id, "first")

    async def main() -> Result:
        waiting = asyncio.create_task(handle.get_async(timeout_ms=30_000))
        await asyncio.to_thread(wait_until, lambda: is_seen(handle))
        hands.complete(handle.workflow_id, "last", 3)
        return await waiting

    assert run_closing(app, main()) == TaskResult(ok=3)


def test_what_a_signal_handler_raises_ends_the_wait_for_a_run(app: Horsies, tasks: Tasks) -> None:
    handle = chain(app, tasks).start().unwrap()
    with (
        pytest.raises(TimeoutError),
        interrupted_when(lambda: is_seen(handle), TimeoutError),
    ):
        handle.wait(timeout_ms=30_000)
    assert app.get_broker().waiters._watches == {}


def test_a_wait_may_be_of_any_length_but_must_have_one(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    wrong: Any = "soon"
    refused = call(app, handle, "wait", timeout_ms=wrong).unwrap_err()
    assert refused.code is HandleErrorCode.VALIDATION_FAILED
    assert code_of(call(app, handle, "get", timeout_ms=wrong)) is OperationalErrorCode.BROKER_ERROR
    hands.complete(handle.workflow_id, "first")
    hands.complete(handle.workflow_id, "last", 3)
    assert call(app, handle, "get", timeout_ms=sys.maxsize).ok_value == 3


def test_a_wait_for_a_single_status_is_one_for_that_status(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    for until in (WorkflowStatus.RUNNING, "RUNNING", ["RUNNING"]):
        met = call(app, handle, "wait", until=until, timeout_ms=30_000)
        assert met.unwrap() is WorkflowStatus.RUNNING


@pytest.mark.parametrize("until", ["running", {"FINISHED"}, [5]])
def test_a_wait_for_what_is_no_status_is_refused(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call, until: object
) -> None:
    handle = chain(app, tasks).start().unwrap()
    refused = call(app, handle, "wait", until=until, timeout_ms=30_000).unwrap_err()
    assert refused.code is HandleErrorCode.VALIDATION_FAILED
    assert "statuses of a run: PENDING, RUNNING" in refused.message


def test_a_lost_notification_only_delays(app: Horsies, tasks: Tasks, hands: Hands) -> None:
    app.get_broker().waiters._poll_seconds = 0.1
    handle = chain(app, tasks).start().unwrap()
    hands.complete(handle.workflow_id, "first")
    waiting = Waiting(handle)
    hands.connection.execute("ALTER TABLE horsies_workflows DISABLE TRIGGER USER")
    try:
        hands.complete(handle.workflow_id, "last")
    finally:
        hands.connection.execute("ALTER TABLE horsies_workflows ENABLE TRIGGER USER")
    assert waiting.result().is_ok()


def test_a_waiter_outlasts_a_cut_connection(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    handle = chain(app, tasks).start().unwrap()
    hands.complete(handle.workflow_id, "first")
    waiting = Waiting(handle)
    terminate(connection, "horsies:waiters")
    hands.complete(handle.workflow_id, "last")
    assert waiting.result().is_ok()


def test_a_cancelled_wait_leaves_nothing_behind(app: Horsies, tasks: Tasks, hands: Hands) -> None:
    handle = chain(app, tasks).start().unwrap()

    async def main() -> None:
        for method in (handle.get_async, handle.wait_async):
            waiting = asyncio.create_task(method())
            await asyncio.to_thread(wait_until, lambda: is_seen(handle))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert app.get_broker().waiters._watches == {}

    run_closing(app, main())


def test_waiting_inside_an_event_loop_is_refused_instead_of_blocking_it(
    app: Horsies, tasks: Tasks
) -> None:
    handle = chain(app, tasks).start().unwrap()

    async def main() -> tuple[Result, Any, Result]:
        with pytest.raises(ResultUnavailable, match=r"await handle\.result_async"):
            handle.result()
        return handle.get(), handle.wait(timeout_ms=30_000), handle.get(timeout_ms=0)

    waited, met, looked = asyncio.run(main())
    assert code_of(waited) is RetrievalCode.EVENT_LOOP_RUNNING
    assert "_async" in (waited.err_value.message or "")
    assert met.unwrap_err().code is HandleErrorCode.LOOP_RUNNER_FAILED
    assert code_of(looked) is RetrievalCode.RESULT_NOT_READY


def test_a_task_and_a_run_of_the_same_id_are_told_apart(
    app: Horsies, tasks: Tasks, hands: Hands
) -> None:
    shared = tasks.number.send(1).unwrap()
    handle = chain(app, tasks).start(shared.task_id).unwrap()
    hands.complete(handle.workflow_id, "first")
    waiting = Waiting(handle)
    assert code_of(shared.get(timeout_ms=30)) is RetrievalCode.WAIT_TIMEOUT
    hands.complete(handle.workflow_id, "last", 9)
    assert waiting.result().ok_value == 9


# Pauses


def test_a_paused_run_answers_at_once(app: Horsies, tasks: Tasks, call: Call) -> None:
    handle = chain(app, tasks).start().unwrap()
    handle.pause().unwrap()
    result = call(app, handle, "get")
    assert code_of(result) is OutcomeCode.WORKFLOW_PAUSED
    assert result.err_value.data == {"workflow_id": handle.workflow_id}


def test_a_run_paused_by_a_failure_says_why(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = chain(app, tasks, on_error=OnError.PAUSE).start().unwrap()
    waiting = Waiting(handle)
    hands.fail(handle.workflow_id, "first")
    assert code_of(waiting.result()) is OutcomeCode.WORKFLOW_PAUSED
    assert "first broke" in (call(app, handle, "get").err_value.message or "")
    assert call(app, handle, "info").unwrap().error.error_code == "BOOM"


def test_a_wait_outlasts_a_pause(app: Horsies, tasks: Tasks, hands: Hands) -> None:
    handle = chain(app, tasks).start().unwrap()
    hands.complete(handle.workflow_id, "first")
    waiting = Waiting(handle, "wait")
    handle.pause().unwrap()
    assert handle.wait(until={WorkflowStatus.PAUSED}, timeout_ms=30_000).unwrap() == "PAUSED"
    assert not waiting.is_over()
    handle.resume().unwrap()
    hands.complete(handle.workflow_id, "last")
    assert waiting.result().unwrap() is WorkflowStatus.COMPLETED


def test_a_wait_for_what_will_not_come_ends_with_the_run(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    looked = call(app, handle, "wait", until={WorkflowStatus.PAUSED}, timeout_ms=0)
    assert looked.unwrap_err().code is HandleErrorCode.WAIT_TIMEOUT
    assert "is RUNNING" in looked.unwrap_err().message
    timed = call(app, handle, "wait", until={WorkflowStatus.PAUSED}, timeout_ms=30)
    assert timed.unwrap_err().code is HandleErrorCode.WAIT_TIMEOUT
    assert timed.unwrap_err().retryable
    assert f"see `horsies workflow show {handle.workflow_id}`" in timed.unwrap_err().message
    handle.cancel().unwrap()
    ended = call(app, handle, "wait", until=[WorkflowStatus.PAUSED], timeout_ms=30_000)
    assert ended.unwrap() is WorkflowStatus.CANCELLED


# Nodes


def test_the_result_of_one_node_never_waits(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    spec = chain(app, tasks)
    first, last = spec.tasks
    handle = spec.start().unwrap()
    key: NodeKey[int] = NodeKey("first")
    assert code_of(call(app, handle, "result_for", key)) is RetrievalCode.RESULT_NOT_READY
    hands.complete(handle.workflow_id, "first", 4)
    for reader in (handle, app.workflow_handle(handle.workflow_id)):
        assert call(app, reader, "result_for", key) == TaskResult(ok=4)
        assert call(app, reader, "result_for", first) == TaskResult(ok=4)
        assert code_of(call(app, reader, "result_for", last)) is RetrievalCode.RESULT_NOT_READY


def test_a_skipped_node_an_unknown_node_and_one_without_an_id_are_told_apart(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    hands.fail(handle.workflow_id, "first")
    assert code_of(call(app, handle, "result_for", NodeKey("first"))) == "BOOM"
    skipped = call(app, handle, "result_for", NodeKey("last"))
    assert code_of(skipped) is OutcomeCode.UPSTREAM_SKIPPED
    unknown = call(app, handle, "result_for", NodeKey("nobody"))
    assert code_of(unknown) is RetrievalCode.NODE_NOT_FOUND
    loose = call(app, handle, "result_for", tasks.number.node()())
    assert code_of(loose) is ContractCode.WORKFLOW_CTX_MISSING_ID
    with pytest.raises(TypeError, match="a node or a NodeKey"):
        handle.result_for(7)  # type: ignore[arg-type]


def test_a_damaged_result_is_an_error_result(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    hands.complete(handle.workflow_id, "first")
    hands.complete(handle.workflow_id, "last")
    connection.execute("UPDATE horsies_tasks SET result = 'nonsense' WHERE workflow_node_index = 1")
    result = call(app, handle, "result_for", NodeKey("last"))
    assert code_of(result) is OperationalErrorCode.RESULT_DESERIALIZATION_ERROR
    assert code_of(handle.get()) is OperationalErrorCode.RESULT_DESERIALIZATION_ERROR
    connection.execute(
        'UPDATE horsies_tasks SET result = \'{"ok":"x"}\' WHERE workflow_node_index = 1'
    )
    result = call(app, handle, "result_for", NodeKey("last"))
    assert code_of(result) is ContractCode.PYDANTIC_HYDRATION_ERROR


def test_results_are_those_of_nodes_that_have_one(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    assert call(app, handle, "results").unwrap() == {}
    hands.fail(handle.workflow_id, "first")
    for reader in (handle, app.workflow_handle(handle.workflow_id)):
        results = call(app, reader, "results").unwrap()
        assert list(results) == ["first"]
        assert code_of(results["first"]) == "BOOM"


def test_nodes_are_described_in_their_order(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = chain(app, tasks).start().unwrap()
    taken = hands.take(handle.workflow_id, "first")
    first, last = call(app, handle, "tasks").unwrap()
    assert (first.node_id, first.index, first.name, first.kind) == ("first", 0, "number", "task")
    assert (first.status, first.result) == (WorkflowTaskStatus.RUNNING, None)
    assert (first.task_id, first.retry_count) == (taken[0], 0)
    assert first.enqueued_at is not None
    assert first.started_at is not None
    assert (last.status, last.task_id) == (WorkflowTaskStatus.PENDING, None)
    hands.end(handle.workflow_id, taken, {"ok": 4})
    first, last = call(app, handle, "tasks").unwrap()
    assert (first.status, first.result) == (WorkflowTaskStatus.COMPLETED, TaskResult(ok=4))
    assert first.completed_at >= first.started_at >= first.enqueued_at
    assert last.status is WorkflowTaskStatus.ENQUEUED
    bare, _ = call(app, handle, "tasks", include_results=False).unwrap()
    assert bare.result is None


def test_items_of_a_map_follow_it_with_their_place(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    source = tasks.numbers.node(node_id="source")()
    squares = MapNode(tasks.square, over=source, node_id="squares", allow_failed_items=True)
    spec = app.workflow("map", [source, squares], output=squares, definition_key="handle.map")
    handle = spec.start().unwrap()
    hands.complete(handle.workflow_id, "source", [1, 2, 3])
    hands.complete(handle.workflow_id, "squares", 4, item=1)
    node, *items = call(app, handle, "tasks").unwrap()[1:]
    assert (node.kind, node.name, node.item_index) == ("map", "square", None)
    assert (node.items_total, node.items_open, node.items_failed) == (3, 2, 0)
    assert [item.item_index for item in items] == [0, 1, 2]
    assert [item.status.value for item in items] == ["ENQUEUED", "COMPLETED", "ENQUEUED"]
    assert items[1].result == TaskResult(ok=4)
    assert items[1].task_id == hands.task_id(handle.workflow_id, "squares", 1)
    hands.fail(handle.workflow_id, "squares", item=0)
    hands.complete(handle.workflow_id, "squares", 9, item=2)
    for reader in (handle, app.workflow_handle(handle.workflow_id)):
        first, *others = call(app, reader, "get", timeout_ms=30_000).ok_value
        assert code_of(first) == "BOOM"
        assert others == [TaskResult(ok=4), TaskResult(ok=9)]
        _, _, failed, *_ = call(app, reader, "tasks").unwrap()
        assert (failed.status, code_of(failed.result)) == (WorkflowTaskStatus.FAILED, "BOOM")


# Sub-workflows


class Stable(WorkflowDefinition[Order]):
    """A child whose types are found by its key."""

    name = "stable"
    definition_key = "handle.stable"

    @classmethod
    def build_with(cls, app: Any) -> WorkflowSpec[Order]:
        only = app.get_task("order").node(node_id="order")()
        return WorkflowSpec(cls.name, [only], output=only, on_error=OnError.PAUSE)


@dataclass
class Family:
    """A run with one below it."""

    parent: WorkflowHandle[Any]
    child_id: str


@pytest.fixture
def family(app: Horsies, hands: Hands) -> Family:
    order_workflow(app)
    node = SubWorkflowNode(Stable, node_id="stable")
    spec = app.workflow("farm", [node], output=node, definition_key="handle.farm")
    handle, child_id = spec.start().unwrap(), new_id()
    hands.expand(handle.workflow_id, "stable", Stable.build_with(app), child_id)
    return Family(handle, child_id)


def test_the_result_of_a_sub_workflow_has_the_type_of_its_definition(
    app: Horsies, hands: Hands, family: Family, call: Call
) -> None:
    (node,) = call(app, family.parent, "tasks").unwrap()
    assert (node.kind, node.name, node.status) == ("workflow", "stable", "RUNNING")
    assert (node.sub_workflow_id, node.sub_workflow_status) == (family.child_id, "RUNNING")
    hands.complete(family.child_id, "order", ORDER.model_dump(mode="json"))
    for reader in (family.parent, app.workflow_handle(family.parent.workflow_id)):
        assert call(app, reader, "get", timeout_ms=30_000).ok_value == ORDER
    (node,) = call(app, family.parent, "tasks").unwrap()
    assert node.sub_workflow_summary == SubWorkflowSummary(
        status=WorkflowStatus.COMPLETED, total_tasks=1, completed_tasks=1
    )
    child = app.workflow_handle(family.child_id)
    assert call(app, child, "get", timeout_ms=30_000).ok_value == ORDER
    info = call(app, child, "info").unwrap()
    assert (info.parent_workflow_id, info.depth) == (family.parent.workflow_id, 1)


def test_a_paused_run_below_is_seen_from_above(
    app: Horsies, hands: Hands, family: Family, call: Call
) -> None:
    assert call(app, family.parent, "info").unwrap().paused_descendants == []
    hands.fail(family.child_id, "order")
    info = call(app, family.parent, "info").unwrap()
    assert (info.status, info.paused_descendants) == (WorkflowStatus.RUNNING, [family.child_id])
    (node,) = call(app, family.parent, "tasks").unwrap()
    assert node.sub_workflow_status is WorkflowStatus.PAUSED


def test_a_failed_sub_workflow_tells_about_itself(
    app: Horsies, hands: Hands, family: Family, call: Call
) -> None:
    hands.fail(family.child_id, "order")
    app.workflow_handle(family.child_id).resume().unwrap()
    error = call(app, family.parent, "get", timeout_ms=30_000).err_value
    assert isinstance(error, SubWorkflowError)
    assert error.error_code is OutcomeCode.SUBWORKFLOW_FAILED
    assert error.sub_workflow_id == family.child_id
    assert error.sub_workflow_summary is not None
    assert error.sub_workflow_summary.failed_tasks == 1


def test_a_damaged_summary_is_an_error(
    app: Horsies, hands: Hands, connection: Database, family: Family, call: Call
) -> None:
    hands.complete(family.child_id, "order", ORDER.model_dump(mode="json"))
    connection.execute("UPDATE horsies_workflow_tasks SET sub_workflow_summary = '{\"x\":1}'")
    error = call(app, family.parent, "tasks").unwrap_err()
    assert error.code is HandleErrorCode.INTERNAL_FAILED
    assert not error.retryable


# Types found by name


class Timed(WorkflowDefinition[Any]):
    """A definition whose signal has a type."""

    name = "timed"
    definition_key = "handle.timed"

    nap = SleepNode(0)
    go: SignalNode[Order] = SignalNode("go", value_type=Order, waits_for=[nap])


def test_sleeps_and_signals_are_read_by_the_definition(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = Timed.build(app).start().unwrap()
    hands.complete(handle.workflow_id, "nap", None)
    found = app.workflow_handle(handle.workflow_id)
    refused = call(app, found, "signal", "go", 7).unwrap_err()
    assert refused.code is HandleErrorCode.VALIDATION_FAILED
    call(app, found, "signal", "go", ORDER).unwrap()
    hands.complete(handle.workflow_id, "go", ORDER.model_dump(mode="json"))
    for reader in (handle, found):
        assert call(app, reader, "result_for", NodeKey("nap")) == TaskResult(ok=None)
        assert call(app, reader, "result_for", NodeKey("go")) == TaskResult(ok=ORDER)


def test_a_task_that_is_not_registered_here_is_read_as_plain_json(
    app: Horsies, hands: Hands, process_url: str, connection: Database
) -> None:
    handle = order_workflow(app).start().unwrap()
    hands.complete(handle.workflow_id, "order", ORDER.model_dump(mode="json"))
    stranger = Horsies(app.config)
    try:
        assert stranger.workflow_handle(handle.workflow_id).get(timeout_ms=30_000).ok_value == {
            "number": 7,
            "lines": ["hay", "oats"],
        }
    finally:
        stranger.close()


# A database that is away

STEERING: dict[str, tuple[Any, ...]] = {
    "status": (),
    "info": (),
    "results": (),
    "tasks": (),
    "pause": (),
    "resume": (),
    "retry": (),
    "cancel": (),
    "signal": ("go",),
    "wait": ([WorkflowStatus.COMPLETED], 300),
}


def test_a_database_that_is_away_is_a_value_everywhere(
    proxy: Proxy, distant_app: Horsies, call: Call
) -> None:
    handle = chain(distant_app, define_tasks(distant_app)).start().unwrap()
    proxy.stop()
    for method, args in STEERING.items():
        error = call(distant_app, handle, method, *args).unwrap_err()
        assert error.code is HandleErrorCode.DB_OPERATION_FAILED, method
        assert error.retryable
        assert error.exception is not None
    for result in (
        call(distant_app, handle, "get", 300),
        call(distant_app, handle, "result_for", NodeKey("first")),
    ):
        assert code_of(result) is OperationalErrorCode.BROKER_ERROR
    proxy.start()
    assert call(distant_app, handle, "status").unwrap() is WorkflowStatus.RUNNING


def test_a_handle_without_a_broker_says_so(call: Call, app: Horsies) -> None:
    handle: WorkflowHandle[Any] = WorkflowHandle(new_id(), None)
    assert code_of(call(app, handle, "get")) is RetrievalCode.RESULT_NOT_AVAILABLE
    for method in ("status", "tasks", "pause", "wait"):
        error = call(app, handle, method).unwrap_err()
        assert error.code is HandleErrorCode.BROKER_NOT_CONFIGURED
    assert repr(handle) == f"WorkflowHandle({handle.workflow_id!r})"


def test_what_is_known_of_a_run(app: Horsies, tasks: Tasks, hands: Hands, call: Call) -> None:
    handle = chain(app, tasks).start(workflow_key="order-7").unwrap()
    hands.complete(handle.workflow_id, "first")
    info = call(app, handle, "info").unwrap()
    assert (info.workflow_id, info.name) == (handle.workflow_id, "chain")
    assert (info.definition_key, info.workflow_key) == ("handle.chain", "order-7")
    assert (info.total_nodes, info.open_nodes, info.failed_nodes) == (2, 1, 0)
    assert (info.root_workflow_id, info.parent_workflow_id) == (handle.workflow_id, None)
    assert info.completed_at is None
    assert info.error is None


@pytest.mark.parametrize(
    "node", [SignalNode("approve", node_id="waiting"), SleepNode(3600, node_id="waiting")]
)
def test_the_drawing_shows_how_long_a_node_waited(
    app: Horsies, connection: Database, node: AnyNode
) -> None:
    handle = app.workflow("order", [node], definition_key="first_hour.order").start().unwrap()
    connection.execute(
        "UPDATE public.horsies_workflow_tasks SET enqueued_at = enqueued_at - interval '1 hour'"
    )
    assert handle.draw().unwrap().endswith("  1h00m")
    Hands(connection).complete(handle.workflow_id, "waiting", True)
    assert handle.draw().unwrap().endswith("  1h00m")
