"""Controlling runs: pause, resume, retry, cancel, signal; also whole trees, at a fixed cost."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Annotated, Any

import psycopg
import pytest

from horsies import (
    HandleErrorCode,
    Horsies,
    MapNode,
    NodeKey,
    OnError,
    OutcomeCode,
    SignalDelivery,
    SignalNode,
    SubWorkflowNode,
    TaskError,
    TaskResult,
    WorkflowDefinition,
    WorkflowHandle,
    WorkflowSpec,
    WorkflowStatus,
    from_node,
    pause_workflow,
    pause_workflow_sync,
    resume_workflow,
    resume_workflow_sync,
)
from horsies.ids import new_id
from tests.support.applications import Call, run_closing
from tests.support.database import Database
from tests.support.statements import counted
from tests.support.turns import Hands, Tasks
from tests.support.wait import wait_until


def chain(app: Horsies, tasks: Tasks, **options: Any) -> WorkflowSpec[int]:
    first = tasks.number.node(node_id="first")()
    middle = tasks.add.node(node_id="middle")(first=from_node(first))
    last = tasks.add.node(node_id="last")(first=from_node(middle))
    return app.workflow(
        "chain", [first, middle, last], output=last, definition_key="steering.chain", **options
    )


def started(app: Horsies, tasks: Tasks, **options: Any) -> WorkflowHandle[int]:
    return chain(app, tasks, **options).start().unwrap()


# Pause and resume


def test_a_pause_holds_what_has_not_started(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = started(app, tasks)
    task_id = hands.task_id(handle.workflow_id, "first")
    assert call(app, handle, "pause").unwrap() is True
    assert call(app, handle, "status").unwrap() is WorkflowStatus.PAUSED
    assert not hands.is_takeable(handle.workflow_id, "first")
    assert call(app, handle, "pause").unwrap() is False
    assert call(app, handle, "resume").unwrap() is True
    assert call(app, handle, "resume").unwrap() is False
    assert hands.is_takeable(handle.workflow_id, "first")
    assert hands.task_id(handle.workflow_id, "first") == task_id, "the same task goes on"


def test_what_ends_during_a_pause_counts_after_it(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = started(app, tasks)
    running = hands.take(handle.workflow_id, "first")
    handle.pause().unwrap()
    hands.end(handle.workflow_id, running, {"ok": 3})
    assert handle.result_for(NodeKey("first")) == TaskResult(ok=3)
    assert hands.statuses(handle.workflow_id)["middle"] == "PENDING"
    call(app, handle, "resume").unwrap()
    assert hands.is_takeable(handle.workflow_id, "middle")


def test_a_resume_in_which_nothing_is_left_to_do_ends_the_run(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = started(app, tasks)
    for node_id in ("first", "middle"):
        hands.complete(handle.workflow_id, node_id)
    running = hands.take(handle.workflow_id, "last")
    handle.pause().unwrap()
    hands.end(handle.workflow_id, running, {"ok": 3})
    call(app, handle, "resume").unwrap()
    assert handle.get(timeout_ms=30_000) == TaskResult(ok=3)


@pytest.mark.parametrize("end", ["COMPLETED", "FAILED", "CANCELLED"])
def test_a_run_that_has_ended_is_neither_paused_nor_resumed(
    app: Horsies, tasks: Tasks, hands: Hands, end: str, call: Call
) -> None:
    handle = started(app, tasks)
    if end == "CANCELLED":
        handle.cancel().unwrap()
    elif end == "FAILED":
        hands.fail(handle.workflow_id, "first")
    else:
        for node_id in ("first", "middle", "last"):
            hands.complete(handle.workflow_id, node_id)
    assert call(app, handle, "pause").unwrap() is False
    assert call(app, handle, "resume").unwrap() is False
    assert hands.status(handle.workflow_id) == end


def test_runs_are_paused_and_resumed_by_their_ids(app: Horsies, tasks: Tasks, hands: Hands) -> None:
    handle, broker = started(app, tasks), app.get_broker()
    assert pause_workflow_sync(broker, handle.workflow_id).unwrap() is True
    assert resume_workflow_sync(broker, handle.workflow_id).unwrap() is True
    assert run_closing(app, pause_workflow(broker, handle.workflow_id)).unwrap() is True
    assert run_closing(app, resume_workflow(broker, handle.workflow_id)).unwrap() is True
    unknown = pause_workflow_sync(broker, new_id()).unwrap_err()
    assert unknown.code is HandleErrorCode.WORKFLOW_NOT_FOUND
    unknown = run_closing(app, resume_workflow(broker, new_id())).unwrap_err()
    assert unknown.code is HandleErrorCode.WORKFLOW_NOT_FOUND


def test_after_a_failure_a_resume_alone_only_delays_the_end(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = started(app, tasks, on_error=OnError.PAUSE)
    hands.fail(handle.workflow_id, "first")
    assert call(app, handle, "resume").unwrap() is True
    assert handle.get(timeout_ms=30_000).err_value.error_code == "BOOM"
    assert hands.statuses(handle.workflow_id) == {
        "first": "FAILED",
        "middle": "SKIPPED",
        "last": "SKIPPED",
    }


# Trying again


@pytest.mark.parametrize("on_error", list(OnError))
def test_a_resume_that_tries_again_restarts_a_run_from_its_failures(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call, on_error: OnError
) -> None:
    handle = started(app, tasks, on_error=on_error)
    hands.complete(handle.workflow_id, "first", 3)
    hands.fail(handle.workflow_id, "middle")
    assert call(app, handle, "resume", retry_failed=True).unwrap() is True
    assert call(app, handle, "info").unwrap().error is None
    assert hands.statuses(handle.workflow_id) == {
        "first": "COMPLETED",
        "middle": "ENQUEUED",
        "last": "PENDING",
    }
    hands.complete(handle.workflow_id, "middle")
    hands.complete(handle.workflow_id, "last", 8)
    assert handle.get(timeout_ms=30_000) == TaskResult(ok=8)


def test_a_resume_that_tries_again_is_a_plain_resume_where_nothing_failed(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = started(app, tasks)
    assert call(app, handle, "resume", retry_failed=True).unwrap() is False
    handle.pause().unwrap()
    assert call(app, handle, "resume", retry_failed=True).unwrap() is True
    assert hands.is_takeable(handle.workflow_id, "first")
    handle.cancel().unwrap()
    assert call(app, handle, "resume", retry_failed=True).unwrap() is False


def test_one_failed_node_is_tried_again_and_others_stay(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    nodes = [tasks.number.node(node_id=name)() for name in ("one", "two")]
    handle = app.workflow("pair", nodes, definition_key="steering.pair").start().unwrap()
    for name in ("one", "two"):
        hands.fail(handle.workflow_id, name)
    before = hands.task_id(handle.workflow_id, "two")
    assert call(app, handle, "retry", nodes[1]).unwrap() is None
    assert handle.status().unwrap() is WorkflowStatus.RUNNING
    assert hands.statuses(handle.workflow_id) == {"one": "FAILED", "two": "ENQUEUED"}
    assert hands.task_id(handle.workflow_id, "two") != before
    hands.complete(handle.workflow_id, "two")
    assert handle.get(timeout_ms=30_000).is_err(), "the other one is still failed"
    assert call(app, handle, "retry", "one").unwrap() is None
    hands.complete(handle.workflow_id, "one")
    assert handle.get(timeout_ms=30_000).is_ok()


def test_what_cannot_be_tried_again_is_told_apart(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = started(app, tasks)

    def refusal(*node: Any) -> HandleErrorCode:
        error = call(app, handle, "retry", *node).unwrap_err()
        assert not error.retryable
        code: HandleErrorCode = error.code
        return code

    assert refusal() is HandleErrorCode.NOTHING_TO_RETRY
    assert refusal(NodeKey("first")) is HandleErrorCode.NOTHING_TO_RETRY
    assert refusal("nobody") is HandleErrorCode.NODE_NOT_FOUND
    assert refusal(tasks.number.node()()) is HandleErrorCode.NODE_NOT_FOUND
    handle.cancel().unwrap()
    assert refusal() is HandleErrorCode.WORKFLOW_NOT_RETRYABLE
    with pytest.raises(TypeError, match="a node or a NodeKey"):
        handle.retry(7)  # type: ignore[arg-type]


def test_only_the_failed_items_of_a_map_are_tried_again(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    source = tasks.numbers.node(node_id="source")()
    squares = MapNode(tasks.square, over=source, node_id="squares")
    spec = app.workflow("map", [source, squares], output=squares, definition_key="steering.map")
    handle = spec.start().unwrap()
    hands.complete(handle.workflow_id, "source", [1, 2])
    hands.complete(handle.workflow_id, "squares", 1, item=0)
    hands.fail(handle.workflow_id, "squares", item=1)
    failed = handle.get(timeout_ms=30_000).err_value
    assert failed.error_code is OutcomeCode.MAP_ITEMS_FAILED
    assert failed.data == {"failed_items": [1]}
    good = hands.task_id(handle.workflow_id, "squares", 0)
    call(app, handle, "retry").unwrap()
    hands.complete(handle.workflow_id, "squares", 4, item=1)
    assert handle.get(timeout_ms=30_000).ok_value == [TaskResult(ok=1), TaskResult(ok=4)]
    assert hands.task_id(handle.workflow_id, "squares", 0) == good


def test_items_of_a_map_are_on_hold_exactly_while_their_run_is_paused(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    source = tasks.numbers.node(node_id="source")()
    squares = MapNode(tasks.square, over=source, node_id="squares")
    spec = app.workflow(
        "map", [source, squares], output=squares, definition_key="s.map", on_error=OnError.PAUSE
    )
    handle = spec.start().unwrap()

    def items() -> list[tuple[int, bool]]:
        return connection.execute(
            "SELECT workflow_item_index, held FROM horsies_tasks WHERE workflow_id = %s"
            " AND workflow_item_index IS NOT NULL AND status = 'PENDING' ORDER BY 1",
            (handle.workflow_id,),
        ).fetchall()

    running = hands.take(handle.workflow_id, "source")
    handle.pause().unwrap()
    hands.end(handle.workflow_id, running, {"ok": [1, 2]})
    assert items() == [], "a paused run begins no map"
    handle.resume().unwrap()
    assert items() == [(0, False), (1, False)]
    handle.pause().unwrap()
    assert items() == [(0, True), (1, True)]
    handle.resume().unwrap()
    hands.complete(handle.workflow_id, "squares", 1, item=0)
    hands.fail(handle.workflow_id, "squares", item=1)
    assert handle.status().unwrap() is WorkflowStatus.PAUSED
    handle.retry().unwrap()
    assert items() == [(1, False)], "a retry lets the run go on before it adds the items"


# Cancel


def test_a_cancel_skips_what_has_not_started_and_leaves_what_runs(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    nodes = [tasks.number.node(node_id=name)() for name in ("running", "waiting")]
    nodes.append(tasks.add.node(node_id="later")(first=from_node(nodes[0])))
    handle = app.workflow("trio", nodes, definition_key="steering.trio").start().unwrap()
    running = hands.take(handle.workflow_id, "running")
    waiting = hands.task_id(handle.workflow_id, "waiting")
    assert call(app, handle, "cancel", reason="the customer left").unwrap() is None
    assert hands.statuses(handle.workflow_id) == {
        "running": "ENQUEUED",
        "waiting": "SKIPPED",
        "later": "SKIPPED",
    }
    result = handle.get(timeout_ms=30_000)
    assert result.err_value.error_code is OutcomeCode.WORKFLOW_CANCELLED
    assert "the customer left" in (result.err_value.message or "")
    assert result.err_value.data["reason"] == "the customer left"
    assert app.handle(waiting).get(timeout_ms=0).err_value.error_code == OutcomeCode.TASK_CANCELLED
    hands.end(handle.workflow_id, running, {"ok": 1})
    assert hands.status(handle.workflow_id) == "CANCELLED", "a late end revives nothing"
    assert hands.statuses(handle.workflow_id)["later"] == "SKIPPED"
    assert call(app, handle, "cancel", reason="again").unwrap() is None
    assert handle.info().unwrap().error == result.err_value


def test_a_cancel_may_interrupt_what_runs(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, process_url: str, call: Call
) -> None:
    handle = started(app, tasks)
    task_id, _ = hands.take(handle.workflow_id, "first")
    with psycopg.connect(process_url, autocommit=True) as worker:
        worker.execute("LISTEN horsies_cancel")
        call(app, handle, "cancel", interrupt=True).unwrap()
        heard = [note.payload for note in worker.notifies(timeout=30, stop_after=1)]
    assert heard == [task_id]
    asked = connection.execute(
        "SELECT cancel_requested_at IS NOT NULL, status FROM horsies_tasks WHERE id = %s",
        (task_id,),
    ).fetchone()
    assert asked == (True, "RUNNING")


def test_a_cancelled_run_wakes_its_waiter(app: Horsies, tasks: Tasks, hands: Hands) -> None:
    app.get_broker().waiters._poll_seconds = 600.0
    handle = started(app, tasks)
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.append(handle.get(timeout_ms=30_000)))
    waiting.start()
    wait_until(lambda: bool(app.get_broker().waiters._watches))
    handle.cancel().unwrap()
    waiting.join(60)
    assert results[0].err_value.error_code is OutcomeCode.WORKFLOW_CANCELLED


# Signals


def signalled(app: Horsies, tasks: Tasks) -> WorkflowHandle[Any]:
    first = tasks.number.node(node_id="first")()
    one: SignalNode[bool] = SignalNode("go", value_type=bool, node_id="one", waits_for=[first])
    two: SignalNode[bool] = SignalNode(
        "go", value_type=bool, node_id="two", waits_for=[one], timeout=timedelta(days=1)
    )
    spec = app.workflow("gate", [first, one, two], output=two, definition_key="steering.gate")
    return spec.start().unwrap()


def test_a_signal_is_delivered_to_the_node_that_waits(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = signalled(app, tasks)
    hands.complete(handle.workflow_id, "first")
    assert not hands.is_takeable(handle.workflow_id, "one")
    assert call(app, handle, "signal", "go", True).unwrap() is SignalDelivery.DELIVERED
    assert hands.is_takeable(handle.workflow_id, "one")
    stored = hands.connection.execute(
        "SELECT kwargs FROM horsies_tasks WHERE id = %s",
        (hands.task_id(handle.workflow_id, "one"),),
    ).fetchone()
    assert stored == ('{"value":true}',)


def test_signals_that_come_early_are_kept_and_taken_once_each(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = signalled(app, tasks)
    assert call(app, handle, "signal", "go", True).unwrap() is SignalDelivery.STORED
    assert call(app, handle, "signal", "go", False).unwrap() is SignalDelivery.STORED
    hands.complete(handle.workflow_id, "first")
    assert hands.is_takeable(handle.workflow_id, "one")
    hands.complete(handle.workflow_id, "one", True)
    assert hands.is_takeable(handle.workflow_id, "two")
    hands.complete(handle.workflow_id, "two", False)
    assert handle.get(timeout_ms=30_000) == TaskResult(ok=False)
    assert hands.count("horsies_workflow_signals") == 0


def test_a_signal_nobody_can_take_is_refused(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    handle = signalled(app, tasks)
    wrong = call(app, handle, "signal", "go", "yes").unwrap_err()
    assert wrong.code is HandleErrorCode.VALIDATION_FAILED
    assert "yes" not in wrong.message, "values are nobody's business"
    nan = call(app, handle, "signal", "stop", float("nan")).unwrap_err()
    assert nan.code is HandleErrorCode.VALIDATION_FAILED
    unknown = call(app, handle, "signal", "stop", True).unwrap_err()
    assert unknown.code is HandleErrorCode.SIGNAL_NOT_FOUND
    assert unknown.message.endswith("waits for a signal 'stop'; its signals are go.")
    handle.cancel().unwrap()
    late = call(app, handle, "signal", "go", True).unwrap_err()
    assert late.code is HandleErrorCode.WORKFLOW_ENDED
    assert "CANCELLED" in late.message
    assert hands.count("horsies_workflow_signals") == 0


@pytest.mark.parametrize("name", ["g\0o", "\ud800", 5, None, b"go", ["go"]])
def test_a_signal_by_what_is_no_name_is_refused(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call, name: Any
) -> None:
    handle = signalled(app, tasks)
    refused = call(app, handle, "signal", name, True).unwrap_err()
    assert refused.code is HandleErrorCode.VALIDATION_FAILED
    assert refused.message.startswith(f"The signal {name!r} was not sent: its name ")
    assert hands.count("horsies_workflow_signals") == 0


def test_a_signal_s_type_may_hold_what_has_no_hash(app: Horsies, hands: Hands, call: Call) -> None:
    described: Any = Annotated[int, {"unit": "seconds"}]
    nodes = [SignalNode("go", value_type=described)]
    handle = app.workflow("w", nodes, definition_key="steering.unhashed").start().unwrap()
    assert call(app, handle, "signal", "go", 7).unwrap() is SignalDelivery.DELIVERED


# Trees of runs


class Inner(WorkflowDefinition[int]):
    """A child that pauses when it fails."""

    name = "inner"
    definition_key = "steering.inner"

    @classmethod
    def build_with(cls, app: Any) -> WorkflowSpec[int]:
        only = app.get_task("number").node(node_id="only")()
        return WorkflowSpec(cls.name, [only], output=only, on_error=OnError.PAUSE)


def family(app: Horsies, hands: Hands) -> tuple[WorkflowHandle[Any], WorkflowHandle[Any]]:
    node = SubWorkflowNode(Inner, node_id="inner")
    other = app.get_task("number")
    assert other is not None
    beside = other.node(node_id="beside")()
    spec = app.workflow("outer", [node, beside], output=node, definition_key="steering.outer")
    handle, child_id = spec.start().unwrap(), new_id()
    hands.expand(handle.workflow_id, "inner", Inner.build_with(app), child_id)
    return handle, app.workflow_handle(child_id)


def test_pause_and_resume_reach_the_runs_below(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    outer, inner = family(app, hands)
    call(app, outer, "pause").unwrap()
    assert inner.status().unwrap() is WorkflowStatus.PAUSED
    assert not hands.is_takeable(inner.workflow_id, "only")
    assert outer.info().unwrap().paused_descendants == [inner.workflow_id]
    call(app, outer, "resume").unwrap()
    assert inner.status().unwrap() is WorkflowStatus.RUNNING
    assert hands.is_takeable(inner.workflow_id, "only")


def test_a_resume_that_tries_again_reaches_the_failures_below(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    outer, inner = family(app, hands)
    hands.fail(inner.workflow_id, "only")
    outer.pause().unwrap()
    assert call(app, outer, "resume", retry_failed=True).unwrap() is True
    assert inner.status().unwrap() is WorkflowStatus.RUNNING
    assert hands.statuses(inner.workflow_id) == {"only": "ENQUEUED"}
    hands.complete(inner.workflow_id, "only", 6)
    hands.complete(outer.workflow_id, "beside")
    assert outer.get(timeout_ms=30_000) == TaskResult(ok=6)


def test_a_failed_run_is_restarted_from_the_failures_below_it(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    outer, inner = family(app, hands)
    hands.complete(outer.workflow_id, "beside")
    hands.fail(inner.workflow_id, "only")
    inner.resume().unwrap()
    assert outer.get(timeout_ms=30_000).err_value.error_code is OutcomeCode.SUBWORKFLOW_FAILED
    late = inner.retry().unwrap_err()
    assert late.code is HandleErrorCode.WORKFLOW_NOT_RETRYABLE
    assert "part of another" in late.message
    call(app, outer, "retry", "inner").unwrap()
    hands.complete(inner.workflow_id, "only", 6)
    assert outer.get(timeout_ms=30_000) == TaskResult(ok=6)


def test_a_cancel_reaches_the_runs_below_and_the_node_above(
    app: Horsies, tasks: Tasks, hands: Hands, call: Call
) -> None:
    outer, inner = family(app, hands)
    call(app, inner, "cancel", reason="no more oats").unwrap()
    assert hands.statuses(outer.workflow_id)["inner"] == "FAILED"
    assert outer.status().unwrap() is WorkflowStatus.RUNNING
    other_outer, other_inner = family(app, hands)
    call(app, other_outer, "cancel").unwrap()
    assert other_inner.status().unwrap() is WorkflowStatus.CANCELLED
    error = other_inner.get(timeout_ms=30_000).err_value
    assert isinstance(error, TaskError)
    assert error.error_code is OutcomeCode.WORKFLOW_CANCELLED


# Cost


def test_steering_a_thousand_nodes_takes_one_statement(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, call: Call
) -> None:
    root = tasks.number.node(node_id="root")()
    leaves = [
        tasks.add.node(node_id=f"leaf-{number}")(first=from_node(root)) for number in range(999)
    ]
    spec = app.workflow("wide", [root, *leaves], definition_key="steering.wide")
    handle = spec.start().unwrap()
    hands.complete(handle.workflow_id, "root")
    app.get_broker().ensure_schema_initialized().unwrap()
    orders: list[tuple[str, dict[str, Any]]] = [
        ("status", {}),
        ("pause", {}),
        ("resume", {}),
        ("pause", {}),
        ("resume", {"retry_failed": True}),
        ("retry", {}),
        ("signal", {"name": "go"}),
        ("cancel", {}),
    ]
    for method, options in orders:
        with counted() as statements:
            call(app, handle, method, **options)
        own = [text for text in statements if "horsies_" in text and "horsies_actions" not in text]
        # The refusal of an unknown signal reads the names of those there are.
        assert len(own) == (2 if method == "signal" else 1), method
    held = connection.execute(
        "SELECT status, count(*) FROM horsies_tasks GROUP BY status ORDER BY status"
    ).fetchall()
    assert held == [("CANCELLED", 999), ("COMPLETED", 1)]
