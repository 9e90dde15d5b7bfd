"""Names in SQL texts: a schema of one's own, and operators that other roles cannot replace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies import TaskError, TaskResult
from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.database_url import channel_prefix
from horsies.db.database import Database
from horsies.db.listen import Inbox
from horsies.db.migrate import (
    UnusableSchemaError,
    apply_migrations,
    known_migrations,
    migration_script,
    prepare_schema,
)
from horsies.db.schema import in_schema, lock_key, object_names, sql_files
from horsies.db.statements.queues import send_notification
from tests.support.applications import app_at
from tests.support.statements import STATEMENTS
from tests.support.wait import wait_until

SCHEMA = "second"
OURS = "SELECT count(*) FROM pg_class WHERE relname LIKE 'horsies%%' AND relnamespace = %s::regnamespace"
# As any role may define it that can create in a schema of the search_path: it prefers the exact types.
CAPTURE = """
CREATE TABLE captured (by text);
CREATE FUNCTION capture(a text, b varchar) RETURNS text LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.captured VALUES (session_user); RETURN a; END $$;
CREATE OPERATOR || (FUNCTION = capture, LEFTARG = text, RIGHTARG = varchar);
CREATE FUNCTION capture_equal(a varchar, b varchar) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.captured VALUES (session_user); RETURN a::text = b::text; END $$;
CREATE OPERATOR = (FUNCTION = capture_equal, LEFTARG = varchar, RIGHTARG = varchar);
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT id FROM horsies_tasks", 'SELECT id FROM "s".horsies_tasks'),
        ("ORDER BY horsies_tasks.id", 'ORDER BY "s".horsies_tasks.id'),
        ("horsies_start_v1($1)", '"s".horsies_start_v1($1)'),
        ("p_node horsies_workflow_tasks", 'p_node "s".horsies_workflow_tasks'),
        ("DROP INDEX horsies_tasks_claim", 'DROP INDEX "s".horsies_tasks_claim'),
        ("ALTER INDEX IF EXISTS horsies_x", 'ALTER INDEX IF EXISTS "s".horsies_x'),
        ("CREATE INDEX horsies_x ON horsies_tasks", 'CREATE INDEX horsies_x ON "s".horsies_tasks'),
        ("other.horsies_tasks", "other.horsies_tasks"),
        ("my_horsies_tasks", "my_horsies_tasks"),
        ("horsies_tasks_claim", "horsies_tasks_claim"),
        ("'horsies_tasks'", "'horsies_tasks'"),
        ("'it''s horsies_tasks'", "'it''s horsies_tasks'"),
        (r"E'\' horsies_tasks' || horsies_tasks", r"""E'\' horsies_tasks' || "s".horsies_tasks"""),
        ('"horsies_tasks"', '"horsies_tasks"'),
        ("-- horsies_tasks isn't\nhorsies_tasks", '-- horsies_tasks isn\'t\n"s".horsies_tasks'),
        ("/* horsies_tasks */", "/* horsies_tasks */"),
        ("AS $$horsies_tasks$$", 'SET search_path = pg_catalog, pg_temp AS $$"s".horsies_tasks$$'),
    ],
)
def test_names_outside_literals_and_comments_are_qualified(text: str, expected: str) -> None:
    assert in_schema(text, "s") == expected


def test_channels_and_locks_of_the_default_schema_are_the_plain_ones() -> None:
    text = "PERFORM pg_notify('task_done', ''), pg_advisory_xact_lock(1751348595, 0)"
    assert in_schema(text, "public") == text
    other = in_schema(text, SCHEMA)
    assert f"pg_notify('{channel_prefix(SCHEMA)}'::text || 'task_done', '')" in other
    assert f"lock({lock_key(SCHEMA, 1751348595, bits=31)}, 0)" in other
    assert lock_key(SCHEMA, 1751348595, bits=31) != lock_key("third", 1751348595, bits=31)


def test_no_literal_names_an_object() -> None:
    """A literal would keep its plain name: regclass casts and EXECUTE need another way."""
    folders = ("migrations", "functions", "statements")
    texts = {name: text for folder in folders for name, text in sql_files(folder).items()}
    for name, text in texts.items():
        # One pass over comments and literals, because a literal may contain the beginning of a comment.
        for literal in re.findall(r"--[^\n]*|'([^']*)'", text):
            assert not object_names() & set(re.findall(r"\w+", literal)), name


@pytest.fixture
def second(database_url: str) -> Database:
    return Database(PostgresConfig(database_url=database_url, schema=SCHEMA))


@pytest.fixture
def admin(database_url: str) -> Iterator[Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def count(connection: Connection[Any], query: str, *parameters: str) -> int:
    (number,) = connection.execute(query.encode(), parameters).fetchone() or (0,)
    return int(number)


def test_everything_is_created_in_the_schema(second: Database, admin: Connection[Any]) -> None:
    prepare_schema(second)
    assert count(admin, OURS, SCHEMA) > 0
    assert count(admin, OURS, "public") == 0
    prepare_schema(Database(second.config, migrates=False))


def test_the_printed_script_creates_the_schema(second: Database, admin: Connection[Any]) -> None:
    script = migration_script(known_migrations(), SCHEMA)
    assert admin.pgconn.exec_(script.encode()).error_message == b""
    prepare_schema(Database(second.config, migrates=False))


@pytest.mark.parametrize("schema", ["public", SCHEMA])
def test_no_function_depends_on_a_search_path(
    database_url: str, admin: Connection[Any], schema: str
) -> None:
    prepare_schema(Database(PostgresConfig(database_url=database_url, schema=schema)))
    rows = admin.execute(
        "SELECT proname, proconfig, prosqlbody IS NOT NULL FROM pg_proc "
        "WHERE pronamespace = %s::regnamespace",
        (schema,),
    ).fetchall()
    assert {name for name, _, _ in rows} <= object_names()
    assert len(rows) > 50
    for name, settings, is_resolved in rows:
        assert is_resolved or "search_path=pg_catalog, pg_temp" in (settings or ()), name


@pytest.mark.parametrize("schema", ["public", SCHEMA])
def test_every_statement_is_valid_in_any_schema(database_url: str, schema: str) -> None:
    database = Database(PostgresConfig(database_url=database_url, schema=schema))
    prepare_schema(database)
    with database.connect("test") as connection:
        connection.execute("SET search_path = pg_temp")
        for parameter in STATEMENTS:
            statement: Any = parameter.values[0]
            sent = connection.pgconn.prepare(b"", statement.numbered(schema))
            assert sent.error_message == b"", statement.name


def test_a_schema_that_cannot_be_created_is_named_with_the_remedy(
    second: Database, admin: Connection[Any]
) -> None:
    admin.execute("CREATE ROLE horsies_newcomer")
    try:
        with second.connect("schema", session=True) as connection:
            connection.execute("SET ROLE horsies_newcomer")
            with pytest.raises(UnusableSchemaError, match="CREATE SCHEMA second AUTHORIZATION"):
                apply_migrations(connection)
    finally:
        admin.execute("DROP ROLE horsies_newcomer")


@pytest.mark.parametrize("in_transaction", [False, True])
def test_operators_of_other_roles_are_not_used(
    database_url: str, admin: Connection[Any], in_transaction: bool
) -> None:
    app = app_at(database_url)

    @app.task("add")
    def add(a: int, b: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    assert app.get_broker().ensure_schema_initialized().is_ok()
    admin.execute(CAPTURE.encode())
    with psycopg.connect(database_url) as caller:
        transaction = caller if in_transaction else None
        sender = add.with_options(transaction=transaction)
        sent = sender.send(1, 2).unwrap()
        keyed = add.with_options(transaction=transaction, idempotency_key="k")
        assert keyed.send(1, 2).unwrap().task_id == keyed.send(1, 2).unwrap().task_id
        sender.schedule(1, 1, 2).unwrap()
        sender.send_many([add.bind(1, 2), add.bind(3, 4)]).unwrap()
    admin.execute("UPDATE horsies_tasks SET status = 'FAILED' WHERE id = %s", (sent.task_id,))
    app.close()
    assert admin.execute("SELECT by FROM captured").fetchall() == []


def test_a_send_in_a_transaction_needs_no_search_path(
    second: Database, admin: Connection[Any], database_url: str
) -> None:
    app = Horsies(AppConfig(broker=second.config))

    @app.task("add")
    def add(a: int, b: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    with psycopg.connect(database_url, options="-c search_path=pg_catalog") as caller:
        add.with_options(transaction=caller).send(1, 2).unwrap()
    app.close()
    assert count(admin, f"SELECT count(*) FROM {SCHEMA}.horsies_tasks") == 1


def test_notifications_of_one_schema_do_not_reach_another(
    second: Database, database_url: str
) -> None:
    first = Database(PostgresConfig(database_url=database_url))
    boxes = {}
    with first.connect("one") as one, second.connect("two") as two:
        for connection in (one, two):
            boxes[connection] = inbox = Inbox()
            inbox.subscribe(connection, ["task_done", "end"])
        send_notification.fetch(one, "task_done", "one")
        send_notification.fetch(two, "task_done", "two")
        for connection in (one, two):
            send_notification.fetch(connection, "end", "")
        received = {}
        for connection, inbox in boxes.items():
            wait_until(lambda: _drained(inbox, connection) >= 2)  # noqa: B023
            received[connection] = list(inbox.take())
    assert received == {
        one: [("task_done", "one"), ("end", "")],
        two: [("task_done", "two"), ("end", "")],
    }


def _drained(inbox: Inbox, connection: Connection[Any]) -> int:
    inbox.drain(connection.pgconn)
    return len(inbox)


def test_the_locks_of_one_schema_do_not_stop_another(second: Database, database_url: str) -> None:
    first = Database(PostgresConfig(database_url=database_url))
    lock = "SELECT horsies_lock_caps(ARRAY['default'], ARRAY[1], {})"
    for database in (first, second):
        prepare_schema(database)
    for cap in ("NULL", "1"):
        with first.connect("one") as one, second.connect("two") as two:
            two.execute("SET lock_timeout = '1s'")
            with one.transaction(), two.transaction():
                for connection, schema in ((one, "public"), (two, SCHEMA)):
                    connection.execute(in_schema(lock.format(cap), schema).encode())
