"""Schema migrations: numbered SQL files and replaceable function files, under one advisory lock.

The first use of a database by any process brings it up to date; twenty processes starting at once
take turns on the lock and the later nineteen find nothing to do.

Files in ``migrations`` create and change tables. Each is applied once, in order, forward only. Files
in ``functions`` only replace functions and triggers. They are applied after the migrations, each one
when its digest differs from the recorded one, all of them after a new migration. A migration may
therefore drop a function that a release renames, or whose parameters it changes.

The version of the schema is the number of the last migration. A release that changes a function file
also brings a migration, if only one with a comment, so the version rises with every change. A
database whose version is higher than the code's is refused before digests are compared: an older
release never replaces the functions of a newer one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any, Literal, TypeAlias

from psycopg import Connection
from psycopg.pq import TransactionStatus

# A constant, not a hash of the URL: two spellings of one database must exclude each other, and
# advisory locks are per database anyway.
MIGRATION_LOCK_KEY = 0x686F727369657301

_CREATE_RECORD = """
CREATE TABLE IF NOT EXISTS horsies_migrations (
    kind text NOT NULL DEFAULT 'migration' CHECK (kind IN ('migration', 'function')),
    version integer NOT NULL, name text NOT NULL, sha text NOT NULL DEFAULT '',
    applied_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (kind, version))
"""

_RECORD = """
INSERT INTO horsies_migrations (kind, version, name, sha) VALUES ('{kind}', {version}, '{name}', '{sha}')
ON CONFLICT (kind, version) DO UPDATE SET name = EXCLUDED.name, sha = EXCLUDED.sha, applied_at = now()
"""

_RECORD_COLUMNS = """
SELECT attname FROM pg_attribute
WHERE attrelid = to_regclass('horsies_migrations') AND attnum > 0 AND NOT attisdropped
"""

# A process that waited for the lock must see the changes its holder committed, also where the
# database's default is a stricter level with one snapshot for the whole transaction.
_ISOLATION = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


Kind: TypeAlias = Literal["migration", "function"]


@dataclass(frozen=True, slots=True)
class Migration:
    """One SQL file of the schema; the version of a function file is its place in their order."""

    version: int
    name: str
    sql: str
    kind: Kind = "migration"

    @property
    def title(self) -> str:
        """The file as messages name it."""
        number = f"{self.version:04d} " if self.kind == "migration" else "functions "
        return number + self.name

    @property
    def record(self) -> str:
        """The statement that records this file as applied."""
        values = {"kind": self.kind, "version": self.version, "name": self.name, "sha": self.sha}
        return _RECORD.strip().format_map(values)

    @property
    def sha(self) -> str:
        """The digest that tells whether a function file has changed."""
        return sha256(self.sql.encode()).hexdigest()


class UnusableSchemaError(Exception):
    """The tables were made by a newer release than this one, or by another program."""


class SchemaMissingError(Exception):
    """The tables are not there, or older than this release, and the process must not change them."""


def known_migrations() -> Sequence[Migration]:
    """Return the files of this release in the order of their application, functions last."""
    return (*_MIGRATIONS, *_FUNCTIONS)


def schema_version() -> int:
    """Return the schema version of this release."""
    return _MIGRATIONS[-1].version


def _read_files(folder: str, kind: Kind) -> tuple[Migration, ...]:
    directory = files("horsies.db").joinpath(folder)
    names = sorted(entry.name for entry in directory.iterdir() if entry.name.endswith(".sql"))
    parted = [(name, *name.removesuffix(".sql").split("_", 1)) for name in names]
    return tuple(
        Migration(int(number), title, directory.joinpath(name).read_text("utf-8"), kind)
        for name, number, title in parted
    )


_MIGRATIONS = _read_files("migrations", "migration")
_FUNCTIONS = _read_files("functions", "function")


def pending_migrations(connection: Connection[Any]) -> Sequence[Migration]:
    """Return the files this database lacks; raise UnusableSchemaError when it is ahead of the code."""
    recorded = _recorded(connection)
    version = max((number for kind, number in recorded if kind == "migration"), default=0)
    if version > schema_version():
        raise UnusableSchemaError(
            f"The database schema is version {version}, but this release of horsies supports only version "
            f"{schema_version()}; upgrade horsies on this machine."
        )
    missing = tuple(migration for migration in _MIGRATIONS if migration.version > version)
    changed = (
        function
        for function in _FUNCTIONS
        if missing or recorded.get((function.kind, function.version)) != function.sha
    )
    return (*missing, *changed)


def require_current_schema(connection: Connection[Any]) -> None:
    """Raise unless the tables are those of this release; for processes that change no schema."""
    missing = pending_migrations(connection)
    if len(missing) == len(known_migrations()):
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
    connection.execute(migration.record.encode(), prepare=False)


def migration_script(migrations: Sequence[Migration]) -> str:
    """Return the SQL that applies these migrations by hand, the record included."""
    steps = [
        f"-- {migration.title}\n{migration.sql.strip()}\n{migration.record};\n"
        for migration in migrations
    ]
    lock = f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK_KEY});"
    return "\n".join(
        ["BEGIN;", f"{_ISOLATION};", lock, f"{_CREATE_RECORD.strip()};\n", *steps, "COMMIT;\n"]
    )


def _recorded(connection: Connection[Any]) -> Mapping[tuple[str, int], str]:
    columns = {name for (name,) in connection.execute(_RECORD_COLUMNS)}
    if not columns:
        return {}
    if not columns >= {"kind", "version", "sha"}:
        raise UnusableSchemaError(
            "The table horsies_migrations in this database was made by another program or by a development "
            "version of horsies; use another database, or drop its horsies_* tables."
        )
    found = connection.execute("SELECT kind, version, sha FROM horsies_migrations").fetchall()
    return {(kind, version): sha for kind, version, sha in found}
