"""The configuration for a command that has only a URL: the defaults of `PostgresConfig`, without pydantic.

The import of pydantic takes 100 ms of processor time, twice as much as everything else that an operator's
command does.
"""

from __future__ import annotations

import os

from horsies.database_url import (
    DEFAULT_SCHEMA,
    SCHEMA_NAME,
    SCHEMA_VARIABLE,
    URL_VARIABLES,
    libpq_url,
    url_problem,
)


class DefaultPostgresConfig:
    """A `PostgresConfig` with only the URL and the schema set. A test compares all fields."""

    session_database_url = None
    pgbouncer_transaction_mode = False
    pool_size = 5
    max_overflow = 10
    pool_timeout = 30.0
    pool_recycle = 1800.0
    pool_pre_ping = True
    echo = False
    worker_pool_size = 3
    worker_max_overflow = 2
    worker_child_pool_min_size = 0
    worker_child_pool_max_size = 2
    worker_child_pool_check = True
    tcp_keepalives = True
    tcp_keepalives_idle = 30
    tcp_keepalives_interval = 10
    tcp_keepalives_count = 3
    tcp_user_timeout_ms = 30_000
    codec = None
    encrypt_errors = True
    store = None
    store_above_bytes = 100_000

    def __init__(self, database_url: str, schema_name: str) -> None:
        is_renamed = database_url.startswith("postgres://")
        self.database_url = libpq_url(database_url) if is_renamed else database_url
        self.schema_name = schema_name


def default_config(database_url: str | None) -> DefaultPostgresConfig | None:
    """Return the configuration for this URL, or from the environment if it is None; return None if invalid.

    `PostgresConfig.from_env` reads the same variables and reports all mistakes.
    """
    found = (os.environ.get(name, "").strip() for name in URL_VARIABLES)
    url = next(filter(None, found), "") if database_url is None else database_url
    schema = os.environ.get(SCHEMA_VARIABLE, "").strip() or DEFAULT_SCHEMA
    if url_problem(url) is not None or not SCHEMA_NAME.fullmatch(schema):
        return None
    return DefaultPostgresConfig(url, schema)
