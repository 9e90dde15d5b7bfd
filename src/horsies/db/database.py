"""Database: the connection pools and dedicated connections of one process.

``Database`` owns every socket of the process. It opens nothing before the first use and shares
nothing across a fork.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from psycopg import AsyncConnection, Connection

from horsies.config.postgres import PostgresConfig
from horsies.database_url import libpq_url
from horsies.db import embedded
from horsies.db.pool import AsyncPool, Pool, PoolLimits

# Pools inherited through a fork are kept here for ever: if the garbage collector closed their
# connections, it would end sessions that the parent process still uses.
_inherited: list[object] = []


class Database:
    """All connections of one process to one database."""

    def __init__(self, config: PostgresConfig, role: str = "producer") -> None:
        self.config = config
        self.role = role
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._urls: tuple[str, str] | None = None
        self._pool: Pool | None = None
        self._async_pools: dict[asyncio.AbstractEventLoop, AsyncPool] = {}

    def _reset_after_fork(self) -> None:
        if self._pid != os.getpid():
            _inherited.append((self._pool, self._async_pools))
            self._lock = threading.Lock()
            self._forget()

    def urls(self) -> tuple[str, str]:
        """Return the URL for ordinary work and the one for LISTEN and schema work."""
        self._reset_after_fork()
        with self._lock:
            if self._urls is None:
                url = _resolve(self.config.database_url)
                session = self.config.session_database_url
                self._urls = url, _resolve(session) if session else url
        return self._urls

    def options(self, role: str) -> dict[str, Any]:
        """Return the connection parameters shared by all connections."""
        config = self.config
        options: dict[str, Any] = {
            "application_name": f"horsies:{role}",
            # Overrides the database and PGCLIENTENCODING: ``Pipeline`` writes UTF-8.
            "client_encoding": "UTF8",
            "connect_timeout": 10,
            "autocommit": True,
            "prepare_threshold": None if config.pgbouncer_transaction_mode else 5,
            "tcp_user_timeout": config.tcp_user_timeout_ms,
        }
        if config.tcp_keepalives:
            options |= {
                "keepalives": 1,
                "keepalives_idle": config.tcp_keepalives_idle,
                "keepalives_interval": config.tcp_keepalives_interval,
                "keepalives_count": config.tcp_keepalives_count,
            }
        return options

    def connect(self, role: str, *, session: bool = False) -> Connection[Any]:
        """Open a dedicated autocommit connection; ``session`` bypasses a pooler."""
        url, session_url = self.urls()
        return Connection.connect(session_url if session else url, **self.options(role))

    def connection(self) -> AbstractContextManager[Connection[Any]]:
        """Lend a pooled synchronous connection."""
        return self.pool().connection()

    def connection_async(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """Lend a pooled connection of the running event loop."""
        return self.pool_async().connection()

    def pool(self) -> Pool:
        self._reset_after_fork()
        with self._lock:
            if self._pool is None:
                self._pool = Pool(lambda: self.connect(self.role), self._limits())
        return self._pool

    def pool_async(self) -> AsyncPool:
        self._reset_after_fork()
        loop = asyncio.get_running_loop()
        if (pool := self._async_pools.get(loop)) is None:
            self._drop_closed_loops()
            pool = self._async_pools[loop] = AsyncPool(
                lambda: AsyncConnection.connect(self.urls()[0], **self.options(self.role)),
                self._limits(),
            )
        return pool

    def _drop_closed_loops(self) -> None:
        for loop in list(self._async_pools):
            if loop.is_closed() and (pool := self._async_pools.pop(loop, None)) is not None:
                pool.close()

    def _limits(self) -> PoolLimits:
        config = self.config
        kept, most = pool_sizes(config, self.role)
        check = config.worker_child_pool_check if self.role == "child" else config.pool_pre_ping
        return PoolLimits(kept, most, config.pool_timeout, config.pool_recycle, check)

    def close(self) -> None:
        """Close the synchronous pool; the next use opens a new one."""
        self._reset_after_fork()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        self._drop_closed_loops()

    def close_async(self) -> None:
        """Close the pool of the running event loop."""
        pool = self._async_pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            pool.close()


def pool_sizes(config: PostgresConfig, role: str) -> tuple[int, int]:
    """Return the number of connections a pool keeps and its maximum, by the process's role.

    A child opens a pool only when its task code sends, and many children share a server.
    """
    if role == "child":
        return config.worker_child_pool_min_size, config.worker_child_pool_max_size
    kept, more = config.pool_size, config.max_overflow
    if role == "worker":
        kept = kept if config.worker_pool_size is None else config.worker_pool_size
        more = more if config.worker_max_overflow is None else config.worker_max_overflow
    return kept, kept + more


def _resolve(url: str) -> str:
    return embedded.start_or_join(url) if embedded.is_embedded(url) else libpq_url(url)
