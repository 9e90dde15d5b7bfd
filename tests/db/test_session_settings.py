"""Settings of a database, a role or the environment that would change the meaning of statements."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.db.limits import Limits
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Nothing, Statement
from horsies.db.statements.tasks import TaskId, read_task
from horsies.db.statements.turn import ClaimTasks, claim_tasks
from horsies.ids import new_id
from tests.support.database import HOSTILE_SETTINGS, changed_defaults
from tests.support.pooled_workers import pooled
from tests.support.rows import add_task
from tests.support.wait import wait_until

PINNED = {
    "datestyle": "ISO, DMY",
    "intervalstyle": "postgres",
    "standard_conforming_strings": "on",
    "array_nulls": "on",
    "transaction_isolation": "read committed",
    "search_path": "pg_catalog, pg_temp",
}
SHOW = Statement(
    "show_settings",
    "SELECT string_agg(name || '=' || current_setting(name), '; ' ORDER BY name) AS id "
    f"FROM unnest(ARRAY[{', '.join(map(repr, PINNED))}]) AS name",
    Nothing,
    TaskId,
)
EXPECTED = "; ".join(f"{name}={value}" for name, value in sorted(PINNED.items()))


@pytest.fixture
def hostile_url(process_url: str, connection: Connection[Any]) -> Iterator[str]:
    with changed_defaults(process_url):
        yield process_url


@pytest.fixture(params=["direct", "pooled"])
def database(hostile_url: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    """The database, straight or behind a pooler in transaction mode."""
    if request.param == "direct":
        database = Database(PostgresConfig(database_url=hostile_url))
        yield database
        database.close()
        return
    with pooled(hostile_url) as (url, broker):
        database = Database(PostgresConfig(database_url=url, **broker))
        yield database
        database.close()


def test_a_statement_of_a_producer_finds_its_settings(database: Database) -> None:
    with database.connection() as connection:
        for _ in range(2):
            assert SHOW.run(connection, Nothing()) == [TaskId(EXPECTED)]


def test_a_statement_of_an_event_loop_finds_its_settings(database: Database) -> None:
    async def shown() -> list[TaskId]:
        async with database.connection_async() as connection:
            rows = await SHOW.run_async(connection, Nothing())
        database.close_async()
        return rows

    assert asyncio.run(shown()) == [TaskId(EXPECTED)]


def test_a_turn_finds_its_settings(database: Database) -> None:
    pipeline = Pipeline.open(database, "turn")
    with pipeline.connection:
        assert pipeline.run([(SHOW, Nothing()), (SHOW, Nothing())]) == [[TaskId(EXPECTED)]] * 2


def test_a_session_finds_its_settings(database: Database) -> None:
    with database.connect("listener", session=True) as connection:
        assert SHOW.run(connection, Nothing()) == [TaskId(EXPECTED)]


def test_a_turn_has_time_limits_of_its_own(database: Database) -> None:
    names = ["statement_timeout", "idle_in_transaction_session_timeout"]
    expected = ["1s", "0"]
    pipeline = Pipeline.open(database, "turn", limits=Limits(statement_ms=1_000))
    with pipeline.connection as connection:
        if connection.info.server_version >= 170_000:
            names.append("transaction_timeout")
            expected.append("0")
        show = Statement(
            "show_limits",
            "SELECT string_agg(current_setting(name), '; ' ORDER BY place) AS id "
            f"FROM unnest(ARRAY[{', '.join(map(repr, names))}]) WITH ORDINALITY AS one (name, place)",
            Nothing,
            TaskId,
        )
        assert pipeline.run([(show, Nothing())]) == [[TaskId("; ".join(expected))]]


def test_an_empty_value_in_a_list_is_one_whatever_the_settings(database: Database) -> None:
    pipeline = Pipeline.open(database, "turn")
    with pipeline.connection:
        order = ClaimTasks("worker-1", "host", [1], ["default"], [1], queue_caps=[None])
        assert pipeline.run([(claim_tasks, order)]) == [[]]


def test_the_settings_of_other_clients_of_a_pooler_stay(hostile_url: str) -> None:
    with pooled(hostile_url) as (url, broker):
        database = Database(PostgresConfig(database_url=url, **broker))
        with database.connection() as connection:
            SHOW.run(connection, Nothing())
        pipeline = Pipeline.open(database, "turn")
        with pipeline.connection, psycopg.connect(url, autocommit=True) as other:
            pipeline.run([(SHOW, Nothing())])
            for name, value in HOSTILE_SETTINGS.items():
                query = "SELECT current_setting(%s)"
                assert other.execute(query, (name,)).fetchone() == (value,)
        database.close()


def test_a_cap_holds_however_strict_the_default_isolation_is(
    database: Database, connection: Connection[Any], process_url: str
) -> None:
    """A turn that waited for the lock of a cap sees the tasks that the holder of the lock started."""
    for _ in range(2):
        add_task(connection)
    order = ClaimTasks("worker-1", "host", [1], ["default"], [1], queue_caps=[1])
    pipeline = Pipeline.open(database, "turn")
    answers: list[list[Any]] = []

    def turn() -> None:
        answers.extend(pipeline.run([(SHOW, Nothing()), (claim_tasks, order)]))

    thread = threading.Thread(target=turn)
    with pipeline.connection:
        with psycopg.connect(process_url) as holder:
            assert len(claim_tasks.run(holder, order)) == 1
            thread.start()
            wait_until(lambda: _waits_for_a_cap(connection))
        thread.join()
    assert answers == [[TaskId(EXPECTED)], []]


def _waits_for_a_cap(connection: Connection[Any]) -> bool:
    found = connection.execute(
        "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND classid = 1751348595 "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return found.fetchone() is not None


def test_times_are_read_whatever_the_date_style(database: Database, process_url: str) -> None:
    task_id = new_id()
    with psycopg.connect(process_url, autocommit=True) as plain:
        add_task(plain, id=task_id)
    with database.connection() as connection:
        (row,) = read_task.fetch(connection, task_id, False, False)
    pipeline = Pipeline.open(database, "turn")
    with pipeline.connection:
        ((same,),) = pipeline.run([read_task(task_id, False, False)])
    assert row.enqueued_at == same.enqueued_at
    assert row.enqueued_at.tzinfo is not None
