"""Children leave after enough tasks or at enough memory, and a successor stands ready."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from horsies.worker.pool.children import PoolSettings
from horsies.worker.pool.events import Died, Reported
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import ChildBootError, ChildPool
from tests.support.pool import (
    BOOT,
    MakePool,
    assignment,
    collect_until,
    is_gone,
    run,
    wide_memory_limit_mb,
)


def drain(pool: ChildPool, count: int) -> tuple[Counter[int], int]:
    """Run `count` tasks; how many each child ran, and the fewest usable children meanwhile."""
    by_pid: Counter[int] = Counter()
    fewest = pool.places.idle_count
    sent = done = 0
    while done < count:
        while pool.places.idle_count and sent < count:
            by_pid[pool.dispatch(assignment("echo", sent))] += 1
            sent += 1
        for event in pool.collect(5.0):
            assert isinstance(event, Reported), event
            done += 1
        fewest = min(fewest, pool.places.idle_count + len(pool.busy))
    return by_pid, fewest


@pytest.mark.parametrize("method", list(StartMethod))
def test_no_child_runs_more_than_its_number_of_tasks(
    make_pool: MakePool, method: StartMethod
) -> None:
    pool = make_pool(2, max_tasks_per_child=10, start_method=method)
    by_pid, _ = drain(pool, 60)
    assert max(by_pid.values()) <= 10
    assert len(by_pid) >= 6


def is_steady(pool: ChildPool) -> bool:
    """Whether no child is starting or leaving."""
    return pool.next_deadline() is None


def test_a_child_leaves_after_its_last_task_and_its_successor_is_ready(make_pool: MakePool) -> None:
    pool = make_pool(1, max_tasks_per_child=3)
    (first,) = pool.pids()
    for _ in range(3):
        assert collect_until(pool, lambda: is_steady(pool)) == []
        assert run(pool, "own_pid") == first
    assert pool.places.idle_count == 1
    assert run(pool, "own_pid") != first
    assert collect_until(pool, lambda: is_gone(first)) == []


def test_of_two_children_near_their_limits_one_leaves_early(make_pool: MakePool) -> None:
    pool = make_pool(2, max_tasks_per_child=3)
    both = set(pool.pids())
    for number in range(4):
        pool.dispatch(assignment("echo", number), pool.pids()[number % 2])
        collect_until(pool, lambda: not pool.busy)
    collect_until(pool, lambda: len(both & set(pool.pids())) == 1 and is_steady(pool))
    (other,) = both & set(pool.pids())
    assert pool.places.idle_count == 2
    pool.dispatch(assignment("echo", 4), other)
    collect_until(pool, lambda: other not in pool.pids())
    assert pool.places.idle_count == 2


def test_children_with_slow_stop_hooks_do_not_pile_up(make_pool: MakePool) -> None:
    program = "tests.support.apps.pool_programs:load_with_slow_stop_hook"
    boot = replace(BOOT, program=program)
    pool = make_pool(2, boot=boot, max_tasks_per_child=2, exit_seconds_of_hooks=600)

    def are_too_many_or_all_exit() -> bool:
        while pool.places.idle_count:
            pool.dispatch(assignment("echo", 1))
        deadline = pool.next_deadline()
        # Only exiting children have so much time: the pool must sleep until one of them ends.
        all_exit = deadline is not None and deadline > time.monotonic() + 300
        return len(pool.pids()) > 5 or (all_exit and not pool.busy)

    collect_until(pool, are_too_many_or_all_exit)
    exiting = pool.pids()
    assert len(exiting) == 5
    os.kill(exiting[0], signal.SIGKILL)
    collect_until(pool, lambda: pool.places.idle_count == 1)
    assert len(pool.pids()) == 5


def test_usable_children_never_run_short_when_the_successor_has_time(make_pool: MakePool) -> None:
    pool = make_pool(2, max_tasks_per_child=5)
    for _ in range(30):
        run(pool, "echo", 1)
        assert pool.places.idle_count == 2
        collect_until(pool, lambda: is_steady(pool))


def test_a_pool_without_a_limit_keeps_its_children(make_pool: MakePool) -> None:
    pool = make_pool(2)
    by_pid, fewest = drain(pool, 300)
    assert set(by_pid) <= set(pool.pids())
    assert fewest == 2


def test_a_child_over_its_memory_limit_reports_and_leaves(make_pool: MakePool) -> None:
    limit_mb = wide_memory_limit_mb()
    pool = make_pool(2, max_memory_per_child_mb=limit_mb)
    pids = set(pool.pids())
    large = pool.places.idle(1)[0]
    assert run(pool, "allocate", 500) == 1
    assert (
        collect_until(pool, lambda: large not in pool.pids() and pool.places.idle_count == 2) == []
    )
    assert set(pool.pids()) & pids == pids - {large}
    assert len(pool.pids()) == 2


def test_a_child_near_its_memory_limit_stays_while_a_spare_stands_by(make_pool: MakePool) -> None:
    limit_mb = wide_memory_limit_mb()
    pool = make_pool(1, max_memory_per_child_mb=limit_mb)
    (pid,) = pool.pids()
    run(pool, "allocate", limit_mb - 25 - round(run(pool, "own_rss_mb")))
    collect_until(pool, lambda: len(pool.pids()) == 2)
    assert pool.places.idle_count == 1
    assert run(pool, "own_pid") == pid
    run(pool, "allocate", 100)
    assert collect_until(pool, lambda: is_gone(pid)) == []
    assert run(pool, "own_pid") != pid


def test_a_memory_limit_below_a_fresh_child_is_refused_with_both_numbers(
    make_pool: MakePool,
) -> None:
    with pytest.raises(ChildBootError, match=r"already uses \d+ MB.*max_memory_per_child_mb=2"):
        make_pool(2, max_memory_per_child_mb=2)


def test_a_memory_limit_close_to_a_fresh_child_is_warned_about(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(1)
    baseline_mb = run(pool, "own_rss_mb")
    make_pool(1, max_memory_per_child_mb=int(baseline_mb * 1.1) + 1)
    assert "children will be replaced often" in caplog.text


def test_fifty_recycled_children_leak_no_descriptor(make_pool: MakePool) -> None:
    pool = make_pool(2, max_tasks_per_child=2)
    drain(pool, 10)
    collect_until(pool, lambda: pool.places.idle_count == 2 and len(pool.pids()) <= 3)
    before = len(os.listdir("/proc/self/fd"))
    by_pid, _ = drain(pool, 110)
    assert len(by_pid) > 50
    collect_until(pool, lambda: pool.places.idle_count == 2 and len(pool.pids()) <= 3)
    # Either count may include the pipes of a third child, a spare or one that is exiting; a leak of a
    # single descriptor per child would be more than fifty.
    assert len(os.listdir("/proc/self/fd")) < before + 25


def test_a_dead_spare_is_replaced(make_pool: MakePool) -> None:
    limit_mb = wide_memory_limit_mb()
    pool = make_pool(1, max_memory_per_child_mb=limit_mb)
    (pid,) = pool.pids()
    run(pool, "allocate", limit_mb - 25 - round(run(pool, "own_rss_mb")))
    collect_until(pool, lambda: len(pool.pids()) == 2)
    (spare,) = set(pool.pids()) - {pid}
    os.kill(spare, signal.SIGKILL)
    events = collect_until(pool, lambda: len(set(pool.pids()) - {pid, spare}) == 1)
    assert all(event == Died(None, spare, "signal 9 (SIGKILL)") for event in events)


def test_shutdown_in_the_middle_of_recycling_leaves_nothing_behind(tmp_path: Path) -> None:
    with selectors.DefaultSelector() as selector:
        pool = ChildPool(PoolSettings(2, max_tasks_per_child=2), BOOT, selector)
        pool.start()
        drain(pool, 9)
        pids = pool.pids()
        pool.shutdown()
        assert all(is_gone(pid) for pid in pids)
        assert not selector.get_map()
