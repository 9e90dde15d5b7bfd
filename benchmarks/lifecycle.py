"""The reference of other benchmarks: the life of a task in bare SQL, with the same driver but without a
worker. One connection with prepared statements and generic plans claims a batch and finishes it with its
attempt rows. ``two_commits`` commits each step separately; ``one_turn`` finishes one batch and claims
the next in one pipelined transaction, which is the maximum rate of a worker without any cost of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from psycopg import Connection

from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    CompleteTasks,
    claim_tasks,
    complete_tasks,
)
from horsies.ids import new_id
from horsies.tasks.outcome import Outcome
from horsies.worker.turn import Bookmarks, Claimer, TurnRequest, take_turn

RESULT = '{"ok":null}'
WORKER = "bare-sql"

INSERT = """
INSERT INTO horsies_tasks (
    id, task_name, queue_name, priority, args, kwargs, sent_at, task_options, enqueue_sha)
SELECT id, %s, 'default', 100, '[]', '{}', now(), '{"retry_policy":null,"good_until":null}',
    repeat('a', 64)
FROM unnest(%s::uuid[]) AS id
"""


def insert(connection: Connection[Any], ids: Sequence[str], task_name: str = "noop") -> None:
    """Insert tasks with these ids."""
    connection.execute(INSERT, (task_name, ids))


def load(connection: Connection[Any], count: int) -> None:
    """Empty the tables and insert this many no-op tasks."""
    connection.execute("TRUNCATE horsies_tasks CASCADE")
    insert(connection, [new_id() for _ in range(count)])
    connection.execute("VACUUM (ANALYZE) horsies_tasks")
    connection.execute("CHECKPOINT")


def two_commits(connection: Connection[Any], batch: int, count: int) -> float:
    """Drain this many loaded tasks, with separate commits of claim and finish; return tasks per second."""
    started = time.perf_counter()
    done = 0
    pipeline = Pipeline(connection)
    while claimed := pipeline.run([(claim_tasks, _claim(batch))])[0]:
        pipeline.run([(complete_tasks, _completion(claimed))])
        done += len(claimed)
    assert done == count
    return count / (time.perf_counter() - started)


def one_turn(connection: Connection[Any], batch: int, count: int) -> float:
    """Drain this many loaded tasks, with finish and claim in one transaction; return tasks per second."""
    started = time.perf_counter()
    done = 0
    claimed: list[ClaimedTask] = []
    pipeline = Pipeline(connection)
    while True:
        steps: list[Step] = [(complete_tasks, _completion(claimed))] if claimed else []
        answers = pipeline.run([*steps, (claim_tasks, _claim(batch))])
        done += len(claimed)
        claimed = answers[-1]
        if not claimed:
            break
    assert done == count
    return count / (time.perf_counter() - started)


def worker_turns(
    connection: Connection[Any], batch: int, count: int, pipeline: Pipeline | None = None
) -> float:
    """Take turns like a worker until this many tasks have ended, without any children. A connection has
    one pipeline; pass the pipeline to take further turns.
    """
    claimer = Claimer(WORKER, "host", ("default",), (None,))
    bookmarks = Bookmarks(claimer.queues)
    pipeline = pipeline or Pipeline(connection)
    outcomes: list[Outcome] = []
    done = 0
    started = time.perf_counter()
    while done < count:
        now = time.monotonic()
        wanted = TurnRequest(pids=list(range(batch)), positions=bookmarks.positions(now))
        turned = take_turn(pipeline, claimer, outcomes, wanted)
        was_short = len(turned.claimed) < batch
        span = (now, time.monotonic())
        bookmarks.note_claim(wanted.positions, turned.claimed, was_short=was_short, span=span)
        assert len(turned.recorded) == len(outcomes)
        done += len(outcomes)
        outcomes = [Outcome.completed(task, RESULT) for task in turned.claimed]
    return done / (time.perf_counter() - started)


def _claim(batch: int) -> ClaimTasks:
    return ClaimTasks(WORKER, "host", list(range(batch)), ["default"], [batch])


def _completion(claimed: list[ClaimedTask]) -> CompleteTasks:
    return CompleteTasks(
        WORKER,
        [task.id for task in claimed],
        [task.generation for task in claimed],
        [RESULT] * len(claimed),
    )
