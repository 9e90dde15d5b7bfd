"""Migrations: many starters, one schema; a newer one is refused; nothing is touched when current.

Function files are replaced when they change, and never by an older release.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import Connection, sql

from horsies.config.postgres import PostgresConfig
from horsies.db import migrate
from horsies.db.database import Database
from horsies.db.errors import is_transient
from horsies.db.migrate import (
    Migration,
    SchemaMissingError,
    UnusableSchemaError,
    apply_migrations,
    known_migrations,
    migration_script,
    pending_migrations,
    prepare_schema,
    require_current_schema,
    schema_version,
)
from horsies.tasks.broker import BrokerErrorCode, PostgresBroker
from tests.support.migrations import additions, apply_all_but, catalogue, following, misplaced
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


def recorded(connection: Connection[Any]) -> list[tuple[str, int, str, str]]:
    return connection.execute(
        "SELECT kind, version, name, sha FROM horsies_migrations ORDER BY kind DESC, version"
    ).fetchall()


def expected_record() -> list[tuple[str, int, str, str]]:
    return [(file.kind, file.version, file.name, file.sha) for file in known_migrations()]


# Schema version of every release, and the digest of its function files. Add a line with each
# release; a function file that changes afterwards needs a new migration, if only with a comment.
RELEASED: dict[int, str] = {}

FUNCTION = "CREATE OR REPLACE FUNCTION public.horsies_answer() RETURNS integer LANGUAGE sql AS 'SELECT {}';"


def functions_digest() -> str:
    return sha256("".join(file.sha for file in functions()).encode()).hexdigest()


def functions() -> list[Migration]:
    return [file for file in known_migrations() if file.kind == "function"]


def answer_file(number: int) -> Migration:
    return Migration(99, "answer", FUNCTION.format(number), "function")


def answer(connection: Connection[Any]) -> int:
    row = connection.execute("SELECT horsies_answer()").fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def release(
    monkeypatch: pytest.MonkeyPatch, *, number: int | None = None, more: Sequence[Migration] = ()
) -> Iterator[None]:
    """Another release: with its own function, with more migrations."""
    with monkeypatch.context() as patched:
        if number is not None:
            patched.setattr(migrate, "_FUNCTIONS", (*functions(), answer_file(number)))
        patched.setattr(migrate, "_MIGRATIONS", (*migrate._MIGRATIONS, *more))
        yield


def later(sql: str = "SELECT 1;") -> Migration:
    return Migration(schema_version() + 1, "later", sql)


@pytest.fixture
def empty(database_url: str) -> Iterator[Connection[Any]]:
    """A connection to a separate database without any tables."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@contextmanager
def role(connection: Connection[Any], *grants: str) -> Iterator[str]:
    """Create a role with only the rights granted here."""
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
    versions = [file.version for file in known_migrations() if file.kind == "migration"]
    assert versions == list(range(1, len(versions) + 1))
    assert schema_version() == len(versions)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (["0001_a.sql", "0002_b.sql"], []),
        (["0001_a.sql", "0002_b.sql", "0003_c.sql", "0004_d.sql"], []),
        (["0001_a.sql", "0002_b.sql", "0002_c.sql"], ["0002_c.sql"]),
        (["0001_a.sql", "0001_c.sql", "0002_b.sql", "0003_d.sql"], ["0001_c.sql"]),
    ],
)
def test_a_migration_is_misplaced_unless_it_comes_after_all_others(
    after: list[str], expected: list[str]
) -> None:
    assert misplaced(["0001_a.sql", "0002_b.sql"], after) == expected


def test_no_commit_adds_a_migration_below_the_highest_number() -> None:
    # A database that was migrated before the commit has later migrations already.
    found = {
        commit: names
        for commit, before, after in additions()
        if (names := misplaced(before, after))
    }
    assert found == {}, "give them the next free numbers"


def test_function_files_have_numbers_of_their_own_and_only_replace() -> None:
    numbers = [file.version for file in functions()]
    assert numbers == sorted(set(numbers))
    for file in functions():
        statements = re.findall(r"^[A-Z][A-Z ]+(?=\s)", file.sql, re.MULTILINE)
        openings = [words for words in statements if words.startswith(("CREATE", "ALTER", "DROP"))]
        assert set(openings) <= {"CREATE OR REPLACE FUNCTION", "CREATE OR REPLACE TRIGGER"}


def test_every_function_is_defined_once() -> None:
    names = [
        name
        for file in known_migrations()
        for name in re.findall(r"FUNCTION (horsies_\w+)\s*\(", file.sql)
        if f"EXECUTE FUNCTION {name}" not in file.sql
    ]
    assert sorted(names) == sorted(set(names))


def test_functions_do_not_change_under_a_released_schema_version() -> None:
    assert RELEASED.get(schema_version(), functions_digest()) == functions_digest()


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


def test_a_database_without_tables_is_reported_with_its_schema(database_url: str) -> None:
    config = PostgresConfig(database_url=database_url, schema="shop")
    error = PostgresBroker(config, migrates=False).ensure_schema_initialized().unwrap_err()
    assert "The schema shop of this database has no tables of horsies" in error.message


def test_a_database_that_lags_behind_gets_the_new_migration_and_all_functions(
    empty: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_migrations(empty)
    new = later("CREATE TABLE public.horsies_later (id integer);")
    with release(monkeypatch, more=[new]):
        assert list(apply_migrations(empty)) == [new, *functions()]
        assert recorded(empty) == expected_record()
        assert list(apply_migrations(empty)) == []


def test_a_function_file_that_the_database_lacks_is_applied_alone_and_once(
    empty: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_migrations(empty)
    with release(monkeypatch, number=1):
        with pytest.raises(SchemaMissingError, match="older than this release"):
            require_current_schema(empty)
        assert list(apply_migrations(empty)) == [answer_file(1)]
        assert list(apply_migrations(empty)) == []
        require_current_schema(empty)
        assert recorded(empty) == expected_record()
    assert answer(empty) == 1


def test_functions_of_the_same_version_are_replaced_by_request_alone(
    empty: Connection[Any],
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with release(monkeypatch, number=1):
        apply_migrations(empty)
    with release(monkeypatch, number=2):
        for _ in range(2):
            prepare_schema(Database(PostgresConfig(database_url=database_url)))
        assert answer(empty) == 1
        assert caplog.text.count("`horsies migrate` replaces them") == 2
        assert list(apply_migrations(empty, replaces=True)) == [answer_file(2)]
        assert list(apply_migrations(empty, replaces=True)) == []
    assert answer(empty) == 2


@pytest.mark.parametrize("migrates", [True, False])
def test_an_older_release_works_on_a_newer_schema_and_leaves_its_functions_alone(
    empty: Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch, migrates: bool
) -> None:
    with release(monkeypatch, number=2, more=[later()]):
        apply_migrations(empty)
    with release(monkeypatch, number=1):
        prepare_schema(Database(PostgresConfig(database_url=database_url), migrates=migrates))
        assert list(apply_migrations(empty, replaces=True)) == []
    assert answer(empty) == 2


def test_a_newer_schema_that_ends_the_compatibility_is_refused(
    empty: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with release(monkeypatch, number=2, more=[later()]):
        monkeypatch.setattr(migrate, "OLDEST_COMPATIBLE", schema_version())
        apply_migrations(empty)
    with (
        release(monkeypatch, number=1),
        pytest.raises(UnusableSchemaError, match="upgrade horsies"),
    ):
        apply_migrations(empty)
    assert answer(empty) == 2


def test_a_migration_may_drop_a_function_whose_parameters_change(
    empty: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with release(monkeypatch, number=1):
        apply_migrations(empty)
    drop = later("DROP FUNCTION public.horsies_answer();")
    with release(monkeypatch, number=1, more=[drop]):
        assert answer_file(1) in apply_migrations(empty)  # unchanged, but applied again
    assert answer(empty) == 1


def test_a_migration_that_fails_leaves_nothing_behind(
    empty: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = later("CREATE TABLE public.a (b nonsense)")
    with release(monkeypatch, more=[broken]), pytest.raises(psycopg.errors.UndefinedObject):
        apply_migrations(empty)
    assert catalogue(empty) == []
    assert list(apply_migrations(empty)) == list(known_migrations())


def test_a_newer_schema_is_refused_with_both_versions_and_the_remedy(
    empty: Connection[Any],
) -> None:
    apply_migrations(empty)
    empty.execute("INSERT INTO horsies_migrations (version, name) VALUES (999, 'tomorrow')")
    with pytest.raises(UnusableSchemaError) as caught:
        apply_migrations(empty)
    assert str(caught.value) == (
        f"The database schema is version 999, but this release of horsies supports only version "
        f"{schema_version()}; upgrade horsies on this machine."
    )


def test_a_record_of_another_layout_is_refused_in_one_sentence(empty: Connection[Any]) -> None:
    empty.execute("CREATE TABLE horsies_migrations (version integer PRIMARY KEY, name text)")
    with pytest.raises(UnusableSchemaError) as caught:
        apply_migrations(empty)
    assert str(caught.value) == (
        "The table horsies_migrations in this database was made by another program, such as the horsies "
        "0.5.4 of the public package index, or by a development version; use another database or schema, "
        "or drop its horsies_* tables."
    )


def test_a_table_of_another_program_is_refused_in_one_sentence(empty: Connection[Any]) -> None:
    empty.execute("CREATE TABLE horsies_tasks (id integer)")
    for attempt in (apply_migrations, require_current_schema):
        with pytest.raises(
            UnusableSchemaError, match="The table horsies_tasks in this database was"
        ):
            attempt(empty)
    assert [name for kind, name, _ in catalogue(empty) if kind == "table"] == ["horsies_tasks"]


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


HOLE, NEWEST = following()
HOLE_NAMED = f"{HOLE.version:04d} colours"


@pytest.fixture
def holed(empty: Connection[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection[Any]]:
    """A database of a release with two more migrations, which has the second one alone."""
    apply_all_but(empty, HOLE)
    with release(monkeypatch, more=[HOLE, NEWEST]):
        yield empty


def test_a_migration_that_is_missing_below_the_highest_is_applied(
    holed: Connection[Any], process_url: str
) -> None:
    assert list(pending_migrations(holed)) == [HOLE, *functions()]
    assert list(apply_migrations(holed)) == [HOLE, *functions()]
    assert recorded(holed) == expected_record()
    assert list(apply_migrations(holed)) == []
    with psycopg.connect(process_url) as migrated:
        added = set(catalogue(holed)) - set(catalogue(migrated))
    assert {name for kind, name, _ in added if kind == "table"} == {
        "horsies_colours",
        "horsies_shapes",
    }


def test_a_process_that_does_not_migrate_names_the_missing_migration(
    holed: Connection[Any], database_url: str
) -> None:
    with pytest.raises(SchemaMissingError, match=f"lacks migration {HOLE_NAMED}; apply it with"):
        require_current_schema(holed)
    config = PostgresConfig(database_url=database_url)
    with pytest.raises(SchemaMissingError, match=HOLE_NAMED):
        prepare_schema(Database(config, migrates=False))
    prepare_schema(Database(config))
    assert recorded(holed) == expected_record()


def test_a_missing_migration_that_cannot_follow_the_later_ones_is_refused_in_one_sentence(
    holed: Connection[Any],
) -> None:
    holed.execute("CREATE TABLE horsies_colours (id integer)")
    before = catalogue(holed)
    with pytest.raises(UnusableSchemaError) as caught:
        apply_migrations(holed)
    assert str(caught.value).startswith(
        f"Migration {HOLE_NAMED} is missing below version {schema_version()} of this database and cannot"
    )
    assert catalogue(holed) == before


def test_an_older_release_refuses_a_newer_schema_that_lacks_one_of_its_own_migrations(
    empty: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_all_but(empty, HOLE)
    with release(monkeypatch, more=[HOLE]):
        for attempt in (apply_migrations, pending_migrations, require_current_schema):
            with pytest.raises(UnusableSchemaError, match=f"{HOLE_NAMED}.*from the newer release"):
                attempt(empty)


def test_a_newer_release_may_lack_numbers_that_this_one_does_not_have(
    empty: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    far = replace(later(), version=schema_version() + 5)
    with release(monkeypatch, more=[far]):
        apply_migrations(empty)
    require_current_schema(empty)
    assert list(pending_migrations(empty, replaces=True)) == []


def test_a_number_that_names_another_migration_is_refused_in_one_sentence(
    empty: Connection[Any],
) -> None:
    apply_migrations(empty)
    empty.execute("UPDATE horsies_migrations SET name = 'other' WHERE version = 1")
    for attempt in (apply_migrations, pending_migrations, require_current_schema):
        with pytest.raises(UnusableSchemaError) as caught:
            attempt(empty)
        assert str(caught.value).startswith(
            "Migration 0001 of this database is 'other', but 'schema' in this release: the tables "
            "were made by a development version of horsies;"
        )


def test_a_development_version_with_22_migrations_is_refused_in_one_sentence(
    empty: Connection[Any],
) -> None:
    apply_migrations(empty)
    empty.execute("DELETE FROM horsies_migrations")
    empty.execute(
        "INSERT INTO horsies_migrations (version, name, oldest_compatible) "
        "SELECT number, CASE number WHEN 1 THEN 'tables' ELSE 'step_' || number END, 1 "
        "FROM generate_series(1, 22) AS number"
    )
    before = catalogue(empty)
    for attempt in (apply_migrations, pending_migrations, require_current_schema):
        with pytest.raises(UnusableSchemaError) as caught:
            attempt(empty)
        assert str(caught.value) == (
            "Migration 0001 of this database is 'tables', but 'schema' in this release: the tables were "
            "made by a development version of horsies; use another database or schema, or drop its "
            "horsies_* tables."
        )
    assert catalogue(empty) == before


@pytest.mark.parametrize("lags_behind", [False, True])
def test_the_printed_script_makes_the_same_schema(
    empty: Connection[Any], other_url: str, lags_behind: bool
) -> None:
    if lags_behind:
        apply_migrations(empty)
        empty.execute("UPDATE horsies_migrations SET sha = 'old' WHERE name = 'claim'")
        empty.execute("DROP FUNCTION horsies_claim_v1")
    script = migration_script(pending_migrations(empty, replaces=True))
    result = empty.pgconn.exec_(script.encode())  # all of it in one message, as psql -c does
    assert result.error_message == b""
    # Not the database of this process, in which other tests may have left a function.
    with psycopg.connect(other_url) as migrated:
        assert catalogue(empty) == catalogue(migrated)
    assert recorded(empty) == expected_record()
    assert list(pending_migrations(empty, replaces=True)) == []


def test_tables_that_appear_between_two_looks_are_not_taken_for_foreign_ones(
    empty: Connection[Any], database_url: str
) -> None:
    class Late(Connection[Any]):
        def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
            if query == migrate._FIND_TABLE:
                apply_migrations(empty)
            return super().execute(query, params, **options)

    with Late.connect(database_url, autocommit=True) as late:
        assert list(pending_migrations(late)) == []


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
        assert "run `horsies migrate` as the owner of the tables" in error.message
    assert catalogue(empty) == []


def test_a_migration_takes_its_lock_before_it_looks(empty: Connection[Any]) -> None:
    script = migration_script(known_migrations())
    lock = sql.Literal(migrate.MIGRATION_LOCK_KEY).as_string(empty)
    begin, isolation, path, first, *_ = script.splitlines()
    assert begin == "BEGIN;"
    assert path == "SET LOCAL search_path = pg_catalog, pg_temp;"
    assert isolation == "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;"
    assert first == f"SELECT pg_advisory_xact_lock({lock});"


def test_a_migration_gives_way_and_then_names_the_sessions_that_block_it(
    empty: Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_migrations(empty)
    monkeypatch.setattr(migrate, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(migrate, "_LOCK_TIMEOUT", "SET LOCAL lock_timeout = 100")
    change = later("ALTER TABLE public.horsies_tasks ADD COLUMN later integer;")
    with (
        release(monkeypatch, more=[change]),
        psycopg.connect(database_url, application_name="report") as blocker,
    ):
        blocker.execute("SELECT 'secret' FROM horsies_tasks")
        with pytest.raises(migrate.SchemaBusyError) as caught:
            apply_migrations(empty)
        pid = blocker.info.backend_pid
        blocker.rollback()
        assert list(apply_migrations(empty)) == [change, *functions()]
    message = str(caught.value)
    assert (
        f"pid {pid} (user postgres, report, idle in transaction, in a transaction since 2"
        in message
    )
    assert f"the oldest with SELECT pg_terminate_backend({pid})" in message
    assert "secret" not in message
    assert is_transient(caught.value)


def test_a_migration_waits_in_short_turns_for_a_lock_that_is_freed(
    empty: Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_migrations(empty)
    monkeypatch.setattr(migrate, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(migrate, "_LOCK_TIMEOUT", "SET LOCAL lock_timeout = 50")
    change = later("ALTER TABLE public.horsies_tasks ADD COLUMN later integer;")
    applied: list[Migration] = []
    with (
        release(monkeypatch, more=[change]),
        psycopg.connect(database_url) as blocker,
        psycopg.connect(database_url, autocommit=True) as reader,
    ):
        blocker.execute("SELECT FROM horsies_tasks")
        thread = threading.Thread(target=lambda: applied.extend(apply_migrations(empty)))
        thread.start()
        wait_until(lambda: _waits_for_a_table(reader))
        reader.execute("SELECT FROM horsies_tasks")  # behind the migration, for a turn at most
        blocker.rollback()
        thread.join()
    assert applied == [change, *functions()]


@pytest.mark.parametrize("start", [apply_migrations, prepare_schema])
def test_a_start_with_a_locked_record_names_the_holder_and_ends(
    start: Any,
    empty: Connection[Any],
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    apply_migrations(empty)
    monkeypatch.setattr(migrate, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(migrate, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(migrate, "_LOCK_TIMEOUT", "SET LOCAL lock_timeout = 100")
    database = Database(PostgresConfig(database_url=database_url))
    with psycopg.connect(database_url, application_name="report") as blocker:
        blocker.execute("LOCK TABLE horsies_migrations IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(migrate.SchemaBusyError) as caught:
            start(database if start is prepare_schema else empty)
        end = f"pg_terminate_backend({blocker.info.backend_pid})"
    assert end in str(caught.value)
    (waits,) = [one.getMessage() for one in caplog.records if one.name == "horsies.schema"]
    assert waits.startswith("waiting for locks on the tables of horsies, held by pid ")
    assert end in waits


def _waits_for_a_table(connection: Connection[Any]) -> bool:
    found = connection.execute(
        "SELECT FROM pg_locks WHERE NOT granted AND relation = 'horsies_tasks'::regclass "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return found.fetchone() is not None
