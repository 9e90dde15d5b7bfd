"""How to reach PostgreSQL: addresses, pool sizes, and how fast a dead connection is noticed.

Part of the configuration a user writes down once; `horsies.config` re-exports it. Nothing here
connects. A value that cannot work is refused when the object is built, with every mistake of the
object in one report and no password in any of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Self

from pydantic import BaseModel, Field, SecretStr, field_validator, model_validator

from horsies.database_url import is_embedded, libpq_url, url_problem
from horsies.errors import ConfigurationError, ErrorCode
from horsies.validation import FROZEN_MODEL, SECONDS_MAX, Problem, raise_problems

URL_VARIABLES = ("HORSIES_DATABASE_URL", "DATABASE_URL")


# What Linux and libpq take; beyond it every connection would fail.
_KEEPALIVE_MAXIMUMS = {
    "tcp_keepalives_idle": 32_767,
    "tcp_keepalives_interval": 32_767,
    "tcp_keepalives_count": 127,
}
_USER_TIMEOUT_MS_MAX = 2**31 - 1


class PostgresConfig(BaseModel):
    """The database and the connections to it.

    Example:
        PostgresConfig(database_url="postgresql://app:secret@db.example/shop")
    """

    model_config = FROZEN_MODEL

    database_url: str = Field(repr=False)
    """The address of the database, as postgresql:// or postgresql+psycopg:// URL; both reach it
    through psycopg 3. Special characters in the password must be percent-encoded. The value
    embedded:// starts a private server for development. Never shown in repr or logs. Required."""

    session_database_url: str | None = Field(default=None, repr=False)
    """A direct or session-pooled address of the same database, used for LISTEN and schema work
    when database_url leads through a transaction pooler. Defaults to None: database_url serves for
    everything."""

    pgbouncer_transaction_mode: bool = False
    """Set when database_url leads to PgBouncer in transaction mode: prepared statements are turned
    off, and session_database_url becomes required. Defaults to False."""

    pool_size: int = Field(default=5, ge=0)
    """Connections a producer's pool keeps open, at least 0. Defaults to 5."""

    max_overflow: int = Field(default=10, ge=0)
    """Connections a producer's pool may open beyond pool_size when all are in use, at least 0.
    Together they must allow one connection. Defaults to 10."""

    pool_timeout: float = Field(default=30, gt=0, le=SECONDS_MAX)
    """Seconds a caller waits for a free connection before the call fails, above 0 and at most 100
    years. Defaults to 30."""

    pool_recycle: float = Field(default=1800, gt=0)
    """Seconds after which a pooled connection is replaced by a fresh one, above 0. Defaults to
    1800 (half an hour)."""

    pool_pre_ping: bool = True
    """Test a pooled connection before handing it out, so that one which died while idle is
    replaced instead of failing the call. Costs no round trip unless the connection has something
    to say. Defaults to True."""

    echo: bool = False
    """Log what senders, steering and workers' turns ask the database for: the name and the
    duration of every statement, never its parameters, at INFO on the logger horsies.sql. For
    debugging only: expect many lines. Defaults to False."""

    worker_pool_size: int | None = 3
    """Connections the pool of a worker's parent process keeps open, at least 1. None takes
    pool_size. Defaults to 3."""

    worker_max_overflow: int | None = 2
    """Connections the pool of a worker's parent process may open beyond worker_pool_size, at least
    0. None takes max_overflow. Defaults to 2."""

    worker_child_pool_min_size: int = 0
    """Connections a child process keeps open once its task code has sent a task, at least 0.
    Children that send nothing never connect. Defaults to 0."""

    worker_child_pool_max_size: int = 2
    """Connections a child process may have open for sending, at least 1 and not below
    worker_child_pool_min_size. Defaults to 2."""

    worker_child_pool_check: bool = True
    """Test a child's connection before handing it out. Defaults to True."""

    tcp_keepalives: bool = True
    """Let the operating system probe idle connections, so that a vanished server or a silent
    firewall is noticed. The three settings below only count when this is on. Defaults to True."""

    tcp_keepalives_idle: int = 30
    """Seconds a connection is idle before the first probe, from 1 to 32,767. Defaults to 30."""

    tcp_keepalives_interval: int = 10
    """Seconds between probes, from 1 to 32,767. Defaults to 10."""

    tcp_keepalives_count: int = 3
    """Unanswered probes after which the connection counts as dead, from 1 to 127. Defaults to 3."""

    tcp_user_timeout_ms: int = 30_000
    """Milliseconds sent data may stay unacknowledged before the connection counts as dead, from 0
    to 2,147,483,647. 0 leaves it to the operating system. Behind PgBouncer, which acknowledges
    whatever the server does, also how long a worker or scheduler waits for an answer. Defaults to
    30,000."""

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """Take the address from HORSIES_DATABASE_URL, else from DATABASE_URL.

        Keyword arguments set every other field, and win over the environment.

        Example:
            config = AppConfig(broker=PostgresConfig.from_env(pool_size=2))
        """
        if "database_url" in overrides:
            return cls(**overrides)
        for variable in URL_VARIABLES:
            if url := os.environ.get(variable, "").strip():
                return cls(database_url=url, **overrides)
        raise ConfigurationError(
            "no database is configured: set HORSIES_DATABASE_URL (or DATABASE_URL), or pass "
            'database_url="embedded://" for a private development server',
            code=ErrorCode.BROKER_INVALID_URL,
        )

    @field_validator("database_url", "session_database_url", mode="before")
    @classmethod
    def _plain_url(cls, value: object) -> object:
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        if isinstance(value, str) and value.startswith("postgres://"):
            return libpq_url(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems("PostgresConfig", self._problems())
        return self

    def _problems(self) -> Iterator[Problem]:
        for message in self._url_problems():
            yield ErrorCode.BROKER_INVALID_URL, message
        for message in self._pool_problems():
            yield ErrorCode.CONFIG_INVALID_BROKER_POOL, message
        for message in self._keepalive_problems():
            yield ErrorCode.CONFIG_INVALID_KEEPALIVE, message

    def _url_problems(self) -> Iterator[str]:
        for name in ("database_url", "session_database_url"):
            url = getattr(self, name)
            if url is not None and (problem := url_problem(url)) is not None:
                yield f"PostgresConfig.{name} is not usable: {problem}"
        session = self.session_database_url
        if session is not None and is_embedded(session) != is_embedded(self.database_url):
            yield (
                "PostgresConfig.session_database_url must lead to the same server as "
                "database_url: use embedded:// for both or for neither"
            )
        if self.pgbouncer_transaction_mode and not self._has_separate_session_url():
            yield (
                "PostgresConfig.pgbouncer_transaction_mode needs a session_database_url that "
                "differs from database_url, because LISTEN does not work through a transaction "
                "pooler"
            )

    def _has_separate_session_url(self) -> bool:
        session = self.session_database_url
        return session is not None and libpq_url(session) != libpq_url(self.database_url)

    def _pool_problems(self) -> Iterator[str]:
        if self.pool_size + self.max_overflow < 1:
            yield "PostgresConfig.pool_size and max_overflow must allow at least one connection"
        if self.worker_pool_size is not None and self.worker_pool_size < 1:
            yield "PostgresConfig.worker_pool_size must be at least 1, or None to take pool_size"
        if self.worker_max_overflow is not None and self.worker_max_overflow < 0:
            yield (
                "PostgresConfig.worker_max_overflow must be at least 0, or None to take "
                "max_overflow"
            )
        yield from self._child_pool_problems()

    def _child_pool_problems(self) -> Iterator[str]:
        smallest, largest = self.worker_child_pool_min_size, self.worker_child_pool_max_size
        if smallest < 0:
            yield "PostgresConfig.worker_child_pool_min_size must be at least 0"
        if largest < 1:
            yield "PostgresConfig.worker_child_pool_max_size must be at least 1"
        elif smallest > largest:
            yield (
                f"PostgresConfig.worker_child_pool_min_size ({smallest}) must not exceed "
                f"worker_child_pool_max_size ({largest})"
            )

    def _keepalive_problems(self) -> Iterator[str]:
        for name, largest in _KEEPALIVE_MAXIMUMS.items() if self.tcp_keepalives else ():
            if not 1 <= getattr(self, name) <= largest:
                yield (
                    f"PostgresConfig.{name} must be from 1 to {largest:,} while tcp_keepalives is "
                    "on"
                )
        if not 0 <= self.tcp_user_timeout_ms <= _USER_TIMEOUT_MS_MAX:
            yield (
                f"PostgresConfig.tcp_user_timeout_ms must be from 0 to {_USER_TIMEOUT_MS_MAX:,}; 0 "
                "leaves it to the operating system"
            )
