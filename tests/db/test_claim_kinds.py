"""Claims for async children and for ordinary ones: each finds its tasks behind any number of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import (
    ClaimTasks,
    claim_tasks,
)
from horsies.worker.connection import TURN_SETTINGS
from tests.support.query_plans import rows_read
from tests.support.rows import add_task

ASYNC = '{"async":true,"retry_policy":null,"good_until":null}'
ORDINARY = '{"retry_policy":null,"good_until":null,"headers":{"async":"true"}}'
FILL = """
INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, task_options, burst)
SELECT gen_random_uuid(), 'work', 'default', 'sha', %s, %s FROM generate_series(1, %s)
"""


@pytest.fixture
def pipeline(process_url: str, connection: Connection[Any]) -> Iterator[Pipeline]:
    with psycopg.connect(process_url, autocommit=True, options=TURN_SETTINGS) as tuned:
        yield Pipeline(tuned)


def request(
    count: int,
    *,
    is_async: bool,
    idle: int | None = None,
    names: Sequence[str] = (),
    unknown: Sequence[str] = (),
) -> ClaimTasks:
    return ClaimTasks(
        "worker-1",
        "host",
        [7] * count,
        ["default"],
        [count],
        idle=idle,
        short_names=names,
        is_async=is_async,
        unknown_names=unknown,
    )


def claimed(pipeline: Pipeline, wanted: ClaimTasks) -> list[str]:
    return [task.id for task in pipeline.run([(claim_tasks, wanted)])[0]]


def test_each_kind_is_claimed_for_its_children_in_order(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    mixed = [add_task(connection, task_options=(ORDINARY, ASYNC)[n % 2]) for n in range(8)]
    unnamed = add_task(connection, task_options=None)
    late = add_task(connection, task_options=ASYNC, priority=1)
    add_task(connection, task_options=ASYNC, held=True)
    assert claimed(pipeline, request(2, is_async=True)) == [late, mixed[1]]
    assert claimed(pipeline, request(3, is_async=False)) == [mixed[0], mixed[2], mixed[4]]
    assert claimed(pipeline, request(9, is_async=True)) == [mixed[3], mixed[5], mixed[7]]
    assert claimed(pipeline, request(9, is_async=False)) == [mixed[6], unnamed]


def test_a_claim_without_a_kind_takes_both(connection: Connection[Any], pipeline: Pipeline) -> None:
    mixed = [add_task(connection, task_options=(ORDINARY, ASYNC)[n % 2]) for n in range(4)]
    wanted = ClaimTasks("worker-1", "host", [7] * 4, ["default"], [4])
    assert [task.id for task in pipeline.run([(claim_tasks, wanted)])[0]] == mixed


def test_unknown_names_and_paused_queues_are_left_out(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    other = add_task(connection, task_options=ASYNC, task_name="other")
    unknown = ["work", "unknown"]
    add_task(connection, task_options=ASYNC, task_name="unknown")
    assert claimed(pipeline, request(5, is_async=True, unknown=unknown)) == [other]
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('default', now())"
    )
    assert claimed(pipeline, request(5, is_async=True)) == []


def test_windows_are_filled_with_ordinary_tasks_only(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    kinds = [ORDINARY, ASYNC, ORDINARY, ASYNC, ORDINARY]
    mixed = [
        add_task(connection, task_options=kind, burst=True, task_name="work") for kind in kinds
    ]
    found = claimed(pipeline, request(5, is_async=False, idle=1, names=["work"]))
    assert found == [mixed[0], mixed[2], mixed[4]]


@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_backlog_of_ordinary_tasks_does_not_hold_up_claims_of_async_ones(
    connection: Connection[Any], pipeline: Pipeline, count: int
) -> None:
    """The plan may have been made while the table was nearly empty."""
    for options in (ORDINARY, ASYNC):
        connection.execute(FILL, (options, False, count))
    connection.execute("VACUUM (ANALYZE) horsies_tasks")
    claimed(pipeline, request(100, is_async=True))
    connection.execute(FILL, (ORDINARY, False, 20_000))
    last = add_task(connection, task_options=ASYNC)
    before = rows_read(pipeline.connection, connection)
    assert claimed(pipeline, request(10, is_async=True)) == [last]
    assert claimed(pipeline, request(10, is_async=True)) == []
    assert rows_read(pipeline.connection, connection) - before < 200
