"""The tables between two tests: emptied by DELETE where that is enough, truncated where it is not."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psycopg
import pytest

from horsies.testing.database import empty_tables
from tests.support.database import Database
from tests.support.rows import add_task


def rows(connection: Database, table: str) -> int:
    found = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
    assert found is not None
    return int(found[0])


def file_of(connection: Database, table: str) -> str:
    """The file of a table: TRUNCATE makes a new one."""
    (found,) = connection.execute("SELECT pg_relation_filepath(%s)", (table,))
    return str(found[0])


def test_a_few_rows_are_deleted_with_those_that_depend_on_them(connection: Database) -> None:
    file = file_of(connection, "horsies_tasks")
    task_id = add_task(connection)
    connection.execute(
        "INSERT INTO horsies_heartbeats (task_id, sender_id, role) VALUES (%s, 'w', 'runner')",
        (task_id,),
    )
    empty_tables(connection)
    assert (rows(connection, "horsies_tasks"), rows(connection, "horsies_heartbeats")) == (0, 0)
    assert file_of(connection, "horsies_tasks") == file
    assert connection.execute("SHOW session_replication_role").fetchone() == ("origin",)


def test_numbers_begin_at_one_again(connection: Database) -> None:
    numbers = []
    for _ in range(2):
        (found,) = connection.execute(
            "INSERT INTO horsies_heartbeats (task_id, sender_id, role) "
            "VALUES (gen_random_uuid(), 'w', 'runner') RETURNING id"
        )
        numbers.append(found[0])
        empty_tables(connection)
    assert numbers == [1, 1]


def test_a_table_that_has_grown_is_truncated(connection: Database) -> None:
    file = file_of(connection, "horsies_tasks")
    add_task(connection, args=secrets.token_hex(1_000_000))  # cannot be compressed
    empty_tables(connection)
    assert rows(connection, "horsies_tasks") == 0
    assert file_of(connection, "horsies_tasks") != file


@pytest.fixture
def noted(connection: Database) -> Iterator[Database]:
    """The database with a table of the application that refers to tasks."""
    connection.execute(
        "CREATE TABLE notes (task_id uuid REFERENCES horsies_tasks (id) ON DELETE CASCADE)"
    )
    yield connection
    connection.execute("DROP TABLE notes")


def test_rows_of_the_application_that_refer_to_tasks_go_with_them(noted: Database) -> None:
    noted.execute("INSERT INTO notes VALUES (%s)", (add_task(noted),))
    empty_tables(noted)
    assert (rows(noted, "horsies_tasks"), rows(noted, "notes")) == (0, 0)


@pytest.fixture
def owner(database_url: str) -> Iterator[Database]:
    """A session of a role that owns a schema with a table, and is no superuser."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "CREATE ROLE horsies_owner; CREATE SCHEMA jobs AUTHORIZATION horsies_owner"
        )
        connection.execute("SET ROLE horsies_owner")
        connection.execute(
            "CREATE TABLE jobs.horsies_things (id integer GENERATED ALWAYS AS IDENTITY, name text)"
        )
        yield connection
        connection.execute("RESET ROLE; DROP OWNED BY horsies_owner; DROP ROLE horsies_owner")


def test_an_owner_who_is_no_superuser_truncates(owner: Database) -> None:
    """Only a superuser may switch triggers off."""
    for _ in range(2):
        owner.execute("INSERT INTO jobs.horsies_things (name) VALUES ('a')")
        empty_tables(owner, "jobs")
        assert rows(owner, "jobs.horsies_things") == 0
    assert owner.execute(
        "INSERT INTO jobs.horsies_things DEFAULT VALUES RETURNING id"
    ).fetchone() == (1,)
