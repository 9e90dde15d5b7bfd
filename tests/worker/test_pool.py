"""The supervisor of child processes, with real processes and real signals."""

from __future__ import annotations

import os
import selectors
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from horsies.worker import os_process
from horsies.worker.pool.events import Died, PoolEvent, Stopped, TakenBack
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import NoIdleChildError
from tests.support.pool import (
    DEADLINE_SECONDS,
    MakePool,
    assignment,
    collect_until,
    is_gone,
    next_event,
    run,
    value_of,
)
from tests.support.wait import wait_until


@pytest.mark.parametrize("method", list(StartMethod))
def test_children_of_every_start_method_take_assignments_and_report(
    make_pool: MakePool, method: StartMethod
) -> None:
    pool = make_pool(2, start_method=method)
    assert pool.places.idle_count == 2
    expected_pids = pool.places.idle(2)
    pids = [pool.dispatch(assignment("own_pid")) for _ in range(2)]
    assert pids == expected_pids
    events: list[PoolEvent] = []
    events += collect_until(pool, lambda: pool.places.idle_count == 2)
    assert sorted(value_of(event) for event in events) == sorted(pids)
    assert sorted(pool.pids()) == sorted(pids)
    assert pool.shutdown() == []
    assert all(is_gone(pid) for pid in pids)


def test_children_are_looked_after_where_pids_have_no_descriptors(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os_process, "HAS_PIDFD", False)
    pool = make_pool(1, start_method=StartMethod.SPAWN, max_tasks_per_child=3)
    (pid,) = pool.pids()
    assert run(pool, "own_pid") == pid
    doomed = assignment("exit_with", 3)
    pool.dispatch(doomed)
    assert next_event(pool) == Died(doomed, pid, "exit code 3")
    collect_until(pool, lambda: pool.places.idle_count == 1)
    assert run(pool, "own_pid") != pid


def test_an_assignment_without_an_idle_child_is_refused(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1)
    pid = pool.dispatch(assignment("wait_forever", str(tmp_path / "started")))
    with pytest.raises(NoIdleChildError):
        pool.dispatch(assignment("echo", 1))
    with pytest.raises(NoIdleChildError, match=str(pid)):
        pool.dispatch(assignment("echo", 1), pid)


def test_an_assignment_can_name_its_child(make_pool: MakePool) -> None:
    pool = make_pool(3)
    for pid in pool.pids():
        assert pool.dispatch(assignment("own_pid"), pid) == pid
        assert value_of(next_event(pool)) == pid


def test_busy_names_what_runs_where(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(2)
    given = assignment("wait_forever", str(tmp_path / "started"))
    pid = pool.dispatch(given)
    assert list(pool.busy) == [given.task_id]
    running = pool.busy[given.task_id]
    assert (running.assignment, running.pid) == (given, pid)
    summaries = {child.pid: child for child in pool.summaries()}
    assert summaries[pid].task_id == given.task_id
    assert {child.task_id for other, child in summaries.items() if other != pid} == {None}
    assert all(child.rss_mb > 1 and child.since for child in summaries.values())


@pytest.mark.parametrize(
    ("name", "args", "description"),
    [
        ("exit_with", (3,), "exit code 3"),
        ("exit_with", (0,), "exit code 0"),
        ("segfault", (), "signal 11 (SIGSEGV)"),
    ],
)
def test_a_dying_child_costs_its_own_assignment_only(
    make_pool: MakePool, tmp_path: Path, name: str, args: tuple[Any, ...], description: str
) -> None:
    pool = make_pool(2)
    sibling = assignment("wait_forever", str(tmp_path / "sibling"))
    sibling_pid = pool.dispatch(sibling)
    doomed = assignment(name, *args)
    doomed_pid = pool.dispatch(doomed)
    assert next_event(pool) == Died(doomed, doomed_pid, description)
    assert list(pool.busy) == [sibling.task_id]
    collect_until(pool, lambda: pool.places.idle_count == 1)
    assert run(pool, "echo", "refilled") == "refilled"
    assert sibling_pid in pool.pids()
    assert doomed_pid not in pool.pids()


def test_a_child_killed_from_outside_is_noticed_and_replaced(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(2)
    given = assignment("wait_forever", str(tmp_path / "started"))
    pid = pool.dispatch(given)
    collect_until(pool, (tmp_path / "started").exists)
    os.kill(pid, signal.SIGKILL)
    assert next_event(pool) == Died(given, pid, "signal 9 (SIGKILL)")
    collect_until(pool, lambda: pool.places.idle_count == 2)


def test_an_idle_child_killed_from_outside_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(1)
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGKILL)
    assert next_event(pool) == Died(None, pid, "signal 9 (SIGKILL)")
    collect_until(pool, lambda: pool.places.idle_count == 1)
    assert pool.pids() != [pid]


def test_an_assignment_to_a_child_that_died_unnoticed_is_known_not_to_have_started(
    make_pool: MakePool,
) -> None:
    pool = make_pool(1)
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGKILL)
    while not is_gone(pid):
        pass
    given = assignment("echo", 1)
    assert pool.dispatch(given) == pid
    assert next_event(pool) == TakenBack((given,))


def test_an_assignment_that_was_never_read_is_known_not_to_have_started(
    make_pool: MakePool,
) -> None:
    pool = make_pool(1)
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    given = assignment("echo", 1)
    pool.dispatch(given)
    os.kill(pid, signal.SIGKILL)
    assert next_event(pool) == TakenBack((given,))


def test_a_task_that_is_asked_to_stop_cleans_up_and_its_child_is_replaced(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1)
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"
    given = assignment("clean_up_when_stopped", str(started), str(cleaned))
    pid = pool.dispatch(given)
    collect_until(pool, started.exists)
    assert pool.stop_task(given.task_id, "cancelled")
    assert next_event(pool) == Stopped(given, pid, forced=False, reason="cancelled")
    assert cleaned.exists()
    collect_until(pool, lambda: pool.places.idle_count == 1 and is_gone(pid))


def test_a_task_that_does_not_stop_is_killed_after_the_grace(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1, stop_grace_seconds=0.2)
    given = assignment("ignore_stop", str(tmp_path / "started"))
    pid = pool.dispatch(given)
    collect_until(pool, (tmp_path / "started").exists)
    asked_at = time.monotonic()
    assert pool.stop_task(given.task_id, "cancelled")
    assert pool.stop_task(given.task_id, "cancelled"), "asking twice changes nothing"
    deadline = pool.next_deadline()
    assert deadline is not None
    assert asked_at + 0.2 <= deadline <= time.monotonic() + 0.2
    assert next_event(pool) == Stopped(given, pid, forced=True, reason="cancelled")
    assert time.monotonic() - asked_at >= 0.2


def test_a_stop_order_right_behind_the_assignment_is_obeyed(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1, stop_grace_seconds=DEADLINE_SECONDS)
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    given = assignment("wait_forever", str(tmp_path / "started"))
    pool.dispatch(given)
    pool.stop_task(given.task_id, "cancelled")
    os.kill(pid, signal.SIGCONT)
    assert next_event(pool) == Stopped(given, pid, forced=False, reason="cancelled")


def test_stopping_a_task_nobody_runs_is_a_no(make_pool: MakePool) -> None:
    assert not make_pool(1).stop_task("nobody", "cancelled")


def test_a_task_over_its_time_limit_is_stopped(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(1)
    given = assignment("wait_forever", str(tmp_path / "started"), timeout_ms=150)
    dispatched_at = time.monotonic()
    pid = pool.dispatch(given)
    assert next_event(pool) == Stopped(given, pid, forced=False, reason="timeout")
    assert time.monotonic() - dispatched_at >= 0.15


def test_a_stopped_process_is_killed_when_its_time_is_over(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1, stop_grace_seconds=0.1)
    started = tmp_path / "started"
    given = assignment("wait_forever", str(started), timeout_ms=200)
    pid = pool.dispatch(given)
    wait_until(started.exists)
    os.kill(pid, signal.SIGSTOP)
    assert next_event(pool) == Stopped(given, pid, forced=True, reason="timeout")


@pytest.mark.parametrize("reason", ["timeout", "cancel"])
def test_a_task_that_never_began_comes_back_however_it_was_stopped(
    make_pool: MakePool, tmp_path: Path, reason: str
) -> None:
    pool = make_pool(1, stop_grace_seconds=0.1)
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    started = tmp_path / "started"
    timeout_ms = 200 if reason == "timeout" else None
    given = assignment("wait_forever", str(started), timeout_ms=timeout_ms)
    pool.dispatch(given)
    if reason == "cancel":
        assert pool.stop_task(given.task_id, "cancel")
    assert next_event(pool) == TakenBack((given,))
    assert not started.exists()


def test_a_finished_task_leaves_no_deadline_behind(make_pool: MakePool) -> None:
    pool = make_pool(1)
    pool.dispatch(assignment("echo", 1, timeout_ms=60_000))
    assert pool.next_deadline() is not None
    next_event(pool)
    assert pool.next_deadline() is None


def test_a_sigterm_that_does_not_come_from_the_worker_stops_no_task(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1)
    given = assignment("wait_forever", str(tmp_path / "started"))
    pid = pool.dispatch(given)
    collect_until(pool, (tmp_path / "started").exists)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert pool.collect(0.2) == []
    assert list(pool.busy) == [given.task_id]


def test_killing_all_children_tells_every_assignment_and_fills_the_pool_again(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(2)
    given = [assignment("wait_forever", str(tmp_path / f"started-{n}")) for n in range(2)]
    pids = [pool.dispatch(one) for one in given]
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    pool.kill_all()
    events = collect_until(pool, lambda: pool.places.idle_count == 2)
    died = {(event.pid, event.description) for event in events if isinstance(event, Died)}
    assert died == {(pid, "signal 9 (SIGKILL)") for pid in pids}


def test_shutdown_tells_what_became_of_running_assignments(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(2)
    given = assignment("wait_forever", str(tmp_path / "started"))
    pid = pool.dispatch(given)
    collect_until(pool, (tmp_path / "started").exists)
    pids = pool.pids()
    assert [event for event in pool.shutdown() if isinstance(event, Died)] == [
        Died(given, pid, "signal 9 (SIGKILL)")
    ]
    assert all(is_gone(one) for one in pids)


def test_descriptors_of_others_in_the_selector_are_handed_back(
    make_pool: MakePool, selector: selectors.BaseSelector
) -> None:
    pool = make_pool(1)
    read_end, write_end = os.pipe()
    key = selector.register(read_end, selectors.EVENT_READ, "mine")
    try:
        os.write(write_end, b"x")
        assert pool.collect(1.0) == []
        assert pool.foreign_keys == [(key, selectors.EVENT_READ)]
    finally:
        selector.unregister(read_end)
        os.close(read_end)
        os.close(write_end)
    pool.collect(0)
    assert pool.foreign_keys == []


def test_a_stop_order_waits_behind_a_large_assignment(make_pool: MakePool) -> None:
    pool = make_pool(1, stop_grace_seconds=DEADLINE_SECONDS)
    given = assignment("wait_with", "x" * 3_000_000)
    pid = pool.dispatch(given)
    pool.stop_task(given.task_id, "cancelled")
    assert next_event(pool) == Stopped(given, pid, forced=False, reason="cancelled")


def test_large_assignments_and_large_reports_pass_in_pieces(make_pool: MakePool) -> None:
    pool = make_pool(2)
    long_text = "x" * 3_000_000
    pool.dispatch(assignment("length_of", long_text))
    pool.dispatch(assignment("text_of", 3_000_000))
    events: list[PoolEvent] = []
    events += collect_until(pool, lambda: pool.places.idle_count == 2)
    values = sorted((value_of(event) for event in events), key=str)
    assert values == [3_000_000, long_text]
