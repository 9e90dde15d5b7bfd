"""Effects exactly once: kills, freezes and lost connections at every point of a task's transaction."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType

import psycopg
import pytest

from horsies import TaskOptions
from tests.support.database import Database, backends
from tests.support.private_server import PrivateServer
from tests.support.proxy import Proxy
from tests.support.rows import add_task, ago
from tests.support.tables import attempts, task, wait_for_status, wait_until_empty
from tests.support.transactions import (
    APPLICATION,
    EFFECTS,
    TX_ROLE,
    assert_effects_match,
    bookings,
)
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, Journal, RunningWorker

IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
# `make soak` kills two thousand; a worker that is killed has to be started again.
KILLS, WORKER_KILLS, SERVER_CRASHES = (1_900, 80, 20) if IS_LONG else (40, 1, 1)
# The test holds this advisory lock to keep commits of the table `bookings` waiting.
GATE = 4711
HOLD_COMMITS = f"""
CREATE FUNCTION e2e_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared({GATE}); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER e2e_gate AFTER INSERT ON bookings DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION e2e_gate();
"""


@pytest.fixture
def gate(effects: Database) -> Iterator[Database]:
    """Commits of `bookings` wait behind their recorded outcome until the test unlocks the gate."""
    effects.execute(HOLD_COMMITS)
    effects.execute("SELECT pg_advisory_lock(%s)", (GATE,))
    yield effects
    effects.execute("SELECT pg_advisory_unlock_all()")
    effects.execute("DROP FUNCTION e2e_gate CASCADE")


def open_gate(connection: Database) -> None:
    connection.execute("SELECT pg_advisory_unlock_all()")


def waits_at_commit(connection: Database) -> list[int]:
    """The sessions of tasks that have recorded their outcome and wait in COMMIT."""
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND wait_event = 'advisory'",
        (TX_ROLE,),
    )
    return [pid for (pid,) in rows]


def child_of(connection: Database, task_id: str) -> int:
    return int(wait_for_status(connection, task_id, "RUNNING").worker_pid)


ASYNC = ("--async-children", "1", "--async-slots", "4")


def start(fleet: Fleet, *options: str, processes: int = 1, url: str | None = None) -> RunningWorker:
    return fleet.start(
        *options,
        application=APPLICATION,
        processes=processes,
        config=QUICK_RECOVERY,
        database_url=url,
    )


def test_a_child_killed_between_the_recorded_outcome_and_the_commit_leaves_nothing(
    fleet: Fleet, booking: ModuleType, gate: Database
) -> None:
    start(fleet)
    sent = booking.book.send(1, 0.0).unwrap()
    wait_until(lambda: waits_at_commit(gate))
    assert task(gate, sent.task_id).status == "RUNNING"
    os.kill(child_of(gate, sent.task_id), signal.SIGKILL)
    # The server notices that its client is gone, and the worker records the crash, while the gate is closed.
    wait_until(lambda: attempts(gate, sent.task_id))
    (first,) = attempts(gate, sent.task_id)
    assert (first.outcome, first.error_code) == ("WORKER_FAILURE", "WORKER_CRASHED")
    assert bookings(gate) == []
    open_gate(gate)
    assert sent.get(30_000).ok_value == 1
    assert bookings(gate) == [1]
    wait_until_empty(gate)
    assert_effects_match(gate, "book")


@pytest.mark.direct("a pooler has connections of its own")
def test_a_child_killed_after_the_commit_and_before_its_report_leaves_a_completed_task(
    fleet: Fleet, booking: ModuleType, gate: Database, process_url: str
) -> None:
    with Proxy(process_url) as proxy:
        worker = start(fleet, url=proxy.url)
        sent = booking.book.send(1, 0.0).unwrap()
        wait_until(lambda: waits_at_commit(gate))
        proxy.pause()
        open_gate(gate)
        row = wait_for_status(gate, sent.task_id, "COMPLETED")
        os.kill(row.worker_pid, signal.SIGKILL)
        proxy.resume()
        worker.wait_for("child_died")
        wait_until_empty(gate)
        wait_until(lambda: f"book {sent.task_id} #1 completed" in worker.log())
    assert [one.outcome for one in attempts(gate, sent.task_id)] == ["COMPLETED"]
    assert "dropped" not in worker.log()
    assert_effects_match(gate, "book")


@pytest.mark.direct("a pooler has connections of its own")
def test_a_commit_whose_answer_is_lost_counts_if_it_took_place(
    fleet: Fleet, booking: ModuleType, gate: Database, process_url: str
) -> None:
    with Proxy(process_url) as proxy:
        worker = start(fleet, url=proxy.url)
        sent = booking.book.send(1, 0.0).unwrap()
        wait_until(lambda: waits_at_commit(gate))
        proxy.swallow_answer_with(b"COMMIT\0")
        open_gate(gate)
        assert proxy.swallowed.wait(30)
        wait_for_status(gate, sent.task_id, "COMPLETED")
        wait_until(lambda: f"book {sent.task_id} #1 completed" in worker.log())
        # The task has sent another one, which the worker runs through the same proxy.
        wait_until_empty(gate)
    assert [one.outcome for one in attempts(gate, sent.task_id)] == ["COMPLETED"]
    assert "dropped" not in worker.log()
    assert_effects_match(gate, "book")


@pytest.mark.direct("a pooler answers for a session that was ended")
@pytest.mark.parametrize("at_commit", [True, False])
def test_a_task_whose_session_is_ended_is_tried_again(
    fleet: Fleet, booking: ModuleType, gate: Database, journal: Journal, at_commit: bool
) -> None:
    start(fleet)
    if at_commit:
        sent = booking.book.send(1, 0.0).unwrap()
        (victim,) = wait_until(lambda: waits_at_commit(gate))
    else:
        sent = booking.book_and_rest.send(1, "session").unwrap()
        wait_until(lambda: journal.lines("session"))
        (victim,) = backends(gate, TX_ROLE)
    gate.execute("SELECT pg_terminate_backend(%s)", (victim,))
    if not at_commit:
        journal.release("session")
    wait_until(lambda: attempts(gate, sent.task_id))
    first = attempts(gate, sent.task_id)[0]
    assert (first.outcome, first.error_code) == ("FAILED", "TRANSACTION_LOST")
    open_gate(gate)
    assert sent.get(30_000).ok_value == 1
    assert bookings(gate) == [1]


def test_a_cancel_behind_the_recorded_outcome_comes_too_late(
    fleet: Fleet, booking: ModuleType, gate: Database
) -> None:
    worker = start(fleet)
    sent = booking.book.send(1, 0.0).unwrap()
    wait_until(lambda: waits_at_commit(gate))
    child = child_of(gate, sent.task_id)
    with pytest.raises(psycopg.errors.QueryCanceled), short_statements(gate):
        # The request itself waits for the row, which the outcome has locked.
        gate.execute(
            "UPDATE horsies_tasks SET cancel_requested_at = now() WHERE id = %s", (sent.task_id,)
        )
    os.kill(child, signal.SIGTERM)
    open_gate(gate)
    assert sent.get(30_000).ok_value == 1
    assert bookings(gate) == [1]
    wait_until_empty(gate)
    assert worker.process.poll() is None


@contextmanager
def short_statements(connection: Database) -> Iterator[None]:
    connection.execute("SET statement_timeout = '200ms'")
    try:
        yield
    finally:
        connection.execute("RESET statement_timeout")


@pytest.mark.direct("a pooler has sessions of its own")
@pytest.mark.timeout(120)
def test_a_zombie_writes_nothing_after_its_successor(
    fleet: Fleet, booking: ModuleType, effects: Database, journal: Journal
) -> None:
    effects.execute("ALTER TABLE bookings DROP CONSTRAINT once")
    zombie = start(fleet)
    sent = booking.book_and_rest.send(1, "zombie").unwrap()
    wait_until(lambda: journal.lines("zombie"))
    zombie.signal(signal.SIGSTOP)
    # The lock of its session proves that a worker lives.
    for pid in backends(effects, "horsies:turn"):
        effects.execute("SELECT pg_terminate_backend(%s)", (pid,))
    start(fleet)
    wait_until(lambda: len(journal.lines("zombie")) == 2, 60)
    # Both attempts end now; the first one has lost its task.
    journal.release("zombie")
    assert sent.get(30_000).ok_value == 1
    wait_until(lambda: effects.execute("SELECT attempt FROM bookings").fetchall() == [(2,)])
    zombie.signal(signal.SIGCONT)
    wait_until(lambda: "claim_lost" in zombie.log() or "declared this one lost" in zombie.log())
    assert effects.execute("SELECT attempt FROM bookings").fetchall() == [(2,)]
    outcomes = [one.outcome for one in attempts(effects, sent.task_id)]
    assert outcomes == ["WORKER_FAILURE", "COMPLETED"]


def journal_of(fleet: Fleet) -> Counter[tuple[str, int]]:
    """How often the code of each attempt began, by task and attempt."""
    path = fleet.journal.path
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((line.split()[0], int(line.split()[1])) for line in lines)


def has_begun(fleet: Fleet, wanted: int) -> bool:
    return journal_of(fleet).total() >= wanted


def assert_books_match(connection: Database, fleet: Fleet, *names: str) -> None:
    """The journal outside the database, the attempts and the effects agree."""
    begun = journal_of(fleet)
    assert set(begun.values()) <= {1}, "an attempt began twice"
    recorded = {(one.task_id, one.attempt) for one in attempts(connection)}
    assert set(begun) <= recorded, "an attempt began and is not recorded"
    rows = connection.execute("SELECT task_id::text, attempt FROM bookings").fetchall()
    assert set(rows) <= set(begun), "an effect of an attempt that never began"
    for name in names:
        assert_effects_match(connection, name)


class Storm:
    """Tasks under kills at random instants."""

    def __init__(self, fleet: Fleet, booking: ModuleType, connection: Database) -> None:
        seed = random.SystemRandom().randint(0, 1 << 32)
        print(f"seed {seed}")
        self.dice = random.Random(seed)
        self.fleet, self.booking, self.connection = fleet, booking, connection
        self.number = 0
        self.kills: Counter[str] = Counter()

    def send(self, count: int) -> None:
        for one_task in (self.booking.book, self.booking.book_async):
            numbers = range(self.number, self.number + count // 2)
            pauses = (0.0, 0.002, 0.004)
            calls = [one_task.bind(one, self.dice.choice(pauses)) for one in numbers]
            one_task.send_many(calls).unwrap()
            self.number += count // 2

    def pending(self) -> int:
        row = self.connection.execute(
            "SELECT count(*) FROM horsies_tasks WHERE task_name LIKE 'book%' "
            "AND status IN ('PENDING', 'CLAIMED', 'RUNNING')"
        ).fetchone()
        assert row is not None
        return int(row[0])

    def kill_child(self) -> None:
        rows = self.connection.execute(
            "SELECT worker_pid FROM horsies_tasks WHERE status = 'RUNNING' AND task_name LIKE 'book%'"
        ).fetchall()
        if rows:
            with suppress(ProcessLookupError):
                os.kill(self.dice.choice(rows)[0], signal.SIGKILL)
                self.kills["child"] += 1

    def end_session(self) -> None:
        found = backends(self.connection, TX_ROLE)
        if found:
            self.connection.execute("SELECT pg_terminate_backend(%s)", (self.dice.choice(found),))
            self.kills["backend"] += 1

    def rest(self) -> None:
        """Wait a random time: several kills fall on one task, others between two statements."""
        deadline = self.dice.uniform(0.0, 0.03)
        self.connection.execute("SELECT pg_sleep(%s)", (deadline,))


@pytest.mark.timeout(1800 if IS_LONG else 180)
def test_effects_are_the_completed_tasks_under_kills_of_children_sessions_and_workers(
    fleet: Fleet, booking: ModuleType, effects: Database
) -> None:
    storm = Storm(fleet, booking, effects)
    worker = start(fleet, *ASYNC, processes=2)
    worker_kills = 0
    while storm.kills.total() < KILLS:
        if storm.pending() < 20:
            storm.send(40)
        storm.dice.choice((storm.kill_child, storm.kill_child, storm.end_session))()
        storm.rest()
        if storm.kills.total() > (worker_kills + 1) * KILLS / (WORKER_KILLS + 1):
            worker.signal(signal.SIGKILL)
            worker.wait()
            worker = start(fleet, *ASYNC, processes=2)
            worker_kills += 1
    wait_until_empty(effects, 120)
    print(dict(storm.kills), worker_kills, "kills,", storm.number, "tasks")
    assert worker_kills == WORKER_KILLS
    assert_books_match(effects, fleet, "book", "book_async")
    statuses = dict(
        effects.execute(
            "SELECT status, count(*) FROM horsies_tasks WHERE task_name LIKE 'book%' GROUP BY 1"
        ).fetchall()
    )
    assert statuses == {"COMPLETED": storm.number}


@pytest.mark.timeout(1800 if IS_LONG else 180)
def test_effects_are_the_completed_tasks_when_the_server_crashes(
    own_server: PrivateServer, own_fleet: Fleet, booking: ModuleType
) -> None:
    options = TaskOptions(booking.AGAIN).to_json()
    dice, numbers = random.Random(7), itertools.count()

    def send(connection: Database, count: int) -> None:
        for number in itertools.islice(numbers, count):
            arguments = f"[{number},{dice.choice((0.0, 0.002, 0.004))}]"
            columns = {"args": arguments, "task_options": options, "max_retries": 100}
            add_task(connection, task_name="book", enqueued_at=ago(0), **columns)

    with psycopg.connect(own_server.url, autocommit=True) as connection:
        connection.execute(EFFECTS)
        send(connection, 60)
    worker = start(own_fleet, processes=2)
    for _ in range(SERVER_CRASHES):
        wanted = journal_of(own_fleet).total() + dice.randint(1, 20)
        wait_until(partial(has_begun, own_fleet, wanted))
        own_server.crash()
        own_server.start()
        with psycopg.connect(own_server.url, autocommit=True) as connection:
            send(connection, 60)
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        wait_until_empty(connection, 120)
        assert_books_match(connection, own_fleet, "book")
        assert len(bookings(connection)) == 60 * (SERVER_CRASHES + 1)
    assert worker.process.poll() is None
