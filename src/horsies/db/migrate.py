"""Schema migrations: numbered SQL files and replaceable function files, under one advisory lock.

The first process that uses a database brings its schema up to date. If twenty processes start at the same
time, they wait for the lock one after another, and all but the first find nothing to do.

Files in ``migrations`` create and change tables. Each migration is applied once, in order, and never undone.
Files in ``functions`` only replace functions and triggers; all these files are applied after a new migration.
So if a release renames a function or changes its parameters, the migration can simply drop the old one.

The schema version is the number of the last migration. A release that changes a function file also adds a
migration, even if it only contains a comment, so the version rises with every change. If the functions
differ although the version is the same, only ``horsies migrate`` replaces them. Otherwise, the processes
of two releases would replace each other's functions again and again.

An older release never changes a newer schema. It can work with a newer schema that declares the older
release compatible, because migrations only add objects, and functions that statements call keep their
names and parameters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Literal, TypeAlias, TypeVar

import psycopg
from psycopg import Connection, sql
from psycopg.errors import InsufficientPrivilege, LockNotAvailable
from psycopg.pq import TransactionStatus

from horsies.database_url import DEFAULT_SCHEMA
from horsies.db.database import Database, installation_of
from horsies.db.errors import describe
from horsies.db.schema import (
    MIGRATIONS_TABLE,
    QUALIFYING_RULES,
    SAFE_SEARCH_PATH,
    in_schema,
    lock_key,
    object_names,
    sql_files,
)

logger = logging.getLogger("horsies.schema")

# The key is a constant, not a hash of the URL: processes with two spellings of the same database URL must
# exclude each other, and advisory locks are per database anyway.
MIGRATION_LOCK_KEY = 0x686F727369657301
# The oldest schema version whose release works with this release's tables and functions.
OLDEST_COMPATIBLE = 1
# While a migration waits for a table, all later statements on that table wait behind it.
LOCK_TIMEOUT_MS = 2_000
RETRY_SECONDS = 0.5
PATIENCE_SECONDS = 60.0

_CREATE_RECORD = """
CREATE TABLE IF NOT EXISTS horsies_migrations (
    kind text NOT NULL DEFAULT 'migration' CHECK (kind IN ('migration', 'function')),
    version integer NOT NULL, name text NOT NULL, sha text NOT NULL DEFAULT '',
    applied_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (kind, version));
-- The oldest schema version whose release works with the schema after this migration.
ALTER TABLE horsies_migrations ADD COLUMN IF NOT EXISTS oldest_compatible integer
""".strip()

_RECORD = """
INSERT INTO horsies_migrations (kind, version, name, sha, oldest_compatible)
VALUES ('{kind}', {version}, '{name}', '{sha}', {oldest_compatible})
ON CONFLICT (kind, version) DO UPDATE SET
    name = EXCLUDED.name, sha = EXCLUDED.sha, applied_at = now(),
    oldest_compatible = EXCLUDED.oldest_compatible
""".strip()

_RECORD_COLUMNS = """
SELECT attname FROM pg_catalog.pg_attribute
WHERE attrelid = pg_catalog.to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""

# The row is read as JSON, because a schema of version 1 lacks the last column.
_READ_RECORD = """
SELECT kind, version, name, sha, (to_jsonb(record) ->> 'oldest_compatible')::integer
FROM horsies_migrations AS record
"""

_FIND_TABLE = """
SELECT relname FROM pg_catalog.pg_class
WHERE relnamespace = pg_catalog.to_regnamespace(%s) AND relname = ANY(%s)
ORDER BY relname LIMIT 1
"""

_IS_HIDDEN = "SELECT pg_catalog.row_security_active(pg_catalog.to_regclass(%s)::oid)"

_FIND_BLOCKERS = """
SELECT DISTINCT held.pid, activity.usename, activity.application_name, activity.state, activity.xact_start
FROM pg_catalog.pg_locks AS held JOIN pg_catalog.pg_stat_activity AS activity ON activity.pid = held.pid
LEFT JOIN pg_catalog.pg_class AS locked ON locked.oid = held.relation
WHERE held.granted AND held.pid <> pg_backend_pid()
  AND held.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
  AND ((locked.relnamespace = to_regnamespace(%(schema)s) AND locked.relname LIKE 'horsies\\_%%')
       OR (held.locktype = 'advisory' AND held.classid::bigint << 32 | held.objid::bigint = %(key)s))
ORDER BY activity.xact_start LIMIT 5
"""

# A process that waited for the lock must see the changes that the previous holder committed, even if the
# database defaults to a stricter isolation level with one snapshot per transaction.
_ISOLATION = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_PATH = f"SET LOCAL search_path = {SAFE_SEARCH_PATH}"
_LOCK_TIMEOUT = f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"


Kind: TypeAlias = Literal["migration", "function"]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Migration:
    """One SQL file of the schema. A function file's version is its position among the function files."""

    version: int
    name: str
    sql: str
    kind: Kind = "migration"

    @property
    def title(self) -> str:
        """The file's name in messages."""
        number = f"{self.version:04d} " if self.kind == "migration" else "functions "
        return number + self.name

    @property
    def record(self) -> str:
        """The statement that records this file as applied."""
        return _RECORD.format(
            kind=self.kind,
            version=self.version,
            name=self.name,
            sha=self.sha,
            oldest_compatible=OLDEST_COMPATIBLE,
        )

    @property
    def sha(self) -> str:
        """The digest of a function file and of the rules that qualify its names. Every process compares these
        digests when it starts. The digest covers the unqualified text, because qualifying all texts took 40
        ms.
        """
        return sha256(f"{QUALIFYING_RULES}{self.sql}".encode()).hexdigest()


class UnusableSchemaError(Exception):
    """The schema belongs to another program or to a release that is incompatible with this one, or it
    cannot be created.
    """


class SchemaBusyError(psycopg.OperationalError):
    """Other sessions held locks on the tables for longer than a migration waits."""


class SchemaMissingError(UnusableSchemaError):
    """The tables are missing or older than this release, and this process may not change them."""


def known_migrations() -> Sequence[Migration]:
    """Return this release's files in the order in which they are applied, functions last."""
    return (*_MIGRATIONS, *_FUNCTIONS)


def schema_version() -> int:
    """Return this release's schema version."""
    return _MIGRATIONS[-1].version


def _read_files(folder: str, kind: Kind) -> tuple[Migration, ...]:
    parted = [
        (*name.removesuffix(".sql").split("_", 1), text) for name, text in sql_files(folder).items()
    ]
    return tuple(Migration(int(number), title, text, kind) for number, title, text in parted)


_MIGRATIONS = _read_files("migrations", "migration")
_FUNCTIONS = _read_files("functions", "function")


@dataclass(frozen=True, slots=True)
class _Record:
    """A schema's applied files, and whether older releases can work with it."""

    digests: Mapping[tuple[str, int], str]
    # The applied migrations by version.
    names: Mapping[int, str]
    oldest_compatible: int | None = None

    @property
    def version(self) -> int:
        return max(self.names, default=0)


def prepare_schema(database: Database) -> None:
    """Bring the schema up to date, or raise an error if it is outdated and this process may not change it."""
    with database.connect("schema", session=True) as connection:
        record = (
            _patiently(connection, partial(_read_record, connection))
            if database.limits is None
            else _read_record(connection)
        )
        if _pending(record):
            (apply_migrations if database.migrates else require_current_schema)(connection)
        elif _pending(record, replaces=True):
            logger.warning(
                "the functions in the database differ from those of this release, although the schema "
                "version %d is the same; `horsies migrate` replaces them",
                record.version,
            )


def pending_migrations(
    connection: Connection[Any], *, replaces: bool = False
) -> Sequence[Migration]:
    """Return the files that this database lacks and, with ``replaces``, the functions that differ.

    Raises UnusableSchemaError if this release cannot work with the database.
    """
    return _pending(_read_record(connection), replaces=replaces)


def missing_migrations(applied: Iterable[int]) -> tuple[Migration, ...]:
    """Return this release's migrations that are not among the applied versions.

    A version below the highest applied one may be missing, because a development branch can apply its
    migrations out of order. So the highest number alone does not show that all lower ones were applied.
    """
    versions = set(applied)
    return tuple(one for one in _MIGRATIONS if one.version not in versions)


def _pending(record: _Record, *, replaces: bool = False) -> Sequence[Migration]:
    _refuse_renamed(record)
    missing = missing_migrations(record.names)
    if record.version > schema_version():
        _refuse_incompatible(record)
        _refuse_holes(record, missing)
        return ()
    functions = (
        function
        for function in _FUNCTIONS
        if missing
        or (function.kind, function.version) not in record.digests
        or (replaces and record.digests[function.kind, function.version] != function.sha)
    )
    return (*missing, *functions)


def _refuse_renamed(record: _Record) -> None:
    """Reject a database in which this version number belongs to a different migration: one from a branch that
    was renumbered when it was merged.
    """
    for one in _MIGRATIONS:
        name = record.names.get(one.version, one.name)
        if name != one.name:
            raise UnusableSchemaError(
                f"Migration {one.version:04d} of this database is {name!r}, but {one.name!r} in this "
                "release: the tables were made by a development version of horsies; use another "
                "database or schema, or drop its horsies_* tables."
            )


def _refuse_holes(record: _Record, missing: Sequence[Migration]) -> None:
    """Raise an error if the database is newer than this release but lacks migrations: applying them would
    replace newer functions with older ones.
    """
    if missing:
        raise SchemaMissingError(
            f"The database schema is version {record.version}, newer than this release of horsies, but "
            f"lacks {_titles(missing)}; run `horsies migrate` from the newer release."
        )


def _titles(missing: Sequence[Migration]) -> str:
    """Return the names of the first five migrations, for a message."""
    names = ", ".join(one.title for one in missing[:5])
    return f"migration {names}" + (", ..." if len(missing) > 5 else "")


def _refuse_incompatible(record: _Record) -> None:
    oldest = record.oldest_compatible
    if oldest is None or schema_version() < oldest:
        raise UnusableSchemaError(
            f"The database schema is version {record.version}, but this release of horsies supports "
            f"only version {schema_version()}; upgrade horsies on this machine."
        )


def require_current_schema(connection: Connection[Any]) -> None:
    """Raise an error unless the tables match this release. For processes that may not change the schema."""
    record = _read_record(connection)
    missing = _pending(record)
    if len(missing) == len(known_migrations()):
        raise SchemaMissingError(
            f"The schema {installation_of(connection).schema} of this database has no tables of horsies; "
            "create them with `horsies migrate`."
        )
    if holes := [one for one in missing_migrations(record.names) if one.version < record.version]:
        raise SchemaMissingError(
            f"The schema of this database is version {record.version}, but lacks {_titles(holes)}; "
            "apply it with `horsies migrate`."
        )
    if missing:
        raise SchemaMissingError(
            "The tables of horsies in this database are older than this release; "
            "bring them up to date with `horsies migrate`."
        )


def apply_migrations(connection: Connection[Any], *, replaces: bool = False) -> Sequence[Migration]:
    """Bring the database up to date in one transaction and return what was applied. If the connection is
    already in a transaction, that transaction stays open.
    """
    if not _patiently(connection, partial(pending_migrations, connection, replaces=replaces)):
        return ()
    return _patiently(connection, partial(_apply_pending, connection, replaces))


def _patiently(connection: Connection[Any], act: Callable[[], Value]) -> Value:
    """Call ``act`` in its own transaction, and repeat it while another session's lock blocks it. The wait is
    split into short attempts, so that other sessions can work in between. The first failed attempt logs which
    session holds the lock.
    """
    if not connection.autocommit or connection.info.transaction_status != TransactionStatus.IDLE:
        return act()
    deadline = time.monotonic() + PATIENCE_SECONDS
    is_first = True
    while True:
        try:
            with connection.transaction():
                connection.execute(f"{_ISOLATION}; {_LOCK_TIMEOUT}".encode())
                return act()
        except LockNotAvailable as error:
            sessions = _describe_blockers(connection)
            if time.monotonic() >= deadline:
                raise SchemaBusyError(
                    f"The tables of horsies cannot be read or migrated: for {PATIENCE_SECONDS:g} s other "
                    f"sessions held locks on them, now {sessions}"
                ) from error
            if is_first:
                logger.warning("waiting for locks on the tables of horsies, held by %s", sessions)
        is_first = False
        time.sleep(RETRY_SECONDS)


def _apply_pending(connection: Connection[Any], replaces: bool) -> Sequence[Migration]:
    schema = installation_of(connection).schema
    connection.execute(_PATH.encode())
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_migration_lock(schema),))
    record = _read_record(connection)
    pending = _pending(record, replaces=replaces)
    if pending:
        _create_schema(connection, schema)
        _execute(connection, _CREATE_RECORD, schema)
    for file in pending:
        try:
            _execute(connection, file.sql, schema)
        except psycopg.Error as error:
            is_hole = file.kind == "migration" and file.version < record.version
            if isinstance(error, LockNotAvailable) or not is_hole:
                raise
            raise UnusableSchemaError(
                f"Migration {file.title} is missing below version {record.version} of this database and "
                f"cannot be applied after the later ones. {describe(error)} Restore a backup, or use another "
                "database or schema."
            ) from error
        _execute(connection, file.record, schema)
    return pending


def _execute(connection: Connection[Any], text: str, schema: str) -> None:
    connection.execute(in_schema(text, schema).encode(), prepare=False)


def _migration_lock(schema: str) -> int:
    return lock_key(schema, MIGRATION_LOCK_KEY, bits=63)


def _create_schema(connection: Connection[Any], schema: str) -> None:
    known = connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", (schema,))
    if known.fetchone() is not None:
        return
    try:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    except InsufficientPrivilege as error:
        raise UnusableSchemaError(
            f"The schema {schema} does not exist and this role may not create it; run CREATE SCHEMA "
            f"{schema} AUTHORIZATION {connection.info.user} as an administrator of the database."
        ) from error


def _describe_blockers(connection: Connection[Any]) -> str:
    """Return a text that names the blocking sessions, oldest first, and explains how to end the oldest."""
    schema = installation_of(connection).schema
    found = connection.execute(
        _FIND_BLOCKERS, {"schema": schema, "key": _migration_lock(schema)}
    ).fetchall()
    sessions = [
        f"pid {pid} (user {user}, {name or 'no application name'}, {state or 'unknown state'}"
        + (f", in a transaction since {since:%Y-%m-%d %H:%M:%S %Z})" if since else ")")
        for pid, user, name, state, since in found
    ]
    if not sessions:
        return "none; try again later."
    end = f"SELECT pg_terminate_backend({found[0][0]})"
    return (
        f"{', '.join(sessions)}; end their transactions, the oldest with {end}, or try again later."
    )


def migration_script(migrations: Sequence[Migration], schema: str = DEFAULT_SCHEMA) -> str:
    """Return the SQL that applies these migrations manually and records them."""
    steps = [
        f"-- {migration.title}\n{migration.sql.strip()}\n{migration.record};\n"
        for migration in migrations
    ]
    lock = f"SELECT pg_advisory_xact_lock({_migration_lock(schema)});"
    creates = [] if schema == DEFAULT_SCHEMA else [f'CREATE SCHEMA IF NOT EXISTS "{schema}";']
    texts = [in_schema(text, schema) for text in (f"{_CREATE_RECORD};\n", *steps)]
    return "\n".join(["BEGIN;", f"{_ISOLATION};", f"{_PATH};", lock, *creates, *texts, "COMMIT;\n"])


def _read_record(connection: Connection[Any]) -> _Record:
    schema = installation_of(connection).schema
    found = _recorded(connection, schema)
    if not found:
        tables = sorted(object_names() - {MIGRATIONS_TABLE})
        for (relation,) in connection.execute(_FIND_TABLE, (schema, tables)):
            # Another process may have migrated the schema between the two statements; the record of
            # migrations is created together with the tables.
            found = _recorded(connection, schema)
            if not found:
                raise foreign_table(relation)
    migrations = {version: row for kind, version, *row in found if kind == "migration"}
    names: dict[int, str] = {version: name for version, (name, _, _) in migrations.items()}
    oldest = migrations[max(names)][2] if names else None
    return _Record({(kind, version): sha for kind, version, _, sha, _ in found}, names, oldest)


def _recorded(connection: Connection[Any], schema: str) -> list[tuple[Any, ...]]:
    """Return the rows of the migration record; no rows if the record does not exist or contains no
    migration.
    """
    table = in_schema(MIGRATIONS_TABLE, schema)
    columns = {name for (name,) in connection.execute(_RECORD_COLUMNS, (table,))}
    if columns and not columns >= {"kind", "version", "name", "sha"}:
        raise foreign_table(MIGRATIONS_TABLE)
    rows = (
        connection.execute(in_schema(_READ_RECORD, schema).encode()).fetchall() if columns else []
    )
    if columns and not rows and connection.execute(_IS_HIDDEN, (table,)).fetchone() == (True,):
        raise UnusableSchemaError(
            f"Row-level security hides the rows of {MIGRATIONS_TABLE} from this role; create a policy that "
            "shows them, on every table of Horsies."
        )
    return rows if any(kind == "migration" for kind, *_ in rows) else []


def foreign_table(table: str) -> UnusableSchemaError:
    """Return the error for a schema that has a table of our names but no migration record."""
    return UnusableSchemaError(
        f"The table {table} in this database was made by another program, such as the horsies 0.5.4 of the "
        "public package index, or by a development version; use another database or schema, or drop its "
        "horsies_* tables."
    )
