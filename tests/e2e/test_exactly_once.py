"""Effects exactly once: kills, freezes and lost connections at every point of a task's transaction."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import ModuleType

import psycopg
import pytest

from horsies import TaskActionErrorCode, TaskOptions, TaskStatus, from_node
from tests.support.database import Database, backends
from tests.support.private_server import PrivateServer
from tests.support.proxy import Proxy
from tests.support.rows import add_task, ago
from tests.support.schedulers import config_of, every, slots
from tests.support.tables import attempts, stop_family, task, wait_for_status, wait_until_empty
from tests.support.transactions import (
    APPLICATION,
    EFFECTS,
    TX_ROLE,
    add_bookings,
    assert_books_match,
    assert_effects_match,
    bookings,
    closed_gate,
    has_begun,
    journal_of,
    open_gate,
    open_sessions,
    receipts,
    report,
    seeded_dice,
    waits_at_gate,
    waits_for_row,
)
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, Journal, RunningWorker

IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
# `make soak` kills two thousand; a worker or a server that is killed has to be started again.
ALL_KILLS = int(os.environ.get("HORSIES_TEST_KILLS", 2_000 if IS_LONG else 42))
WORKER_KILLS, SERVER_CRASHES = max(1, ALL_KILLS // 25), max(1, ALL_KILLS // 100)
KILLS = ALL_KILLS - WORKER_KILLS - SERVER_CRASHES
# A child that records its outcome again and again needs tasks: a storm sends more when so few are open.
FEW_TASKS, MORE_TASKS = 100, 200
IDLE = "idle session"
# From this number on, every kind of kill has its share.
MANY_KILLS = 1_000
PROGRESS_SECONDS = 5.0
# The nodes of a chain, and the kills until it has ended.
LINKS, CHAIN_KILLS = (100, 100) if IS_LONG else (10, 5)
# Tasks that commit by `tx`, or by `record_in`.
IN_TURN = ("book_in_turn", "book_in_turn_async", "book_in_session", "book_in_async_session")
DAWDLE_SECONDS = 10.0 if IS_LONG else 2.0


@pytest.fixture
def gate(effects: Database) -> Iterator[Database]:
    """Commits of `bookings` wait behind their recorded outcome until the test unlocks the gate."""
    with closed_gate(effects):
        yield effects


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


@pytest.mark.parametrize("point", ["begin", "write", "commit"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_child_killed_inside_its_transaction_leaves_nothing(
    fleet: Fleet,
    booking: ModuleType,
    effects: Database,
    journal: Journal,
    is_async: bool,
    point: str,
) -> None:
    """Before its first statement, before its outcome is recorded, or between that and the commit."""
    start(fleet, *ASYNC)
    with held_at(effects, booking, journal, point, is_async) as task_id:
        os.kill(child_of(effects, task_id), signal.SIGKILL)
        # The server notices that its client is gone, and the worker records the crash, behind a closed gate.
        wait_until(lambda: attempts(effects, task_id))
        (first,) = attempts(effects, task_id)
        assert (first.outcome, first.error_code) == ("WORKER_FAILURE", "WORKER_CRASHED")
        assert bookings(effects) == receipts(effects) == []
        journal.release("begin")
    wait_for_status(effects, task_id, "COMPLETED")
    assert effects.execute("SELECT number, attempt FROM bookings").fetchall() == [(1, 2)]
    assert receipts(effects) == [1]
    wait_until_empty(effects)


@pytest.mark.parametrize("name", ["book", "book_async"])
def test_a_send_inside_a_transaction_needs_no_other_session(
    fleet: Fleet, booking: ModuleType, effects: Database, process_url: str, name: str
) -> None:
    """The first send of a child does not read the record of migrations, which its worker has read."""
    booking.app.get_broker().ensure_schema_initialized().unwrap()
    start(fleet, *ASYNC)
    with psycopg.connect(process_url) as holder:
        holder.execute("LOCK TABLE horsies_migrations IN ACCESS EXCLUSIVE MODE")
        assert getattr(booking, name).send(1, 0.0).unwrap().get(30_000).ok_value == 1
    assert bookings(effects) == [1]


@pytest.mark.direct("a pooler has connections of its own")
def test_a_worker_killed_after_the_commit_of_its_child_leaves_a_completed_task(
    fleet: Fleet, booking: ModuleType, gate: Database, process_url: str
) -> None:
    with Proxy(process_url) as proxy:
        worker = start(fleet, url=proxy.url)
        sent = booking.book.send(1, 0.0).unwrap()
        wait_until(lambda: waits_at_gate(gate))
        proxy.pause()
        open_gate(gate)
        wait_for_status(gate, sent.task_id, "COMPLETED")
        worker.signal(signal.SIGKILL)
        worker.wait()
    start(fleet)
    wait_until_empty(gate)
    assert [one.outcome for one in attempts(gate, sent.task_id)] == ["COMPLETED"]
    assert_effects_match(gate, "book")


@pytest.mark.direct("a pooler has connections of its own")
def test_a_child_killed_after_the_commit_and_before_its_report_leaves_a_completed_task(
    fleet: Fleet, booking: ModuleType, gate: Database, process_url: str
) -> None:
    with Proxy(process_url) as proxy:
        worker = start(fleet, url=proxy.url)
        sent = booking.book.send(1, 0.0).unwrap()
        wait_until(lambda: waits_at_gate(gate))
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
@pytest.mark.parametrize("name", ["book", "book_async"])
def test_a_commit_whose_answer_is_lost_counts_if_it_took_place(
    fleet: Fleet, booking: ModuleType, gate: Database, process_url: str, name: str
) -> None:
    with Proxy(process_url) as proxy:
        worker = start(fleet, *ASYNC, url=proxy.url)
        sent = getattr(booking, name).send(1, 0.0).unwrap()
        wait_until(lambda: waits_at_gate(gate))
        proxy.swallow_answer_with(b"COMMIT\0")
        open_gate(gate)
        assert proxy.swallowed.wait(30)
        wait_for_status(gate, sent.task_id, "COMPLETED")
        wait_until(lambda: f"{name} {sent.task_id} #1 completed" in worker.log())
        # The task has sent another one, which the worker runs through the same proxy.
        wait_until_empty(gate)
    assert [one.outcome for one in attempts(gate, sent.task_id)] == ["COMPLETED"]
    assert "dropped" not in worker.log()
    assert_effects_match(gate, name)


@pytest.mark.direct("a pooler has connections of its own")
def test_a_commit_that_a_cut_connection_interrupts_leaves_nothing(
    fleet: Fleet, booking: ModuleType, gate: Database, process_url: str
) -> None:
    """The server waits inside COMMIT, and rolls back when it notices that its client is gone."""
    with Proxy(process_url) as proxy:
        start(fleet, *ASYNC, url=proxy.url)
        sent = [booking.book.send(1, 0.0).unwrap(), booking.book_async.send(2, 0.0).unwrap()]
        wait_until(lambda: len(waits_at_gate(gate)) == 2)
        proxy.cut()
        for one in sent:
            wait_until(lambda one=one: attempts(gate, one.task_id))  # type: ignore[misc]
            assert attempts(gate, one.task_id)[0].error_code == "TRANSACTION_LOST"
        assert bookings(gate) == []
        open_gate(gate)
        assert [one.get(30_000).ok_value for one in sent] == [1, 2]
        wait_until_empty(gate)
    rows = gate.execute("SELECT number, attempt FROM bookings ORDER BY number").fetchall()
    assert rows == [(1, 2), (2, 2)]
    for name in ("book", "book_async"):
        assert_effects_match(gate, name)


@pytest.mark.direct("a pooler has connections of its own")
def test_a_commit_that_goes_on_without_its_client_counts(
    fleet: Fleet, booking: ModuleType, gate: Database, process_url: str
) -> None:
    """The server waits inside COMMIT, and does not notice that its client is gone."""
    with Proxy(process_url) as proxy:
        proxy.questions = {}
        worker = start(fleet, *ASYNC, url=proxy.url)
        sent = [booking.book.send(1, 0.0).unwrap(), booking.book_async.send(2, 0.0).unwrap()]
        wait_until(lambda: len(waits_at_gate(gate)) == 2)
        for one in sent:
            proxy.desert(f"{one.task_id}/".encode())
        # The statement of the worker, which takes the tasks for lost, waits behind the outcomes.
        wait_until(lambda: waits_for_row(gate, "horsies:turn"))
        open_gate(gate)
        assert [one.get(30_000).ok_value for one in sent] == [1, 2]
        wait_until_empty(gate)
    ends = [end.outcome for one in sent for end in attempts(gate, one.task_id)]
    assert ends == ["COMPLETED", "COMPLETED"]
    assert "dropped" not in worker.log()
    for name in ("book", "book_async"):
        assert_effects_match(gate, name)


@pytest.mark.direct("a pooler answers for a session that was ended")
@pytest.mark.parametrize("at_commit", [True, False])
def test_a_task_whose_session_is_ended_is_tried_again(
    fleet: Fleet, booking: ModuleType, gate: Database, journal: Journal, at_commit: bool
) -> None:
    start(fleet)
    if at_commit:
        sent = booking.book.send(1, 0.0).unwrap()
        (victim,) = wait_until(lambda: waits_at_gate(gate))
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
    wait_until(lambda: waits_at_gate(gate))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(sent.cancel)
        # The request itself waits for the row, which the outcome has locked.
        wait_until(lambda: waits_for_row(gate, "horsies:%"))
        open_gate(gate)
        error = answer.result(30).unwrap_err()
    assert error.code is TaskActionErrorCode.TASK_NOT_CANCELLABLE
    assert error.current_status is TaskStatus.COMPLETED
    assert sent.get(30_000).ok_value == 1
    assert bookings(gate) == [1]
    wait_until_empty(gate)
    assert worker.process.poll() is None


def test_a_time_limit_that_passes_during_the_commit_comes_too_late(
    fleet: Fleet, booking: ModuleType, gate: Database
) -> None:
    start(fleet)
    sent = booking.book_in_time.send(1).unwrap()
    wait_until(lambda: waits_at_gate(gate))
    # The worker asks the child to stop, and would kill it five seconds later.
    wait_until(lambda: has_run(gate, sent.task_id, 5.5))
    open_gate(gate)
    assert sent.get(30_000).ok_value == 1
    assert bookings(gate) == [1]
    assert [one.outcome for one in attempts(gate, sent.task_id)] == ["COMPLETED"]


def has_run(connection: Database, task_id: str, seconds: float) -> bool:
    row = connection.execute(
        "SELECT clock_timestamp() - started_at > %s * interval '1 second' FROM horsies_tasks WHERE id = %s",
        (seconds, task_id),
    ).fetchone()
    return row is not None and bool(row[0])


@pytest.mark.direct("a pooler has sessions of its own")
@pytest.mark.parametrize(
    ("point", "is_async"),
    [
        ("begin", False),
        ("begin", True),
        ("write", False),
        ("write", True),
        ("record", False),
        ("commit", False),
        ("commit", True),
    ],
)
def test_a_worker_that_stops_at_a_statement_leaves_one_effect(
    fleet: Fleet,
    booking: ModuleType,
    effects: Database,
    journal: Journal,
    point: str,
    is_async: bool,
) -> None:
    worker = start(fleet, "--shutdown-grace", "0.1", *(ASYNC if is_async else ()))
    with held_at(effects, booking, journal, point, is_async) as task_id:
        worker.signal(signal.SIGTERM)
        worker.wait_for("tasks_interrupted")
        if point in ("begin", "write"):  # stopped there, and returned to the queue
            wait_until(lambda: task(effects, task_id).status == "PENDING")
    # Behind the finishing statement the COMMIT wins; before it, another worker begins again.
    assert worker.wait() == 0
    journal.release("begin")
    wanted = "COMPLETED" if point in ("record", "commit") else "PENDING"
    assert task(effects, task_id).status == wanted
    assert bookings(effects) == ([1] if wanted == "COMPLETED" else [])
    start(fleet)
    wait_for_status(effects, task_id, "COMPLETED")
    wait_until_empty(effects)
    assert bookings(effects) == receipts(effects) == [1]
    tokens = [int(one.label) for one in journal.lines("token", task_id)]
    assert len(tokens) == (2 if wanted == "PENDING" else 1)
    assert tokens == sorted(set(tokens)), "a later attempt has a greater token"


@contextmanager
def held_at(
    connection: Database, booking: ModuleType, journal: Journal, point: str, is_async: bool
) -> Iterator[str]:
    """A task that waits at one of its statements until the end of the block."""
    send = booking.book_or_return_async.send if is_async else booking.book_or_return.send
    with ExitStack() as stack:
        if point in ("write", "commit"):
            stack.enter_context(closed_gate(connection, point))
        elif point == "record":
            stack.enter_context(closed_gate(connection, "write"))
        sent = send(1, "begin" if point == "begin" else "").unwrap()
        if point == "begin":
            wait_until(lambda: journal.lines("begin"))
        else:
            wait_until(lambda: waits_at_gate(connection))
        if point == "record":  # another session has locked the row of the task
            with psycopg.connect(connection.info.dsn) as other:
                other.execute("SELECT FROM horsies_tasks WHERE id = %s FOR UPDATE", (sent.task_id,))
                open_gate(connection)
                wait_until(lambda: waits_for_row(connection))
                yield sent.task_id
        else:
            yield sent.task_id


def replace_frozen(fleet: Fleet, zombie: RunningWorker, effects: Database) -> None:
    """Freeze a worker, and start another one that takes over its tasks."""
    zombie.signal(signal.SIGSTOP)
    # The lock of its session proves that a worker lives.
    for pid in backends(effects, "horsies:turn"):
        effects.execute("SELECT pg_terminate_backend(%s)", (pid,))
    start(fleet)


def wake(zombie: RunningWorker) -> None:
    """Continue a frozen worker, and wait until it has noticed that it lost its tasks."""
    zombie.signal(signal.SIGCONT)
    wait_until(lambda: "claim_lost" in zombie.log() or "declared this worker lost" in zombie.log())


@pytest.mark.direct("a pooler has sessions of its own")
@pytest.mark.timeout(120)
def test_a_zombie_writes_nothing_after_its_successor(
    fleet: Fleet, booking: ModuleType, effects: Database, journal: Journal
) -> None:
    effects.execute("ALTER TABLE bookings DROP CONSTRAINT once")
    zombie = start(fleet)
    sent = booking.book_and_rest.send(1, "zombie").unwrap()
    wait_until(lambda: journal.lines("zombie"))
    replace_frozen(fleet, zombie, effects)
    wait_until(lambda: len(journal.lines("zombie")) == 2, 60)
    # Both attempts end now; the first one has lost its task.
    journal.release("zombie")
    assert sent.get(30_000).ok_value == 1
    wait_until(lambda: effects.execute("SELECT attempt FROM bookings").fetchall() == [(2,)])
    wake(zombie)
    assert effects.execute("SELECT attempt FROM bookings").fetchall() == [(2,)]
    outcomes = [one.outcome for one in attempts(effects, sent.task_id)]
    assert outcomes == ["WORKER_FAILURE", "COMPLETED"]


@pytest.mark.direct("a pooler has sessions of its own")
@pytest.mark.timeout(120)
def test_a_zombie_writes_nothing_before_its_successor(
    fleet: Fleet, booking: ModuleType, effects: Database, journal: Journal
) -> None:
    effects.execute("ALTER TABLE bookings DROP CONSTRAINT once")
    zombie = start(fleet)
    sent = booking.book_in_turn.send(1, "turn").unwrap()
    wait_until(lambda: journal.lines("turn 1"))
    replace_frozen(fleet, zombie, effects)
    wait_until(lambda: journal.lines("turn 2"), 60)
    # The child of the frozen worker ends first: its outcome matches no row, and it rolls back.
    (first, second) = backends(effects, f"{TX_ROLE}{sent.task_id}")
    journal.release("turn 1")
    wait_until(lambda: len(backends(effects, f"{TX_ROLE}{sent.task_id}")) == 1)
    assert first != second
    assert bookings(effects) == []
    wake(zombie)
    journal.release("turn 2")
    assert sent.get(30_000).ok_value == 1
    assert effects.execute("SELECT attempt FROM bookings").fetchall() == [(2,)]


@pytest.mark.direct("a pooler has sessions of its own")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("successor", ["runs", "has ended"])
def test_a_frozen_child_that_wakes_up_rolls_back(
    fleet: Fleet, booking: ModuleType, effects: Database, journal: Journal, successor: str
) -> None:
    effects.execute("ALTER TABLE bookings DROP CONSTRAINT once")
    zombie = start(fleet, *ASYNC, processes=2)
    ids = [
        getattr(booking, name).send(number, "in turn").unwrap().task_id
        for number, name in enumerate(IN_TURN)
    ]
    wait_until(lambda: len(journal.lines("in turn 1")) == len(ids))
    frozen = open_sessions(effects)
    assert len(frozen) == len(ids)
    *children, _ = stop_family(zombie, effects, *ids)
    start(fleet, *ASYNC, processes=2)
    wait_until(lambda: len(journal.lines("in turn 2")) == len(ids), 60)
    journal.release("in turn 1")
    if successor == "has ended":
        journal.release("in turn 2")
        for one in ids:
            wait_for_status(effects, one, "COMPLETED")
    assert frozen <= open_sessions(effects), "their transactions are open"
    for child in children:
        os.kill(child, signal.SIGCONT)
    # The transactions end while the worker of the children is still frozen.
    wait_until(lambda: not frozen & open_sessions(effects))
    numbers = list(range(len(ids)))
    assert bookings(effects) == (numbers if successor == "has ended" else [])
    wait_until(lambda: all(has_lost(zombie, one) for one in ids))
    zombie.signal(signal.SIGCONT)
    # The reports of its children, or the loss of the whole worker, whichever the worker notices first.
    lost = ("its transaction was rolled back", "declared this worker lost")
    wait_until(lambda: any(text in zombie.log() for text in lost))
    journal.release("in turn 2")
    for one in ids:
        wait_for_status(effects, one, "COMPLETED")
        ends = [(end.attempt, end.outcome) for end in attempts(effects, one)]
        assert ends == [(1, "WORKER_FAILURE"), (2, "COMPLETED")]
    rows = effects.execute("SELECT number, attempt FROM bookings ORDER BY number").fetchall()
    assert rows == [(number, 2) for number in numbers]


def has_lost(worker: RunningWorker, task_id: str) -> bool:
    """Return whether a child has found that another worker has the task."""
    lines = worker.log().splitlines()
    return any(task_id in one and "belongs to another worker now" in one for one in lines)


def test_every_slot_of_a_schedule_has_its_effect_once_when_a_child_is_killed(
    fleet: Fleet, booking: ModuleType, effects: Database
) -> None:
    config = QUICK_RECOVERY | config_of(every(1, "slots", task_name="book_own_id"))
    with closed_gate(effects):
        worker = fleet.start(
            "--with-scheduler", application=APPLICATION, processes=1, config=config
        )
        wait_until(lambda: waits_at_gate(effects))
        (victim,) = running(effects)
        os.kill(child_of(effects, victim), signal.SIGKILL)
        wait_until(lambda: attempts(effects, victim))
        open_gate(effects)
        wait_until(lambda: len(bookings(effects)) >= 3)
    assert worker.stop() == 0
    completed = "SELECT id::text, 1 FROM horsies_tasks WHERE status = 'COMPLETED'"
    effects_of = "SELECT task_id::text, count(*)::integer FROM bookings GROUP BY task_id"
    assert dict(effects.execute(effects_of).fetchall()) == dict(
        effects.execute(completed).fetchall()
    )
    assert [one.error_code for one in attempts(effects, victim)] == ["WORKER_CRASHED", None]
    times = slots(effects, "slots")
    assert times == [times[0] + timedelta(seconds=number) for number in range(len(times))]


def running(connection: Database) -> list[str]:
    rows = connection.execute("SELECT id::text FROM horsies_tasks WHERE status = 'RUNNING'")
    return [task_id for (task_id,) in rows]


@pytest.fixture
def ordered(booking: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.ordered_booking")
    yield module
    module.app.close()


def started(connection: Database) -> dict[str, list[int]]:
    """The numbers of the tasks that have been claimed, by key."""
    rows = connection.execute(
        "SELECT lane_key, array_agg((args::json->>1)::integer ORDER BY args::json->>1) "
        "FROM horsies_tasks WHERE claimed_at IS NOT NULL GROUP BY lane_key"
    ).fetchall()
    return dict(rows)


def test_the_effects_of_a_key_are_in_order_when_a_child_is_killed(
    fleet: Fleet, ordered: ModuleType, gate: Database
) -> None:
    fleet.start(application="tests.support.apps.ordered_booking:app", processes=2)
    firsts = {"a": 0, "b": ordered.SPAN}
    calls = [
        ordered.book_in_order.bind(key, first + one)
        for one in range(5)
        for key, first in firsts.items()
    ]
    handles = ordered.book_in_order.send_many(calls).unwrap()
    wait_until(lambda: len(waits_at_gate(gate)) == 2)
    victim = handles[0].task_id
    os.kill(child_of(gate, victim), signal.SIGKILL)
    wait_until(lambda: attempts(gate, victim))
    # The next attempt waits at the gate as well; the tasks behind it wait for its commit.
    wait_until(lambda: len(waits_at_gate(gate)) == 2)
    assert started(gate) == {key: [first] for key, first in firsts.items()}
    open_gate(gate)
    # A worker that hardly polls starts the next task of a key when the one before it is recorded.
    results = [one.get(30_000).ok_value for one in handles]
    for place, (key, first) in enumerate(firsts.items()):
        before = [list(range(first, first + one)) for one in range(5)]
        assert results[place::2] == before, f"the effects that each task of key {key} has seen"
    assert bookings(gate) == sorted(first + one for first in firsts.values() for one in range(5))
    ends = Counter((one.task_id, one.outcome) for one in attempts(gate))
    wanted = Counter((one.task_id, "COMPLETED") for one in handles)
    assert ends == wanted + Counter([(victim, "WORKER_FAILURE")])


def test_a_task_whose_server_restarts_is_tried_again(
    own_server: PrivateServer, own_fleet: Fleet, booking: ModuleType
) -> None:
    columns = {"task_options": TaskOptions(booking.AGAIN).to_json(), "max_retries": 100}
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        connection.execute(EFFECTS)
        task_id = add_task(
            connection,
            task_name="book_in_turn",
            args='[1, "restart"]',
            enqueued_at=ago(0),
            **columns,
        )
    start(own_fleet)
    journal = own_fleet.journal
    wait_until(lambda: journal.lines("restart 1"))
    own_server.stop()
    own_server.start()
    journal.release("restart 1")
    journal.release("restart 2")
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        wait_for_status(connection, task_id, "COMPLETED")
        codes = [one.error_code for one in attempts(connection, task_id)]
        assert codes == ["TRANSACTION_LOST", None]
        assert bookings(connection) == [1]


class Storm:
    """Tasks under kills at random instants."""

    def __init__(
        self, fleet: Fleet, booking: ModuleType, connection: Database, proxy: Proxy | None = None
    ) -> None:
        self.dice = seeded_dice()
        self.fleet, self.booking, self.connection = fleet, booking, connection
        self.proxy = proxy
        self.number = 0
        self.kills: Counter[str] = Counter()
        self._begun = 0

    def send(self, count: int) -> None:
        for one_task in (self.booking.book, self.booking.book_async):
            numbers = range(self.number, self.number + count // 2)
            pauses = (0.0, 0.002, 0.004)
            calls = [one_task.bind(one, self.dice.choice(pauses)) for one in numbers]
            one_task.send_many(calls).unwrap()
            self.number += count // 2

    def keep_tasks(self) -> None:
        """Send more tasks if few are open."""
        if self.pending() < FEW_TASKS:
            self.send(MORE_TASKS)

    def pending(self) -> int:
        row = self.connection.execute(
            "SELECT count(*) FROM horsies_tasks WHERE task_name LIKE 'book%' "
            "AND status IN ('PENDING', 'CLAIMED', 'RUNNING')"
        ).fetchone()
        assert row is not None
        return int(row[0])

    def progress(self) -> None:
        """Wait until an attempt has begun since the last kill, so that no kill hits the start of a child
        that the one before it has caused. None begins if the kill has hit nothing and the tasks wait.
        """
        ends_at = time.monotonic() + PROGRESS_SECONDS
        wait_until(
            lambda: (
                self.fleet.journal.length() > self._begun
                or not self.pending()
                or time.monotonic() > ends_at
            )
        )

    def kill(self) -> None:
        """Kill a child, end a session or lose an answer, if there is one; note which, and how far the tasks
        have come.
        """
        ways = [self.kill_child, self.end_session]
        self.dice.choice([*ways, self.lose_answer] if self.proxy else ways)()
        self._begun = self.fleet.journal.length()

    def hits(self) -> int:
        """Return the number of kills, without the ends of sessions in which no task ran."""
        return self.kills.total() - self.kills[IDLE]

    def assert_kinds(self, *kinds: str) -> None:
        """Check that each kind was killed often; among few kills, chance may leave one out."""
        rare = {kind: self.kills[kind] for kind in kinds if self.kills[kind] < self.hits() / 20}
        assert self.hits() < MANY_KILLS or not rare, rare

    def kill_child(self) -> None:
        rows = self.connection.execute(
            "SELECT worker_pid, task_name FROM horsies_tasks "
            "WHERE status = 'RUNNING' AND task_name LIKE 'book%'"
        ).fetchall()
        if rows:
            pid, name = self.dice.choice(rows)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills["async child" if name.endswith("async") else "child"] += 1

    def end_session(self) -> None:
        rows = self.connection.execute(
            "SELECT pid, task_name FROM pg_stat_activity "
            "LEFT JOIN horsies_tasks ON id::text = split_part(application_name, ' ', 2) "
            "WHERE application_name LIKE %s AND datname = current_database()",
            (TX_ROLE,),
        ).fetchall()
        if rows:
            busy = [row for row in rows if row[1] is not None]
            pid, name = self.dice.choice(busy or rows)
            self.connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
            self.kills[f"session of {name}" if name else IDLE] += 1

    def lose_answer(self) -> None:
        """Cut a connection, of a child or of the worker, instead of delivering the answer to its COMMIT."""
        assert self.proxy is not None
        self.proxy.swallow_answer_with(b"COMMIT\0")
        assert self.proxy.swallowed.wait(60)
        self.kills["lost answer"] += 1

    def rest(self) -> None:
        """Wait a random time, so that kills hit any statement."""
        deadline = self.dice.uniform(0.0, 0.12)
        self.connection.execute("SELECT pg_sleep(%s)", (deadline,))


@pytest.mark.timeout(3600 if IS_LONG else 180)
def test_effects_are_the_completed_tasks_under_kills_of_children_sessions_and_workers(
    fleet: Fleet, booking: ModuleType, effects: Database
) -> None:
    with Proxy(fleet.way.url) as proxy:
        fleet.route = replace(fleet.way, url=proxy.url)
        storm = Storm(fleet, booking, effects, proxy)
        worker_kills = rage(storm)
        wait_until_empty(effects, 120)
    report(effects, storm.kills | {"worker": worker_kills})
    assert (storm.hits(), worker_kills) == (KILLS, WORKER_KILLS)
    storm.assert_kinds(
        "child", "async child", "session of book", "session of book_async", "lost answer"
    )
    assert_books_match(effects, fleet, "book", "book_async")
    statuses = dict(
        effects.execute(
            "SELECT status, count(*) FROM horsies_tasks WHERE task_name LIKE 'book%' GROUP BY 1"
        ).fetchall()
    )
    assert statuses == {"COMPLETED": storm.number}


def rage(storm: Storm) -> int:
    """Kill until all kills are done; return how many workers were killed, and leave one running."""
    worker, worker_kills = start(storm.fleet, *ASYNC, processes=2), 0
    while storm.hits() < KILLS:
        storm.keep_tasks()
        storm.progress()
        storm.rest()
        storm.kill()
        if storm.hits() > (worker_kills + 1) * KILLS / (WORKER_KILLS + 1):
            worker.signal(signal.SIGKILL)
            worker.wait()
            worker = start(storm.fleet, *ASYNC, processes=2)
            worker_kills += 1
    return worker_kills


@pytest.mark.timeout(1800 if IS_LONG else 180)
def test_effects_are_the_completed_tasks_when_the_server_crashes(
    own_server: PrivateServer, own_fleet: Fleet, booking: ModuleType
) -> None:
    dice, kills = seeded_dice(), Counter[str]()
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        connection.execute(EFFECTS)
        add_bookings(connection, booking, range(60), dice)
    worker = start(own_fleet, *ASYNC, processes=2)
    for number in range(SERVER_CRASHES):
        wanted = journal_of(own_fleet).total() + dice.randint(1, 20)
        wait_until(partial(has_begun, own_fleet, wanted))
        is_crash = number % 2 == 0
        (own_server.crash if is_crash else own_server.stop)()
        kills["server crash" if is_crash else "server restart"] += 1
        own_server.start()
        with psycopg.connect(own_server.url, autocommit=True) as connection:
            add_bookings(connection, booking, range(60 * (number + 1), 60 * (number + 2)), dice)
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        wait_until_empty(connection, 120)
        report(connection, kills)
        assert_books_match(connection, own_fleet, "book", "book_async")
        assert len(bookings(connection)) == 60 * (SERVER_CRASHES + 1)
    assert worker.process.poll() is None


@pytest.mark.timeout(600 if IS_LONG else 120)
def test_a_chain_of_transactions_under_kills_has_the_effect_of_every_node_once(
    fleet: Fleet, booking: ModuleType, effects: Database, journal: Journal
) -> None:
    nodes = [booking.book_link.node()(before=0, label="")]
    for number in range(1, LINKS):
        label = "last" if number == LINKS - 1 else ""
        nodes.append(booking.book_link.node()(before=from_node(nodes[-1]), label=label))
    spec = booking.app.workflow("links", nodes, output=nodes[-1], definition_key="booking.links")
    storm = Storm(fleet, booking, effects)
    start(fleet, processes=2)
    handle = spec.start().unwrap()
    while storm.hits() < CHAIN_KILLS:
        storm.progress()
        storm.rest()
        storm.kill()
    journal.release("last")
    assert handle.get(120_000).ok_value == LINKS
    wait_until_empty(effects)
    report(effects, storm.kills)
    assert bookings(effects) == receipts(effects) == list(range(1, LINKS + 1))
    rows = effects.execute(
        "SELECT count(*), count(DISTINCT task_id) FROM horsies_task_attempts AS attempt "
        "JOIN horsies_tasks AS task ON task.id = task_id "
        "WHERE outcome = 'COMPLETED' AND task_name = 'book_link'"
    ).fetchall()
    assert rows == [(LINKS, LINKS)]
    begun = journal_of(fleet)
    assert set(begun.values()) == {1}


def run_seconds(booking: ModuleType, number: int) -> float:
    """Start a run of two nodes, which writes this number and the next one; measure the time until its end."""
    first = booking.book_next.node()(before=number - 1)
    second = booking.book_next.node()(before=from_node(first))
    spec = booking.app.workflow("pair", [first, second], definition_key="booking.pair")
    began = time.perf_counter()
    assert spec.start().unwrap().get(30_000).is_ok()
    return time.perf_counter() - began


def has_booked(connection: Database, number: int) -> bool:
    return number in bookings(connection)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["book_slowly", "record_slowly"])
def test_other_runs_end_beside_a_node_that_keeps_its_transaction_open(
    fleet: Fleet, booking: ModuleType, effects: Database, journal: Journal, name: str
) -> None:
    """It keeps it open before its outcome is recorded, or behind that, with the root of its run locked."""
    start(fleet, processes=3)
    numbers = itertools.count(1_000, 10)
    alone = [run_seconds(booking, next(numbers)) for _ in range(10)]
    slow = getattr(booking, name).node()(number=1, seconds=DAWDLE_SECONDS)
    after_sibling = booking.rest_node.node()(label="sibling")
    spec = booking.app.workflow("slow", [slow, after_sibling], definition_key="booking.slow")
    handle = spec.start().unwrap()
    wait_until(lambda: journal.lines("slow") and journal.lines("sibling"))
    # The sibling ends now: the worker records that in its turns, beside the outcomes of other runs.
    journal.release("sibling")
    meanwhile = []
    while not has_booked(effects, 1):
        meanwhile.append(run_seconds(booking, next(numbers)))
    assert handle.get(30_000).is_ok()
    shown = [
        f"median {statistics.median(one):.3f} s, longest {max(one):.3f} s"
        for one in (alone, meanwhile)
    ]
    print(f"\n{name}: a run of two nodes: alone {shown[0]}; beside the open transaction {shown[1]}")
    assert meanwhile
