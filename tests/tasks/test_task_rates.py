"""Rates of tasks: all calls of a task share a key, and its rate is that key's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from horsies import Horsies, Rate
from horsies.db.statements.workers import register_defaults, store_task_rates
from horsies.errors import TaskDefinitionError
from horsies.tasks.keys import key_of_task, lane_of
from horsies.worker.keyed import LimitsOfKeys
from horsies.worker.known_tasks import task_defaults
from tests.support.applications import Task
from tests.support.database import Database
from tests.support.keys import Ring

SLOWLY = Rate(count=1, per_seconds=60, burst=2)


@pytest.fixture
def mail(app: Horsies) -> Task:
    @app.task("mail", rate=SLOWLY)
    def mail(number: int) -> None: ...

    @app.task("other")
    def other() -> None: ...

    return mail


def store(app: Horsies, connection: Database) -> None:
    """What a worker does when it starts."""
    limits = LimitsOfKeys(app.config, app.definitions())
    statement, values = store_task_rates(limits.rates, limits.queues)
    statement.run(connection, values)


def stored(connection: Database) -> list[tuple[Any, ...]]:
    query = (
        "SELECT lane_key, task_rate_seconds, task_rate_burst FROM horsies_lanes ORDER BY lane_key"
    )
    return connection.execute(query).fetchall()


def test_calls_of_the_task_wait_for_its_rate_and_others_do_not(
    app: Horsies, mail: Task, connection: Database
) -> None:
    store(app, connection)
    for number in range(5):
        mail.send(number).unwrap()
    app.tasks["other"].send().unwrap()
    ring = Ring(connection)
    taken = ring.claim(9)
    assert taken.count("task:mail") == 2
    assert ring.claim(9) == []
    assert 50 < ring.wait_seconds <= 60
    assert app.keys.get("default", "task:mail").unwrap().rate_seconds == 60


def test_an_operator_may_change_the_rate_and_clear_restores_it(
    app: Horsies, mail: Task, connection: Database
) -> None:
    store(app, connection)
    key = key_of_task("mail")
    raised = app.keys.set("default", key, rate=Rate(count=10)).unwrap()
    assert raised.rate_seconds == 0.1
    app.keys.pause("default", key).unwrap()
    app.keys.resume("default", key).unwrap()
    assert app.keys.clear("default", key).unwrap().rate_seconds == 60


def test_a_worker_without_the_rate_lifts_it_and_leaves_those_of_others(
    app: Horsies, mail: Task, connection: Database
) -> None:
    store(app, connection)
    others = json.dumps([{"key": "task:foreign", "rate_seconds": 2.0, "rate_burst": 1}])
    statement, values = store_task_rates(others, ["default"])
    statement.run(connection, values)
    assert stored(connection) == [("task:foreign", 2.0, 1), ("task:mail", 60.0, 2)]
    without = json.dumps([{"key": "task:mail", "rate_seconds": None, "rate_burst": None}])
    statement, values = store_task_rates(without, ["default"])
    statement.run(connection, values)
    assert stored(connection) == [("task:foreign", 2.0, 1), ("task:mail", None, None)]


def test_a_send_from_sql_has_the_key_of_the_rate(
    app: Horsies, mail: Task, connection: Database
) -> None:
    statement, values = register_defaults(task_defaults(app))
    statement.run(connection, values)
    connection.execute("SELECT horsies_send_v1('mail', '{\"number\": 1}')")
    rows = connection.execute("SELECT lane_key, lane, held FROM horsies_tasks").fetchall()
    assert rows == [("task:mail", lane_of("default", "task:mail").number, True)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 100}, "rate must be a Rate, not int"),
        ({"rate": SLOWLY, "key": "number"}, "rate= and key= exclude each other"),
        ({"rate": SLOWLY, "name": "x" * 251}, "has at most 250 characters, not 251"),
    ],
)
def test_a_bad_rate_is_refused_at_definition(
    app: Horsies, options: dict[str, Any], message: str
) -> None:
    name = options.pop("name", "bad")

    def bad(number: str) -> None: ...

    with pytest.raises(TaskDefinitionError, match=message):
        app.task(name, **options)(bad)
