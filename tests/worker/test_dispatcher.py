"""The tasks a worker owns: handed out, waiting, ended, recorded, refused, lost."""

from __future__ import annotations

import json
import logging
import selectors
import time
from collections.abc import Mapping, Set
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
from psycopg import OperationalError

from horsies.app import Horsies
from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import ClaimedTask
from horsies.logs import TaskFilter, set_log_headers
from horsies.tasks.outcome import (
    STOPPED_BY_CANCEL,
    STOPPED_BY_LOSS,
    STOPPED_BY_TIMEOUT,
    STOPPED_FOR_REQUEUE,
    TOO_LATE,
    Outcome,
    outcome_of_unread_inputs,
    without_result,
)
from horsies.worker.config import WorkerConfig
from horsies.worker.dispatcher import Dispatcher
from horsies.worker.ledger import (
    ENDED,
    REFUSED,
    REFUSED_CHARACTERS_MAX,
    REFUSED_MAX,
    RUNNING,
    UNCALLED,
    WAITING,
    Ledger,
    freed_by_queue,
    options_of,
)
from horsies.worker.loop import Worker
from horsies.worker.node_inputs import NodeInputs
from horsies.worker.pool.events import Died, HookFailed, PoolEvent, Reported, Stopped, TakenBack
from horsies.worker.pool.pool import ChildPool
from horsies.worker.pool.window import Windows
from horsies.worker.protocol import ChildReport, NodePart, TransactionEnd
from horsies.worker.tally import log_ends
from horsies.worker.turn import Claimer, TurnRequest, TurnResult, take_turn
from tests.support.pool import MakePool, RecordingPool, attempt, claimed


@pytest.fixture
def pool() -> RecordingPool:
    return RecordingPool({1, 2, 3})


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def dispatcher(pool: RecordingPool, ledger: Ledger) -> Dispatcher:
    return Dispatcher(cast(ChildPool, pool), ledger)


def held_ids(ledger: Ledger) -> list[str]:
    return [task.id for task in ledger.tasks()]


def turned(
    *recorded: str,
    refused: Set[str] = frozenset(),
    failed: Set[str] = frozenset(),
    cancelled: Set[str] = frozenset(),
    instead: Mapping[str, Outcome] = MappingProxyType({}),
) -> TurnResult:
    """The result of a turn that recorded the outcomes of these tasks."""
    return TurnResult(
        set(recorded), {}, (), refused, failed=failed, cancelled=cancelled, instead=instead
    )


def report(
    task_id: str, generation: int = 1, transaction: TransactionEnd = TransactionEnd.NONE
) -> Reported:
    is_ok = transaction in (TransactionEnd.NONE, TransactionEnd.RECORDED)
    code = None if is_ok else "TRANSACTION_LOST"
    child_report = ChildReport(task_id, generation, is_ok, "1", code, code)
    return Reported(child_report._replace(transaction=transaction), 1, 0.0)


class NoPipeline:
    """A connection that must not be used."""


@pytest.mark.parametrize(("apart", "in_windows"), [([], True), (["work"], False)])
def test_a_task_that_takes_a_transaction_is_never_in_a_window(
    pool: RecordingPool, ledger: Ledger, apart: list[str], in_windows: bool
) -> None:
    windows = Windows(8, apart)
    dispatcher = Dispatcher(cast(ChildPool, pool), ledger, windows=windows)
    for number in range(20):
        task = claimed(f"a{number}", 1)._replace(burst=True)
        ledger.put(task, RUNNING)
        dispatcher.absorb([report(task.id)])
    assert (windows.width("work") > 1) is in_windows
    assert (windows.short_names() == ["work"]) is in_windows


def test_an_outcome_that_its_child_has_recorded_needs_no_statement(
    dispatcher: Dispatcher, ledger: Ledger
) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([report("a", transaction=TransactionEnd.RECORDED)])
    outcomes = ledger.to_record()
    result = take_turn(
        cast(Pipeline, NoPipeline()),
        Claimer("w", "host", ["default"], [None]),
        outcomes,
        TurnRequest(),
    )
    ((outcome, _, _),) = ledger.close(outcomes, result)
    assert (outcome.status, outcome.result) == ("COMPLETED", "1")
    assert ledger.is_empty


def test_a_task_that_its_transaction_found_lost_is_dropped_and_released(
    dispatcher: Dispatcher, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([report("a", transaction=TransactionEnd.LOST)])
    assert ledger.is_empty
    assert ledger.needs_release
    assert "belongs to another worker now; its transaction was rolled back" in caplog.text


@pytest.mark.parametrize("how", ["doubt", "death"])
def test_a_success_that_the_child_may_have_recorded_counts_if_the_database_has_it(
    dispatcher: Dispatcher, ledger: Ledger, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    dispatcher.hand_out([claimed("a", 1), claimed("b", 2)])
    if how == "doubt":
        dispatcher.absorb([report(one, transaction=TransactionEnd.DOUBT) for one in ("a", "b")])
    else:
        dispatcher.absorb([Died(attempt(one), 1, "signal 9", 0.0) for one in ("a", "b")])
    outcomes = ledger.to_record()
    assert all(one.is_in_doubt for one in outcomes)
    result = turned("a", "b")._replace(by_child={"a"})
    ends = {end[0].task_id: end[0].status for end in ledger.close(outcomes, result)}
    assert ends == {"a": "COMPLETED", "b": "FAILED"}
    assert "dropped" not in caplog.text


def test_started_tasks_go_out_and_prefetched_ones_wait(
    dispatcher: Dispatcher, ledger: Ledger, pool: RecordingPool
) -> None:
    dispatcher.hand_out([claimed("a", 1), claimed("b"), claimed("c")])
    assert pool.dispatched == [("a", 1, 1)]
    assert (ledger.count(RUNNING), ledger.count(WAITING)) == (1, 2)
    assert [task.id for task in ledger.tasks(WAITING)[:1]] == ["b"]
    assert held_ids(ledger) == ["a", "b", "c"]
    assert not ledger.is_empty
    assert not ledger.needs_release


def test_a_task_that_came_back_is_held_once_as_its_newest_attempt(
    dispatcher: Dispatcher, ledger: Ledger, pool: RecordingPool
) -> None:
    dispatcher.hand_out([claimed("a", 1), claimed("b"), claimed("a", generation=2)])
    assert pool.stopped == [("a", STOPPED_BY_LOSS)]
    dispatcher.hand_out([claimed("b", 2, generation=3)])
    held = {(task.id, task.generation) for task in ledger.tasks()}
    assert held == {("a", 2), ("b", 3)}
    assert len(ledger.tasks()) == 2


def test_a_task_no_child_can_take_is_released(dispatcher: Dispatcher, ledger: Ledger) -> None:
    dispatcher.hand_out([claimed("a", 99)])
    assert ledger.needs_release
    assert held_ids(ledger) == []
    assert ledger.note_released() == [claimed("a", 99)]
    assert not ledger.needs_release


def test_a_claim_is_in_doubt_only_when_its_block_fails(ledger: Ledger) -> None:
    with ledger.claim_in_doubt():
        pass
    assert not ledger.needs_release
    with pytest.raises(ArithmeticError), ledger.claim_in_doubt():
        raise ArithmeticError
    assert ledger.needs_release
    assert ledger.note_released() == []
    assert not ledger.needs_release


def test_waiting_tasks_start_in_order_and_lost_ones_go_back(
    dispatcher: Dispatcher, ledger: Ledger, pool: RecordingPool
) -> None:
    dispatcher.hand_out([claimed("a"), claimed("b"), claimed("c")])
    started = dispatcher.take_started(ledger.tasks(WAITING)[:2], {"b": 2})
    assert [(task.id, task.worker_pid) for task in started] == [("b", 2)]
    assert held_ids(ledger) == ["c"]
    dispatcher.hand_out(started)
    assert pool.dispatched == [("b", 1, 2)]
    assert sorted(held_ids(ledger)) == ["b", "c"]
    assert ledger.needs_release, "the database may still say that the lost one is ours"


def test_the_line_about_a_lost_prefetched_task_has_its_headers(
    dispatcher: Dispatcher, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler finds the headers of a line in the ledger, so the line comes before the task leaves."""
    caplog.handler.addFilter(TaskFilter())
    caplog.set_level(logging.INFO, "horsies")
    set_log_headers(["request_id"], partial(options_of, ledger.owned))
    try:
        options = json.dumps({"headers": {"request_id": "r-17"}})
        dispatcher.hand_out([claimed("a")._replace(task_options=options)])
        assert dispatcher.take_started(ledger.tasks(WAITING), {}) == []
    finally:
        set_log_headers([])
    (record,) = caplog.records
    assert record.getMessage() == "prefetched task a was lost before it started"
    assert vars(record)["headers"] == {"request_id": "r-17"}


def test_nothing_is_released_when_all_that_waited_has_started(
    dispatcher: Dispatcher, ledger: Ledger
) -> None:
    dispatcher.hand_out([claimed("a"), claimed("b")])
    dispatcher.take_started(ledger.tasks(WAITING)[:2], {"a": 1, "b": 2})
    assert not ledger.needs_release


def test_what_waits_is_put_back_as_a_whole(dispatcher: Dispatcher, ledger: Ledger) -> None:
    dispatcher.put_back()
    assert not ledger.needs_release
    dispatcher.hand_out([claimed("a", 1), claimed("b")])
    dispatcher.put_back()
    assert ledger.needs_release
    assert held_ids(ledger) == ["a"]


def test_a_report_becomes_an_outcome_until_it_is_recorded(
    dispatcher: Dispatcher, ledger: Ledger
) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([report("a")])
    assert ledger.to_record() == [Outcome.completed(claimed("a"), "1", 0)]
    assert (ledger.count(RUNNING), ledger.is_empty, held_ids(ledger)) == (0, False, ["a"])
    ledger.close(ledger.to_record(), turned("a"))
    assert ledger.is_empty


def test_an_outcome_that_waited_for_the_database_counts_the_wait_from_its_start(
    dispatcher: Dispatcher, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    for module in ("dispatcher", "ledger"):
        monkeypatch.setattr(f"horsies.worker.{module}.time", clock)
    dispatcher.hand_out([claimed("a", 1), claimed("b", 2)])
    dispatcher.absorb([report("a")._replace(run_seconds=0.5)])
    clock.monotonic = lambda: 100.5
    dispatcher.absorb([Died(attempt("b"), 2, "signal 9", run_seconds=2.0)])
    assert [one.run_us for one in ledger.to_record()] == [500_000, 2_000_000]
    clock.monotonic = lambda: 130.5
    for _ in range(2):  # the first turn after an outage may fail
        assert [one.run_us for one in ledger.to_record()] == [31_000_000, 32_000_000]


def test_a_report_that_came_during_a_long_statement_counts_the_wait_from_its_arrival(
    dispatcher: Dispatcher, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    for module in ("dispatcher", "ledger"):
        monkeypatch.setattr(f"horsies.worker.{module}.time", clock)
    dispatcher.hand_out([claimed("a", 1), claimed("b", 2), claimed("c", 3)])
    clock.monotonic = lambda: 130.0
    dispatcher.absorb([report("a")._replace(run_seconds=0.5)], 20.0)
    dispatcher.absorb([Died(attempt("b"), 2, "signal 9", run_seconds=2.0)], 10.0)
    dispatcher.absorb([report("c")._replace(run_seconds=0.5)])
    expected = [20_500_000, 12_000_000, 500_000]
    assert [one.run_us for one in ledger.to_record()] == expected


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
    monkeypatch.setattr(worker._dispatcher, "absorb", lambda _, waited: waits.append(waited))
    worker._serve_children()
    clock.monotonic = lambda: 130.0
    worker._serve_children()
    clock.monotonic = lambda: 130.5
    worker._absorb_early()
    worker._absorb_early()
    assert waits == [30.5, 0.0]


def test_claimed_nodes_are_kept_though_the_spans_of_recorded_tasks_cannot_be_stored(
    app: Horsies,
    make_pool: MakePool,
    selector: selectors.BaseSelector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @app.task("work")
    def work_of_a_node() -> None: ...

    pool = make_pool(1)
    worker = Worker(app, WorkerConfig("app:app", 1, ["default"]), pool, selector)
    node = claimed("a", pool.pids()[0])._replace(workflow_id="run", workflow_inputs="{}")
    turn = TurnResult({"b"}, {}, [node])
    monkeypatch.setattr("horsies.worker.work.take_turn", lambda *_: turn)
    monkeypatch.setattr(NodeInputs, "read", lambda *_: ({}, []))
    lost = Mock(side_effect=OperationalError("the connection is lost"))
    traces = Mock(linked=lambda _, tasks: tasks, store=lost)
    monkeypatch.setattr(worker._dispatcher, "traces", traces)
    work = worker._work
    with pytest.raises(OperationalError):
        work._turn(Mock(), [], TurnRequest(pids=pool.pids()), work._kinds[0])
    assert held_ids(worker._dispatcher.ledger) == ["a"]


def test_the_outcome_of_an_attempt_is_void_once_its_task_comes_back(
    dispatcher: Dispatcher, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """The first attempt was lost while its outcome waited: the database has a newer one by now."""
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([report("a")])
    dispatcher.hand_out([claimed("a", 2, generation=2), claimed("b", 3)])
    assert "outcome of task a dropped" in caplog.text
    dispatcher.absorb([report("b"), report("a", 2)])
    recorded = [(one.task_id, one.generation) for one in ledger.to_record()]
    assert recorded == [("b", 1), ("a", 2)]


def test_an_outcome_of_a_lost_claim_is_dropped_with_a_warning(
    dispatcher: Dispatcher, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([report("a")])
    ledger.close(ledger.to_record(), turned())
    assert ledger.is_empty
    assert "outcome of task a dropped" in caplog.text


@pytest.mark.parametrize("event", [report("a", 1), report("unknown")])
def test_what_an_earlier_attempt_says_is_ignored(
    dispatcher: Dispatcher, ledger: Ledger, event: Reported
) -> None:
    dispatcher.hand_out([claimed("a", 1, generation=2)])
    dispatcher.absorb([event])
    assert ledger.to_record() == []


def test_a_task_that_came_back_voids_its_earlier_attempt(
    dispatcher: Dispatcher, ledger: Ledger, pool: RecordingPool
) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.hand_out([claimed("a", 2, generation=3)])
    assert pool.stopped == [("a", STOPPED_BY_LOSS)]
    assert pool.dispatched[-1] == ("a", 3, 2)
    dispatcher.absorb([Stopped(attempt("a"), 1, True, STOPPED_BY_LOSS), report("a", 3)])
    assert ledger.to_record() == [Outcome.completed(claimed("a", generation=3), "1", 0)]


def test_a_death_before_the_start_gives_the_task_back(
    dispatcher: Dispatcher, ledger: Ledger
) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([TakenBack([attempt("a")])])
    assert ledger.needs_release
    assert ledger.to_record() == []
    assert held_ids(ledger) == []


def test_a_death_while_running_is_a_failure(dispatcher: Dispatcher, ledger: Ledger) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([Died(attempt("a"), 1, "signal 9 (SIGKILL)")])
    (outcome,) = ledger.to_record()
    assert outcome.error_code == "WORKER_CRASHED"


def test_the_death_of_an_idle_child_costs_no_task(dispatcher: Dispatcher, ledger: Ledger) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([Died(None, 2, "exit code 3"), Died(attempt("other"), 3, "exit code 3")])
    assert ledger.to_record() == []
    assert held_ids(ledger) == ["a"]


def test_freed_places_are_counted_by_queue(dispatcher: Dispatcher, ledger: Ledger) -> None:
    dispatcher.hand_out(
        [claimed("a", 1, "x"), claimed("b", 2, "x"), claimed("c", 3, "y"), claimed("d")]
    )
    assert freed_by_queue(ledger.owned, ledger.to_record()) == {}
    dispatcher.absorb([report("a"), report("b"), report("c")])
    assert freed_by_queue(ledger.owned, ledger.to_record()) == {"x": 2, "y": 1}


def test_the_first_end_is_known_only_while_an_outcome_waits_to_be_recorded(
    dispatcher: Dispatcher, ledger: Ledger
) -> None:
    assert ledger.ended_since is None
    dispatcher.hand_out([claimed("a", 1), claimed("b", 2)])
    before = time.monotonic()
    dispatcher.absorb([report("a")])
    first = ledger.ended_since
    assert first is not None
    assert first >= before
    dispatcher.absorb([report("b")])
    assert ledger.ended_since == first
    ledger.close(ledger.to_record(), turned("a", "b"))
    assert ledger.ended_since is None


def test_a_cancelled_task_is_stopped_and_one_that_waits_goes_back_in_case_it_was_started(
    dispatcher: Dispatcher, ledger: Ledger, pool: RecordingPool
) -> None:
    dispatcher.hand_out([claimed("a", 1), claimed("b")])
    dispatcher.cancel(["a", "b"])
    assert ("a", STOPPED_BY_CANCEL) in pool.stopped
    assert held_ids(ledger) == ["a"]
    assert ledger.needs_release


def test_a_failed_hook_is_remembered(dispatcher: Dispatcher, ledger: Ledger) -> None:
    dispatcher.absorb([HookFailed("connect", "raised ValueError: no")])
    assert dispatcher.failed_hook == "Child process start hook connect raised ValueError: no."


def node(task_id: str, pid: int | None = None, index: int = 0) -> ClaimedTask:
    return claimed(task_id, pid)._replace(workflow_id="run", workflow_node_index=index)


def test_nodes_go_out_with_their_part_and_others_without_one(
    dispatcher: Dispatcher, ledger: Ledger, pool: RecordingPool
) -> None:
    part = NodePart("run", 0)
    dispatcher.hand_out([claimed("a", 1), node("b", 2)], {"b": part})
    assert pool.nodes == [None, part]


def test_what_nodes_returned_is_kept_once_it_is_recorded(
    dispatcher: Dispatcher, ledger: Ledger
) -> None:
    dispatcher.hand_out([claimed("a", 1), node("b", 2), node("c", 3, index=1)])
    dispatcher.absorb([report("a"), report("b"), report("c")])
    inputs = NodeInputs()
    inputs.note_ends(ledger.close(ledger.to_record(), turned("a", "b")))
    taker = node("d", 1, 2)._replace(workflow_inputs='{"args":{"x":0},"context":{}}')
    parts, unreadable = inputs.read(cast(Pipeline, None), [taker])
    assert [source.result for source in parts["d"].sources] == ["1"]
    assert unreadable == []


def test_a_node_whose_inputs_cannot_be_read_fails_without_a_child(
    dispatcher: Dispatcher, ledger: Ledger, pool: RecordingPool
) -> None:
    ledger.put(node("a", 1), ENDED, outcome_of_unread_inputs(node("a", 1)))
    (outcome,) = ledger.to_record()
    assert outcome.error_code == "WORKER_SERIALIZATION_ERROR"
    assert outcome.workflow_id == "run"
    assert pool.dispatched == []
    ledger.close(ledger.to_record(), turned("a"))
    assert ledger.is_empty


def test_a_task_tried_again_at_once_is_another_attempt(
    dispatcher: Dispatcher, ledger: Ledger, pool: RecordingPool
) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([report("a")])
    ledger.close(ledger.to_record(), turned("a"))
    dispatcher.hand_out([claimed("a", 2, generation=2)])
    assert pool.dispatched == [("a", 1, 1), ("a", 2, 2)]
    assert pool.stopped == []
    assert (ledger.count(RUNNING), ledger.to_record()) == (1, [])
    dispatcher.absorb([report("a", generation=2)])
    assert [one.generation for one in ledger.to_record()] == [2]


def test_a_refused_outcome_is_kept_apart_until_it_is_recorded(
    dispatcher: Dispatcher, ledger: Ledger
) -> None:
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([report("a")._replace(run_seconds=0.25)])
    assert ledger.close(ledger.to_record(), turned(refused={"a"})) == []
    assert (ledger.to_record(), ledger.count(RUNNING), ledger.count(REFUSED)) == ([], 0, 1)
    assert held_ids(ledger) == ["a"]
    ((task, outcome),) = ledger.outcomes(REFUSED)
    instead = without_result(outcome)
    ends = ledger.close([outcome], turned("a", instead={"a": instead}))
    assert ends == [(instead, task, 0.25)]
    assert ledger.is_empty


def test_a_refused_outcome_is_void_when_its_task_comes_back_and_fails_without_a_child(
    ledger: Ledger,
) -> None:
    first, second = claimed("a", 1), claimed("a", 1, generation=2)
    ledger.put(first, ENDED, Outcome.completed(first, "1"))
    ledger.close(ledger.to_record(), turned(refused={"a"}))
    ledger.put(second, ENDED, Outcome.completed(second, "2"))
    assert ledger.count(REFUSED) == 0
    assert [one.result for one in ledger.to_record()] == ["2"]


@pytest.mark.parametrize(
    ("count", "characters"),
    [(REFUSED_MAX, 1), (2, REFUSED_CHARACTERS_MAX // 2)],
    ids=["many", "large"],
)
def test_a_worker_with_too_many_refused_outcomes_is_full(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, count: int, characters: int
) -> None:
    # Made here: as a parameter, every test process would keep these 128 MB to its end.
    result = "x" * characters
    tasks = [claimed(f"task-{number}", 1) for number in range(count)]
    for task in tasks:
        ledger.put(task, ENDED, Outcome.completed(task, result))
        assert not ledger.is_full
        ledger.close(ledger.to_record(), turned(refused={task.id}))
    assert ledger.is_full
    assert f"{count} outcomes are refused; claiming no tasks" in caplog.text
    ledger.forget(tasks[0].id)
    assert not ledger.is_full


def test_a_call_that_does_not_fit_waits_apart_until_it_is_left_or_fails(
    dispatcher: Dispatcher, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher.hand_out([claimed("a", 1), claimed("b", 2)])
    misfits = [report(one).report._replace(was_called=False) for one in ("a", "b")]
    dispatcher.absorb([Reported(misfit, 1, 0.0) for misfit in misfits])
    assert (ledger.to_record(), ledger.count(UNCALLED)) == ([], 2)
    (first, _), (second, outcome) = ledger.outcomes(UNCALLED)
    ledger.give_back([first])
    ledger.put(second, ENDED, outcome)
    assert ledger.note_released() == [first]
    assert ledger.to_record() == [outcome]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (report("a"), "work a #1 completed after 0.000 s"),
        (
            Died(attempt("a"), 1, "exit code 3", 2.5),
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
    dispatcher: Dispatcher,
    ledger: Ledger,
    caplog: pytest.LogCaptureFixture,
    event: PoolEvent,
    line: str,
) -> None:
    caplog.set_level("INFO", "horsies.tasks")
    dispatcher.hand_out([claimed("a", 1), claimed("b", 2)])
    dispatcher.absorb([event, report("b")])
    log_ends(ledger.close(ledger.to_record(), turned("a")))
    (record,) = [one for one in caplog.records if one.name == "horsies.tasks"]
    assert record.getMessage().endswith(line)
    assert vars(record)["task_id"] == "a"


def test_a_retry_that_the_database_had_no_time_for_is_not_announced(
    dispatcher: Dispatcher, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "horsies.tasks")
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([Stopped(attempt("a"), 1, True, STOPPED_FOR_REQUEUE, 0.5)])
    log_ends(ledger.close(ledger.to_record(), turned("a", failed={"a"})))
    line = f"work a #1 failed with WORKER_STOPPED after 0.500 s ({TOO_LATE})"
    assert caplog.messages == [line]


def test_ends_are_not_logged_above_the_level_of_their_logger(
    dispatcher: Dispatcher, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "horsies.tasks")
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([report("a")])
    log_ends(ledger.close(ledger.to_record(), turned("a")))
    assert not caplog.records


def test_a_cancel_before_the_return_to_the_queue_is_logged_as_the_end(
    dispatcher: Dispatcher, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "horsies.tasks")
    dispatcher.hand_out([claimed("a", 1)])
    dispatcher.absorb([Stopped(attempt("a"), 1, True, STOPPED_FOR_REQUEUE, 0.5)])
    log_ends(ledger.close(ledger.to_record(), turned("a", cancelled={"a"})))
    assert "work a #1 was cancelled after 0.500 s" in caplog.text
    assert "retry" not in caplog.text
