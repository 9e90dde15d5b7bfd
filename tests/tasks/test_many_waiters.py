"""A thousand waiters: one connection, and everyone woken for a second of processor time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from horsies.app import Horsies
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.handle import TaskHandle
from tests.support.applications import Task, run_closing
from tests.support.database import Database, backends
from tests.support.rows import finish
from tests.support.wait import wait_until

WAITERS = 1_000
BATCH = 100
PROCESSOR_SECONDS = 1.0


@pytest.fixture
def small_stacks() -> Iterator[None]:
    """A thousand threads need a thousand stacks."""
    before = threading.stack_size(256 * 1024)
    yield
    threading.stack_size(before)


@pytest.fixture
def app(app: Horsies) -> Horsies:
    """An application whose waiters only notifications can wake."""
    app.get_broker().waiters._poll_seconds = 600.0
    return app


def all_seen(app: Horsies) -> bool:
    watches = list(app.get_broker().waiters._watches.values())
    return len(watches) == WAITERS and all(watch.was_read for watch in watches)


def complete_all(connection: Database, handles: Sequence[TaskHandle[Any]]) -> float:
    """Complete the tasks in batches, each with its own number; return the processor time before.

    This process uses 0.2 s of it from here on. The time on the clock depends on the other processes.
    """
    before = time.process_time()
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
    return before


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
    results: list[tuple[int, Any]] = []

    def wait(position: int) -> None:
        results.append((position, handles[position].get(timeout_ms=60_000).ok))

    threads = [threading.Thread(target=wait, args=(n,)) for n in range(WAITERS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: all_seen(app), 30)
    check_connections(app, connection, earlier)
    before = complete_all(connection, handles)
    for thread in threads:
        thread.join()
    assert time.process_time() - before < PROCESSOR_SECONDS
    check_connections(app, connection, earlier)
    assert all(position == value for position, value in results)
    assert len(results) == WAITERS


def test_a_thousand_coroutines_wait_on_one_connection(
    app: Horsies, add: Task, connection: Database
) -> None:
    earlier = backends(connection, "horsies:waiters")
    handles = add.send_many(add.bind(n) for n in range(WAITERS)).unwrap()

    async def main() -> list[TaskResult[Any, TaskError]]:
        waiting = [asyncio.create_task(one.get_async(timeout_ms=60_000)) for one in handles]
        await asyncio.to_thread(wait_until, lambda: all_seen(app), 30)
        check_connections(app, connection, earlier)
        before = await asyncio.to_thread(complete_all, connection, handles)
        results = await asyncio.gather(*waiting)
        assert time.process_time() - before < PROCESSOR_SECONDS
        check_connections(app, connection, earlier)
        return results

    assert [result.ok for result in run_closing(app, main())] == list(range(WAITERS))


def test_waiters_that_come_and_go_leave_nothing_behind(
    app: Horsies, add: Task, connection: Database
) -> None:
    handles = add.send_many(add.bind(n) for n in range(WAITERS)).unwrap()

    async def main() -> None:
        await asyncio.gather(*(handle.get_async(timeout_ms=1) for handle in handles))
        finish(connection, [handle.task_id for handle in handles])
        found = await asyncio.gather(*(handle.get_async(timeout_ms=30_000) for handle in handles))
        assert all(result.is_ok() for result in found)
        waiters = app.get_broker().waiters
        assert not waiters._watches
        assert not waiters._fresh

    run_closing(app, main())
