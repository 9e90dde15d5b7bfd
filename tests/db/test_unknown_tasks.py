"""Statements for tasks that a worker cannot run: leaving them out, asking for other workers, failing them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import Connection, sql

from horsies.db.statements.turn import (
    ClaimSomeTasks,
    ClaimTasks,
    ClaimUnresolvable,
    FindTakers,
    claim_some_tasks,
    claim_unresolvable,
    find_takers,
)
from horsies.ids import new_id
from horsies.states import TaskStatus
from tests.support.rows import add_task, row_of

Database = Connection[Any]

GRACE_SECONDS = 60.0
LONG_AGO = sql.SQL("now() - interval '1 hour'")
LATELY = sql.SQL("now() - interval '30 s'")
NEW_TASK = {"tasks": {"new": "2"}, "workflows": {"flow": "2"}}


def add_worker(
    connection: Database,
    known: dict[str, Any] | None,
    *,
    queue: str = "default",
    stopped_at: sql.SQL | None = None,
) -> str:
    worker_id = new_id()
    connection.execute(
        sql.SQL(
            "INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues, "
            "known_tasks, stopped_at) VALUES (%s, 1, 'host', 1, 1, %s, %s, {})"
        ).format(stopped_at or sql.SQL("NULL")),
        (worker_id, [queue], None if known is None else json.dumps(known)),
    )
    return worker_id


def claim_unknown(connection: Database) -> list[str]:
    claim = ClaimUnresolvable("me", "host", ["default"], ["new"], GRACE_SECONDS, 10)
    return [row.id for row in claim_unresolvable.run(connection, claim)]


def test_a_claim_leaves_out_unknown_names_and_refused_tasks(connection: Database) -> None:
    add_task(connection, task_name="new")
    refused, wanted = (add_task(connection, task_name="old") for _ in range(2))
    claim = ClaimTasks("me", "host", [1, 2, 3], ["default"], [3])
    rows = claim_some_tasks.run(
        connection, ClaimSomeTasks(*claim[:-2], ["new"], [refused], *claim[-2:], None)
    )
    assert [(row.id, row.task_name) for row in rows] == [(wanted, "old")]
    rows = claim_some_tasks.run(
        connection, ClaimSomeTasks(*claim[:-2], ["new"], [], *claim[-2:], None)
    )
    assert [row.id for row in rows] == [refused]


@pytest.mark.parametrize("status", TaskStatus)
def test_a_pending_task_that_no_worker_knows_is_claimed_to_fail(
    connection: Database, status: TaskStatus
) -> None:
    add_worker(connection, {"tasks": {"old": "1"}, "workflows": {}})
    task_id = add_task(connection, task_name="new", status=status.value, enqueued_at=LONG_AGO)
    is_pending = status is TaskStatus.PENDING
    assert claim_unknown(connection) == ([task_id] if is_pending else [])
    assert row_of(connection, task_id)["status"] == ("RUNNING" if is_pending else status.value)


@pytest.mark.parametrize(
    ("worker", "is_claimed"),
    [
        ({"known": NEW_TASK}, False),
        ({"known": None}, False),  # it did not register its tasks and may have any
        ({"known": NEW_TASK, "stopped_at": LATELY}, False),
        ({"known": NEW_TASK, "stopped_at": LONG_AGO}, True),
        ({"known": NEW_TASK, "queue": "other"}, True),
    ],
)
def test_a_task_that_a_worker_of_its_queue_knows_is_left_alone(
    connection: Database, worker: dict[str, Any], is_claimed: bool
) -> None:
    add_worker(connection, **worker)
    task_id = add_task(connection, task_name="new", enqueued_at=LONG_AGO)
    assert claim_unknown(connection) == ([task_id] if is_claimed else [])


@pytest.mark.parametrize(
    "columns",
    [
        {"enqueued_at": LATELY},
        {"enqueued_at": LONG_AGO, "held": True},
        {"enqueued_at": LONG_AGO, "task_name": "old"},
        {"enqueued_at": LONG_AGO, "queue_name": "other"},
        {"enqueued_at": LONG_AGO, "good_until": LATELY},
    ],
)
def test_a_task_that_may_still_run_is_not_claimed_to_fail(
    connection: Database, columns: dict[str, Any]
) -> None:
    add_task(connection, **({"task_name": "new"} | columns))
    assert claim_unknown(connection) == []


def test_a_task_of_a_paused_queue_is_not_claimed_to_fail(connection: Database) -> None:
    add_task(connection, task_name="new", enqueued_at=LONG_AGO)
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('default', now())"
    )
    assert claim_unknown(connection) == []


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        ({"known": NEW_TASK}, (True, True)),
        ({"known": None}, (True, True)),
        ({"known": NEW_TASK, "stopped_at": LATELY}, (False, True)),
        ({"known": NEW_TASK, "stopped_at": LONG_AGO}, (False, False)),
        ({"known": NEW_TASK, "queue": "other"}, (False, False)),
        ({"known": {"tasks": {"new": "1"}, "workflows": {"flow": "1"}}}, (False, False)),
        ({"known": {"tasks": {}, "workflows": {}}}, (False, False)),
    ],
)
@pytest.mark.parametrize(("kind", "name"), [("tasks", "new"), ("workflows", "flow")])
def test_a_taker_is_another_worker_with_other_parameters(
    connection: Database, worker: dict[str, Any], expected: tuple[bool, bool], kind: str, name: str
) -> None:
    me = add_worker(connection, {"tasks": {"new": "0"}, "workflows": {"flow": "0"}})
    add_worker(connection, **worker)
    task_id, due_at = new_id(), "2020-01-01 00:00+00"
    asked = FindTakers(me, GRACE_SECONDS, [task_id], [kind], [name], ["1"], ["default"], [due_at])
    (taker,) = find_takers.run(connection, asked)
    assert (taker.id, taker.is_known, taker.is_recent) == (task_id, *expected)


def test_a_task_that_has_just_become_due_is_recent(connection: Database) -> None:
    asked = FindTakers(
        "me", GRACE_SECONDS, [new_id()], ["tasks"], ["new"], [""], ["default"], ["now"]
    )
    (taker,) = find_takers.run(connection, asked)
    assert (taker.is_known, taker.is_recent) == (False, True)
