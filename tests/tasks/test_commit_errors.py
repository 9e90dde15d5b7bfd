"""Errors at COMMIT: a send or a start whose statements all succeeded, and that was rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from horsies import AppConfig, Horsies, TaskError, TaskResult
from horsies.result import Err
from tests.support.applications import run_closing
from tests.support.database import Database, framed_config
from tests.support.poison import DEFERRED, poisoned

POISONOUS = "NEW.task_name = 'poison'"


@pytest.fixture(params=[False, True], ids=["direct", "pooled"])
def app(
    process_url: str, connection: Database, request: pytest.FixtureRequest
) -> Iterator[Horsies]:
    app = Horsies(AppConfig(broker=framed_config(process_url, is_pooled=request.param)))

    @app.task("poison")
    def poison(n: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=n)

    @app.task("innocent")
    def innocent(n: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=n)

    yield app
    app.close()


def all_ways(app: Horsies, name: str) -> list[Any]:
    """Send the task in every way there is; return the results."""
    task = app.tasks()[name]
    other = app.tasks()["innocent"].node(node_id="first")(n=1)
    flow = app.workflow("flow", [other, task.node(node_id="second")(n=2)], definition_key="flow")
    many = [task.bind(n) for n in range(3)]
    return [
        task.send(1),
        task.with_options(idempotency_key=f"{name} 1").send(1),
        task.schedule(10, 1),
        task.send_many(many),
        flow.start(),
        run_closing(app, task.send_async(1)),
        run_closing(app, task.send_many_async(many)),
        run_closing(app, flow.start_async()),
    ]


def stored(connection: Database) -> list[Any]:
    return connection.execute("SELECT task_name FROM horsies_tasks").fetchall()


@pytest.mark.parametrize(("state", "retryable"), [("23514", False), ("40001", True)])
def test_nothing_is_sent_that_was_not_committed(
    app: Horsies, connection: Database, state: str, retryable: bool
) -> None:
    with poisoned(connection, POISONOUS, state=state, event="INSERT", trigger=DEFERRED):
        for refused in all_ways(app, "poison"):
            assert isinstance(refused, Err), refused
            assert refused.err_value.retryable is retryable
            assert "poisonous" in refused.err_value.message
        assert stored(connection) == []
        assert all(sent.is_ok() for sent in all_ways(app, "innocent"))
    assert len(stored(connection)) == 14


def test_a_deferred_constraint_is_an_error_of_the_data(app: Horsies, connection: Database) -> None:
    connection.execute("CREATE TABLE test_names (name text PRIMARY KEY)")
    connection.execute("INSERT INTO test_names VALUES ('innocent')")
    connection.execute(
        "ALTER TABLE horsies_tasks ADD CONSTRAINT test_known FOREIGN KEY (task_name) "
        "REFERENCES test_names DEFERRABLE INITIALLY DEFERRED"
    )
    try:
        for refused in all_ways(app, "poison"):
            assert isinstance(refused, Err), refused
            assert not refused.err_value.retryable
            assert refused.err_value.exception.sqlstate == "23503"
        assert stored(connection) == []
        assert app.tasks()["innocent"].send(1).is_ok()
    finally:
        connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT test_known")
        connection.execute("DROP TABLE test_names")
