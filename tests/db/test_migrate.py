"""Migrations: many starters, one schema; a newer one is refused; nothing is touched when current."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import Connection, sql

from horsies.config.postgres import PostgresConfig
from horsies.db import migrate
from horsies.db.migrate import (
    Migration,
    SchemaTooNewError,
    apply_migrations,
    known_migrations,
    migration_script,
    pending_migrations,
)
from horsies.tasks.broker import BrokerErrorCode, PostgresBroker
from tests.support.wait import wait_until

# Twenty processes that have imported everything and stand before the same gate: a pipe that opens
# for all of them when its last writer lets go.
STARTERS = """
import os, sys
from horsies.tasks.broker import PostgresBroker
from horsies.config.postgres import PostgresConfig

gate, opener = os.pipe()
for _ in range(20):
    if os.fork() == 0:
        os.close(opener)
        os.read(gate, 1)
        broker = PostgresBroker(PostgresConfig(database_url=sys.argv[1]))
        os.write(1, f"{broker.ensure_schema_initialized()}\\n".encode())
        os._exit(0)
os.close(opener)
for _ in range(20):
    os.wait()
"""

CATALOGUE = """
SELECT 'column', table_name || '.' || column_name,
       concat_ws(' ', ordinal_position, data_type, character_maximum_length, is_nullable, column_default,
                 is_identity)
FROM information_schema.columns WHERE table_schema = 'public'
UNION ALL SELECT 'table', relname, concat(relkind, reloptions) FROM pg_class
    WHERE relnamespace = 'public'::regnamespace
UNION ALL SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL SELECT 'constraint', conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace
UNION ALL SELECT 'function', proname, pg_get_functiondef(oid) FROM pg_proc
    WHERE pronamespace = 'public'::regnamespace
UNION ALL SELECT 'trigger', tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
ORDER BY 1, 2, 3
"""


def catalogue(connection: Connection[Any]) -> list[tuple[str, str, str]]:
    """Return everything our schema consists of, as the server describes it."""
    return connection.execute(CATALOGUE).fetchall()


def recorded(connection: Connection[Any]) -> list[tuple[int, str]]:
    return connection.execute(
        "SELECT version, name FROM horsies_migrations ORDER BY version"
    ).fetchall()


def expected_record() -> list[tuple[int, str]]:
    return [(migration.version, migration.name) for migration in known_migrations()]


@pytest.fixture
def empty(database_url: str) -> Iterator[Connection[Any]]:
    """A connection to a database of its own that nobody has touched."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@contextmanager
def role(connection: Connection[Any], *grants: str) -> Iterator[str]:
    """Create a role that may do nothing but what is granted here."""
    name = "horsies_guest_" + connection.info.dbname[-12:]
    connection.execute(f"CREATE ROLE {name}".encode())
    try:
        for grant in ("REVOKE CREATE ON SCHEMA public FROM PUBLIC", *grants):
            connection.execute(grant.format(role=name).encode())
        yield name
    finally:
        connection.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


def as_role(url: str, name: str) -> str:
    parts = urlsplit(url)
    query = "&".join(filter(None, [parts.query, f"options=-c%20role%3D{name}"]))
    return urlunsplit(parts._replace(query=query))


def test_the_migrations_are_numbered_without_gaps() -> None:
    versions = [migration.version for migration in known_migrations()]
    assert versions == list(range(1, len(versions) + 1))


def test_a_fresh_database_gets_every_migration_once(empty: Connection[Any]) -> None:
    assert list(pending_migrations(empty)) == list(known_migrations())
    assert list(apply_migrations(empty)) == list(known_migrations())
    assert recorded(empty) == expected_record()
    assert list(pending_migrations(empty)) == []


def test_migrating_again_changes_nothing(empty: Connection[Any]) -> None:
    apply_migrations(empty)
    before = catalogue(empty)
    assert list(apply_migrations(empty)) == []
    assert catalogue(empty) == before
    assert recorded(empty) == expected_record()


def test_twenty_processes_that_start_at_once_all_succeed(
    empty: Connection[Any], database_url: str
) -> None:
    command = [sys.executable, "-c", STARTERS, database_url]
    started = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert started.stderr == ""
    assert started.stdout.splitlines() == ["Ok(None)"] * 20
    assert recorded(empty) == expected_record()


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_whoever_waited_for_another_starter_finds_nothing_to_do(
    empty: Connection[Any], database_url: str, isolation: str
) -> None:
    options = f"-c default_transaction_isolation={isolation.replace(' ', chr(92) + ' ')}"
    answers: list[Any] = []

    def start_second() -> None:
        with psycopg.connect(database_url, autocommit=True, options=options) as second:
            answers.append(apply_migrations(second))

    with (
        psycopg.connect(database_url) as first,
        first.transaction(),
    ):
        apply_migrations(first)
        thread = threading.Thread(target=start_second)
        thread.start()
        wait_until(lambda: _somebody_waits(empty))
    thread.join()
    assert answers == [()]
    assert recorded(empty) == expected_record()


def _somebody_waits(connection: Connection[Any]) -> bool:
    found = connection.execute(
        "SELECT 1 FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database "
        "WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"
    )
    return found.fetchone() is not None


def test_a_database_that_lags_behind_gets_only_what_it_lacks(
    empty: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = tuple(known_migrations())
    with monkeypatch.context() as old_release:
        old_release.setattr(migrate, "_MIGRATIONS", everything[:2])
        apply_migrations(empty)
    assert list(apply_migrations(empty)) == list(everything[2:])
    assert recorded(empty) == expected_record()


def test_a_migration_that_fails_leaves_nothing_behind(
    empty: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Migration(len(known_migrations()) + 1, "broken", "CREATE TABLE a (b nonsense)")
    with monkeypatch.context() as faulty_release:
        faulty_release.setattr(migrate, "_MIGRATIONS", (*known_migrations(), broken))
        with pytest.raises(psycopg.errors.UndefinedObject):
            apply_migrations(empty)
    assert catalogue(empty) == []
    assert list(apply_migrations(empty)) == list(known_migrations())


def test_a_newer_schema_is_refused_with_both_versions_and_the_remedy(
    empty: Connection[Any],
) -> None:
    apply_migrations(empty)
    empty.execute("INSERT INTO horsies_migrations (version, name) VALUES (999, 'tomorrow')")
    latest = known_migrations()[-1].version
    with pytest.raises(SchemaTooNewError) as caught:
        apply_migrations(empty)
    assert str(caught.value) == (
        f"The database schema is version 999, but this release of horsies knows only version {latest}; "
        "upgrade horsies on this machine."
    )


def test_the_broker_reports_a_newer_schema_as_a_lasting_error(
    empty: Connection[Any], broker_config: PostgresConfig
) -> None:
    apply_migrations(empty)
    empty.execute("INSERT INTO horsies_migrations (version, name) VALUES (999, 'tomorrow')")
    error = PostgresBroker(broker_config).ensure_schema_initialized().unwrap_err()
    assert error.code is BrokerErrorCode.SCHEMA_INIT_FAILED
    assert not error.retryable
    assert "version 999" in error.message
    assert "upgrade horsies" in error.message


@pytest.mark.parametrize("applied", [0, 2])
def test_the_printed_script_makes_the_same_schema(
    empty: Connection[Any],
    process_url: str,
    monkeypatch: pytest.MonkeyPatch,
    applied: int,
) -> None:
    if applied:
        with monkeypatch.context() as old_release:
            old_release.setattr(migrate, "_MIGRATIONS", tuple(known_migrations())[:applied])
            apply_migrations(empty)
    script = migration_script(pending_migrations(empty))
    result = empty.pgconn.exec_(script.encode())  # all of it in one message, as psql -c does
    assert result.error_message == b""
    with psycopg.connect(process_url) as migrated:
        assert catalogue(empty) == catalogue(migrated)
    assert recorded(empty) == expected_record()
    assert list(pending_migrations(empty)) == []


def test_the_printed_script_is_all_or_nothing(empty: Connection[Any]) -> None:
    broken = replace(known_migrations()[-1], sql="SELECT 1/0;")
    script = migration_script([*known_migrations()[:-1], broken])
    assert b"division by zero" in empty.pgconn.exec_(script.encode()).error_message
    empty.execute("ROLLBACK")
    assert catalogue(empty) == []


def test_a_current_schema_needs_no_right_to_create(
    empty: Connection[Any], database_url: str
) -> None:
    apply_migrations(empty)
    with role(empty, "GRANT SELECT ON horsies_migrations TO {role}") as guest:
        broker = PostgresBroker(PostgresConfig(database_url=as_role(database_url, guest)))
        assert broker.ensure_schema_initialized().is_ok()


def test_a_role_that_may_not_create_is_told_so_and_changes_nothing(
    empty: Connection[Any], database_url: str
) -> None:
    with role(empty) as guest:
        broker = PostgresBroker(PostgresConfig(database_url=as_role(database_url, guest)))
        error = broker.ensure_schema_initialized().unwrap_err()
        assert error.code is BrokerErrorCode.SCHEMA_INIT_FAILED
        assert not error.retryable
        assert "permission denied for schema public" in error.message
    assert catalogue(empty) == []


def test_a_migration_takes_its_lock_before_it_looks(empty: Connection[Any]) -> None:
    script = migration_script(known_migrations())
    lock = sql.Literal(migrate.MIGRATION_LOCK_KEY).as_string(empty)
    begin, isolation, first, *_ = script.splitlines()
    assert begin == "BEGIN;"
    assert isolation == "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;"
    assert first == f"SELECT pg_advisory_xact_lock({lock});"
