"""Tasks with keys: their limits, their claims, and their outcomes."""

from __future__ import annotations

from typing import Any

from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    CompleteTasks,
    FailTasks,
    RetryTasks,
    claim_tasks,
    complete_tasks,
    fail_tasks,
    retry_tasks,
)
from horsies.tasks.keys import lane_of
from tests.support.database import Database
from tests.support.rows import add_task

FIRST = -(2**63)


class Ring:
    """A worker's claims from one queue; each claim continues where the previous one stopped."""

    def __init__(self, connection: Database, queue: str = "default") -> None:
        self.connection, self.queue, self.cursor = connection, queue, FIRST
        self.is_drained = False
        self.wait_seconds = 0.0

    def claim(self, children: int = 1, **more: Any) -> list[str | None]:
        """Return the keys of the tasks that this many idle children receive."""
        return [key_of(self.connection, task) for task in self.take(children, **more)]

    def take(self, children: int = 1, **more: Any) -> list[ClaimedTask]:
        pids = list(range(1, children + 1))
        worker_id = more.pop("worker_id", "w")
        queue_limits = more.pop("queue_limits", [children])
        wanted = ClaimTasks(
            worker_id, "host", pids, [self.queue], queue_limits, cursors=[self.cursor], **more
        )
        rows = claim_tasks.run(self.connection, wanted)
        (answer,) = [row for row in rows if not row.id]
        assert answer.lane is not None
        is_drained, _, wait_seconds = answer.details.partition(" ")
        self.cursor, self.is_drained = answer.lane, is_drained == "t"
        self.wait_seconds = float(wait_seconds or 0)
        return [row for row in rows if row.id]


def key_of(connection: Database, task: ClaimedTask) -> str | None:
    query = "SELECT lane_key FROM horsies_tasks WHERE id = %s"
    (row,) = connection.execute(query, (task.id,)).fetchall()
    return None if row[0] is None else str(row[0])


def add_keyed(
    connection: Database, key: str, count: int = 1, queue: str = "default", **columns: Any
) -> None:
    for _ in range(count):
        lane = lane_of(queue, key).number
        add_task(connection, queue_name=queue, lane_key=key, lane=lane, held=True, **columns)


def add_many_keyed(connection: Database, key: str, count: int, queue: str = "default") -> None:
    connection.execute(
        "INSERT INTO horsies_tasks "
        "(id, task_name, queue_name, enqueue_sha, lane_key, lane, held, enqueued_at) SELECT "
        " gen_random_uuid(), 'work', %s, 'sha', %s, %s, true, now() - interval '1 minute' "
        "FROM generate_series(1, %s)",
        (queue, key, lane_of(queue, key).number, count),
    )


OFFER = ("task_queue_default", "@")


def limit(
    connection: Database, key: str | None = None, queue: str = "default", **columns: Any
) -> None:
    """Set the limits of all keys, or of one."""
    lane = 0 if key is None else lane_of(queue, key).number
    values = {"queue_name": queue, "lane": lane, "lane_key": key, **columns}
    names = ", ".join(values)
    marks = ", ".join("%s" for _ in values)
    connection.execute(
        f"INSERT INTO horsies_lanes ({names}) VALUES ({marks})".encode(), [*values.values()]
    )


def end(connection: Database, *tasks: Any) -> None:
    ids, generations = [task.id for task in tasks], [task.generation for task in tasks]
    done = complete_tasks.run(
        connection, CompleteTasks("w", ids, generations, ["{}"] * len(ids), [None] * len(ids))
    )
    assert len(done) == len(ids)


def retry(connection: Database, task: Any, delay_seconds: float) -> None:
    values = RetryTasks(
        "w",
        [task.id],
        [task.generation],
        [delay_seconds],
        ["FAILED"],
        ["X"],
        ["x"],
        [None],
        [None],
        [9],
        [None],
    )
    assert retry_tasks.run(connection, values)


def fail(connection: Database, task: Any) -> None:
    values = FailTasks(
        "w",
        [task.id],
        [task.generation],
        ["FAILED"],
        ["{}"],
        ["FAILED"],
        ["DOWN"],
        ["x"],
        [None],
        [None],
        [None],
    )
    assert fail_tasks.run(connection, values)
