"""The table that tasks of the application `booking` write to, and its comparison with the tasks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from horsies import MapNode, TaskOptions
from tests.support.database import Database
from tests.support.rows import add_task, ago
from tests.support.tables import attempts
from tests.support.workers import Fleet

APPLICATION = "tests.support.apps.booking:app"
# The sessions of tasks, with the id of the running task.
TX_ROLE = "horsies:child-tx%"
# The sessions that tasks open themselves.
OWN_ROLE = "booking"

EFFECTS = """CREATE TABLE bookings (
    number integer NOT NULL, attempt integer NOT NULL, task_id uuid NOT NULL,
    CONSTRAINT positive CHECK (number > -1),
    CONSTRAINT once UNIQUE (number) DEFERRABLE INITIALLY DEFERRED)"""
# Per task: its effects, whether it completed, and the tasks that it sent.
_DIFFERENCES = """
    SELECT task.id::text, task.status, coalesce(effect.number, 0), coalesce(receipt.number, 0)
    FROM horsies_tasks AS task
    LEFT JOIN (SELECT task_id, count(*) AS number FROM bookings GROUP BY task_id) AS effect
        ON effect.task_id = task.id
    LEFT JOIN (
        SELECT args, count(*) AS number FROM horsies_tasks WHERE task_name = 'receipt' GROUP BY args
    ) AS receipt ON receipt.args = task.args
    WHERE task.task_name = %s"""
# The test holds this advisory lock to block statements on the table `bookings`, or commits that
# change it.
GATE = 4711
_GATES = {
    "write": "CREATE TRIGGER e2e_gate BEFORE INSERT ON bookings FOR EACH ROW EXECUTE FUNCTION e2e_gate()",
    "commit": "CREATE CONSTRAINT TRIGGER e2e_gate AFTER INSERT ON bookings DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW EXECUTE FUNCTION e2e_gate()",
}
_FUNCTION = f"""
CREATE FUNCTION e2e_gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared({GATE}); RETURN NEW; END $$"""


@contextmanager
def closed_gate(connection: Database, point: str = "commit") -> Iterator[None]:
    """Make tasks wait in their INSERT, or in COMMIT after their outcome is recorded, until
    ``open_gate``.
    """
    close_gate(connection, point)
    try:
        yield
    finally:
        open_gate(connection)
        connection.execute("DROP FUNCTION e2e_gate CASCADE")


def close_gate(connection: Database, point: str = "commit") -> None:
    """Close the gate until ``open_gate``, or until this connection's server is gone."""
    connection.execute(_FUNCTION)
    connection.execute(_GATES[point].encode())
    connection.execute("SELECT pg_advisory_lock(%s)", (GATE,))


def open_gate(connection: Database) -> None:
    connection.execute("SELECT pg_advisory_unlock_all()")


def waits_at_gate(connection: Database, role: str = TX_ROLE) -> list[int]:
    """Return the sessions of tasks that wait at the gate."""
    return _waiting(connection, role, "advisory")


def waits_for_row(connection: Database, role: str = TX_ROLE) -> list[int]:
    """Return the sessions of tasks that wait for a row lock of another session."""
    return _waiting(connection, role, "transactionid", "tuple")


def _waiting(connection: Database, role: str, *events: str) -> list[int]:
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s "
        "AND wait_event = ANY(%s) AND datname = current_database()",
        (role, list(events)),
    )
    return [pid for (pid,) in rows]


def open_sessions(connection: Database) -> set[int]:
    """Return the sessions in whose transactions tasks are, `tx.connection` and those that they opened."""
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE (application_name LIKE %s OR application_name = %s) "
        "AND xact_start IS NOT NULL AND datname = current_database()",
        (TX_ROLE, OWN_ROLE),
    )
    return {pid for (pid,) in rows}


def idle_sessions(connection: Database) -> list[int]:
    """Return the sessions of tasks that are idle inside a transaction that the task opened itself."""
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = %s "
        "AND state = 'idle in transaction' AND datname = current_database()",
        (OWN_ROLE,),
    )
    return [pid for (pid,) in rows]


@contextmanager
def effects_table(connection: Database) -> Iterator[None]:
    """Create the empty table `bookings` for the duration of the block."""
    connection.execute("DROP TABLE IF EXISTS bookings")
    connection.execute(EFFECTS)
    try:
        yield
    finally:
        # A worker that the test froze would keep the table locked.
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE (application_name LIKE %s OR application_name = %s AND state <> 'idle') "
            "AND datname = current_database()",
            (TX_ROLE, OWN_ROLE),
        )
        connection.execute("DROP TABLE IF EXISTS bookings")


def bookings(connection: Database) -> list[int]:
    rows = connection.execute("SELECT number FROM bookings ORDER BY number").fetchall()
    return [number for (number,) in rows]


def receipts(connection: Database) -> list[int]:
    """Return the numbers of the receipts that tasks have sent."""
    rows = connection.execute(
        "SELECT (args::json->>0)::integer FROM horsies_tasks WHERE task_name = 'receipt' ORDER BY 1"
    ).fetchall()
    return [number for (number,) in rows]


def assert_effects_match(connection: Database, task_name: str) -> None:
    """Check that each completed task has one effect and one receipt, and every other task has neither."""
    rows = connection.execute(_DIFFERENCES, (task_name,)).fetchall()
    wrong = [row for row in rows if {row[2], row[3]} != {int(row[1] == "COMPLETED")}]
    assert rows
    assert not wrong, wrong


def assert_map_books(booking: ModuleType, connection: Database, name: str, count: int) -> None:
    """Check that a map of a task, whose source writes a row as well, writes a row for each item."""
    source = booking.list_numbers.node()(count=count)
    mapped = MapNode(getattr(booking, name), over=source, each="before")
    spec = booking.app.workflow("map", [source, mapped], definition_key="booking.map")
    assert spec.start().unwrap().get(30_000).is_ok()
    assert bookings(connection) == [*range(1, count + 1), 1000]


def seeded_dice() -> random.Random:
    """Return a random generator that the printed seed makes repeatable."""
    seed = random.SystemRandom().randint(0, 1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def add_bookings(
    connection: Database, booking: ModuleType, numbers: Iterable[int], dice: random.Random
) -> None:
    """Store tasks that write these numbers, every second task for an async child."""
    for number in numbers:
        is_async = number % 2 == 1
        columns = {
            "task_name": "book_async" if is_async else "book",
            "args": f"[{number},{dice.choice((0.0, 0.002, 0.004))}]",
            "task_options": TaskOptions(booking.AGAIN, is_async=is_async).to_json(),
            "max_retries": 100,
        }
        add_task(connection, enqueued_at=ago(0), **columns)


def journal_of(fleet: Fleet) -> Counter[tuple[str, int]]:
    """Return how often the code of each attempt started, by task and attempt."""
    path = fleet.journal.path
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((line.split()[0], int(line.split()[1])) for line in lines)


def has_begun(fleet: Fleet, wanted: int) -> bool:
    return journal_of(fleet).total() >= wanted


def assert_books_match(connection: Database, fleet: Fleet, *names: str) -> None:
    """Check that the journal outside the database, the attempts and the effects agree."""
    begun = journal_of(fleet)
    assert set(begun.values()) <= {1}, "an attempt began twice"
    recorded = {(one.task_id, one.attempt) for one in attempts(connection)}
    assert set(begun) <= recorded, "an attempt began and is not recorded"
    rows = connection.execute("SELECT task_id::text, attempt FROM bookings").fetchall()
    assert set(rows) <= set(begun), "an effect of an attempt that never began"
    for name in names:
        assert_effects_match(connection, name)


def report(connection: Database, kills: Mapping[str, int]) -> None:
    """Print the figures of a stress test (`pytest -s`)."""
    (figures,) = connection.execute(
        "SELECT count(*) FILTER (WHERE task_name LIKE 'book%'), "
        "count(*) FILTER (WHERE task_name LIKE 'book%' AND status = 'COMPLETED'), "
        "count(*) FILTER (WHERE task_name = 'receipt'), (SELECT count(*) FROM bookings), "
        "(SELECT count(*) FROM horsies_task_attempts) FROM horsies_tasks"
    )
    names = ("tasks", "completed", "follow-up sends", "effect rows", "attempts")
    print(f"\nkills {dict(kills)}", dict(zip(names, figures, strict=True)))
