"""For each red code of the catalogue, database rows that cause it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from psycopg.types.json import Jsonb

from tests.support.database import Database
from tests.support.rows import add_snapshot, add_task, add_worker, ago

QUEUE = "/queues/mail"


class RedState(NamedTuple):
    """The page of the subject whose explanation has the code, and a task that the state concerns.

    ``explained`` is the code in the explanation if it differs.
    """

    path: str
    task_id: str | None = None
    explained: str | None = None


def add_server(connection: Database, tasks: dict[str, str], cap: int | None = None) -> None:
    """Add a live worker of the queue that knows these tasks."""
    known = Jsonb({"tasks": tasks, "workflows": {}})
    worker = add_worker(connection, queues=["mail"], known_tasks=known)
    caps = {} if cap is None else {"mail": cap}
    add_snapshot(connection, worker, queue_max_concurrency=Jsonb(caps))


def add_due(connection: Database) -> str:
    return add_task(connection, queue_name="mail", task_name="pay", enqueued_at=ago(9))


def add_overdue_schedule(connection: Database) -> RedState:
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, updated_at) "
        "VALUES ('nightly', now() - interval '1 hour', now() - interval '1 hour')"
    )
    return RedState("/schedules/nightly")


def _paused(connection: Database) -> RedState:
    task_id = add_due(connection)
    connection.execute("INSERT INTO horsies_queues VALUES ('mail', now() - interval '2 hours')")
    return RedState(QUEUE, task_id)


def _unserved(connection: Database) -> RedState:
    return RedState(QUEUE, add_due(connection))


def _unknown(connection: Database) -> RedState:
    add_server(connection, {"other": "f"})
    return RedState(QUEUE, add_due(connection))


def _refused(connection: Database, fingerprint: str, message: str) -> RedState:
    add_server(connection, {"pay": "f"})
    task_id = add_due(connection)
    connection.execute(
        "INSERT INTO horsies_refusals (task_id, fingerprint, message, until) VALUES (%s, %s, %s, now())",
        (task_id, fingerprint, message),
    )
    return RedState(QUEUE, task_id)


def _unfit(connection: Database) -> RedState:
    return _refused(connection, "f", "It does not fit: there is no parameter 'title'.")


def _unreadable(connection: Database) -> RedState:
    return _refused(connection, "key:k1", "The payload is encrypted.")


def _capped_at_zero(connection: Database) -> RedState:
    add_server(connection, {"pay": "f"}, cap=0)
    return RedState(QUEUE, add_due(connection))


def _differing_caps(connection: Database) -> RedState:
    add_server(connection, {"pay": "f"}, cap=5)
    add_server(connection, {"pay": "f"})
    return RedState(QUEUE, add_due(connection))


def _held(connection: Database) -> RedState:
    task_id = add_task(connection, queue_name="mail", task_name="pay", generation=2, held=True)
    add_server(connection, {"pay": "f"})
    connection.execute(
        "INSERT INTO horsies_parked (task_id, generation, since, signals, children, problem) "
        "VALUES (%s, 2, now(), '{}', '{}', 'DURABLE_MISMATCH: the code asks for another step.')",
        (task_id,),
    )
    return RedState(f"/tasks/{task_id}", task_id)


def _blocked(connection: Database) -> RedState:
    task_id = add_due(connection)
    add_server(connection, {"pay": "f"})
    connection.execute(
        "INSERT INTO horsies_blocked (kind, id, status, generation, action, error) "
        "VALUES ('task', %s, 'PENDING', 0, 'claim', 'refused')",
        (task_id,),
    )
    return RedState(f"/tasks/{task_id}", task_id)


def _unserved_schedule(connection: Database) -> RedState:
    """The session that writes the rows counts as a scheduler without an entry for the schedule."""
    connection.execute("SET application_name = 'horsies:scheduler'")
    return add_overdue_schedule(connection)


def _lost_worker(connection: Database) -> RedState:
    """A lost worker has no explanation, but its task has one."""
    worker = add_worker(connection, queues=["mail"], seen_at=ago(600))
    add_snapshot(connection, worker, tasks_running=1, snapshot_at=ago(600))
    task_id = add_task(
        connection,
        queue_name="mail",
        status="RUNNING",
        claimed_by_worker_id=worker,
        claimed_at=ago(700),
        started_at=ago(700),
    )
    return RedState(f"/tasks/{task_id}", task_id, explained="RUNNER_LOST")


RED_STATES: dict[str, Callable[[Database], RedState]] = {
    "QUEUE_PAUSED": _paused,
    "QUEUE_UNSERVED": _unserved,
    "TASK_UNKNOWN": _unknown,
    "CALL_DOES_NOT_FIT": _unfit,
    "PAYLOAD_UNREADABLE": _unreadable,
    "QUEUE_CAP_ZERO": _capped_at_zero,
    "CAPS_DISAGREE": _differing_caps,
    "BLOCKED": _blocked,
    "HELD_BY_RECORD": _held,
    "NO_SCHEDULER": add_overdue_schedule,
    "NOT_SERVED": _unserved_schedule,
    "WORKER_LOST": _lost_worker,
}
