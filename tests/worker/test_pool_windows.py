"""Windows of real children: which tasks have begun, and which come back, whatever happens to the child."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from horsies.worker.pool.events import Died, PoolEvent, Reported, Stopped, TakenBack
from horsies.worker.pool.pool import ChildPool, NoIdleChildError
from horsies.worker.protocol import Assignment
from tests.support.pool import (
    MakePool,
    assignment,
    collect_events,
    collect_until,
    is_gone,
    run,
    wide_memory_limit_mb,
)
from tests.support.wait import wait_until

PATIENT = 60.0


def give(
    pool: ChildPool,
    tasks: Sequence[Assignment],
    *,
    patience: float = PATIENT,
    pid: int | None = None,
) -> int:
    """Give a window to a child; returns its pid."""
    chosen = pool.pids()[0] if pid is None else pid
    pool.dispatch_window(chosen, [(task, patience) for task in tasks])
    return chosen


def begun(journal: Path) -> list[str]:
    return journal.read_text().splitlines() if journal.exists() else []


def returned(events: Iterable[PoolEvent]) -> list[str]:
    return [
        one.task_id for event in events if isinstance(event, TakenBack) for one in event.assignments
    ]


def reported(events: Iterable[PoolEvent]) -> list[str]:
    return [event.report.task_id for event in events if isinstance(event, Reported)]


def ids(tasks: Iterable[Assignment]) -> list[str]:
    return [task.task_id for task in tasks]


def notes(journal: Path, count: int) -> list[Assignment]:
    return [assignment("note", str(journal), str(number)) for number in range(count)]


def sleeper(journal: Path, seconds: float = 600.0, timeout_ms: int | None = None) -> Assignment:
    return assignment("note_and_sleep", str(journal), "long", seconds, timeout_ms=timeout_ms)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_a_window_runs_in_order_and_leaves_an_idle_child(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(1, has_windows=True)
    tasks = notes(journal, 32)
    pid = give(pool, tasks[:20])
    give(pool, tasks[20:])
    assert pool.places.window_space(32) == (0, 32)
    events = collect_events(pool, 32, Reported)
    assert reported(events) == ids(tasks)
    assert begun(journal) == [str(number) for number in range(32)]
    assert (pool.places.idle_count, pool.pids(), list(pool.held_tasks)) == (1, [pid], [])
    assert run(pool, "echo", 1) == 1, "a plain assignment needs no permit"


def test_a_child_with_a_plain_task_takes_nothing_behind_it(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(1, has_windows=True)
    pid = pool.dispatch(sleeper(journal))
    assert (pool.places.idle_and_behind(8), pool.places.window_space(8)) == (([], []), (0, 0))
    with pytest.raises(NoIdleChildError):
        give(pool, notes(journal, 1), pid=pid)


def test_without_windows_there_is_no_place_behind_a_task(make_pool: MakePool) -> None:
    pool = make_pool(2)
    assert pool.places.idle_and_behind(8) == (pool.places.idle(2), [])
    with pytest.raises(NoIdleChildError):
        give(pool, [assignment("echo", 1)])


def test_few_tasks_are_spread_over_the_children(make_pool: MakePool, journal: Path) -> None:
    pool = make_pool(3, has_windows=True)
    first, second, third = pool.places.idle(3)
    give(pool, [sleeper(journal), *notes(journal, 1)], pid=third)
    idle, ahead = pool.places.idle_and_behind(3)
    assert idle == [first, second]
    assert ahead == [first, second, first, second, third]


def test_a_killed_child_costs_the_task_it_had_begun(make_pool: MakePool, journal: Path) -> None:
    pool = make_pool(1, has_windows=True)
    done, front, behind = notes(journal, 3), sleeper(journal), notes(journal, 5)
    pid = give(pool, [*done, front, *behind])
    wait_until(lambda: "long" in begun(journal))
    os.kill(pid, signal.SIGKILL)
    events = collect_events(pool, 1, Died)
    assert reported(events) == ids(done)
    assert returned(events) == ids(behind)
    (death,) = (event for event in events if isinstance(event, Died))
    assert death.assignment == front
    assert begun(journal) == ["0", "1", "2", "long"]


def test_a_child_killed_before_its_first_task_costs_none(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(1, has_windows=True)
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    tasks = notes(journal, 4)
    give(pool, tasks)
    os.kill(pid, signal.SIGKILL)
    events = collect_until(pool, lambda: is_gone(pid) and pid not in pool.pids())
    assert returned(events) == ids(tasks)
    assert begun(journal) == []


def test_tasks_behind_a_slow_one_come_back_and_the_child_gets_no_more(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(1, has_windows=True)
    front, behind = sleeper(journal), notes(journal, 31)
    give(pool, [front, *behind], patience=0.01)
    events = collect_events(pool, 1, TakenBack)
    assert returned(events) == ids(behind)
    assert list(pool.busy) == [front.task_id]
    assert (pool.places.idle_and_behind(32), pool.places.window_space(32)) == (([], []), (0, 0))


def test_a_slow_child_takes_more_again_after_its_report(make_pool: MakePool, journal: Path) -> None:
    pool = make_pool(1, has_windows=True)
    give(pool, [sleeper(journal, 0.1), *notes(journal, 3)], patience=0.01)
    collect_until(pool, lambda: pool.places.idle_count == 1)
    tasks = notes(journal, 3)
    give(pool, tasks)
    assert reported(collect_events(pool, 3, Reported)) == ids(tasks)


def test_a_child_that_does_not_begin_keeps_only_its_front(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(1, has_windows=True)
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    tasks = notes(journal, 4)
    give(pool, tasks, patience=0.01)
    assert returned(collect_events(pool, 1, TakenBack)) == ids(tasks[1:])
    os.kill(pid, signal.SIGCONT)
    assert reported(collect_events(pool, 1, Reported)) == ids(tasks[:1])
    assert begun(journal) == ["0"]
    assert run(pool, "echo", 2) == 2


def test_the_time_limit_of_a_task_counts_from_its_own_start(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(1, has_windows=True, stop_grace_seconds=5.0)
    before = [sleeper(journal, 0.3, timeout_ms=1_000) for _ in range(4)]
    late, behind = sleeper(journal, timeout_ms=1_000), notes(journal, 3)
    give(pool, [*before, late, *behind])
    events = collect_events(pool, 1, Stopped)
    assert reported(events) == ids(before)
    assert returned(events) == ids(behind)
    (stopped,) = (event for event in events if isinstance(event, Stopped))
    assert (stopped.assignment, stopped.reason, stopped.forced) == (late, "timeout", False)
    assert stopped.run_seconds is not None
    assert stopped.run_seconds >= 1.0


def test_a_child_that_never_begins_is_replaced_at_the_time_limit(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(1, has_windows=True)
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGSTOP)
    front, behind = assignment("note", str(journal), "x", timeout_ms=200), notes(journal, 2)
    give(pool, [front, *behind])
    events = collect_until(pool, lambda: pool.places.idle_count == 1 and pool.pids() != [pid])
    assert returned(events) == ids([front, *behind])
    assert [event for event in events if isinstance(event, Stopped)] == []
    assert begun(journal) == []


def test_a_cancelled_task_behind_others_comes_back_alone(
    make_pool: MakePool, journal: Path, tmp_path: Path
) -> None:
    pool = make_pool(1, has_windows=True)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    front = assignment("gated", str(journal), str(gate), "front")
    behind = notes(journal, 4)
    pid = give(pool, [front, *behind])
    wait_until(lambda: begun(journal))
    assert pool.stop_task(behind[1].task_id, "cancel")
    gate.write_bytes(b"x")
    events = collect_events(pool, 4, Reported)
    assert returned(events) == [behind[1].task_id]
    assert reported(events) == ids([front, behind[0], *behind[2:]])
    assert begun(journal) == ["front", "0", "2", "3"]
    assert pool.pids() == [pid], "the others were not disturbed"


def test_a_cancelled_front_is_stopped_behind_the_frames_it_has_not_read(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(1, has_windows=True, stop_grace_seconds=20.0)
    front, behind = sleeper(journal), notes(journal, 31)
    give(pool, [front, *behind])
    wait_until(lambda: begun(journal))
    assert pool.stop_task(front.task_id, "cancel")
    events = collect_events(pool, 1, Stopped)
    assert returned(events) == ids(behind)
    assert [event.forced for event in events if isinstance(event, Stopped)] == [False]
    collect_until(pool, lambda: pool.places.idle_count == 1)
    assert begun(journal) == ["long"]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_task_that_ended_unnoticed_does_not_pass_its_stop_to_the_next_one(
    make_pool: MakePool, journal: Path, tmp_path: Path, end: str
) -> None:
    pool = make_pool(1, has_windows=True)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    first, second = (assignment("gated", str(journal), str(gate), name) for name in "ab")
    pid = give(pool, [first, second])
    wait_until(lambda: begun(journal) == ["a"])
    gate.write_bytes(b"x")
    wait_until(lambda: begun(journal) == ["a", "b"])
    # Its report has not been read.
    if end == "stop":
        assert pool.stop_task(first.task_id, "cancel")
    else:
        pool.kill_task(first.task_id)
    gate.write_bytes(b"x")
    events = collect_events(pool, 2, Reported)
    assert reported(events) == ids([first, second])
    assert pool.pids() == [pid]


def test_a_stopping_worker_takes_back_everything_that_has_not_begun(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(2, has_windows=True)
    windows = {pid: [sleeper(journal), *notes(journal, 5)] for pid in pool.pids()}
    for pid, tasks in windows.items():
        give(pool, tasks, pid=pid)
    wait_until(lambda: len(begun(journal)) == 2)
    pool.return_unstarted()
    events = pool.collect(0)
    assert sorted(returned(events)) == sorted(
        task_id for tasks in windows.values() for task_id in ids(tasks[1:])
    )
    assert sorted(pool.busy) == sorted(tasks[0].task_id for tasks in windows.values())


def test_a_stopping_worker_knows_the_task_that_a_child_has_gone_on_to(
    make_pool: MakePool, journal: Path, tmp_path: Path
) -> None:
    pool = make_pool(1, has_windows=True)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    first = assignment("gated", str(journal), str(gate), "a")
    second = sleeper(journal)
    give(pool, [first, second])
    wait_until(lambda: begun(journal) == ["a"])
    gate.write_bytes(b"x")
    wait_until(lambda: begun(journal) == ["a", "long"])
    pool.return_unstarted()
    assert list(pool.busy) == [second.task_id], "a forced shutdown interrupts these"
    assert pool.stop_task(second.task_id, "shutdown")
    events = collect_events(pool, 1, Stopped)
    assert reported(events) == ids([first])


def test_a_report_that_a_stop_has_read_does_not_wait_for_the_next_event(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(1, has_windows=True)
    (task,) = notes(journal, 1)
    give(pool, [task])
    wait_until(lambda: begun(journal))
    while pool.busy:
        pool.return_unstarted()
    asked_at = time.monotonic()
    assert reported(pool.collect(30.0)) == [task.task_id]
    assert time.monotonic() - asked_at < 15.0


def test_killing_all_children_returns_what_they_had_not_begun(
    make_pool: MakePool, journal: Path
) -> None:
    pool = make_pool(2, has_windows=True)
    windows = {pid: [sleeper(journal), *notes(journal, 3)] for pid in pool.pids()}
    for pid, tasks in windows.items():
        give(pool, tasks, pid=pid)
    wait_until(lambda: len(begun(journal)) == 2)
    pool.kill_all()
    events = collect_events(pool, 2, Died)
    assert len(returned(events)) == 6
    assert {event.assignment for event in events if isinstance(event, Died)} == {
        tasks[0] for tasks in windows.values()
    }


def test_no_child_runs_more_tasks_than_its_limit(make_pool: MakePool, journal: Path) -> None:
    pool = make_pool(1, has_windows=True, max_tasks_per_child=20)
    first = pool.pids()[0]
    idle, ahead = pool.places.idle_and_behind(32)
    assert (len(idle), len(ahead)) == (1, 19)
    tasks = [assignment("own_pid") for _ in range(20)]
    give(pool, tasks)
    collect_events(pool, 20, Reported)
    collect_until(pool, lambda: pool.places.idle_count == 1 and first not in pool.pids())


def test_a_child_near_its_limit_takes_all_tasks_that_are_left_to_it(
    make_pool: MakePool, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.randint", lambda lowest, _: lowest)
    pool = make_pool(1, has_windows=True, max_tasks_per_child=20)
    pid = pool.pids()[0]
    give(pool, [assignment("own_pid") for _ in range(18)])
    collect_events(pool, 18, Reported)
    assert pool.places.idle_and_behind(8) == ([pid], [pid])
    last = notes(journal, 2)
    give(pool, last, pid=pid)
    assert reported(collect_events(pool, 2, Reported)) == ids(last)
    collect_until(pool, lambda: pool.places.idle_count == 1 and pid not in pool.pids())


def test_a_child_that_grew_too_large_goes_after_its_front(
    make_pool: MakePool, journal: Path
) -> None:
    limit_mb = wide_memory_limit_mb()
    pool = make_pool(1, has_windows=True, max_memory_per_child_mb=limit_mb)
    large = pool.pids()[0]
    behind = [sleeper(journal, 0.05), *notes(journal, 5)]
    give(pool, [assignment("allocate", 500), *behind])
    events = collect_until(pool, lambda: large not in pool.pids() and pool.places.idle_count == 1)
    assert len(reported(events)) + len(returned(events)) == 7
    assert set(begun(journal)) <= {"long"}


@pytest.mark.parametrize(
    "hostile", ["note_and_exit", "note_and_segfault", "note_and_close", "note_and_block"]
)
def test_a_hostile_task_costs_itself_only(make_pool: MakePool, journal: Path, hostile: str) -> None:
    pool = make_pool(1, has_windows=True, stop_grace_seconds=0.1)
    before, behind = notes(journal, 2), notes(journal, 3)
    front = assignment(hostile, str(journal), "hostile", timeout_ms=500)
    give(pool, [*before, front, *behind])
    events = collect_until(pool, lambda: pool.places.idle_count == 1 and not pool.busy)
    assert reported(events) == ids(before)
    assert returned(events) == ids(behind)
    ends = [event for event in events if isinstance(event, Died | Stopped)]
    assert [event.assignment for event in ends] == [front]
    assert begun(journal) == ["0", "1", "hostile"]


def test_large_results_and_forks_disturb_no_window(make_pool: MakePool, journal: Path) -> None:
    pool = make_pool(1, has_windows=True)
    tasks = [
        assignment(name, str(journal), str(number))
        for number, name in enumerate(["note_and_return_much", "note_and_fork", "note"] * 2)
    ]
    give(pool, tasks)
    events = collect_events(pool, 6, Reported)
    assert reported(events) == ids(tasks)
    assert begun(journal) == ["0", "1", "2", "3", "4", "5"]
