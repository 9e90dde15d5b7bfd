"""The tasks a worker owns: handed out, waiting, recorded, lost."""

from __future__ import annotations

import selectors
from types import SimpleNamespace
from typing import cast

import pytest

from horsies.app import Horsies
from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import ClaimedTask
from horsies.tasks.outcome import (
    STOPPED_BY_CANCEL,
    STOPPED_BY_LOSS,
    STOPPED_BY_TIMEOUT,
    STOPPED_FOR_REQUEUE,
    TOO_LATE,
    Outcome,
    outcome_of_unread_inputs,
)
from horsies.worker.config import WorkerConfig
from horsies.worker.in_flight import InFlight
from horsies.worker.loop import Worker
from horsies.worker.pool.assignments import Died, HookFailed, PoolEvent, Reported, Stopped
from horsies.worker.pool.pool import ChildPool
from horsies.worker.protocol import ChildReport, NodePart
from tests.support.pool import MakePool, RecordingPool, attempt, claimed


@pytest.fixture
def pool() -> RecordingPool:
    return RecordingPool({1, 2, 3})


@pytest.fixture
def in_flight(pool: RecordingPool) -> InFlight:
    return InFlight(cast(ChildPool, pool))


def held_ids(in_flight: InFlight) -> list[str]:
    return [task.id for task in in_flight.held()]


def report(task_id: str, generation: int = 1) -> Reported:
    return Reported(ChildReport(task_id, generation, True, "1", None, None), 1, 0.0)


def test_started_tasks_go_out_and_prefetched_ones_wait(
    in_flight: InFlight, pool: RecordingPool
) -> None:
    in_flight.hand_out([claimed("a", 1), claimed("b"), claimed("c")])
    assert pool.dispatched == [("a", 1, 1)]
    assert (in_flight.running_count, in_flight.waiting_count) == (1, 2)
    assert [task.id for task in in_flight.waiting(1)] == ["b"]
    assert held_ids(in_flight) == ["a", "b", "c"]
    assert not in_flight.is_empty
    assert not in_flight.needs_release


def test_a_task_that_came_back_is_held_once_as_its_newest_attempt(in_flight: InFlight) -> None:
    in_flight.hand_out([claimed("a", 1), claimed("b"), claimed("a", generation=2)])
    in_flight.hand_out([claimed("b", 2, generation=3)])
    held = {(task.id, task.generation) for task in in_flight.held()}
    assert held == {("a", 2), ("b", 3)}
    assert len(in_flight.held()) == 2


def test_a_task_no_child_can_take_is_released(in_flight: InFlight) -> None:
    in_flight.hand_out([claimed("a", 99)])
    assert in_flight.needs_release
    assert held_ids(in_flight) == []


def test_a_claim_is_in_doubt_only_when_its_block_fails(in_flight: InFlight) -> None:
    with in_flight.claim_in_doubt():
        pass
    assert not in_flight.needs_release
    with pytest.raises(ArithmeticError), in_flight.claim_in_doubt():
        raise ArithmeticError
    assert in_flight.needs_release
    assert not in_flight.is_cleared
    in_flight.note_released()
    assert in_flight.is_cleared


def test_waiting_tasks_start_in_order_and_lost_ones_go_back(
    in_flight: InFlight, pool: RecordingPool
) -> None:
    in_flight.hand_out([claimed("a"), claimed("b"), claimed("c")])
    started = in_flight.take_started(in_flight.waiting(2), {"b": 2})
    assert [(task.id, task.worker_pid) for task in started] == [("b", 2)]
    assert held_ids(in_flight) == ["c"]
    in_flight.hand_out(started)
    assert pool.dispatched == [("b", 1, 2)]
    assert held_ids(in_flight) == ["b", "c"]
    assert in_flight.needs_release, "the database may still say that the lost one is ours"


def test_nothing_is_released_when_all_that_waited_has_started(in_flight: InFlight) -> None:
    in_flight.hand_out([claimed("a"), claimed("b")])
    in_flight.take_started(in_flight.waiting(2), {"a": 1, "b": 2})
    assert not in_flight.needs_release


def test_what_waits_is_put_back_as_a_whole(in_flight: InFlight) -> None:
    in_flight.put_back()
    assert not in_flight.needs_release
    in_flight.hand_out([claimed("a", 1), claimed("b")])
    in_flight.put_back()
    assert in_flight.needs_release
    assert held_ids(in_flight) == ["a"]


def test_a_report_becomes_an_outcome_until_it_is_recorded(in_flight: InFlight) -> None:
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([report("a")])
    assert in_flight.outcomes == [Outcome.completed(claimed("a"), "1", 0)]
    assert (in_flight.running_count, in_flight.is_empty, held_ids(in_flight)) == (0, False, ["a"])
    in_flight.close_recorded(in_flight.outcomes, {"a"})
    assert in_flight.is_empty


def test_an_outcome_that_waited_for_the_database_counts_the_wait_from_its_start(
    in_flight: InFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("horsies.worker.in_flight.time", clock)
    in_flight.hand_out([claimed("a", 1), claimed("b", 2)])
    in_flight.absorb([report("a")._replace(run_seconds=0.5)])
    clock.monotonic = lambda: 100.5
    in_flight.absorb([Died(attempt("b"), 2, "signal 9", run_seconds=2.0)])
    assert [one.run_us for one in in_flight.next_outcomes()] == [500_000, 2_000_000]
    clock.monotonic = lambda: 130.5
    for _ in range(2):  # the first turn after an outage may fail
        assert [one.run_us for one in in_flight.next_outcomes()] == [31_000_000, 32_000_000]


def test_a_report_that_came_during_a_long_statement_counts_the_wait_from_its_arrival(
    in_flight: InFlight, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("horsies.worker.in_flight.time", clock)
    in_flight.hand_out([claimed("a", 1), claimed("b", 2), claimed("c", 3)])
    clock.monotonic = lambda: 130.0
    in_flight.absorb([report("a")._replace(run_seconds=0.5)], 20.0)
    in_flight.absorb([Died(attempt("b"), 2, "signal 9", run_seconds=2.0)], 10.0)
    in_flight.absorb([report("c")._replace(run_seconds=0.5)])
    expected = [20_500_000, 12_000_000, 500_000]
    assert [one.run_us for one in in_flight.next_outcomes()] == expected


def test_events_that_come_during_a_statement_are_absorbed_with_their_wait_if_it_was_long(
    app: Horsies,
    make_pool: MakePool,
    selector: selectors.BaseSelector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(app, WorkerConfig("app:app", 1, ["default"]), make_pool(1), selector)
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("horsies.worker.loop.time", clock)
    monkeypatch.setattr(worker._pool, "collect", lambda _: [HookFailed("hook", "failed")])
    waits: list[float] = []
    monkeypatch.setattr(worker._in_flight, "absorb", lambda _, waited: waits.append(waited))
    worker._serve_children()
    clock.monotonic = lambda: 130.0
    worker._serve_children()
    clock.monotonic = lambda: 130.5
    worker._absorb_early()
    worker._absorb_early()
    assert waits == [30.5, 0.0]


def test_two_attempts_of_one_task_are_not_recorded_in_one_turn(
    pool: RecordingPool, in_flight: InFlight
) -> None:
    """The first was lost while its outcome waited; statements find the values of a task by its id."""
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([report("a")])
    in_flight.hand_out([claimed("a", 2, generation=2), claimed("b", 3)])
    in_flight.absorb([report("b"), report("a", 2)])
    turns = []
    while outcomes := in_flight.next_outcomes():
        turns.append([(one.task_id, one.generation) for one in outcomes])
        in_flight.close_recorded(outcomes, {"b"})
    assert turns == [[("a", 1), ("b", 1)], [("a", 2)]]


def test_an_outcome_of_a_lost_claim_is_dropped_with_a_warning(
    in_flight: InFlight, caplog: pytest.LogCaptureFixture
) -> None:
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([report("a")])
    in_flight.close_recorded(in_flight.outcomes, set())
    assert in_flight.is_empty
    assert "outcome of task a dropped" in caplog.text


@pytest.mark.parametrize("event", [report("a", 1), report("unknown")])
def test_what_an_earlier_attempt_says_is_ignored(in_flight: InFlight, event: Reported) -> None:
    in_flight.hand_out([claimed("a", 1, generation=2)])
    in_flight.absorb([event])
    assert in_flight.outcomes == []


def test_a_task_that_came_back_voids_its_earlier_attempt(
    in_flight: InFlight, pool: RecordingPool
) -> None:
    in_flight.hand_out([claimed("a", 1)])
    in_flight.hand_out([claimed("a", 2, generation=3)])
    assert pool.stopped == [("a", STOPPED_BY_LOSS)]
    assert pool.dispatched[-1] == ("a", 3, 2)
    in_flight.absorb([Stopped(attempt("a"), 1, True, STOPPED_BY_LOSS), report("a", 3)])
    assert in_flight.outcomes == [Outcome.completed(claimed("a", generation=3), "1", 0)]


def test_a_death_before_the_start_gives_the_task_back(in_flight: InFlight) -> None:
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([Died(attempt("a"), 1, "exit code 3", started=False)])
    assert in_flight.needs_release
    assert in_flight.outcomes == []
    assert held_ids(in_flight) == []


def test_a_death_while_running_is_a_failure(in_flight: InFlight) -> None:
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([Died(attempt("a"), 1, "signal 9 (SIGKILL)")])
    (outcome,) = in_flight.outcomes
    assert outcome.error_code == "WORKER_CRASHED"


def test_the_death_of_an_idle_child_costs_no_task(in_flight: InFlight) -> None:
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([Died(None, 2, "exit code 3"), Died(attempt("other"), 3, "exit code 3")])
    assert in_flight.outcomes == []
    assert held_ids(in_flight) == ["a"]


def test_freed_places_are_counted_by_queue(in_flight: InFlight) -> None:
    in_flight.hand_out(
        [claimed("a", 1, "x"), claimed("b", 2, "x"), claimed("c", 3, "y"), claimed("d")]
    )
    assert in_flight.freed_by_queue(in_flight.outcomes) == {}
    in_flight.absorb([report("a"), report("b"), report("c")])
    assert in_flight.freed_by_queue(in_flight.outcomes) == {"x": 2, "y": 1}


def test_a_cancelled_task_is_stopped_and_one_that_waits_is_forgotten(
    in_flight: InFlight, pool: RecordingPool
) -> None:
    in_flight.hand_out([claimed("a", 1), claimed("b")])
    in_flight.cancel(["a", "b"])
    assert ("a", STOPPED_BY_CANCEL) in pool.stopped
    assert held_ids(in_flight) == ["a"]


def test_a_failed_hook_is_remembered(in_flight: InFlight) -> None:
    in_flight.absorb([HookFailed("connect", "raised ValueError: no")])
    assert in_flight.failed_hook == "Child process start hook connect raised ValueError: no."


def node(task_id: str, pid: int | None = None, index: int = 0) -> ClaimedTask:
    return claimed(task_id, pid)._replace(workflow_id="run", workflow_node_index=index)


def test_nodes_go_out_with_their_part_and_others_without_one(
    in_flight: InFlight, pool: RecordingPool
) -> None:
    part = NodePart("run", 0)
    in_flight.hand_out([claimed("a", 1), node("b", 2)], {"b": part})
    assert pool.nodes == [None, part]


def test_only_outcomes_of_nodes_may_create_tasks(in_flight: InFlight) -> None:
    in_flight.hand_out([claimed("a", 1), node("b", 2)])
    in_flight.absorb([report("a")])
    assert not in_flight.ends_nodes
    in_flight.absorb([report("b")])
    assert in_flight.ends_nodes
    assert in_flight.outcomes[1] == Outcome.completed(node("b"), "1", 0)


def test_what_nodes_returned_is_kept_once_it_is_recorded(in_flight: InFlight) -> None:
    in_flight.hand_out([claimed("a", 1), node("b", 2), node("c", 3, index=1)])
    in_flight.absorb([report("a"), report("b"), report("c")])
    in_flight.keep_results(in_flight.outcomes, {"a", "b"})
    taker = node("d", 1, 2)._replace(workflow_inputs='{"args":{"x":0},"context":{}}')
    parts, unreadable = in_flight.inputs.read(cast(Pipeline, None), [taker])
    assert [source.result for source in parts["d"].sources] == ["1"]
    assert unreadable == []


def test_a_node_whose_inputs_cannot_be_read_fails_without_a_child(
    in_flight: InFlight, pool: RecordingPool
) -> None:
    in_flight.fail(node("a", 1), outcome_of_unread_inputs(node("a", 1)))
    (outcome,) = in_flight.outcomes
    assert outcome.error_code == "WORKER_SERIALIZATION_ERROR"
    assert outcome.workflow_id == "run"
    assert pool.dispatched == []
    in_flight.close_recorded(in_flight.outcomes, {"a"})
    assert in_flight.is_empty


def test_a_task_tried_again_at_once_may_go_out_before_its_outcome_is_closed(
    in_flight: InFlight, pool: RecordingPool
) -> None:
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([report("a")])
    recorded_outcomes = in_flight.outcomes
    in_flight.hand_out([claimed("a", 2, generation=2)])
    in_flight.close_recorded(recorded_outcomes, {"a"})
    assert pool.dispatched == [("a", 1, 1), ("a", 2, 2)]
    assert (in_flight.running_count, in_flight.outcomes) == (1, [])
    in_flight.absorb([report("a", generation=2)])
    assert [one.generation for one in in_flight.outcomes] == [2]


def test_a_refused_outcome_is_void_when_its_task_comes_back_and_fails_without_a_child(
    in_flight: InFlight,
) -> None:
    first, second = claimed("a", 1), claimed("a", 1)._replace(generation=2)
    for task, refused in ((first, {"a"}), (second, set[str]())):
        outcome = Outcome.completed(task, "1")
        in_flight.fail(task, outcome)
        in_flight.close_recorded([outcome], {"a"}, refused)
    assert not in_flight.blocked
    assert in_flight.is_empty
    assert in_flight.running_count == 0


def test_an_outcome_of_an_attempt_that_is_gone_is_dropped(in_flight: InFlight) -> None:
    outcome = Outcome.completed(claimed("a", 1), "1")
    in_flight.outcomes.append(outcome)
    in_flight.close_recorded([outcome], set())
    assert in_flight.is_empty


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (report("a"), "work a #1 completed after 0.000 s"),
        (
            Died(attempt("a"), 1, "exit code 3", True, 2.5),
            "failed with WORKER_CRASHED after 2.500 s",
        ),
        (Stopped(attempt("a"), 1, True, STOPPED_BY_CANCEL, 0.5), "#1 was cancelled after 0.500 s"),
        (Stopped(attempt("a"), 1, True, STOPPED_BY_TIMEOUT, 0.5), "TASK_TIMEOUT after 0.500 s"),
        (
            Stopped(attempt("a"), 1, True, STOPPED_FOR_REQUEUE, 0.5),
            "work a #1 was interrupted after 0.500 s (returned to its queue: the worker stopped)",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, tuple | Died | Stopped) else "",
)
def test_the_end_of_an_attempt_is_one_line(
    in_flight: InFlight, caplog: pytest.LogCaptureFixture, event: PoolEvent, line: str
) -> None:
    caplog.set_level("INFO", "horsies.tasks")
    in_flight.hand_out([claimed("a", 1), claimed("b", 2)])
    in_flight.absorb([event, report("b")])
    in_flight.close_recorded(in_flight.outcomes, {"a"})
    (record,) = [one for one in caplog.records if one.name == "horsies.tasks"]
    assert record.getMessage().endswith(line)
    assert vars(record)["task_id"] == "a"


def test_a_retry_that_the_database_had_no_time_for_is_not_announced(
    in_flight: InFlight, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "horsies.tasks")
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([Stopped(attempt("a"), 1, True, STOPPED_FOR_REQUEUE, 0.5)])
    in_flight.close_recorded(in_flight.outcomes, {"a"}, failed={"a"})
    line = f"work a #1 failed with WORKER_STOPPED after 0.500 s ({TOO_LATE})"
    assert caplog.messages == [line]


def test_ends_are_not_logged_above_the_level_of_their_logger(
    in_flight: InFlight, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "horsies.tasks")
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([report("a")])
    in_flight.close_recorded(in_flight.outcomes, {"a"})
    assert not caplog.records


def test_a_cancel_before_the_return_to_the_queue_is_logged_as_the_end(
    in_flight: InFlight, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "horsies.tasks")
    in_flight.hand_out([claimed("a", 1)])
    in_flight.absorb([Stopped(attempt("a"), 1, True, STOPPED_FOR_REQUEUE, 0.5)])
    in_flight.close_recorded(in_flight.outcomes, {"a"}, cancelled={"a"})
    assert "work a #1 was cancelled after 0.500 s" in caplog.text
    assert "retry" not in caplog.text
