"""Pools of connections, for the threads of a process and for the coroutines of an event loop.

A connection is opened by whoever needs one and finds none, and kept for whoever comes next. Nothing
runs in the background: no thread that a fork would lose, no task that keeps an ending event loop
from ending, and no pause between a server that is back and the first send that reaches it.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus

# How long a connection beyond the number to keep may rest before it is ended.
SPARE_SECONDS = 60.0

AnyConnection = TypeVar("AnyConnection", Connection[Any], AsyncConnection[Any])


class PoolTimeout(psycopg.OperationalError):
    """All connections stayed in use for as long as the caller was ready to wait."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How many connections to keep and to have, how long to wait for one, how long to use it."""

    kept: int
    most: int
    wait_seconds: float
    lifetime_seconds: float
    check: bool = True

    def exhausted(self) -> PoolTimeout:
        """Return the error for a caller who waited in vain."""
        return PoolTimeout(
            f"All {self.most} connections were in use for {self.wait_seconds:g} seconds; "
            "raise pool_size or max_overflow."
        )


class Pool:
    """Lends connections to the threads of one process."""

    def __init__(self, connect: Callable[[], Connection[Any]], limits: PoolLimits) -> None:
        self._connect = connect
        self._limits = limits
        self._slots = threading.Semaphore(limits.most)
        self._shelf: _Shelf[Connection[Any]] = _Shelf(limits)

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """Lend a connection for the length of a with block."""
        self._wait_for_slot()
        try:
            lent = self._shelf.take() or self._shelf.admit(self._connect())
            try:
                yield lent.connection
            finally:
                self._shelf.put(lent)
        finally:
            self._slots.release()

    def _wait_for_slot(self) -> None:
        if not self._slots.acquire(timeout=self._limits.wait_seconds):
            raise self._limits.exhausted()

    def close(self) -> None:
        """Close what is not lent now, and what is lent when it comes back."""
        self._shelf.close()


class AsyncPool:
    """Lends connections to the coroutines of one event loop."""

    def __init__(
        self, connect: Callable[[], Awaitable[AsyncConnection[Any]]], limits: PoolLimits
    ) -> None:
        self._connect = connect
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.most)
        self._shelf: _Shelf[AsyncConnection[Any]] = _Shelf(limits)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        """Lend a connection for the length of a with block."""
        await self._wait_for_slot()
        try:
            lent = self._shelf.take() or self._shelf.admit(await self._connect())
            try:
                yield lent.connection
            finally:
                self._shelf.put(lent)
        finally:
            self._slots.release()

    async def _wait_for_slot(self) -> None:
        try:
            async with asyncio.timeout(self._limits.wait_seconds):
                await self._slots.acquire()
        except TimeoutError as error:
            raise self._limits.exhausted() from error

    def close(self) -> None:
        """The same as for threads; needs no event loop, so it works after the loop has ended."""
        self._shelf.close()


@dataclass(slots=True)
class _Lent(Generic[AnyConnection]):
    connection: AnyConnection
    expires_at: float
    put_back_at: float = 0.0


class _Shelf(Generic[AnyConnection]):
    """Where connections rest between two borrowers; the last one put there is taken first, so the
    first in the list is the one that has rested longest.
    """

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[_Lent[AnyConnection]] = []
        self._closed = False

    def admit(self, connection: AnyConnection) -> _Lent[AnyConnection]:
        """Take a new connection into the books."""
        return _Lent(connection, time.monotonic() + self._limits.lifetime_seconds)

    def take(self) -> _Lent[AnyConnection] | None:
        """Return a connection that is neither too old nor closed by the server, or None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                lent = self._idle.pop()
            if time.monotonic() < lent.expires_at and self._is_alive(lent):
                return lent
            _end(lent)

    def _is_alive(self, lent: _Lent[AnyConnection]) -> bool:
        return not (self._limits.check and is_readable(lent.connection.pgconn))

    def put(self, lent: _Lent[AnyConnection]) -> None:
        """Keep the connection unless it is broken; end one that has rested for too long."""
        lent.put_back_at = time.monotonic()
        usable = lent.connection.pgconn.transaction_status == TransactionStatus.IDLE
        with self._lock:
            if usable and not self._closed:
                self._idle.append(lent)
                ended = self._longest_resting()
            else:
                ended = lent
        if ended is not None:
            _end(ended)

    def _longest_resting(self) -> _Lent[AnyConnection] | None:
        if len(self._idle) <= self._limits.kept:
            return None
        if self._idle[0].put_back_at > time.monotonic() - SPARE_SECONDS:
            return None
        return self._idle.pop(0)

    def close(self) -> None:
        """End all resting connections; those of a parent process are left to the parent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for lent in idle if self._pid == os.getpid() else ():
            _end(lent)

    def __del__(self) -> None:
        self.close()


def _end(lent: _Lent[Any]) -> None:
    lent.connection.pgconn.finish()


def is_readable(pgconn: Any) -> bool:
    """Tell whether something arrived on an idle connection: most likely the server's goodbye.

    This costs about 2 µs where the usual SELECT 1 costs 80, a third of a whole send.
    """
    poller = select.poll()
    poller.register(pgconn.socket, select.POLLIN)
    return bool(poller.poll(0))
