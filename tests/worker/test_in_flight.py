"""The desk: what a worker owns, what it gives to children, and what it forgets."""

from __future__ import annotations

from typing import cast

import pytest

from horsies.db.pipeline import Together
from horsies.db.statements.turn import ClaimedTask
from horsies.tasks.outcome import STOPPED_BY_CANCEL, STOPPED_BY_LOSS, Completed, Failed
from horsies.worker.in_flight import Desk
from horsies.worker.pool.events import Died, HookFailed, Reported, Stopped
from horsies.worker.pool.pool import ChildPool
from horsies.worker.protocol import ChildReport, NodePart
from tests.support.pool import RecordingPool, attempt, claimed


@pytest.fixture
def pool() -> RecordingPool:
    return RecordingPool({1, 2, 3})


@pytest.fixture
def desk(pool: RecordingPool) -> Desk:
    return Desk(cast(ChildPool, pool))


def held_ids(desk: Desk) -> list[str]:
    return [task.id for task in desk.held()]


def report(task_id: str, generation: int = 1) -> Reported:
    return Reported(ChildReport(task_id, generation, True, "1", None, None), 1, 0.0)


def test_started_tasks_go_out_and_prefetched_ones_wait(desk: Desk, pool: RecordingPool) -> None:
    desk.hand_out([claimed("a", 1), claimed("b"), claimed("c")])
    assert pool.dispatched == [("a", 1, 1)]
    assert (desk.running_count, desk.waiting_count) == (1, 2)
    assert [task.id for task in desk.waiting(1)] == ["b"]
    assert held_ids(desk) == ["a", "b", "c"]
    assert not desk.is_empty
    assert not desk.needs_release


def test_a_task_no_child_can_take_is_released(desk: Desk) -> None:
    desk.hand_out([claimed("a", 99)])
    assert desk.needs_release
    assert held_ids(desk) == []


def test_waiting_tasks_start_in_order_and_lost_ones_go_back(
    desk: Desk, pool: RecordingPool
) -> None:
    desk.hand_out([claimed("a"), claimed("b"), claimed("c")])
    started = desk.take_started(desk.waiting(2), {"b": 2})
    assert [(task.id, task.worker_pid) for task in started] == [("b", 2)]
    assert held_ids(desk) == ["c"]
    desk.hand_out(started)
    assert pool.dispatched == [("b", 1, 2)]
    assert held_ids(desk) == ["b", "c"]
    assert desk.needs_release, "the database may still say that the lost one is ours"


def test_nothing_is_released_when_all_that_waited_has_started(desk: Desk) -> None:
    desk.hand_out([claimed("a"), claimed("b")])
    desk.take_started(desk.waiting(2), {"a": 1, "b": 2})
    assert not desk.needs_release


def test_what_waits_is_put_back_as_a_whole(desk: Desk) -> None:
    desk.put_back()
    assert not desk.needs_release
    desk.hand_out([claimed("a", 1), claimed("b")])
    desk.put_back()
    assert desk.needs_release
    assert held_ids(desk) == ["a"]


def test_a_report_becomes_a_settlement_and_leaves_with_it(desk: Desk) -> None:
    desk.hand_out([claimed("a", 1)])
    desk.absorb([report("a")])
    assert desk.settlements == [Completed("a", 1, "1")]
    assert (desk.running_count, desk.is_empty, held_ids(desk)) == (0, False, ["a"])
    desk.close_settled(desk.settlements, {"a"})
    assert desk.is_empty


def test_an_outcome_that_belongs_to_somebody_else_is_dropped_with_a_warning(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.hand_out([claimed("a", 1)])
    desk.absorb([report("a")])
    desk.close_settled(desk.settlements, set())
    assert desk.is_empty
    assert "a belongs to somebody else now" in caplog.text


@pytest.mark.parametrize("event", [report("a", 1), report("unknown")])
def test_what_an_earlier_attempt_says_is_ignored(desk: Desk, event: Reported) -> None:
    desk.hand_out([claimed("a", 1, generation=2)])
    desk.absorb([event])
    assert desk.settlements == []


def test_a_task_that_came_back_voids_its_earlier_attempt(desk: Desk, pool: RecordingPool) -> None:
    desk.hand_out([claimed("a", 1)])
    desk.hand_out([claimed("a", 2, generation=3)])
    assert pool.stopped == [("a", STOPPED_BY_LOSS)]
    assert pool.dispatched[-1] == ("a", 3, 2)
    desk.absorb([Stopped(attempt("a"), 1, True, STOPPED_BY_LOSS), report("a", 3)])
    assert desk.settlements == [Completed("a", 3, "1")]


def test_a_death_before_the_start_gives_the_task_back(desk: Desk) -> None:
    desk.hand_out([claimed("a", 1)])
    desk.absorb([Died(attempt("a"), 1, "exit code 3", started=False)])
    assert desk.needs_release
    assert desk.settlements == []
    assert held_ids(desk) == []


def test_a_death_while_running_is_a_failure(desk: Desk) -> None:
    desk.hand_out([claimed("a", 1)])
    desk.absorb([Died(attempt("a"), 1, "signal 9 (SIGKILL)")])
    (settlement,) = desk.settlements
    assert isinstance(settlement, Failed)
    assert settlement.error_code == "WORKER_CRASHED"


def test_the_death_of_an_idle_child_costs_no_task(desk: Desk) -> None:
    desk.hand_out([claimed("a", 1)])
    desk.absorb([Died(None, 2, "exit code 3"), Died(attempt("other"), 3, "exit code 3")])
    assert desk.settlements == []
    assert held_ids(desk) == ["a"]


def test_freed_places_are_counted_by_queue(desk: Desk) -> None:
    desk.hand_out([claimed("a", 1, "x"), claimed("b", 2, "x"), claimed("c", 3, "y"), claimed("d")])
    assert desk.freed_by_queue() == {}
    desk.absorb([report("a"), report("b"), report("c")])
    assert desk.freed_by_queue() == {"x": 2, "y": 1}


def test_a_cancelled_task_is_stopped_and_one_that_waits_is_forgotten(
    desk: Desk, pool: RecordingPool
) -> None:
    desk.hand_out([claimed("a", 1), claimed("b")])
    desk.cancel(["a", "b"])
    assert ("a", STOPPED_BY_CANCEL) in pool.stopped
    assert held_ids(desk) == ["a"]


def test_a_failed_hook_is_remembered(desk: Desk) -> None:
    desk.absorb([HookFailed("connect", "raised ValueError: no")])
    assert desk.failed_hook == "Child process start hook connect raised ValueError: no."


def node(task_id: str, pid: int | None = None, index: int = 0) -> ClaimedTask:
    return claimed(task_id, pid)._replace(workflow_id="run", workflow_node_index=index)


def test_nodes_go_out_with_their_part_and_others_without_one(
    desk: Desk, pool: RecordingPool
) -> None:
    part = NodePart("run", 0)
    desk.hand_out([claimed("a", 1), node("b", 2)], {"b": part})
    assert pool.nodes == [None, part]


def test_only_settlements_of_nodes_may_make_work(desk: Desk) -> None:
    desk.hand_out([claimed("a", 1), node("b", 2)])
    desk.absorb([report("a")])
    assert not desk.settles_nodes
    desk.absorb([report("b")])
    assert desk.settles_nodes
    assert desk.settlements[1] == Completed("b", 1, "1", "run")


def test_what_nodes_returned_is_kept_once_it_is_recorded(desk: Desk) -> None:
    desk.hand_out([claimed("a", 1), node("b", 2), node("c", 3, index=1)])
    desk.absorb([report("a"), report("b"), report("c")])
    desk.keep_results(desk.settlements, {"a", "b"})
    taker = node("d", 1, 2)._replace(workflow_inputs='{"args":{"x":0},"context":{}}')
    parts, unreadable = desk.inputs.read(cast(Together, None), [taker])
    assert [source.result for source in parts["d"].sources] == ["1"]
    assert unreadable == []


def test_a_node_whose_inputs_cannot_be_read_fails_without_a_child(
    desk: Desk, pool: RecordingPool
) -> None:
    desk.refuse([node("a", 1)])
    (settlement,) = desk.settlements
    assert isinstance(settlement, Failed)
    assert settlement.error_code == "WORKER_SERIALIZATION_ERROR"
    assert settlement.workflow_id == "run"
    assert pool.dispatched == []
    desk.close_settled(desk.settlements, {"a"})
    assert desk.is_empty


def test_a_task_tried_again_at_once_may_go_out_before_its_outcome_is_closed(
    desk: Desk, pool: RecordingPool
) -> None:
    desk.hand_out([claimed("a", 1)])
    desk.absorb([report("a")])
    settled = desk.settlements
    desk.hand_out([claimed("a", 2, generation=2)])
    desk.close_settled(settled, {"a"})
    assert pool.dispatched == [("a", 1, 1), ("a", 2, 2)]
    assert (desk.running_count, desk.settlements) == (1, [])
    desk.absorb([report("a", generation=2)])
    assert [one.generation for one in desk.settlements] == [2]
