"""Windows of short tasks under kills, freezes and mixed queues: the journal and the database agree."""

from __future__ import annotations

import importlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

import pytest

from horsies import OnError, WorkflowStatus
from tests.support.database import Database
from tests.support.tables import (
    assert_each_ended_once,
    attempts,
    count,
    recover_dead_workers,
    tasks,
    wait_for_status,
    wait_until_empty,
    widest_window,
    witnessed,
)
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, RunningWorker

APPLICATION = "tests.support.apps.bursts:app"
# `make soak` kills ten thousand, in rounds with books of their own.
IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
ROUNDS, KILLS = (50, 200) if IS_LONG else (1, 25)


@pytest.fixture(scope="module")
def bursts(programs: ModuleType) -> Iterable[ModuleType]:
    """The application, once the database of the tests is known."""
    module = importlib.import_module("tests.support.apps.bursts")
    yield module
    module.app.close()


def journal_of(fleet: Fleet) -> Counter[tuple[str, int]]:
    """How often the code of each attempt began, by task and attempt."""
    path = fleet.journal.path
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((line.split()[0], int(line.split()[1])) for line in lines)


def check_books(connection: Database, fleet: Fleet) -> None:
    """Every attempt that began is recorded once; a task that came back has no attempt for it."""
    assert_each_ended_once(connection)
    begun = journal_of(fleet)
    assert set(begun.values()) == {1}, "an attempt began twice"
    recorded = {(one.task_id, one.attempt): one for one in attempts(connection)}
    assert set(begun) <= set(recorded), "an attempt began and is not recorded"
    made: dict[str, list[int]] = {}
    for key, attempt in recorded.items():
        assert attempt.outcome in ("COMPLETED", "WORKER_FAILURE")
        assert key in begun or attempt.outcome == "WORKER_FAILURE"
        made.setdefault(attempt.task_id, []).append(attempt.attempt)
    for row in tasks(connection):
        assert sorted(made[row.id]) == list(range(1, row.retry_count + 2))


def send(task: object, number: int, *args: object) -> list[str]:
    calls = [task.bind(*args) for _ in range(number)]  # type: ignore[attr-defined]
    return [one.task_id for one in task.send_many(calls).unwrap()]  # type: ignore[attr-defined]


def wait_for_windows(connection: Database) -> None:
    wait_until(lambda: widest_window(connection) > 1, what="no window opened")


def kill_children(
    worker: RunningWorker, bursts: ModuleType, connection: Database, dice: random.Random
) -> int:
    """Kill busy children one after the other while there is always work; returns the widest window."""
    widest, killed = 0, 0
    while killed < KILLS:
        if count(connection, "PENDING") < 500:
            send(bursts.blink, 1_000, dice.random() / 2_000)
        rows = connection.execute(
            "SELECT worker_pid, count(*) FROM horsies_tasks WHERE status = 'RUNNING' GROUP BY worker_pid"
        ).fetchall()
        if not rows:
            assert worker.process.poll() is None, worker.log()
            continue
        pid, held = dice.choice(rows)
        widest = max(widest, held)
        for _ in range(dice.randint(0, 2_000)):
            os.getpid()  # not always right after a claim
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
            # The worker has to notice, or the next kill hits the same child.
            wait_until(lambda pid=pid: not is_busy(connection, pid), 20, "a death unnoticed")  # type: ignore[misc]
    return widest


def is_busy(connection: Database, pid: int) -> bool:
    found = connection.execute(
        "SELECT EXISTS (SELECT FROM horsies_tasks WHERE status = 'RUNNING' AND worker_pid = %s)",
        (pid,),
    ).fetchone()
    assert found is not None
    return bool(found[0])


@pytest.mark.parametrize("_round", range(ROUNDS))
def test_killed_children_cost_one_task_each(
    fleet: Fleet, bursts: ModuleType, connection: Database, _round: int
) -> None:
    seed = random.SystemRandom().randint(0, 1 << 32)
    print(f"seed {seed}")
    with witnessed(connection):
        worker = fleet.start("--quiet-tasks", processes=4, application=APPLICATION)
        widest = kill_children(worker, bursts, connection, random.Random(seed))
        for how in ("exit", "segfault", "close", "fork", "kill", "much"):
            send(bursts.misbehave, 3, how)
            send(bursts.blink, 50)
        wait_until_empty(connection)
        check_books(connection, fleet)
    crashed = [one for one in attempts(connection) if one.outcome == "WORKER_FAILURE"]
    by_child = Counter(one.worker_pid for one in crashed)
    print(f"{KILLS} kills, {len(crashed)} attempts ended by a death, widest window {widest}")
    assert max(by_child.values()) == 1, "one death cost several tasks"
    assert len(crashed) <= KILLS + 3 * 5
    # Tasks of a busy machine seem longer, and fewer of them fit into a window.
    assert widest > (4 if IS_LONG else 1)
    assert count(connection, "COMPLETED") == len(tasks(connection))


@pytest.mark.timeout(120)
def test_mixed_queues_keep_their_promises(
    fleet: Fleet, bursts: ModuleType, connection: Database
) -> None:
    # A child must never have a second task while it runs one that may not wait behind others.
    connection.execute(
        "CREATE UNIQUE INDEX one_plain_task_per_child ON horsies_tasks (worker_pid) "
        "WHERE status = 'RUNNING' AND NOT burst"
    )
    try:
        for _ in range(10):
            send(bursts.blink, 60)
            send(bursts.plain, 20)
            send(bursts.flash, 20)
        fleet.start("--quiet-tasks", processes=3, application=APPLICATION)
        wait_until_empty(connection, 60)
    finally:
        connection.execute("DROP INDEX one_plain_task_per_child")
    assert count(connection, "COMPLETED") == 1_000
    begun = journal_of(fleet)
    assert (len(begun), set(begun.values())) == (1_000, {1})
    text = fleet.journal.path.read_text()
    by_child = Counter(line.split()[2] for line in text.splitlines())
    assert max(by_child.values()) <= 100, "a child ran more tasks than its limit"


@pytest.mark.timeout(120)
def test_a_long_task_in_front_keeps_nobody_waiting(
    fleet: Fleet, bursts: ModuleType, connection: Database
) -> None:
    fleet.start("--quiet-tasks", processes=2, application=APPLICATION)
    send(bursts.blink, 500)
    wait_until_empty(connection)
    (long,) = send(bursts.blink, 1, 0.0, "long")
    send(bursts.blink, 62)
    wait_until(lambda: count(connection, "COMPLETED") == 562, 30, "tasks waited behind a long one")
    assert journal_of(fleet)[long, 1] == 1
    fleet.journal.release("long")
    wait_until_empty(connection)
    assert set(journal_of(fleet).values()) == {1}


@pytest.mark.timeout(120)
def test_a_killed_worker_leaves_its_windows_to_others(
    fleet: Fleet, bursts: ModuleType, connection: Database
) -> None:
    with witnessed(connection):
        worker = fleet.start("--quiet-tasks", processes=4, application=APPLICATION)
        send(bursts.blink, 1_500, 0.0005)
        send(bursts.flash, 200, 0.0005)
        wait_for_windows(connection)
        family = worker.family()
        worker.signal(signal.SIGKILL)
        worker.wait()
        lost = len(recover_dead_workers(connection))
        assert 1 <= lost <= 4 * 32, "at most a window per child"
        fleet.start("--quiet-tasks", processes=4, application=APPLICATION)
        wait_until_empty(connection)
        check_books(connection, fleet)
    assert len(family) >= 4
    assert {row.task_name for row in tasks(connection, "FAILED")} <= {"flash"}


def test_a_stopping_worker_returns_its_windows(
    fleet: Fleet, bursts: ModuleType, connection: Database
) -> None:
    worker = fleet.start("--quiet-tasks", processes=4, application=APPLICATION)
    send(bursts.blink, 3_000, 0.0005)
    wait_for_windows(connection)
    assert worker.stop() == 0
    assert count(connection, "RUNNING") == 0
    recorded = {(one.task_id, one.attempt): one.outcome for one in attempts(connection)}
    assert set(recorded.values()) == {"COMPLETED"}
    assert journal_of(fleet) == Counter(recorded.keys()), "begun and not recorded, or the reverse"
    assert count(connection, "PENDING") == 3_000 - len(recorded)


def test_frozen_children_and_a_frozen_worker(
    fleet: Fleet, bursts: ModuleType, connection: Database
) -> None:
    with witnessed(connection):
        worker = fleet.start(
            "--quiet-tasks", processes=2, application=APPLICATION, config=QUICK_RECOVERY
        )
        send(bursts.blink, 300)
        wait_until_empty(connection)
        send(bursts.blink, 400, 0.0005)
        wait_for_windows(connection)
        rows = connection.execute(
            "SELECT worker_pid FROM horsies_tasks WHERE status = 'RUNNING' LIMIT 1"
        ).fetchall()
        frozen = rows[0][0] if rows else None
        if frozen is not None:
            os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: count(connection, "PENDING") == 0 and count(connection, "RUNNING") <= 1)
        # The worker kills a child that begins no task for 5 s.
        with suppress(ProcessLookupError):
            if frozen is not None:
                os.kill(frozen, signal.SIGCONT)
        wait_until_empty(connection)
        send(bursts.blink, 3_000, 0.0005)
        wait_for_windows(connection)
        worker.signal(signal.SIGSTOP)
        fleet.start("--quiet-tasks", processes=2, application=APPLICATION, config=QUICK_RECOVERY)
        frozen_at = time.monotonic()
        wait_until(lambda: time.monotonic() > frozen_at + 5.0, 10)
        worker.signal(signal.SIGCONT)
        wait_until_empty(connection)
        check_books(connection, fleet)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.timeout(120)
def test_a_pause_and_a_cancel_cost_tasks_that_have_not_begun_no_attempt(
    fleet: Fleet, bursts: ModuleType, connection: Database
) -> None:
    fleet.start("--quiet-tasks", processes=1, application=APPLICATION)
    first = bursts.blink.send().unwrap()
    assert first.get(30_000).is_ok()
    child = attempts(connection, first.task_id)[0].worker_pid
    with frozen(child):
        waiting = bursts.blink.send().unwrap()
        wait_for_status(connection, waiting.task_id, "RUNNING")
        bursts.app.pause_queue("default").unwrap()
        wait_for_status(connection, waiting.task_id, "PENDING")
    bursts.app.resume_queue("default").unwrap()
    assert waiting.get(30_000).is_ok()
    with frozen(child):
        cancelled = bursts.blink.send().unwrap()
        wait_for_status(connection, cancelled.task_id, "RUNNING")
        cancelled.cancel().unwrap()
        wait_for_status(connection, cancelled.task_id, "CANCELLED")
    with frozen(child):
        nodes = [bursts.blink.node()()]
        run = bursts.app.workflow("blinking", nodes, definition_key="blinking").start().unwrap()
        wait_until(lambda: count(connection, "RUNNING") == 1)
        assert run.pause().unwrap()
        wait_until(lambda: count(connection, "PENDING") == 1)
    assert run.resume().unwrap()
    assert run.get(30_000).is_ok()
    assert [one.outcome for one in attempts(connection)] == ["COMPLETED"] * 3
    assert list(journal_of(fleet).values()) == [1, 1, 1]


@pytest.mark.timeout(120)
def test_a_run_that_an_error_pauses_takes_back_its_tasks_that_have_not_begun(
    fleet: Fleet, bursts: ModuleType, connection: Database
) -> None:
    fleet.start("--quiet-tasks", processes=2, application=APPLICATION)
    warm = [bursts.blink.send(0.0, "warm").unwrap() for _ in range(2)]
    wait_until(lambda: count(connection, "RUNNING") == 2)
    fleet.journal.release("warm")
    assert all(one.get(30_000).is_ok() for one in warm)
    first, second = (attempts(connection, one.task_id)[0].worker_pid for one in warm)
    with frozen(first), frozen(second):
        nodes = [bursts.blink.node()(), bursts.misbehave.node()(how="raise")]
        spec = bursts.app.workflow(
            "careful", nodes, definition_key="careful", on_error=OnError.PAUSE
        )
        run = spec.start().unwrap()
        wait_until(lambda: count(connection, "RUNNING") == 2)
        (waiting, _), (_, failing_pid) = connection.execute(
            "SELECT id::text, worker_pid FROM horsies_tasks WHERE status = 'RUNNING' ORDER BY task_name"
        ).fetchall()
        os.kill(failing_pid, signal.SIGCONT)
        wait_for_status(connection, waiting, "PENDING")
    assert run.info().unwrap().status is WorkflowStatus.PAUSED
    assert attempts(connection, waiting) == []


def test_two_workers_share_a_trickle(
    fleet: Fleet, bursts: ModuleType, connection: Database
) -> None:
    workers = [fleet.start("--quiet-tasks", processes=2, application=APPLICATION) for _ in range(2)]
    for _ in range(25):
        handles = [bursts.blink.send(0.004).unwrap() for _ in range(3)]
        for one in handles:
            assert one.get(30_000).ok_value == "done"
    shares = connection.execute(
        "SELECT worker_id, count(*) FROM horsies_task_attempts GROUP BY worker_id"
    ).fetchall()
    assert len(shares) == len(workers), "one worker took everything"
    assert min(share for _, share in shares) >= 5
