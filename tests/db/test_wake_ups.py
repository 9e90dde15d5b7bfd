"""Which workers a send wakes: all of a few, some of many, and those first that wait for tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from psycopg import Connection

from horsies.db.statements.workers import pass_wake_up, wait_for_tasks
from horsies.worker.liveness import lock_key
from tests.support.notifications import SENTINEL, Ears
from tests.support.rows import add_task, ago

QUEUE_CHANNEL = "task_queue_a"
Heard = Callable[[], list[tuple[str, str]]]

INSERT = """
INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues, waits, hears)
VALUES (%s, %s, 'host', 1, 1, %s, %s, %s)
"""


def add_worker(
    connection: Connection[Any], *, waits: bool = True, queue: str = "a", hears: bool = True
) -> str:
    # Ids of one process count upwards within a millisecond; those of many workers are spread.
    worker_id = str(uuid4())
    values = (worker_id, lock_key(worker_id), [queue], waits, hears)
    connection.execute(INSERT, values)
    return worker_id


def wake_channels(workers: list[str]) -> set[tuple[str, str]]:
    return {(f"horsies_wake_{worker}", "a") for worker in workers}


@pytest.fixture
def listen(process_url: str) -> Iterator[Callable[[list[str]], Heard]]:
    """Listen on the queue's channel and those of these workers."""
    opened: list[Ears] = []

    def start(workers: list[str]) -> Heard:
        channels = (QUEUE_CHANNEL, SENTINEL, *(f"horsies_wake_{one}" for one in workers))
        opened.append(Ears(process_url, channels))
        return opened[-1].heard

    yield start
    for ears in opened:
        ears.close()


Listen = Callable[[list[str]], Heard]


def test_a_send_wakes_all_workers_while_there_are_few(
    connection: Connection[Any], listen: Listen
) -> None:
    heard = listen([add_worker(connection) for _ in range(4)])
    task_id = add_task(connection, queue_name="a")
    assert heard() == [(QUEUE_CHANNEL, task_id)]


def test_a_send_wakes_two_of_many_workers_and_not_always_the_same(
    connection: Connection[Any], listen: Listen
) -> None:
    workers = [add_worker(connection) for _ in range(10)]
    heard = listen(workers)
    woken: set[tuple[str, str]] = set()
    for _ in range(60):
        add_task(connection, queue_name="a")
        now = heard()
        assert len(set(now)) == 2
        woken |= set(now)
    assert len(woken) > 5
    assert woken <= wake_channels(workers)


def test_a_send_wakes_workers_that_wait_receive_and_serve_the_queue(
    connection: Connection[Any], listen: Listen
) -> None:
    waiting = [add_worker(connection) for _ in range(2)]
    others = [
        add_worker(connection, waits=False),
        add_worker(connection, queue="b"),
        add_worker(connection, hears=False),
    ]
    heard = listen(waiting + others)
    for _ in range(10):
        add_task(connection, queue_name="a")
        assert set(heard()) == wake_channels(waiting)


def test_a_send_wakes_two_busy_workers_if_none_waits(
    connection: Connection[Any], listen: Listen
) -> None:
    workers = [add_worker(connection, waits=False) for _ in range(6)]
    elsewhere = [add_worker(connection, queue="b") for _ in range(6)]
    heard = listen(workers + elsewhere)
    add_task(connection, queue_name="a")
    now = set(heard())
    assert len(now) == 2
    assert now <= wake_channels(workers)


def test_a_send_to_a_queue_that_no_worker_serves_notifies_the_queue(
    connection: Connection[Any], listen: Listen
) -> None:
    heard = listen([add_worker(connection, queue="b") for _ in range(6)])
    task_id = add_task(connection, queue_name="a")
    assert heard() == [(QUEUE_CHANNEL, task_id)]


@pytest.mark.parametrize(("tasks", "woken"), [(3, 4), (32, 10), (33, 0)])
def test_a_burst_wakes_as_many_workers_as_it_needs(
    connection: Connection[Any], listen: Listen, tasks: int, woken: int
) -> None:
    heard = listen([add_worker(connection) for _ in range(10)])
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, args, kwargs, sent_at, enqueue_sha) "
        "SELECT gen_random_uuid(), 'noop', 'a', '[]', '{}', now(), repeat('a', 64) "
        "FROM generate_series(1, %s)",
        (tasks,),
    )
    now = heard()
    assert len(set(now)) == (woken or 1)
    assert ((QUEUE_CHANNEL, "") in now) is (woken == 0), "very many tasks wake all workers"


def test_a_task_for_later_concerns_all_workers(connection: Connection[Any], listen: Listen) -> None:
    heard = listen([add_worker(connection) for _ in range(10)])
    task_id = add_task(connection, queue_name="a", enqueued_at=ago(-60))
    assert heard() == [(QUEUE_CHANNEL, task_id)]


def test_an_old_snapshot_wakes_all_workers(connection: Connection[Any], listen: Listen) -> None:
    heard = listen([add_worker(connection) for _ in range(10)])
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        task_id = add_task(connection, queue_name="a")
    assert heard() == [(QUEUE_CHANNEL, task_id)]


def pass_on(connection: Connection[Any], worker_id: str) -> int:
    ((woken,),) = pass_wake_up.fetch(connection, worker_id, ["a"])
    return woken


def test_a_worker_that_cannot_serve_a_wake_up_wakes_two_others_and_waits_no_more(
    connection: Connection[Any], listen: Listen
) -> None:
    busy, *waiting = (add_worker(connection) for _ in range(6))
    heard = listen([busy, *waiting])
    assert pass_on(connection, busy) == 0, "no task is due"
    add_task(connection, queue_name="a")
    heard()
    for _ in range(10):
        assert pass_on(connection, busy) == 2
        now = set(heard())
        assert len(now) == 2
        assert now <= wake_channels(waiting)
    row = connection.execute("SELECT waits FROM horsies_workers WHERE worker_id = %s", (busy,))
    assert row.fetchone() == (False,)
    wait_for_tasks.fetch(connection, busy)
    row = connection.execute("SELECT waits FROM horsies_workers WHERE worker_id = %s", (busy,))
    assert row.fetchone() == (True,)


def test_a_wake_up_is_passed_to_nobody_while_no_other_worker_waits(
    connection: Connection[Any], listen: Listen
) -> None:
    busy, *others = (add_worker(connection, waits=False) for _ in range(6))
    heard = listen([busy, *others])
    add_task(connection, queue_name="a")
    heard()
    assert pass_on(connection, busy) == 0
    assert heard() == []


def test_a_task_for_later_is_no_reason_to_pass_a_wake_up_on(
    connection: Connection[Any], listen: Listen
) -> None:
    busy, *_ = (add_worker(connection) for _ in range(6))
    add_task(connection, queue_name="a", enqueued_at=ago(-60))
    assert pass_on(connection, busy) == 0
