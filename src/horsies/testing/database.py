"""Throw-away databases for tests: created for a test run, emptied between tests, and dropped at the end
of the run.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from horsies.app import Horsies
from horsies.database_url import DEFAULT_SCHEMA, libpq_url
from horsies.db.embedded import start_or_join, temporary_parent, url_of
from horsies.db.errors import describe
from horsies.db.schema import MIGRATIONS_TABLE
from horsies.errors import ConfigurationError
from horsies.tasks.broker import build_broker
from horsies.testing.pending import forget_clock

SERVER_VARIABLE = "HORSIES_TEST_DATABASE_URL"

_FIND_TABLES = """
SELECT relname FROM pg_catalog.pg_class
WHERE relkind IN ('r', 'p') AND relnamespace = to_regnamespace(%s) AND relname LIKE 'horsies\\_%%'
  AND relname <> %s
"""

# DELETE takes 3 ms for one row, but TRUNCATE takes 15 ms of processor time, because it creates new
# files and invalidates every session's catalogue. TRUNCATE is used for a grown table, and for a
# table to which the application's tables refer, because their rows must be deleted as well.
_DELETED_BYTES_MAX = 131_072
_MAY_DELETE = """
WITH filled AS (SELECT name::regclass AS oid FROM unnest(%(names)s::text[]) AS name)
SELECT current_setting('is_superuser') = 'on'
  AND NOT EXISTS (SELECT FROM filled WHERE pg_catalog.pg_table_size(oid) > %(most)s)
  AND NOT EXISTS (
      SELECT FROM pg_catalog.pg_constraint JOIN pg_catalog.pg_class AS other ON other.oid = conrelid
      WHERE contype = 'f' AND confrelid IN (SELECT oid FROM filled)
        AND other.relname NOT LIKE 'horsies\\_%%')
"""
_RESTART_IDENTITIES = sql.SQL("""
SELECT pg_catalog.setval(objid::regclass, seqstart, false)
FROM pg_catalog.pg_depend JOIN pg_catalog.pg_sequence ON seqrelid = objid
WHERE refobjid = ANY (ARRAY[{}]::text[]::regclass[]) AND deptype = 'i'
""")


@dataclass(frozen=True)
class HorsiesDatabase:
    """A test's database: ``app`` uses it, and ``url`` is its address for other libraries."""

    app: Horsies
    """The application, which uses this database during the test."""
    # Hide the password, because pytest prints the fixtures of a failed test.
    url: str = field(repr=False)
    """The address of the database, for other libraries."""

    def clean(self) -> None:
        """Delete all tasks, runs and schedules, and reset the clock to the real time."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            empty_tables(connection, self.app.config.broker.schema_name)
        forget_clock(self.app)


def server_url(run_id: str) -> str:
    """Return the address of the test server: HORSIES_TEST_DATABASE_URL, or an embedded server.

    Processes with the same ``run_id`` share the embedded server; the last process deletes it.
    """
    if named := os.environ.get(SERVER_VARIABLE):
        return libpq_url(named)
    try:
        directory = temporary_parent() / f"horsies-tests-{run_id}"
        url = start_or_join(url_of(directory), keep_data=False)
    except ConfigurationError as error:
        error.help_text = f"{error.help_text}, or name a server for tests in {SERVER_VARIABLE}"
        raise
    with psycopg.connect(url, autocommit=True) as connection:
        # Disable durability: the server is temporary, tests create and drop many databases, and on
        # a busy disk each checkpoint took seconds.
        connection.execute("ALTER SYSTEM SET fsync = off")
        connection.execute("SELECT pg_reload_conf()")
    return url


@contextmanager
def created_database(server: str, template: str | None = None) -> Iterator[str]:
    """Create a database on this server, yield its address, and drop it after the block.

    With a ``template``, the new database is a copy of this database on the same server.
    """
    __tracebackhide__ = True
    name = f"horsies_test_{uuid.uuid4().hex}"
    create = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template is not None:
        create += sql.SQL(" TEMPLATE {} STRATEGY file_copy").format(sql.Identifier(template))
    try:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(create)
    except psycopg.errors.InsufficientPrivilege:
        raise RuntimeError(
            f"The user of {SERVER_VARIABLE} may not create databases; give it the attribute CREATEDB."
        ) from None
    except psycopg.OperationalError as error:
        # No "from error": pytest would print the arguments of psycopg's functions, including the
        # password.
        raise RuntimeError(
            f"The server of {SERVER_VARIABLE} cannot be used: {describe(error)}"
        ) from None
    try:
        yield database_on(server, name)
    finally:
        drop_database(server, name)


def database_on(server: str, name: str) -> str:
    """Return the address of another database on the same server."""
    return urlunsplit(urlsplit(server)._replace(path=f"/{name}"))


def drop_database(server: str, name: str) -> None:
    """Drop a database and end its sessions; do nothing if it does not exist."""
    drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(drop.format(sql.Identifier(name)))


def empty_tables(connection: psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA) -> None:
    """Empty the tables that have rows with the cheapest statements; most tests fill one or two tables
    with a few rows.
    """
    found = connection.execute(_FIND_TABLES, (schema, MIGRATIONS_TABLE))
    tables = [sql.Identifier(schema, name) for (name,) in found]
    if not tables:
        return
    has_rows = sql.SQL(", ").join(sql.SQL("EXISTS (SELECT FROM {})").format(one) for one in tables)
    (flags,) = connection.execute(sql.SQL("SELECT {}").format(has_rows))
    filled = [one for one, has_row in zip(tables, flags, strict=True) if has_row]
    if not filled:
        return
    names = [one.as_string() for one in filled]
    (may_delete,) = connection.execute(_MAY_DELETE, {"names": names, "most": _DELETED_BYTES_MAX})
    if may_delete == (True,):
        connection.execute(_deletions(filled))
    else:
        truncate = sql.SQL("TRUNCATE {} RESTART IDENTITY CASCADE")
        connection.execute(truncate.format(sql.SQL(", ").join(filled)))


def _deletions(tables: Sequence[sql.Identifier]) -> sql.Composed:
    """Delete every row and restart the identity columns, as TRUNCATE does, in one transaction."""
    return sql.SQL("; ").join(
        [
            # In this mode, no trigger fires and no foreign key is checked.
            sql.SQL("SET LOCAL session_replication_role = replica"),
            *(sql.SQL("DELETE FROM {}").format(one) for one in tables),
            sql.SQL("SET LOCAL session_replication_role = origin"),
            _RESTART_IDENTITIES.format(
                sql.SQL(", ").join(sql.Literal(one.as_string()) for one in tables)
            ),
        ]
    )


def point_at(app: Horsies, url: str) -> None:
    """Make the application use this database directly, regardless of its configuration."""
    changes = {
        "database_url": url,
        "session_database_url": None,
        "pgbouncer_transaction_mode": False,
    }
    broker = app.config.broker.model_copy(update=changes)
    app.close()
    # The configuration is frozen and shared with the application's tasks, so change it in place.
    object.__setattr__(app.config, "broker", broker)
    app._broker = None


@contextmanager
def prepared_database(app: Horsies, url: str) -> Iterator[HorsiesDatabase]:
    """Create the application's tables in this database and make the application use it for the duration
    of the block.
    """
    before = app.config.broker
    point_at(app, url)
    broker = build_broker(app.config.broker, "producer", migrates=True)
    try:
        broker.ensure_schema_initialized().unwrap()
        broker.close()
        yield HorsiesDatabase(app, url)
    finally:
        app.close()
        object.__setattr__(app.config, "broker", before)
        app._broker = None
