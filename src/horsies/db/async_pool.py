"""The connections of one event loop: opened by whoever needs one, kept for whoever comes next.

Nothing runs in the background. The pool that comes with psycopg fills itself from tasks that
outlive a cancellation, and a loop that ends soon after its first send, as the one of
``asyncio.run(task.send_async(...))`` does, would wait for them for ever.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg_pool import PoolTimeout


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How many connections to keep and to have, how long to wait for one, how long to use it."""

    kept: int
    most: int
    wait_seconds: float
    lifetime_seconds: float


@dataclass(frozen=True, slots=True)
class _Lent:
    connection: AsyncConnection[Any]
    expires_at: float


class AsyncPool:
    """Lends connections to the coroutines of one event loop."""

    def __init__(
        self, connect: Callable[[], Awaitable[AsyncConnection[Any]]], limits: PoolLimits
    ) -> None:
        self._connect = connect
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.most)
        self._idle: list[_Lent] = []

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection[Any]]:
        """Lend a connection for the length of a with block."""
        await self._wait_for_slot()
        try:
            lent = self._reuse() or await self._open()
            try:
                yield lent.connection
            finally:
                self._take_back(lent)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Close what is not lent; needs no event loop, so it works after the loop has ended too."""
        while self._idle:
            _end(self._idle.pop())

    async def _wait_for_slot(self) -> None:
        limits = self._limits
        try:
            async with asyncio.timeout(limits.wait_seconds):
                await self._slots.acquire()
        except TimeoutError as error:
            raise PoolTimeout(
                f"All {limits.most} connections were in use for {limits.wait_seconds:g} seconds; "
                "raise pool_size or max_overflow."
            ) from error

    def _reuse(self) -> _Lent | None:
        while self._idle:
            lent = self._idle.pop()
            if time.monotonic() < lent.expires_at and not is_readable(lent.connection.pgconn):
                return lent
            _end(lent)
        return None

    async def _open(self) -> _Lent:
        connection = await self._connect()
        return _Lent(connection, time.monotonic() + self._limits.lifetime_seconds)

    def _take_back(self, lent: _Lent) -> None:
        # With every slot taken somebody may be waiting for this very connection.
        wanted = len(self._idle) < self._limits.kept or self._slots.locked()
        status = lent.connection.pgconn.transaction_status
        if wanted and status == TransactionStatus.IDLE:
            self._idle.append(lent)
        else:
            _end(lent)


def _end(lent: _Lent) -> None:
    lent.connection.pgconn.finish()


def is_readable(pgconn: Any) -> bool:
    """Tell whether something arrived on an idle connection: most likely the server's goodbye.

    This costs about 2 µs where the usual SELECT 1 costs 80, a third of a whole send.
    """
    poller = select.poll()
    poller.register(pgconn.socket, select.POLLIN)
    return bool(poller.poll(0))
