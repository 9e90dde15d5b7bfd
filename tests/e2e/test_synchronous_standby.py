"""A server whose synchronous standby is away: a commit that no standby has is not a success."""

from __future__ import annotations

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
from horsies.db.statements.tasks import TaskId
from tests.support.private_server import PrivateServer
from tests.support.rows import add_task
from tests.support.statements import FINISH
from tests.support.wait import wait_until

PATIENCE_SECONDS = 0.3

pytestmark = pytest.mark.direct("the server process behind a pooler is unknown")


@pytest.fixture
def operator(own_server: PrivateServer) -> Iterator[Connection[Any]]:
    """A session whose own commits wait for no standby."""
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = local")
        yield connection


def name_standbys(operator: Connection[Any], names: str) -> None:
    operator.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    operator.execute("SELECT pg_reload_conf()")
    with psycopg.connect(operator.info.dsn, autocommit=True) as session:
        wait_until(lambda: session.execute("SHOW synchronous_standby_names").fetchone() == (names,))


def test_a_turn_waits_for_the_standby_for_longer_than_its_time_limit(
    own_server: PrivateServer, operator: Connection[Any]
) -> None:
    task_id = add_task(operator)
    database = Database(PostgresConfig(database_url=own_server.url))
    pipeline = Pipeline.open(database, "turns", "", Limits(statement_ms=5_000))
    name_standbys(operator, "gone")
    calls, answers = [], []
    pipeline.meanwhile = lambda: calls.append(1)
    # On a busy machine, the statement needs this long to reach the wait of its commit.
    limit_seconds = 5 * PATIENCE_SECONDS
    turn = threading.Thread(
        target=lambda: answers.append(pipeline.run([(FINISH, TaskId(task_id))], limit_seconds))
    )
    turn.start()
    # Called every tenth of a second: several times the limit.
    wait_until(lambda: len(calls) > 30 * limit_seconds or bool(answers))
    assert answers == []
    name_standbys(operator, "")
    turn.join(30)
    assert len(answers) == 1
    pipeline.connection.close()


def test_a_commit_whose_wait_for_the_standby_was_cancelled_is_in_doubt(
    own_server: PrivateServer, operator: Connection[Any]
) -> None:
    task_id = add_task(operator)
    with psycopg.connect(own_server.url, autocommit=True) as mine:
        pipeline = Pipeline(mine)  # it cannot ask what the server waits for
        name_standbys(operator, "gone")
        with pytest.raises(psycopg.OperationalError, match="the commit is in doubt"):
            pipeline.run([(FINISH, TaskId(task_id))], PATIENCE_SECONDS)
        name_standbys(operator, "")
