"""Statements for tasks that a worker cannot run: leaving them out, asking for other workers, failing them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from psycopg import Connection, sql

from horsies.db.statements.refusals import (
    Taker,
    delete_refusals,
    find_takers,
    forget_refusals,
    refuse_tasks,
)
from horsies.db.statements.turn import (
    ClaimTasks,
    ClaimUnresolvable,
    claim_tasks,
    claim_unresolvable,
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
    known = claim._replace(unknown_names=["new"])
    rows = claim_tasks.run(connection, known._replace(refused_ids=[refused]))
    assert [(row.id, row.task_name) for row in rows] == [(wanted, "old")]
    rows = claim_tasks.run(connection, known)
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


def refuse(connection: Database, task_id: str, fingerprint: str) -> float:
    """Refuse a call; for how many seconds the fingerprint leaves the task out."""
    (row,) = refuse_tasks.fetch(
        connection, "me", GRACE_SECONDS, 5.0, [task_id], [fingerprint], ["does not fit"]
    )
    assert (row.id, row.fingerprint) == (task_id, fingerprint)
    return row.seconds


def age_refusals(connection: Database) -> None:
    connection.execute(
        "UPDATE horsies_refusals SET since = now() - interval '1 hour', until = now()"
    )


def taker_of(connection: Database, task_id: str, kind: str = "tasks", name: str = "new") -> Taker:
    (taker,) = find_takers.fetch(connection, GRACE_SECONDS, [task_id], [kind], [name], ["default"])
    assert taker.id == task_id
    return taker


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
def test_a_taker_is_a_worker_whose_parameters_have_not_refused_the_task(
    connection: Database, worker: dict[str, Any], expected: tuple[bool, bool], kind: str, name: str
) -> None:
    add_worker(connection, {"tasks": {"new": "0"}, "workflows": {"flow": "0"}})
    add_worker(connection, **worker)
    task_id = add_task(connection)
    refuse(connection, task_id, "0"), refuse(connection, task_id, "1")
    age_refusals(connection)
    taker = taker_of(connection, task_id, kind, name)
    assert (taker.is_known, taker.is_recent) == expected


def test_a_task_that_every_worker_has_refused_is_recent_until_the_first_refusal_is_old(
    connection: Database,
) -> None:
    add_worker(connection, NEW_TASK)
    task_id = add_task(connection)
    refuse(connection, task_id, "2")
    assert taker_of(connection, task_id)[1:3] == (False, True)
    age_refusals(connection)
    refuse(connection, task_id, "1")
    assert taker_of(connection, task_id)[1:3] == (False, False)


def test_a_refusal_lasts_for_the_grace_period_and_then_for_a_pause(connection: Database) -> None:
    task_id = add_task(connection)
    assert GRACE_SECONDS - 10 < refuse(connection, task_id, "1") <= GRACE_SECONDS
    assert GRACE_SECONDS - 10 < refuse(connection, task_id, "1") <= GRACE_SECONDS
    age_refusals(connection)
    assert 0 < refuse(connection, task_id, "1") <= 5


def claim_without(
    connection: Database, refused_by: list[str], *, is_async: bool | None = None, idle: int = 3
) -> list[str]:
    claim = ClaimTasks("me", "host", [1, 2, 3], ["default"], [3], idle=idle, short_names=["new"])
    with connection.transaction(force_rollback=True):
        rows = claim_tasks.run(connection, claim._replace(is_async=is_async, refused_by=refused_by))
    return [row.id for row in rows]


@pytest.mark.parametrize("how", [{}, {"is_async": False}, {"is_async": True}, {"idle": 0}])
def test_a_claim_leaves_out_the_tasks_that_a_fingerprint_refused_until_their_time_is_over(
    connection: Database, how: dict[str, Any]
) -> None:
    options = '{"async":true}' if how.get("is_async") else None
    refused, wanted = (
        add_task(connection, task_name="new", burst=True, task_options=options) for _ in range(2)
    )
    refuse(connection, refused, "1")
    assert claim_without(connection, ["1"], **how) == [wanted]
    assert claim_without(connection, ["2"], **how) == [refused, wanted]
    age_refusals(connection)
    assert claim_without(connection, ["1"], **how) == [refused, wanted]


@pytest.mark.parametrize("status", TaskStatus)
def test_refusals_are_kept_while_their_task_has_not_ended(
    connection: Database, status: TaskStatus
) -> None:
    task_id, gone = add_task(connection, status=status.value), new_id()
    refuse(connection, task_id, "1"), refuse(connection, gone, "1")
    is_kept = status.value in ("PENDING", "CLAIMED", "RUNNING")
    deleted = {row.id for row in delete_refusals.fetch(connection)}
    assert deleted == {gone} | (set() if is_kept else {task_id})


def test_a_task_that_fails_has_no_refusals_any_more(connection: Database) -> None:
    failing, kept = (add_task(connection) for _ in range(2))
    for task_id in (failing, kept):
        refuse(connection, task_id, "1")
    assert [row.id for row in forget_refusals.fetch(connection, [failing])] == [failing]
    left = connection.execute("SELECT task_id::text FROM horsies_refusals").fetchall()
    assert left == [(kept,)]
