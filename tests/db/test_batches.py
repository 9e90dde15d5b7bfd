"""The claim of a batch: the tasks behind those that children were given, under every limit."""

from __future__ import annotations

from typing import Any

import pytest

from horsies.db.statements.turn import ClaimBatch, ClaimedTask, claim_batch
from horsies.tasks.keys import lane_of
from tests.support.database import Database
from tests.support.keys import Ring, add_keyed, add_many_keyed
from tests.support.query_plans import reads
from tests.support.rows import ago


def claim_of(heads: list[ClaimedTask], size: int = 5, **more: Any) -> ClaimBatch:
    """The claim for these tasks, which the worker w has claimed for its children."""
    last = heads[-1]
    assert last.lane is not None
    return ClaimBatch(
        "w",
        "host",
        [head.id for head in heads],
        [head.worker_pid or 0 for head in heads],
        size,
        last.queue_name,
        last.lane,
        last.task_name,
        more.pop("wanted", len(heads) * (size - 1)),
        last.priority,
        last.enqueued_at,
        **more,
    )


def join(connection: Database, heads: list[ClaimedTask], **more: Any) -> list[ClaimedTask]:
    return claim_batch.run(connection, claim_of(heads, **more))


def test_a_head_is_joined_by_those_behind_it_in_order(connection: Database) -> None:
    add_keyed(connection, "a", 7)
    add_keyed(connection, "b", 2)
    heads = [one for one in Ring(connection).take(2) if one.lane == lane_of("default", "a").number]
    assert len(heads) == 1
    joined = join(connection, heads)
    assert len(joined) == 4
    assert {one.worker_pid for one in joined} == {heads[0].worker_pid}
    places = [(one.priority, one.enqueued_at, one.id) for one in (*heads, *joined)]
    assert places == sorted(places)
    assert {one.generation for one in joined} == {1}
    query = "SELECT status, count(*) FROM horsies_tasks GROUP BY status ORDER BY status"
    assert connection.execute(query).fetchall() == [("PENDING", 3), ("RUNNING", 6)]


def test_batches_of_several_children_are_filled_one_after_another(connection: Database) -> None:
    add_keyed(connection, "a", 8)
    heads = Ring(connection).take(3)
    heads.sort(key=lambda one: (one.priority, one.enqueued_at, one.id))
    join(connection, heads)
    query = "SELECT worker_pid, count(*) FROM horsies_tasks GROUP BY worker_pid ORDER BY worker_pid"
    first, second = heads[0].worker_pid, heads[1].worker_pid
    assert dict(connection.execute(query).fetchall()) == {first: 5, second: 3}


@pytest.mark.parametrize(
    ("more", "joined"),
    [
        ({}, 4),
        ({"wanted": 2}, 2),
        ({"queue_cap": 3}, 2),
        ({"queue_cap": 1}, 0),
        ({"cluster_cap": 2}, 1),
        ({"rate_seconds": 60.0, "rate_burst": 2}, 2),
    ],
)
def test_the_limits_of_the_queue_hold(
    connection: Database, more: dict[str, Any], joined: int
) -> None:
    add_keyed(connection, "a", 9)
    assert len(join(connection, Ring(connection).take(), **more)) == joined


@pytest.mark.parametrize(
    ("columns", "joined"),
    [
        ({"max_concurrency": 3}, 2),
        ({"rate_seconds": 60.0, "rate_burst": 3}, 2),
        ({"is_fifo": True}, 0),
        ({"paused_at": "now()"}, 0),
    ],
)
def test_the_limits_of_the_key_hold(
    connection: Database, columns: dict[str, Any], joined: int
) -> None:
    add_keyed(connection, "a", 9)
    lane = lane_of("default", "a").number
    is_pause = "paused_at" in columns
    heads = Ring(connection).take() if is_pause else []
    values = {"queue_name": "default", "lane": lane, "lane_key": "a", "weight": 1, **columns}
    names = ", ".join(values)
    connection.execute(
        f"INSERT INTO horsies_lanes ({names}) VALUES ({', '.join(['%s'] * len(values))})".encode(),
        [*values.values()],
    )
    assert len(join(connection, heads or Ring(connection).take())) == joined


@pytest.mark.parametrize(("names", "joined"), [("AAABA", 2), ("ABA", 0), ("AAAAAAA", 4)])
def test_a_task_of_another_name_is_not_overtaken(
    connection: Database, names: str, joined: int
) -> None:
    for place, name in enumerate(names):
        add_keyed(connection, "a", task_name=name, enqueued_at=ago(60 - place))
    heads = Ring(connection).take()
    assert [one.task_name for one in join(connection, heads)] == ["A"] * joined


def test_a_paused_queue_and_refused_tasks_stay(connection: Database) -> None:
    add_keyed(connection, "a", 4)
    heads = Ring(connection).take()
    (left,) = connection.execute(
        "SELECT id::text FROM horsies_tasks WHERE status = 'PENDING' ORDER BY id DESC LIMIT 1"
    ).fetchall()
    joined = join(connection, heads, refused_ids=[left[0]])
    assert len(joined) == 2
    assert left[0] not in {one.id for one in joined}
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('default', now())"
    )
    assert join(connection, heads) == []


def test_the_search_reads_no_more_than_the_batch(connection: Database) -> None:
    """However many wait, with the same key or another one, and whatever was claimed before."""
    for key in "ab":
        add_many_keyed(connection, key, 3_000)
    ring = Ring(connection)
    ring.take(1_000, queue_limits=[1_000])
    heads = ring.take()
    with connection.transaction():
        rows, read = reads(connection, (claim_batch, claim_of(heads)))
    assert len(rows) == 4
    assert read < 200
