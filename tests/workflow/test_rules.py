"""The semantics most easily got wrong, one test or more for each."""

from __future__ import annotations

import json
import threading
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies import (
    Horsies,
    OnError,
    OutcomeCode,
    SubWorkflowError,
    SubWorkflowNode,
    WorkflowDefinition,
    WorkflowStartErrorCode,
    WorkflowStatus,
)
from horsies.db.statements.workflows import read_results
from horsies.ids import new_id
from tests.support.database import lock_waiters
from tests.support.oracle.compare import Duet
from tests.support.oracle.engine import Engine
from tests.support.oracle.shapes import NodeShape, RunShape, chain, fan
from tests.support.oracle.tree import End, Place
from tests.support.turns import Hands, Tasks
from tests.support.wait import wait_until


def run_row(duet: Duet, run_id: str) -> tuple[str, Any]:
    """Return the stored status and error of a run, once the oracle has agreed with it."""
    duet.check()
    found = duet.connection.execute(
        "SELECT status, error FROM horsies_workflows WHERE id = %s", (run_id,)
    ).fetchone()
    assert found is not None
    return found[0], None if found[1] is None else json.loads(found[1])


def node_statuses(duet: Duet, run_id: str) -> list[str]:
    duet.check()
    found = duet.connection.execute(
        "SELECT status FROM horsies_workflow_tasks WHERE workflow_id = %s ORDER BY task_index",
        (run_id,),
    )
    return [status for (status,) in found]


def error_of(end: End) -> dict[str, Any]:
    assert end.result is not None
    error: dict[str, Any] = end.result["err"]
    return error


def child_of(duet: Duet) -> str:
    """Return the run that was started last."""
    return list(duet.oracle.runs)[-1]


def test_all_with_one_failed_and_one_running_dependency_stays_pending(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(), NodeShape(), NodeShape(after=(0, 1)))))
    duet.claim([(run, 1, None)])
    duet.fail((run, 0, None))
    assert node_statuses(duet, run) == ["FAILED", "ENQUEUED", "PENDING"]
    duet.succeed((run, 1, None))
    assert node_statuses(duet, run) == ["FAILED", "COMPLETED", "SKIPPED"]


def test_every_dependent_of_a_failed_root_is_skipped(duet: Duet) -> None:
    run = duet.start_one(
        RunShape((NodeShape(), NodeShape(after=(0,)), NodeShape(after=(1,)), NodeShape(after=(0,))))
    )
    duet.fail((run, 0, None))
    assert node_statuses(duet, run) == ["FAILED", "SKIPPED", "SKIPPED", "SKIPPED"]
    assert run_row(duet, run)[0] == "FAILED"


@pytest.mark.parametrize(("join", "min_success"), [("any", None), ("quorum", 1)])
@pytest.mark.parametrize("slow_one_succeeds", [True, False])
def test_a_context_node_delays_a_join_that_is_already_satisfied(
    duet: Duet, join: str, min_success: int | None, slow_one_succeeds: bool
) -> None:
    last = NodeShape(after=(0, 1), join=join, min_success=min_success, context=(1,))
    run = duet.start_one(RunShape((NodeShape(), NodeShape(), last)))
    duet.succeed((run, 0, None))
    assert node_statuses(duet, run)[2] == "PENDING"
    if slow_one_succeeds:
        duet.succeed((run, 1, None))
    else:
        duet.fail((run, 1, None))
    assert node_statuses(duet, run)[2] == "ENQUEUED"


def test_a_source_that_is_still_open_is_left_out_of_the_inputs(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(), NodeShape(), NodeShape(after=(0, 1), join="any"))))
    duet.succeed((run, 0, None), value=1)
    assert node_statuses(duet, run)[2] == "ENQUEUED"
    inputs = read_results.fetch(duet.connection, [run, run], [0, 1], 1_000)
    assert [(row.task_index, row.result) for row in inputs] == [(0, '{"ok": 1}')]


def test_a_recovered_workflow_is_still_failed(duet: Duet) -> None:
    run = duet.start_one(
        RunShape((NodeShape(), NodeShape(after=(0,), allow_failed_deps=True)), output=1)
    )
    duet.fail((run, 0, None))
    duet.succeed((run, 1, None))
    assert node_statuses(duet, run) == ["FAILED", "COMPLETED"]
    assert run_row(duet, run)[0] == "FAILED"


def test_the_error_of_a_run_is_that_of_the_lowest_index_not_of_the_first_in_time(
    duet: Duet,
) -> None:
    run = duet.start_one(RunShape((NodeShape(), NodeShape(), NodeShape())))
    first_in_time, first_by_index = duet.failed((run, 2, None)), duet.failed((run, 1, None))
    duet.finish(first_in_time)
    assert run_row(duet, run) == ("RUNNING", error_of(first_in_time))
    duet.finish(first_by_index)
    duet.succeed((run, 0, None))
    assert run_row(duet, run) == ("FAILED", error_of(first_by_index))


def test_a_pause_beats_a_success_policy_that_could_still_be_met(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(), NodeShape()), on_error="pause", cases=((1,),)))
    failed = duet.failed((run, 0, None))
    duet.finish(failed)
    assert run_row(duet, run) == ("PAUSED", error_of(failed))
    assert duet.claimable() == []


def test_a_pause_stops_what_other_branches_would_set_off(duet: Duet) -> None:
    run = duet.start_one(
        RunShape((NodeShape(), NodeShape(), NodeShape(after=(1,))), on_error="pause")
    )
    duet.claim([(run, 1, None)])
    duet.fail((run, 0, None))
    duet.succeed((run, 1, None))
    assert node_statuses(duet, run) == ["FAILED", "COMPLETED", "PENDING"]
    duet.resume(run)
    assert node_statuses(duet, run) == ["FAILED", "COMPLETED", "ENQUEUED"]


def test_a_pause_stops_other_branches_that_end_in_the_same_transaction(duet: Duet) -> None:
    run = duet.start_one(
        RunShape((NodeShape(), NodeShape(), NodeShape(after=(1,))), on_error="pause")
    )
    duet.finish(duet.success((run, 1, None)), duet.failed((run, 0, None)))
    assert node_statuses(duet, run) == ["FAILED", "COMPLETED", "PENDING"]


def test_a_later_failure_does_not_replace_the_error_of_the_pause(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(), NodeShape()), on_error="pause"))
    duet.claim([(run, 0, None), (run, 1, None)])
    first = duet.failed((run, 1, None))
    duet.finish(first)
    duet.fail((run, 0, None))
    assert run_row(duet, run) == ("PAUSED", error_of(first))


def test_an_optional_node_may_fail_without_a_pause(duet: Duet) -> None:
    shape = RunShape((NodeShape(), NodeShape(optional=True)), on_error="pause", cases=((0,),))
    run = duet.start_one(shape)
    duet.fail((run, 1, None))
    assert run_row(duet, run)[0] == "RUNNING"
    duet.succeed((run, 0, None))
    assert run_row(duet, run) == ("COMPLETED", None)


def test_a_run_resumed_after_a_failure_ends_failed(duet: Duet) -> None:
    run = duet.start_one(
        RunShape((NodeShape(), NodeShape(after=(0,)), NodeShape()), on_error="pause")
    )
    failed = duet.failed((run, 0, None))
    duet.finish(failed)
    duet.resume(run)
    assert node_statuses(duet, run) == ["FAILED", "SKIPPED", "ENQUEUED"]
    assert run_row(duet, run) == ("RUNNING", error_of(failed)), "the error is kept"
    duet.succeed((run, 2, None))
    assert run_row(duet, run) == ("FAILED", error_of(failed))


def test_a_resume_ends_a_run_in_which_nothing_is_left_to_do(duet: Duet) -> None:
    run = duet.start_one(chain(2, on_error="pause"))
    duet.fail((run, 0, None))
    assert run_row(duet, run)[0] == "PAUSED"
    duet.resume(run)
    assert node_statuses(duet, run) == ["FAILED", "SKIPPED"]
    assert run_row(duet, run)[0] == "FAILED"


def test_a_resume_ends_a_child_in_which_nothing_is_left_to_do_and_its_parent_node(
    duet: Duet,
) -> None:
    child = chain(2, on_error="pause")
    run = duet.start_one(RunShape((NodeShape(kind="workflow", child=child), NodeShape(after=(0,)))))
    duet.succeed((run, 0, None))
    below = child_of(duet)
    duet.fail((below, 0, None))
    assert run_row(duet, below)[0] == "PAUSED"
    assert run_row(duet, run)[0] == "RUNNING", "a child that pauses by itself pauses nobody else"
    duet.pause(run)
    duet.resume(run)
    assert run_row(duet, below)[0] == "FAILED"
    assert node_statuses(duet, run) == ["FAILED", "SKIPPED"]
    assert run_row(duet, run)[0] == "FAILED"


@pytest.mark.parametrize("by_failure", [True, False])
def test_get_returns_when_the_run_is_paused(
    app: Horsies, tasks: Tasks, hands: Hands, by_failure: bool
) -> None:
    only = tasks.number.node(node_id="only")()
    spec = app.workflow(
        "one", [only], output=only, on_error=OnError.PAUSE, definition_key="point.seven"
    )
    handle = spec.start().unwrap()
    codes: list[object] = []
    waiter = threading.Thread(
        target=lambda: codes.append(handle.get(timeout_ms=60_000).err_value.error_code)
    )
    waiter.start()
    if by_failure:
        hands.fail(handle.workflow_id, "only")
    else:
        handle.pause().unwrap()
    waiter.join(30)
    assert codes == [OutcomeCode.WORKFLOW_PAUSED]
    assert handle.status().unwrap() is WorkflowStatus.PAUSED


@pytest.mark.parametrize("late_one_succeeds", [True, False])
def test_a_cancel_leaves_running_tasks_alone_and_they_do_not_undo_it(
    duet: Duet, late_one_succeeds: bool
) -> None:
    run = duet.start_one(fan(2))
    duet.succeed((run, 0, None))
    duet.claim([(run, 1, None)])
    duet.cancel(run)
    assert node_statuses(duet, run) == ["COMPLETED", "ENQUEUED", "SKIPPED", "SKIPPED"]
    assert duet.places("RUNNING") == [(run, 1, None)]
    end = duet.success((run, 1, None)) if late_one_succeeds else duet.failed((run, 1, None))
    duet.finish(end)
    late = "COMPLETED" if late_one_succeeds else "FAILED"
    assert node_statuses(duet, run) == ["COMPLETED", late, "SKIPPED", "SKIPPED"]
    assert run_row(duet, run)[0] == "CANCELLED"


def test_the_late_end_of_a_child_does_not_revive_its_cancelled_parent(duet: Duet) -> None:
    run = duet.start_one(
        RunShape((NodeShape(kind="workflow", child=chain(1)), NodeShape(after=(0,))))
    )
    duet.succeed((run, 0, None))
    below = child_of(duet)
    duet.claim([(below, 0, None)])
    duet.cancel(run)
    duet.succeed((below, 0, None))
    assert run_row(duet, below)[0] == "CANCELLED"
    assert run_row(duet, run)[0] == "CANCELLED"
    assert node_statuses(duet, run) == ["FAILED", "SKIPPED"]


def finish_at_once(url: str, connection: Connection[Any], first: Place, second: Place) -> None:
    """End two tasks of one tree from two connections, the second while the first is not committed."""
    with (
        psycopg.connect(url, autocommit=True) as one,
        psycopg.connect(url, autocommit=True) as other,
    ):
        late = threading.Thread(
            target=lambda: Engine(other).finish([End(second, "COMPLETED", {"ok": 2})])
        )
        with one.transaction():
            Engine(one).finish([End(first, "COMPLETED", {"ok": 1})])
            late.start()
            wait_until(lambda: lock_waiters(connection, other.info.backend_pid))
        late.join()


def test_two_last_completions_at_once_finalise_exactly_once(
    connection: Connection[Any], process_url: str
) -> None:
    run = Engine(connection).start(RunShape((NodeShape(), NodeShape())))
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute("LISTEN workflow_done")
        finish_at_once(process_url, connection, (run, 0, None), (run, 1, None))
        connection.execute("NOTIFY workflow_done, 'the last one'")
        heard = [note.payload for note in listener.notifies(timeout=30, stop_after=2)]
    assert heard == [run, "the last one"]
    found = connection.execute(
        "SELECT status, open_nodes, failed_nodes FROM horsies_workflows WHERE id = %s", (run,)
    ).fetchone()
    assert found == ("COMPLETED", 0, 0)


def test_two_sibling_children_that_end_at_once_promote_their_fan_in_exactly_once(
    connection: Connection[Any], process_url: str
) -> None:
    child = NodeShape(kind="workflow", child=chain(1))
    duet = Duet(connection)
    run = duet.start_one(RunShape((child, child, NodeShape(after=(0, 1)))))
    duet.succeed((run, 0, None), (run, 1, None))
    first, second = list(duet.oracle.runs)[1:]
    finish_at_once(process_url, connection, (first, 0, None), (second, 0, None))
    duet.oracle.finish([End((first, 0, None), "COMPLETED", {"ok": 1})])
    duet.oracle.finish([End((second, 0, None), "COMPLETED", {"ok": 2})])
    assert node_statuses(duet, run) == ["COMPLETED", "COMPLETED", "ENQUEUED"]
    tasks = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE workflow_id = %s AND workflow_node_index = 2",
        (run,),
    ).fetchone()
    assert tasks == (1,)


def test_a_child_without_output_yields_none(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(kind="workflow", child=chain(1)),), output=0))
    duet.succeed((run, 0, None))
    duet.succeed((child_of(duet), 0, None), value="not for the parent")
    duet.check()
    result = duet.connection.execute(
        "SELECT (horsies_run_result_v1(run, 1000000000)).result FROM horsies_workflows AS run WHERE id = %s",
        (run,),
    ).fetchone()
    assert result == ('{"ok":null}',)


def test_a_failed_child_keeps_its_id_and_summary_in_the_error(
    app: Horsies, tasks: Tasks, hands: Hands
) -> None:
    class Below(WorkflowDefinition[int]):
        name = "below"
        definition_key = f"point.ten.{new_id()}"
        first = tasks.number.node()()
        second = tasks.number.node(waits_for=[first])()

        class Meta:
            output: Any = None

    Below.Meta.output = Below.second
    node = SubWorkflowNode(Below, node_id="below")
    spec = app.workflow("above", [node], output=node, definition_key="point.ten.above")
    handle = spec.start().unwrap()
    child_id = new_id()
    hands.expand(handle.workflow_id, "below", Below.build(app), child_id)
    hands.fail(child_id, "first")
    for error in (
        handle.get(timeout_ms=0).err_value,
        handle.result_for(node).err_value,
        app.workflow_handle(handle.workflow_id).get(timeout_ms=0).err_value,
    ):
        assert isinstance(error, SubWorkflowError)
        assert error.error_code is OutcomeCode.SUBWORKFLOW_FAILED
        assert error.sub_workflow_id == child_id
        summary = error.sub_workflow_summary
        assert summary is not None
        assert (summary.status, summary.total_tasks) == (WorkflowStatus.FAILED, 2)
        assert (summary.completed_tasks, summary.failed_tasks, summary.skipped_tasks) == (0, 1, 1)
        assert summary.error_summary == "first broke"


@pytest.mark.parametrize(
    ("state", "code"), [("EXPIRED", "TASK_EXPIRED"), ("CANCELLED", "TASK_CANCELLED")]
)
def test_expired_and_cancelled_tasks_make_failed_nodes(duet: Duet, state: str, code: str) -> None:
    run = duet.start_one(chain(2))
    duet.finish(End((run, 0, None), state))
    assert node_statuses(duet, run) == ["FAILED", "SKIPPED"]
    status, error = run_row(duet, run)
    assert (status, error["error_code"]) == ("FAILED", {"__builtin_task_code__": code})


def test_a_cancelled_task_of_a_paused_run_makes_a_failed_node_and_moves_nothing(duet: Duet) -> None:
    run = duet.start_one(chain(2))
    duet.pause(run)
    duet.cancel_task((run, 0, None))
    assert node_statuses(duet, run) == ["FAILED", "PENDING"]
    assert run_row(duet, run)[0] == "PAUSED"


def test_the_same_id_and_name_is_the_existing_run_another_name_an_error(
    app: Horsies, tasks: Tasks
) -> None:
    def spec(name: str) -> Any:
        only = tasks.number.node(node_id="only")()
        return app.workflow(name, [only], output=only, definition_key="point.twelve")

    run_id = new_id()
    first = spec("orders").start(workflow_id=run_id).unwrap()
    again = spec("orders").start(workflow_id=run_id).unwrap()
    assert first.workflow_id == again.workflow_id == run_id
    refused = spec("invoices").start(workflow_id=run_id).unwrap_err()
    assert refused.code is WorkflowStartErrorCode.VALIDATION_FAILED
    assert refused.workflow_id == run_id
