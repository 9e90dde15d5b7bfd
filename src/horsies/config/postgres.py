"""Connections to PostgreSQL: URLs, pool sizes, and detection of dead connections.

Nothing here connects. An invalid value is rejected when the object is built; one report lists all
mistakes and never shows a password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from horsies.database_url import (
    DEFAULT_SCHEMA,
    SCHEMA_NAME,
    SCHEMA_VARIABLE,
    URL_VARIABLES,
    is_embedded,
    libpq_url,
    search_path_in_url,
    url_problem,
)
from horsies.encryption import PayloadCodec
from horsies.errors import ConfigurationError, ErrorCode
from horsies.payload_store import TABLE_STORE, PayloadStore, TableStore
from horsies.validation import SECONDS_MAX, Check, FrozenModel, raise_failed

# The limits of Linux and libpq; every connection with a larger value would fail.
_KEEPALIVE_MAXIMUMS = {
    "tcp_keepalives_idle": 32_767,
    "tcp_keepalives_interval": 32_767,
    "tcp_keepalives_count": 127,
}
_USER_TIMEOUT_MS_MAX = 2**31 - 1
_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,32}")
# One character shorter than a key id, because references put a mark before the id of a store.
_STORE_ID = re.compile(r"[A-Za-z0-9_.-]{1,31}")


def _schema_rule(given: str) -> str:
    return (
        "must be 1 to 63 lower-case letters, digits and '_', must not begin with a digit "
        f"or pg_, and must not be information_schema; not {given[:100]!r}"
    )


def _first_schema(search_path: str) -> str:
    """Return the first named schema of a search_path, for a message; return "..." if it names none."""
    first = search_path.split(",")[0].strip().strip('"')
    return first if SCHEMA_NAME.fullmatch(first) else "..."


def _checked_codec(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, type) or not isinstance(value, PayloadCodec):
        raise ValueError("must have key_id, key_ids, encode and decode, as FernetCodec has")
    ids = [value.key_id, *value.key_ids]
    if not all(isinstance(one, str) and _KEY_ID.fullmatch(one) for one in ids):
        raise ValueError("has a key id that is not 1 to 32 letters, digits, '-', '_' or '.'")
    return value


def _checked_store(value: object) -> object:
    if value is None or isinstance(value, TableStore):
        return value
    if isinstance(value, type) or not isinstance(value, PayloadStore):
        raise ValueError("must be TableStore(), or have store_id, put, get and delete")
    name: object = value.store_id
    if not isinstance(name, str) or not _STORE_ID.fullmatch(name) or name == TABLE_STORE:
        raise ValueError(
            f"has a store_id that is not 1 to 31 letters, digits, '-', '_' or '.', or is {TABLE_STORE!r}"
        )
    return value


class PostgresConfig(FrozenModel):
    """The database and the connections to it.

    Example:
        PostgresConfig(database_url="postgresql://app:secret@db.example/shop")
    """

    database_url: str = Field(repr=False)
    """The address of the database, a postgresql:// or postgresql+psycopg:// URL; both use psycopg 3.
    Special characters in the password must be percent-encoded. The value
    embedded:// starts a private server for development. Never shown in repr or logs. Required."""

    session_database_url: str | None = Field(default=None, repr=False)
    """A direct or session-pooled address of the same database. LISTEN and migrations use it when
    database_url points to a transaction pooler. Defaults to None: database_url is used for everything.
    """

    pgbouncer_transaction_mode: bool = False
    """Set this when database_url points to PgBouncer in transaction mode: it turns off prepared
    statements and makes session_database_url required. Defaults to False.
    """

    schema_name: str = Field(default=DEFAULT_SCHEMA, alias="schema")
    """The schema of the tables and functions, given as `schema=`: 1 to 63 lower-case letters, digits
    and `_`. It is created if the role is allowed to create it. Applications with different schemas in
    one database do not see, wake or lock each other. Defaults to public.
    """

    pool_size: int = Field(default=5, ge=0)
    """How many connections a producer's pool keeps open, at least 0. Defaults to 5."""

    max_overflow: int = Field(default=10, ge=0)
    """How many connections a producer's pool may open beyond pool_size when all are in use, at least 0.
    pool_size and max_overflow together must allow at least one connection. Defaults to 10.
    """

    pool_timeout: float = Field(default=30, gt=0, le=SECONDS_MAX)
    """How many seconds a caller waits for a free connection before the call fails, above 0 and at most
    100 years. Defaults to 30.
    """

    pool_recycle: float = Field(default=1800, gt=0)
    """Seconds after which a pooled connection is replaced by a fresh one, above 0. Defaults to
    1800 (half an hour)."""

    pool_pre_ping: bool = True
    """Test a pooled connection before use, and replace it if it died while idle. The test checks only
    the socket and needs no round trip. Defaults to True.
    """

    echo: bool = False
    """Log the statements of senders, operator actions and workers' turns: the name and the duration of
    each statement, never its parameters, at INFO on the logger horsies.sql. For debugging only: expect
    many lines. Defaults to False.
    """

    worker_pool_size: int | None = 3
    """Connections that a worker's parent process keeps open for application code that sends tasks or
    reads results there, such as a thread of a module, at least 1. The worker itself does not use them: it
    has its own connections. None means pool_size. Defaults to 3.
    """

    worker_max_overflow: int | None = 2
    """Connections that application code in a worker's parent process may open beyond worker_pool_size,
    at least 0. None means max_overflow. Defaults to 2.
    """

    worker_child_pool_min_size: int = 0
    """How many connections a child process keeps open after its task code has sent a task, at least 0.
    Children that do not send never connect. Defaults to 0.
    """

    worker_child_pool_max_size: int = 2
    """How many connections a child process may have open for sending, at least 1 and not below
    worker_child_pool_min_size. Defaults to 2.
    """

    worker_child_pool_check: bool = True
    """Test a child's connection before use. Defaults to True."""

    tcp_keepalives: bool = True
    """Let the operating system probe idle connections, to detect a lost server or a firewall that drops
    packets. The next three settings only apply if this is on. Defaults to True.
    """

    tcp_keepalives_idle: int = 30
    """How many idle seconds pass before the first probe, from 1 to 32,767. Defaults to 30."""

    tcp_keepalives_interval: int = 10
    """Seconds between probes, from 1 to 32,767. Defaults to 10."""

    tcp_keepalives_count: int = 3
    """Unanswered probes after which the connection counts as dead, from 1 to 127. Defaults to 3."""

    tcp_user_timeout_ms: int = 30_000
    """How many milliseconds sent data may stay unacknowledged before the connection counts as dead, from
    0 to 2,147,483,647. 0 leaves the limit to the operating system. PgBouncer acknowledges data even when
    the server is down, so with PgBouncer this setting also limits how long a worker or scheduler waits
    for a response. Defaults to 30,000.
    """

    codec: PayloadCodec | None = Field(default=None, repr=False)
    """The codec that encrypts stored arguments, results, errors, steps, signals, notes and kept log
    lines: a `FernetCodec`, or your own `PayloadCodec`. None stores them as plain JSON. Defaults to None.
    """

    encrypt_errors: bool = True
    """With a codec, also encrypt the messages and tracebacks of tasks' errors, which often quote
    arguments. The data of errors is always encrypted, and error codes never are. Defaults to True.
    """

    store: PayloadStore | TableStore | None = Field(default=None, repr=False)
    """The store that keeps large arguments, results, steps and signals outside the rows of tasks: a
    `TableStore`, an `S3Store`, or your own `PayloadStore`. None keeps them in the rows. Defaults to None.
    """

    store_above_bytes: int = Field(default=100_000, ge=1_000, le=1_000_000_000)
    """With a store, the size of JSON above which a payload is kept there, from 1,000 to 1,000,000,000 bytes.
    Defaults to 100,000.
    """

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """Take the address from HORSIES_DATABASE_URL or else DATABASE_URL, and the schema from
        HORSIES_SCHEMA if it is set.

        Keyword arguments set the other fields; a `database_url` or `schema` passed here takes precedence.

        Example:
            config = AppConfig(broker=PostgresConfig.from_env(pool_size=2))
        """
        schema = os.environ.get(SCHEMA_VARIABLE, "").strip()
        if schema and "schema" not in overrides:
            if not SCHEMA_NAME.fullmatch(schema):
                raise ConfigurationError(
                    f"The environment variable {SCHEMA_VARIABLE} {_schema_rule(schema)}.",
                    code=ErrorCode.CONFIG_INVALID_SCHEMA,
                )
            overrides["schema"] = schema
        if "database_url" in overrides:
            return cls(**overrides)
        for variable in URL_VARIABLES:
            if url := os.environ.get(variable, "").strip():
                return cls(database_url=url, **overrides)
        raise ConfigurationError(
            "No database is configured: set HORSIES_DATABASE_URL (or DATABASE_URL), or write "
            'Horsies("embedded://") for a private development server.',
            code=ErrorCode.BROKER_INVALID_URL,
        )

    @field_validator("codec", mode="plain")
    @classmethod
    def _usable_codec(cls, value: object) -> object:
        return _checked_codec(value)

    @field_validator("store", mode="plain")
    @classmethod
    def _usable_store(cls, value: object) -> object:
        return _checked_store(value)

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
        checks = [*self._url_checks(), *self._pool_checks(), *self._keepalive_checks()]
        raise_failed("PostgresConfig", checks)
        return self

    def _url_checks(self) -> Iterator[Check]:
        code = ErrorCode.BROKER_INVALID_URL
        url, session = self.database_url, self.session_database_url
        for name, given in {"database_url": url, "session_database_url": session}.items():
            problem = None if given is None else url_problem(given)
            yield problem is not None, code, f"{name} is not usable: {problem}"
            path = None if given is None else search_path_in_url(given)
            yield (
                path is not None and "schema_name" not in self.model_fields_set,
                ErrorCode.CONFIG_INVALID_SCHEMA,
                f"{name} sets a search_path in its options, which does not choose the schema of the tables: "
                f"use PostgresConfig(schema={_first_schema(path or '')!r}) or {SCHEMA_VARIABLE}, or "
                f"schema={DEFAULT_SCHEMA!r} if the tables are there",
            )
        yield (
            session is not None and is_embedded(session) != is_embedded(url),
            code,
            "session_database_url must lead to the same server as database_url: use embedded:// "
            "for both or for neither",
        )
        is_separate = session is not None and libpq_url(session) != libpq_url(url)
        yield (
            self.pgbouncer_transaction_mode and not is_separate,
            code,
            "pgbouncer_transaction_mode needs a session_database_url that differs from database_url, "
            "because LISTEN does not work through a transaction pooler",
        )
        yield (
            not SCHEMA_NAME.fullmatch(self.schema_name),
            ErrorCode.CONFIG_INVALID_SCHEMA,
            f"schema {_schema_rule(self.schema_name)}",
        )

    def _pool_checks(self) -> Iterator[Check]:
        code = ErrorCode.CONFIG_INVALID_BROKER_POOL
        size, overflow = self.worker_pool_size, self.worker_max_overflow
        smallest, largest = self.worker_child_pool_min_size, self.worker_child_pool_max_size
        total = self.pool_size + self.max_overflow
        yield total < 1, code, "pool_size and max_overflow must allow at least one connection"
        is_small = size is not None and size < 1
        yield is_small, code, "worker_pool_size must be at least 1, or None to take pool_size"
        is_below = overflow is not None and overflow < 0
        yield is_below, code, "worker_max_overflow must be at least 0, or None to take max_overflow"
        yield smallest < 0, code, "worker_child_pool_min_size must be at least 0"
        yield largest < 1, code, "worker_child_pool_max_size must be at least 1"
        yield (
            largest >= 1 and smallest > largest,
            code,
            f"worker_child_pool_min_size ({smallest}) must not exceed worker_child_pool_max_size "
            f"({largest})",
        )

    def _keepalive_checks(self) -> Iterator[Check]:
        code = ErrorCode.CONFIG_INVALID_KEEPALIVE
        for name, largest in _KEEPALIVE_MAXIMUMS.items() if self.tcp_keepalives else ():
            is_wrong = not 1 <= getattr(self, name) <= largest
            yield is_wrong, code, f"{name} must be from 1 to {largest:,} while tcp_keepalives is on"
        yield (
            not 0 <= self.tcp_user_timeout_ms <= _USER_TIMEOUT_MS_MAX,
            code,
            f"tcp_user_timeout_ms must be from 0 to {_USER_TIMEOUT_MS_MAX:,}; 0 leaves it to the "
            "operating system",
        )
