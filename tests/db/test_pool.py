"""Pools: which callers get a connection, which wait, and which connections are closed."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import psycopg
import pytest

from horsies.db.database import (
    AsyncOwnConnection,
    AsyncPool,
    OwnConnection,
    Pool,
    PoolLimits,
    PoolTimeout,
)

LIMITS = PoolLimits(kept=1, most=3, wait_seconds=0.1, lifetime_seconds=100)
# For threads that wait for each other.
PATIENT = replace(LIMITS, wait_seconds=60)


class Server:
    """Opens connections and remembers how many are open."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.opened: list[OwnConnection | AsyncOwnConnection] = []

    def connect(self) -> OwnConnection:
        connection = OwnConnection.connect(self.url, autocommit=True)
        self.opened.append(connection)
        return connection

    async def connect_async(self) -> AsyncOwnConnection:
        connection = await AsyncOwnConnection.connect(self.url, autocommit=True)
        self.opened.append(connection)
        return connection

    def open_count(self) -> int:
        return sum(not connection.closed for connection in self.opened)


@pytest.fixture
def server(process_url: str) -> Iterator[Server]:
    server = Server(process_url)
    yield server
    for connection in server.opened:
        connection.pgconn.finish()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass."""

    def pass_time(seconds: float) -> None:
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds)
        monkeypatch.setattr("horsies.db.database.time", clock)

    return pass_time


def borrow(pool: Pool, count: int) -> list[OwnConnection]:
    """Use that many connections at once, then give them all back."""
    with ExitStack() as stack:
        return [stack.enter_context(pool.connection()) for _ in range(count)]


# Raises KeyboardInterrupt at the first return of a function in `threading` while a connection is taken and
# put back, then takes another one.
INTERRUPTED = """
import sys
from contextlib import suppress
from horsies.db.database import OwnConnection, Pool, PoolLimits

def interrupt(frame, event, argument):
    if event == "return" and frame.f_globals.get("__name__") == "threading":
        raise KeyboardInterrupt
    return interrupt

def connect():
    return OwnConnection.connect(sys.argv[1], autocommit=True)

pool = Pool(connect, PoolLimits(kept=1, most=3, wait_seconds=0.1, lifetime_seconds=100))
sys.settrace(interrupt)
with suppress(KeyboardInterrupt):
    pool.put(pool.take())
sys.settrace(None)
with pool.connection() as connection:
    print(connection.execute("SELECT 'taken'").fetchone()[0])
pool.close()
"""


def test_an_interrupt_while_a_connection_is_taken_leaves_no_lock_behind(process_url: str) -> None:
    # In an interpreter of its own, because a lock that stays taken stops it, and because Python 3.11 can loop
    # forever at the start of a traced function while an event for the interpreter is pending.
    command = [sys.executable, "-c", INTERRUPTED, process_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("taken\n", "")


def test_a_pool_opens_nothing_before_it_is_needed(server: Server) -> None:
    Pool(server.connect, LIMITS)
    assert server.opened == []


def test_a_connection_is_used_again(server: Server) -> None:
    pool = Pool(server.connect, LIMITS)
    assert borrow(pool, 1) == borrow(pool, 1)
    assert len(server.opened) == 1


def test_as_many_are_opened_as_are_needed_at_once_and_no_more(server: Server) -> None:
    pool = Pool(server.connect, PATIENT)
    borrow(pool, 3)
    with ThreadPoolExecutor(10) as threads:
        list(threads.map(lambda _: borrow(pool, 1), range(30)))
    assert len(server.opened) == 3


def test_who_finds_all_in_use_waits_and_is_told_after_a_while(server: Server) -> None:
    pool = Pool(server.connect, LIMITS)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(pool.connection())
        with pytest.raises(PoolTimeout, match="All 3 connections"):
            borrow(pool, 1)
    borrow(pool, 3)


def test_who_waits_gets_the_connection_that_comes_back(server: Server) -> None:
    pool = Pool(server.connect, PoolLimits(1, 1, wait_seconds=10, lifetime_seconds=100))
    with ThreadPoolExecutor(1) as thread:
        with pool.connection() as held:
            waiting = thread.submit(borrow, pool, 1)
        assert waiting.result(timeout=30) == [held]


def test_a_failed_connection_attempt_costs_no_slot(server: Server) -> None:
    def refuse() -> OwnConnection:
        raise psycopg.OperationalError("connection refused")

    pool = Pool(refuse, LIMITS)
    for _ in range(10):
        with pytest.raises(psycopg.OperationalError, match="refused"):
            borrow(pool, 1)


def test_a_connection_the_server_closed_is_replaced(server: Server) -> None:
    pool = Pool(server.connect, LIMITS)
    for dead in borrow(pool, 3):
        with server.connect() as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (dead.info.backend_pid,))
    with pool.connection() as alive:
        assert alive.execute("SELECT 1").fetchone() == (1,)


def test_a_connection_in_the_middle_of_a_transaction_is_not_lent_again(server: Server) -> None:
    pool = Pool(server.connect, LIMITS)
    with pool.connection() as connection:
        connection.execute("BEGIN")
    assert connection.closed
    assert borrow(pool, 1) != [connection]


def test_a_connection_that_broke_in_use_is_not_lent_again(server: Server) -> None:
    pool = Pool(server.connect, LIMITS)
    with pytest.raises(psycopg.OperationalError), pool.connection() as connection:
        connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    assert borrow(pool, 1) != [connection]


def test_an_old_connection_is_replaced(server: Server, later: Callable[[float], None]) -> None:
    pool = Pool(server.connect, LIMITS)
    (old,) = borrow(pool, 1)
    later(101)
    assert borrow(pool, 1) != [old]
    assert old.closed


def test_spare_connections_end_after_a_while_but_not_those_to_keep(
    server: Server, later: Callable[[float], None]
) -> None:
    pool = Pool(server.connect, LIMITS)
    borrow(pool, 3)
    assert server.open_count() == 3
    later(61)
    for _ in range(5):
        borrow(pool, 1)
    assert server.open_count() == 1


def test_with_none_to_keep_a_connection_still_serves_many_in_a_row(server: Server) -> None:
    pool = Pool(server.connect, PoolLimits(0, 2, wait_seconds=1, lifetime_seconds=100))
    for _ in range(5):
        borrow(pool, 1)
    assert len(server.opened) == 1


def test_a_closed_pool_ends_its_connections_also_those_that_come_back_later(
    server: Server,
) -> None:
    pool = Pool(server.connect, LIMITS)
    borrow(pool, 2)
    with pool.connection():
        pool.close()
        assert server.open_count() == 1
    assert server.open_count() == 0


def test_a_forgotten_pool_leaves_no_connection_and_no_warning(server: Server) -> None:
    pool = Pool(server.connect, LIMITS)
    borrow(pool, 1)
    (connection,) = server.opened
    del pool
    gc.collect()
    assert connection.closed


def test_closing_a_pool_in_a_forked_process_leaves_the_parents_connections_open(
    server: Server,
) -> None:
    pool = Pool(server.connect, LIMITS)
    borrow(pool, 1)
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pool.connection() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert len(server.opened) == 1


# Event loops


def test_coroutines_share_connections_in_the_same_way(server: Server) -> None:
    async def main() -> None:
        pool = AsyncPool(server.connect_async, PoolLimits(1, 3, 10, 100))

        async def use() -> None:
            async with pool.connection() as connection:
                await connection.execute("SELECT 1")

        await asyncio.gather(*(use() for _ in range(30)))
        assert len(server.opened) == 3
        pool.close()

    asyncio.run(main())
    assert server.open_count() == 0


def test_a_coroutine_that_finds_all_in_use_is_told_after_a_while(server: Server) -> None:
    async def main() -> None:
        pool = AsyncPool(server.connect_async, PoolLimits(1, 1, 0.1, 100))
        async with pool.connection():
            with pytest.raises(PoolTimeout):
                async with pool.connection():
                    pass
        pool.close()

    asyncio.run(main())


def test_a_cancelled_coroutine_gives_its_slot_back(server: Server) -> None:
    async def main() -> None:
        pool = AsyncPool(server.connect_async, PoolLimits(1, 1, 10, 100))
        started = asyncio.Event()

        async def hang() -> None:
            async with pool.connection() as connection:
                started.set()
                await connection.execute("SELECT pg_sleep(60)")

        task = asyncio.create_task(hang())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with pool.connection() as connection:
            await connection.execute("SELECT 1")
        pool.close()

    asyncio.run(main())


def test_a_pool_can_be_closed_after_its_loop_has_ended(server: Server) -> None:
    async def main() -> AsyncPool:
        pool = AsyncPool(server.connect_async, LIMITS)
        async with pool.connection():
            return pool

    asyncio.run(main()).close()
    assert server.open_count() == 0


def test_threads_that_borrow_and_return_at_random_never_share(server: Server) -> None:
    pool = Pool(server.connect, PoolLimits(1, 3, 10, 100))
    in_use: set[int] = set()
    lock = threading.Lock()

    def work(_: int) -> None:
        with pool.connection() as connection:
            with lock:
                assert id(connection) not in in_use
                in_use.add(id(connection))
            connection.execute("SELECT 1")
            with lock:
                in_use.remove(id(connection))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(100)))
    assert server.open_count() <= 3
