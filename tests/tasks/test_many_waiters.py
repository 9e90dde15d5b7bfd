"""A thousand waiters: one connection, and everyone awake within a second of the last commit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from horsies.app import Horsies
from horsies.tasks.handle import TaskHandle
from tests.support.applications import run_closing
from tests.support.database import Database, backends
from tests.support.rows import finish
from tests.support.wait import wait_until
from tests.tasks.conftest import Task

WAITERS = 1_000
BATCH = 100


@pytest.fixture
def small_stacks() -> Iterator[None]:
    """A thousand threads need a thousand stacks."""
    before = threading.stack_size(256 * 1024)
    yield
    threading.stack_size(before)


def all_seen(app: Horsies) -> bool:
    watches = list(app.get_broker().waiters._watches.values())
    return len(watches) == WAITERS and all(watch.was_read for watch in watches)


def complete_all(connection: Database, handles: Sequence[TaskHandle[Any]]) -> float:
    """Complete the tasks in batches, each with its own number, and say when the last committed."""
    for start in range(0, WAITERS, BATCH):
        batch = handles[start : start + BATCH]
        connection.execute(
            "UPDATE horsies_tasks SET status = 'COMPLETED', result = done.result "
            "FROM unnest(%s::uuid[], %s::text[]) AS done (id, result) "
            "WHERE horsies_tasks.id = done.id",
            (
                [handle.task_id for handle in batch],
                [f'{{"ok":{start + offset}}}' for offset in range(len(batch))],
            ),
        )
    return time.monotonic()


def check_connections(app: Horsies, connection: Database, earlier: list[int]) -> None:
    """``earlier`` are sessions of other tests: a waiting connection outlasts its last waiter for a minute."""
    config = app.config.broker
    assert len(set(backends(connection, "horsies:waiters")).difference(earlier)) == 1
    assert len(backends(connection, "horsies:producer")) <= config.pool_size + config.max_overflow


def test_a_thousand_threads_wait_on_one_connection(
    app: Horsies, add: Task, connection: Database, small_stacks: None
) -> None:
    earlier = backends(connection, "horsies:waiters")
    handles = add.send_many(add.bind(n) for n in range(WAITERS)).unwrap()
    results: list[tuple[int, Any, float]] = []

    def wait(position: int) -> None:
        value = handles[position].get(timeout_ms=60_000).ok
        results.append((position, value, time.monotonic()))

    threads = [threading.Thread(target=wait, args=(n,)) for n in range(WAITERS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: all_seen(app), 30)
    check_connections(app, connection, earlier)
    committed = complete_all(connection, handles)
    for thread in threads:
        thread.join()
    check_connections(app, connection, earlier)
    assert all(position == value for position, value, _ in results)
    assert len(results) == WAITERS
    assert max(moment for _, _, moment in results) - committed < 1.0


def test_a_thousand_coroutines_wait_on_one_connection(
    app: Horsies, add: Task, connection: Database
) -> None:
    earlier = backends(connection, "horsies:waiters")
    handles = add.send_many(add.bind(n) for n in range(WAITERS)).unwrap()

    async def wait(handle: TaskHandle[Any]) -> tuple[Any, float]:
        result = await handle.get_async(timeout_ms=60_000)
        return result.ok, time.monotonic()

    async def main() -> tuple[list[tuple[Any, float]], float]:
        waiting = [asyncio.create_task(wait(handle)) for handle in handles]
        await asyncio.to_thread(wait_until, lambda: all_seen(app), 30)
        check_connections(app, connection, earlier)
        committed = await asyncio.to_thread(complete_all, connection, handles)
        results = await asyncio.gather(*waiting)
        check_connections(app, connection, earlier)
        return results, committed

    results, committed = run_closing(app, main())
    assert [value for value, _ in results] == list(range(WAITERS))
    assert max(moment for _, moment in results) - committed < 1.0


def test_waiters_that_come_and_go_leave_nothing_behind(
    app: Horsies, add: Task, connection: Database
) -> None:
    handles = add.send_many(add.bind(n) for n in range(WAITERS)).unwrap()

    async def main() -> None:
        await asyncio.gather(*(handle.get_async(timeout_ms=1) for handle in handles))
        finish(connection, [handle.task_id for handle in handles])
        found = await asyncio.gather(*(handle.get_async(timeout_ms=20_000) for handle in handles))
        assert all(result.is_ok() for result in found)
        waiters = app.get_broker().waiters
        assert not waiters._watches
        assert not waiters._fresh

    run_closing(app, main())
