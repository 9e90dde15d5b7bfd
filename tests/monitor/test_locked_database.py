"""A table that another session has locked, and a server that is frozen: every command ends within its
limit, and names the session that holds the lock.

`HORSIES_TEST_OUTAGES=long pytest -s tests/monitor/test_locked_database.py` locks every table in turn, at
default limits, and prints the slowest answer of each command.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from subprocess import run as run_program

import psycopg
import pytest
from psycopg.errors import QueryCanceled

from horsies.cli import session
from horsies.config.postgres import PostgresConfig
from horsies.db import migrate
from horsies.db.blockers import SlowError
from horsies.db.blockers import named as named_cause
from horsies.db.database import LIMITED_CONNECT_SECONDS
from horsies.db.database import Database as Connections
from horsies.db.limits import Limits
from horsies.db.migrate import apply_migrations
from horsies.monitor import orders
from horsies.monitor.diagnose import doctor
from horsies.tasks import check
from tests.support.command_line import Run
from tests.support.commands import environment
from tests.support.database import Database
from tests.support.every_command import (
    APPLICATION,
    CHANGES,
    READS,
    WITHOUT,
    every_command,
    words_of,
)
from tests.support.locks import locked
from tests.support.private_server import PrivateServer
from tests.support.routes import programs as programs
from tests.support.routes import route as route
from tests.support.rows import UNKNOWN_ID, add_run, add_task, add_worker
from tests.support.wait import wait_until
from tests.support.workers import DATABASE_VARIABLE

IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
# Tables that all and many commands read.
SAMPLE = ["horsies_migrations", "horsies_tasks"]
QUICK = Limits(lock_ms=100, statement_ms=8_000, silence_seconds=10.0)
# A busy machine starts and ends a session slowly; the doctor tries every check.
SLACK_SECONDS = 8.0
DOCTOR_SECONDS = doctor.PATIENCE_SECONDS + SLACK_SECONDS
FROZEN_SAMPLE = ["status", "explain queue", "doctor", "cancel"]
EVERY = [*READS, *CHANGES]
# Commands whose answer may be another one than the error: a report, or a refusal because of the row's state.
REPORTS = ("health", "doctor", "retry", "delete", "redact", "workflow audit")
REFUSALS = (
    *("nothing was changed", "has failed", "is not held", "is not parked", "has no step"),
    *("no task named", "not a schedule of", "is not registered in", "is CANCELLED"),
)
# A migration waits for other migrations.
MIGRATION_SECONDS = migrate.PATIENCE_SECONDS + migrate.LOCK_TIMEOUT_MS / 1_000 + SLACK_SECONDS
LIMITS = {"doctor": DOCTOR_SECONDS, "migrate": MIGRATION_SECONDS}


@pytest.fixture
def ids(connection: Database) -> dict[str, str]:
    add_worker(connection, queues=["mail"])
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, updated_at, timing) "
        'VALUES (\'nightly\', now(), now(), \'{"pattern": {"type": "interval", "hours": 1}}\')'
    )
    return subjects(connection)


def subjects(connection: Database) -> dict[str, str]:
    task = add_task(connection, queue_name="mail")
    return {"TASK": task, "RUN": add_run(connection), "APP": APPLICATION}


@pytest.fixture
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    if not IS_LONG:
        monkeypatch.setattr(session, "READING", QUICK)
        monkeypatch.setattr(session, "CHANGING", QUICK)
        monkeypatch.setattr(doctor, "READING_LIMITS_MS", (8_000, 100))
        monkeypatch.setattr(check, "READING", QUICK)
        monkeypatch.setattr(migrate, "PATIENCE_SECONDS", 0.0)


def tables_of(connection: Database) -> list[str]:
    found = connection.execute(
        "SELECT tablename FROM pg_tables WHERE tablename LIKE 'horsies\\_%' ORDER BY 1"
    )
    every = [name for (name,) in found]
    assert set(SAMPLE) < set(every)
    return every if IS_LONG else SAMPLE


@pytest.mark.usefixtures("_limits", "ids", "programs")
@pytest.mark.timeout(3_600 if IS_LONG else 240)
def test_with_any_table_locked_every_command_ends_and_names_the_holder(
    horsies: Run, connection: Database, process_url: str
) -> None:
    silent: list[str] = []
    late: list[str] = []
    named: dict[str, set[str]] = {}
    slowest: dict[str, tuple[float, str]] = {}
    for table in tables_of(connection):
        fresh = subjects(
            connection
        )  # commands that do not need the table have changed the last ones
        with locked(process_url, table) as pid:
            for name in EVERY:
                began = time.monotonic()
                ended = horsies(*(fresh.get(word, word) for word in words_of(name)))
                seconds = time.monotonic() - began
                slowest[name] = max(slowest.get(name, (0.0, "")), (seconds, table))
                shown = " ".join((ended.out + ended.err).split())
                if f"pid {pid} (" in shown and f"_backend({pid})" in shown:
                    named.setdefault(table, set()).add(name)
                elif (
                    ended.code not in (0, 4)
                    and name not in REPORTS
                    and not any(words in shown for words in REFUSALS)
                ):
                    silent.append(f"{name} with {table}: {shown}")
                if seconds > LIMITS.get(name, SLACK_SECONDS):
                    late.append(f"{name} with {table}: {seconds:.1f} s")
        print(f"{table}: {len(named.get(table, ()))} of {len(EVERY)} commands name the session")
    for name, (seconds, table) in slowest.items():
        print(f"{name:20} at most {seconds:5.2f} s, with {table}")
    assert (silent, late) == ([], [])
    assert named["horsies_migrations"] >= set(EVERY)
    assert {"status", "explain", "show", "tasks", "doctor"} <= named["horsies_tasks"]
    assert all("doctor" in commands for commands in named.values())
    assert set(named) == set(tables_of(connection))


def test_every_command_has_an_example_or_a_reason() -> None:
    """The commands of the run with locked tables are those of the command line."""
    listed = {*READS, *CHANGES, *WITHOUT}
    assert every_command() - listed == set(), "add an example to tests/support/every_command.py"
    # An example may add a word: the kind of a subject, or a flag.
    shorter = {name for name in listed if name.rpartition(" ")[0] in every_command()}
    assert listed - every_command() - shorter == set()


@pytest.mark.usefixtures("_limits")
def test_the_sentence_has_the_session_and_the_command_that_ends_it(
    horsies: Run, process_url: str, ids: dict[str, str]
) -> None:
    with locked(process_url, "horsies_tasks") as pid:
        ended = horsies("explain", ids["TASK"])
        report = json.loads(horsies("doctor", "--json", "--only", "locks").out)
    assert ended.code == 1
    user = psycopg.conninfo.conninfo_to_dict(process_url).get("user", "postgres")
    assert ended.err.startswith(
        f"error: Another session locks horsies_tasks: pid {pid} (user {user}, application report, "
        "idle in transaction, transaction open for "
    )
    assert ended.err.endswith(
        "; its last statement is: LOCK TABLE horsies_tasks IN ACCESS EXCLUSIVE MODE; to end it: "
        f"SELECT pg_terminate_backend({pid})\n"
    )
    assert report["level"] in ("red", "green")  # red after a second


@pytest.mark.usefixtures("_limits")
@pytest.mark.parametrize("command", ["delete", "redact"])
def test_a_bulk_order_waits_for_a_locked_table_once(
    horsies: Run,
    connection: Database,
    process_url: str,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setattr(orders, "RESEND_DELAYS_SECONDS", [math.inf])  # no sleep takes that long
    task_id = add_task(connection, status="COMPLETED")
    with locked(process_url, "horsies_task_logs") as pid:
        ended = horsies(command, task_id, "--yes")
    assert ended.code == 1
    assert f"pid {pid} (user" in ended.err, ended
    continued = ended.err.split("--order ")[1].split()[0]
    assert horsies(command, "--order", continued).code == 0


def test_a_session_that_waits_for_another_one_is_named_after_it(
    horsies: Run, connection: Database, process_url: str, ids: dict[str, str]
) -> None:
    """An ALTER TABLE that waits for a long report makes every later reader wait."""
    with psycopg.connect(process_url, application_name="report") as report:
        report.execute("SELECT count(*) FROM horsies_tasks")
        with psycopg.connect(process_url, application_name="alter") as alter:
            alter.execute("SELECT 1")
            alter.pgconn.send_query(b"LOCK TABLE horsies_tasks IN ACCESS EXCLUSIVE MODE")
            wait_for_lock(connection, alter.info.backend_pid)
            ended = horsies("status")
            assert f"pid {report.info.backend_pid} (user" in ended.err, ended
            alter.pgconn.finish()


def wait_for_lock(connection: Database, pid: int) -> None:
    query = "SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s"
    wait_until(lambda: connection.execute(query, (pid,)).fetchone() == ("Lock",))


@pytest.mark.usefixtures("_limits")
def test_a_change_names_the_session_that_has_locked_its_row(
    horsies: Run, connection: Database, process_url: str, ids: dict[str, str]
) -> None:
    with psycopg.connect(process_url, application_name="console") as holder:
        holder.execute("SELECT FROM horsies_tasks WHERE id = %s FOR UPDATE", (ids["TASK"],))
        connection.execute("SELECT pg_sleep(0.2)")
        ended = horsies("cancel", ids["TASK"])
        assert ended.code == 1
        assert f"pid {holder.info.backend_pid} (user" in ended.err, ended


def test_a_statement_that_takes_too_long_says_so(process_url: str, connection: Database) -> None:
    database = limited(process_url, Limits(lock_ms=1_000, statement_ms=100))
    with database.connect("operator") as slow, pytest.raises(QueryCanceled) as ended:
        slow.execute("SELECT pg_sleep(30)")
    found = named_cause(database, ended.value)
    assert isinstance(found, SlowError)
    assert str(found).startswith("The database did not finish a statement within 0.1 s")


def test_a_session_that_is_frozen_is_closed(process_url: str, connection: Database) -> None:
    database = limited(process_url, Limits(silence_seconds=0.3))
    with database.connect("operator") as frozen:
        pid = frozen.info.backend_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(psycopg.OperationalError, match=r"did not answer for 0\.3 s"):
                frozen.execute("SELECT 1")
            assert frozen.closed
        finally:
            os.kill(pid, signal.SIGCONT)


def limited(url: str, limits: Limits) -> Connections:
    return Connections(PostgresConfig(database_url=url), "operator", limits=limits)


@pytest.mark.slow
def test_a_frozen_server_ends_every_command() -> None:
    """The postmaster accepts connections in the kernel, and nothing answers."""
    server = PrivateServer()
    commands = list(map(words_of, EVERY if IS_LONG else FROZEN_SAMPLE))
    try:
        with psycopg.connect(server.url) as connection:
            apply_migrations(connection)
        pids = server.pids()
        _signal(pids, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(4) as pool:
                ended = list(pool.map(partial(_run, server.url), commands))
        finally:
            _signal(pids, signal.SIGCONT)
    finally:
        server.remove()
    for command, (code, text, seconds) in zip(commands, ended, strict=True):
        if IS_LONG:
            print(f"{' '.join(command):32} {seconds:6.2f} s {text}")
        assert code == 1, command
        assert "did not answer in time" in text, text
        assert seconds < LIMITED_CONNECT_SECONDS + 5 * SLACK_SECONDS, command


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal the processes of a server, except those that have just ended, as that of a closed session."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _run(url: str, command: list[str]) -> tuple[int, str, float]:
    began = time.monotonic()
    known = {"TASK": UNKNOWN_ID, "RUN": UNKNOWN_ID, "APP": APPLICATION}
    words = [known.get(word, word) for word in command]
    ended = run_program(
        [sys.executable, "-m", "horsies", *words],
        env=environment(DATABASE_URL=url, COLUMNS="300") | {DATABASE_VARIABLE: url},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return ended.returncode, ended.stderr, time.monotonic() - began
