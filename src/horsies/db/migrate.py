"""Schema migrations: numbered SQL files, applied forward only, under one fixed advisory lock.

The first use of a database by any process brings it up to date; twenty processes starting at once
take turns on the lock and the later nineteen find nothing to do. A database that is newer than the
code is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from psycopg import Connection
from psycopg.pq import TransactionStatus

# A constant, not a hash of the URL: two spellings of one database must exclude each other, and
# advisory locks are per database anyway.
MIGRATION_LOCK_KEY = 0x686F727369657301

_CREATE_RECORD = """
CREATE TABLE IF NOT EXISTS horsies_migrations (
    version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())
"""

# Whoever waited for the lock must see what its holder committed, also where the database's default
# is a stricter level with one snapshot for the whole transaction.
_ISOLATION = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step of the schema."""

    version: int
    name: str
    sql: str


class SchemaTooNewError(Exception):
    """The database was migrated by a newer release than this one."""


class SchemaMissingError(Exception):
    """The tables are not there, or older than this release, and the process must not change them."""


def known_migrations() -> Sequence[Migration]:
    """Return the migrations of this release, oldest first."""
    return _MIGRATIONS


def _read_migrations() -> Sequence[Migration]:
    directory = files("horsies.db").joinpath("migrations")
    names = sorted(entry.name for entry in directory.iterdir() if entry.name.endswith(".sql"))
    return tuple(
        Migration(int(name[:4]), name[5:-4], directory.joinpath(name).read_text("utf-8"))
        for name in names
    )


_MIGRATIONS = _read_migrations()


def pending_migrations(connection: Connection[Any]) -> Sequence[Migration]:
    """Return what this database still lacks; raise SchemaTooNewError when it is ahead of the code."""
    version = _current_version(connection)
    latest = _MIGRATIONS[-1].version
    if version > latest:
        raise SchemaTooNewError(
            f"The database schema is version {version}, but this release of horsies knows only version "
            f"{latest}; upgrade horsies on this machine."
        )
    return tuple(migration for migration in _MIGRATIONS if migration.version > version)


def require_current_schema(connection: Connection[Any]) -> None:
    """Raise unless the tables are those of this release; for processes that change no schema."""
    missing = pending_migrations(connection)
    if len(missing) == len(_MIGRATIONS):
        raise SchemaMissingError(
            "This database has no tables of horsies; create them with `horsies migrate`."
        )
    if missing:
        raise SchemaMissingError(
            "The tables of horsies in this database are older than this release; "
            "bring them up to date with `horsies migrate`."
        )


def apply_migrations(connection: Connection[Any]) -> Sequence[Migration]:
    """Bring the database up to date in one transaction and return what was applied."""
    if not pending_migrations(connection):
        return ()
    is_outermost = connection.info.transaction_status == TransactionStatus.IDLE
    with connection.transaction():
        if is_outermost:
            connection.execute(_ISOLATION)
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK_KEY,))
        connection.execute(_CREATE_RECORD)
        applied = pending_migrations(connection)
        for migration in applied:
            _apply(connection, migration)
    return applied


def _apply(connection: Connection[Any], migration: Migration) -> None:
    connection.execute(migration.sql.encode(), prepare=False)
    connection.execute(
        "INSERT INTO horsies_migrations (version, name) VALUES (%s, %s)",
        (migration.version, migration.name),
    )


def migration_script(migrations: Sequence[Migration]) -> str:
    """Return the SQL that applies these migrations by hand, the record included."""
    steps = [
        f"-- {migration.version:04d} {migration.name}\n{migration.sql.strip()}\n"
        f"INSERT INTO horsies_migrations (version, name) VALUES ({migration.version}, '{migration.name}');\n"
        for migration in migrations
    ]
    lock = f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK_KEY});"
    return "\n".join(
        ["BEGIN;", f"{_ISOLATION};", lock, f"{_CREATE_RECORD.strip()};\n", *steps, "COMMIT;\n"]
    )


def _current_version(connection: Connection[Any]) -> int:
    row = connection.execute("SELECT to_regclass('horsies_migrations') IS NOT NULL").fetchone()
    if row is None or not row[0]:
        return 0
    found = connection.execute(
        "SELECT coalesce(max(version), 0) FROM horsies_migrations"
    ).fetchone()
    return int(found[0]) if found else 0
