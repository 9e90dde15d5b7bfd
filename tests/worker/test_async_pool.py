"""Async children as the pool sees them: places, many tasks per child, and frames that do not fit."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from horsies.tasks.outcome import STOPPED_BY_LOSS
from horsies.worker import protocol
from horsies.worker.dispatcher import Dispatcher
from horsies.worker.ledger import Ledger
from horsies.worker.pool.children import PoolSettings
from horsies.worker.pool.events import Died, Reported, Stopped, TakenBack
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import ChildPool, NoIdleChildError
from tests.support.pool import BOOT, assignment, collect_events, is_gone, value_of
from tests.support.wait import wait_until


@pytest.fixture
def pool() -> Iterator[ChildPool]:
    """Two async children with three slots each."""
    with selectors.DefaultSelector() as selector:
        settings = PoolSettings(
            0, StartMethod.FORK, stop_grace_seconds=60.0, async_children=2, async_slots=3
        )
        pool = ChildPool(settings, BOOT, selector)
        assert pool.start()
        yield pool
        pool.shutdown()


def test_tasks_are_spread_and_a_full_child_refuses_more(pool: ChildPool) -> None:
    places = pool.places.next_async(10)
    assert len(places) == 6
    assert len(set(places[:2])) == 2
    for pid in places:
        pool.dispatch(assignment("echo", 1), pid)
    with pytest.raises(NoIdleChildError):
        pool.dispatch(assignment("echo", 1), places[0])
    with pytest.raises(NoIdleChildError):
        pool.dispatch_window(places[0], [(assignment("echo", 1), 0.0)])
    assert pool.places.next_async(10) == []
    assert sum(summary.tasks or 0 for summary in pool.summaries()) == 6
    events = collect_events(pool, 6, Reported)
    assert {event.pid for event in events if isinstance(event, Reported)} == set(places)
    assert pool.places.async_count == 6
    assert pool.idle_children == 2


def test_ended_tasks_do_not_stay_among_the_deadlines(pool: ChildPool) -> None:
    for _ in range(450):
        for pid in pool.places.next_async(6):
            pool.dispatch(assignment("echo", 1, timeout_ms=3_600_000), pid)
        collect_events(pool, 6, Reported)
    assert len(pool._assignments.deadlines) < 1_100


@pytest.mark.parametrize("kind", ["task stopped", "progress", "other task", "assign"])
def test_a_forged_frame_costs_its_child_alone(pool: ChildPool, kind: str) -> None:
    first, second = pool.places.next_async(2)
    pool.dispatch(assignment("write_forgery", kind), first)
    pool.dispatch(assignment("echo", 5), second)
    events = collect_events(pool, 1, Died)
    (died,) = [event for event in events if isinstance(event, Died)]
    assert died.pid == first
    assert "malformed frame" in died.description
    wait_until(lambda: pool.collect(0.05) is not None and pool.places.async_count == 6)


def test_the_end_of_a_lost_attempt_costs_its_child_no_other_task(
    pool: ChildPool, tmp_path: Path
) -> None:
    """Another worker recovered the task, and its next attempt runs in the other child."""
    first, second = pool.places.next_async(2)
    begun = tmp_path / "begun"
    lost, neighbour = (assignment("wait_for_ever", str(begun), False) for _ in range(2))
    pool.dispatch(lost, first)
    wait_until(begun.exists)
    pool.dispatch(neighbour, first)
    pool.stop_task(lost.task_id, "lost")
    again = lost._replace(generation=lost.generation + 1)
    pool.dispatch(again, second)
    events = collect_events(pool, 1, Stopped)
    assert [one.assignment for one in events if isinstance(one, Stopped | Died)] == [lost]
    assert {task_id: task.pid for task_id, task in pool.busy.items()} == {
        neighbour.task_id: first,
        again.task_id: second,
    }


def test_a_task_of_another_worker_is_cancelled_and_its_neighbour_goes_on(
    pool: ChildPool, tmp_path: Path
) -> None:
    pid, _ = pool.places.next_async(2)
    begun = [tmp_path / "lost", tmp_path / "neighbour"]
    lost, neighbour = (assignment("wait_for_ever", str(one), False) for one in begun)
    pool.dispatch_window(pid, [(lost, 0.0), (neighbour, 0.0)])
    wait_until(lambda: all(one.exists() for one in begun))
    Dispatcher(pool, Ledger()).keep_owned([neighbour.task_id])
    assert collect_events(pool, 1, Stopped) == [Stopped(lost, pid, False, STOPPED_BY_LOSS)]
    assert {task_id: task.pid for task_id, task in pool.busy.items()} == {neighbour.task_id: pid}


def test_a_task_that_is_stopped_before_its_first_step_comes_back(
    pool: ChildPool, tmp_path: Path
) -> None:
    pid, _ = pool.places.next_async(2)
    unstarted = assignment("wait_for_ever", str(tmp_path / "begun"), False)
    os.kill(pid, signal.SIGSTOP)
    try:
        pool.dispatch(unstarted, pid)
        pool.stop_task(unstarted.task_id, "cancel")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert collect_events(pool, 1, TakenBack) == [TakenBack((unstarted,))]
    assert not (tmp_path / "begun").exists()
    assert (pool.places.async_count, list(pool.busy)) == (6, [])


def test_an_assignment_that_cannot_be_decoded_comes_back_while_its_neighbour_runs_on(
    pool: ChildPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, _ = pool.places.next_async(2)
    neighbour = assignment("wait_for_ever", str(tmp_path / "begun"), False)
    pool.dispatch(neighbour, pid)
    wait_until((tmp_path / "begun").exists)
    damaged = assignment("echo", 1)
    encode = protocol.encode_assignment

    def cut(*given: Any) -> bytes:
        """Leave out a byte before the number at the end, as when a task has read a part of the socket."""
        frame = encode(*given)
        return (len(frame) - 5).to_bytes(4, "big") + frame[4:-9] + frame[-8:]

    monkeypatch.setattr(protocol, "encode_assignment", cut)
    pool.dispatch(damaged, pid)
    assert collect_events(pool, 1, TakenBack) == [TakenBack((damaged,))]
    assert {task_id: task.pid for task_id, task in pool.busy.items()} == {neighbour.task_id: pid}


def test_a_lost_attempt_that_does_not_stop_is_killed_although_the_next_one_runs(
    tmp_path: Path,
) -> None:
    with selectors.DefaultSelector() as selector:
        settings = PoolSettings(
            0, StartMethod.FORK, stop_grace_seconds=0.05, async_children=2, async_slots=3
        )
        pool = ChildPool(settings, BOOT, selector)
        try:
            assert pool.start()
            first, second = pool.places.next_async(2)
            lost = assignment("wait_for_ever", str(tmp_path / "begun"), True)
            pool.dispatch(lost, first)
            wait_until((tmp_path / "begun").exists)
            pool.stop_task(lost.task_id, "lost")
            pool.dispatch(lost._replace(generation=lost.generation + 1), second)
            (stopped,) = collect_events(pool, 1, Stopped)
            assert isinstance(stopped, Stopped)
            assert (stopped.assignment, stopped.pid, stopped.forced) == (lost, first, True)
            assert list(pool.busy) == [lost.task_id]
        finally:
            pool.shutdown()


def test_a_task_without_a_report_fails_alone(pool: ChildPool) -> None:
    """As when there is not enough memory for its result."""
    first, _ = pool.places.next_async(2)
    broken, neighbour = assignment("no_such_function"), assignment("echo", 5)
    pool.dispatch(broken, first)
    pool.dispatch(neighbour, first)
    events = collect_events(pool, 2, Reported)
    reports = {one.report.task_id: one.report for one in events if isinstance(one, Reported)}
    assert reports[neighbour.task_id].ok
    assert "KeyError" in (reports[broken.task_id].error_message or "")
    assert reports[broken.task_id].error_code == "UNHANDLED_EXCEPTION"


def test_a_time_limit_that_passes_after_the_stop_does_not_end_the_grace_period(
    pool: ChildPool, tmp_path: Path
) -> None:
    first, _ = pool.places.next_async(2)
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    cancelled = assignment("clean_up_slowly", str(begun), str(gate), timeout_ms=1)
    neighbour = assignment("wait_for_ever", str(tmp_path / "other"), False)
    os.mkfifo(gate)
    pool.dispatch(neighbour, first)
    pool.dispatch(cancelled, first)
    wait_until(begun.exists)
    pool.stop_task(cancelled.task_id, "cancel")
    assert pool.collect(0.05) == []
    with gate.open("r+b", buffering=0) as pipe:
        pipe.write(b"!")
        (stopped,) = collect_events(pool, 1, Stopped)
    assert stopped == Stopped(cancelled, first, False, "cancel")
    assert {task_id: task.pid for task_id, task in pool.busy.items()} == {neighbour.task_id: first}


def test_a_task_factory_of_the_application_does_not_keep_tasks_from_starting(
    pool: ChildPool,
) -> None:
    first, _ = pool.places.next_async(2)
    pool.dispatch(assignment("set_old_task_factory"), first)
    collect_events(pool, 1, Reported)
    pool.dispatch(assignment("echo", 5), first)
    (event,) = collect_events(pool, 1, Reported)
    assert isinstance(event, Reported)
    assert event.report.ok


def test_a_process_forked_by_a_coroutine_runs_no_step_of_another_task(
    pool: ChildPool, tmp_path: Path
) -> None:
    first, _ = pool.places.next_async(2)
    journal = tmp_path / "journal"
    pool.dispatch(assignment("note_twice", str(journal), 0.5), first)
    wait_until(journal.exists)
    pool.dispatch(assignment("fork_into_the_loop"), first)
    (pid,) = filter(None, map(value_of, collect_events(pool, 2, Reported)))
    wait_until(lambda: is_gone(pid))
    assert journal.read_text().split() == ["begun", "ended"]


def test_a_task_that_another_cancels_before_its_first_step_runs(pool: ChildPool) -> None:
    pid, _ = pool.places.next_async(2)
    tasks = [assignment("cancel_others"), assignment("echo", 5)]
    os.kill(pid, signal.SIGSTOP)
    try:
        for task in tasks:
            pool.dispatch(task, pid)
    finally:
        os.kill(pid, signal.SIGCONT)
    events = collect_events(pool, 2, Reported)
    assert [one.report.ok for one in events if isinstance(one, Reported)] == [True, True]


def test_a_child_that_dies_behind_a_blocked_loop_costs_no_task_that_has_not_begun(
    tmp_path: Path,
) -> None:
    begun, blocked = tmp_path / "begun", tmp_path / "blocked"
    with selectors.DefaultSelector() as selector:
        settings = PoolSettings(
            0, StartMethod.FORK, stop_grace_seconds=0.05, async_children=1, async_slots=4
        )
        pool = ChildPool(settings, BOOT, selector)
        try:
            assert pool.start()
            (pid,) = pool.places.next_async(1)
            ran = [assignment("wait_for_ever", str(begun), False)]
            ran += [assignment("note_and_sleep", str(blocked), "blocked", 600.0)]
            for task, journal in zip(ran, (begun, blocked), strict=True):
                pool.dispatch(task, pid)
                wait_until(journal.exists)
            limited = assignment("note", str(tmp_path / "never"), "x", timeout_ms=1)
            unlimited = assignment("note", str(tmp_path / "never"), "x")
            pool.dispatch_window(pid, [(limited, 0.0), (unlimited, 0.0)])
            events = collect_events(pool, 2, Died)
        finally:
            pool.shutdown()
    assert [one.assignment for one in events if isinstance(one, Died)] == ran
    assert [one for one in events if not isinstance(one, Died)] == [TakenBack((limited, unlimited))]
    assert not (tmp_path / "never").exists()


def test_assignments_that_wait_for_a_blocked_child_are_not_copied_for_each_other(
    pool: ChildPool,
) -> None:
    pid, _ = pool.places.next_async(2)
    tasks = [assignment("echo", str(number) * 1_000_000) for number in range(3)]
    (process,) = (one for one in pool._children.all if one.pid == pid)
    os.kill(pid, signal.SIGSTOP)
    try:
        pool.dispatch(tasks[0], pid)
        waiting = process.outgoing
        for task in tasks[1:]:
            pool.dispatch(task, pid)
        assert process.outgoing is waiting
        assert len(waiting) > 2_000_000
    finally:
        os.kill(pid, signal.SIGCONT)
    texts = [value_of(event) for event in collect_events(pool, 3, Reported)]
    assert texts == [str(number) * 1_000_000 for number in range(3)]
    assert not process.outgoing


def test_tasks_run_where_no_thread_can_watch_the_loop() -> None:
    boot = replace(BOOT, program="tests.support.apps.pool_programs:load_without_threads")
    with selectors.DefaultSelector() as selector:
        settings = PoolSettings(0, StartMethod.FORK, async_children=1, async_slots=3)
        pool = ChildPool(settings, boot, selector)
        try:
            assert pool.start()
            for pid in pool.places.next_async(3):
                pool.dispatch(assignment("echo", 5), pid)
            assert len(collect_events(pool, 3, Reported)) == 3
        finally:
            pool.shutdown()
