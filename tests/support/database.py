"""Databases of the test server, and the sessions of other processes in them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from horsies.config.postgres import PostgresConfig
from horsies.db.migrate import apply_migrations, known_migrations
from horsies.testing.database import created_database as created_database
from horsies.testing.database import database_on as database_on
from horsies.testing.database import drop_database as drop_database

HOSTILE_SETTINGS = {
    "datestyle": "SQL, DMY",
    "intervalstyle": "iso_8601",
    "standard_conforming_strings": "off",
    "array_nulls": "off",
    "default_transaction_isolation": "serializable",
    "search_path": "public",
}

Database: TypeAlias = psycopg.Connection[Any]


def is_reusable(connection: Database) -> bool:
    """Return whether a test left a connection unchanged; if so, reset its session for the next test. On
    a busy machine, a new session needs 54 to 67 ms to find the tables empty, a kept session 8 to 11 ms.
    """
    as_opened = (
        not connection.closed
        and connection.autocommit
        and connection.info.transaction_status == TransactionStatus.IDLE
        and connection.info.pipeline_status == PipelineStatus.OFF
        and connection.row_factory is tuple_row
        and not (connection._notice_handlers or connection._notify_handlers)
        and (connection.prepare_threshold, connection._adapters) == (5, None)
        and (connection.isolation_level, connection.read_only) == (None, None)
    )
    if as_opened:
        connection._prepared.clear()
        try:
            connection.execute("DISCARD ALL")
        except psycopg.OperationalError:  # A test has ended the session.
            return False
    return as_opened


def with_password(url: str, password: str) -> str:
    """Return the URL with a password, even if the server asks for none."""
    parts = urlsplit(url)
    place = f"{parts.username}:{password}@{parts.netloc.rpartition('@')[2]}"
    return urlunsplit(parts._replace(netloc=place))


def template_database(server_url: str, fill: str = "") -> str:
    """Return the name of a migrated and analysed database with the rows of this script.

    The test processes share the database: the first process creates it while the others wait.
    """
    content = fill.join(migration.sha for migration in known_migrations())
    name = f"horsies_template_{uuid.uuid5(uuid.NAMESPACE_OID, content).hex}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(hashtext(%s))", (name,))
        known = connection.execute("SELECT FROM pg_database WHERE datname = %s", (name,))
        if known.fetchone() is None:
            draft = f"{name}_draft"
            drop_database(server_url, draft)
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(draft)))
            _fill(database_on(server_url, draft), fill)
            rename = sql.SQL("ALTER DATABASE {} RENAME TO {}")
            connection.execute(rename.format(sql.Identifier(draft), sql.Identifier(name)))
    return name


def _fill(url: str, script: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        apply_migrations(connection)
        if script:
            connection.execute(script.encode())
            connection.execute("VACUUM ANALYZE")


def backends(connection: Database, name: str) -> list[int]:
    """Return the server processes of connections whose application name matches this pattern."""
    rows = connection.execute(
        "SELECT pid FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE %s ORDER BY pid",
        (name,),
    )
    return [row[0] for row in rows]


def lock_waiters(connection: Database, pid: int | None = None) -> int:
    """Count the sessions of the database, or of a server process, that wait for a lock."""
    (row,) = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        "AND datname = current_database() AND (%(pid)s::integer IS NULL OR pid = %(pid)s)",
        {"pid": pid},
    )
    return int(row[0])


def notify(connection: Database, channel: str, payload: str = "") -> None:
    connection.execute("SELECT pg_notify(%s, %s)", (channel, payload))


def terminate(connection: Database, name: str) -> list[int]:
    """Cut every connection whose application name matches this pattern, and wait until these connections
    are gone.
    """
    pids = backends(connection, name)
    connection.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM unnest(%s::integer[]) AS pid", (pids,)
    )
    return pids


def terminate_others(connection: Database) -> None:
    """Cut every connection to the database except this one, including a pooler's spare connections."""
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )


@contextmanager
def function_replaced(connection: Database, name: str, definition: str) -> Iterator[None]:
    """Replace a function of the schema during the block, then restore its definition and its settings."""
    (original,) = connection.execute(
        "SELECT pg_get_functiondef(%s::regproc)", (name,)
    ).fetchone() or ("",)
    connection.execute(f"CREATE OR REPLACE FUNCTION {name}{definition}".encode())
    try:
        yield
    finally:
        connection.execute(original.encode())


@contextmanager
def steps_of(connection: Database, items: int, size: int = 16_777_216) -> Iterator[None]:
    """Limit the growth of maps to this many items, or about this many bytes, at a time."""
    step = (
        "(OUT items integer, OUT bytes integer) "
        f"LANGUAGE sql IMMUTABLE AS $$ SELECT {items}, {size} $$"
    )
    with function_replaced(connection, "horsies_step", step):
        yield


@contextmanager
def new_sessions_with(connection: Database, setting: str, value: str) -> Iterator[None]:
    """Set a setting for every new session of the database."""
    names = sql.Identifier(connection.info.dbname), sql.Identifier(setting)
    connection.execute(sql.SQL("ALTER DATABASE {} SET {} = {}").format(*names, sql.Literal(value)))
    try:
        yield
    finally:
        connection.execute(sql.SQL("ALTER DATABASE {} RESET {}").format(*names))


@contextmanager
def changed_defaults(url: str) -> Iterator[None]:
    """Make hostile settings the database's defaults."""
    with psycopg.connect(url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        for setting, value in HOSTILE_SETTINGS.items():
            values = sql.SQL(", ").join(map(sql.Literal, value.split(", ")))
            change = sql.SQL("ALTER DATABASE {} SET {} = {}")
            connection.execute(change.format(name, sql.Identifier(setting), values))
        try:
            yield
        finally:
            connection.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(name))


def framed_config(url: str, *, is_pooled: bool) -> PostgresConfig:
    """Return a configuration. With ``is_pooled``, transactions are sent as they would be behind a pooler,
    although there is none.
    """
    if not is_pooled:
        return PostgresConfig(database_url=url)
    session_url = f"{url}&application_name=session"
    return PostgresConfig(
        database_url=url, session_database_url=session_url, pgbouncer_transaction_mode=True
    )
