"""`horsies migrate`: create or update the tables, or show the missing migrations."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import psycopg
import typer
from psycopg import Connection

from horsies.cli import session
from horsies.cli.options import (
    DatabaseUrlOption,
    LocatorArgument,
    LogFormatOption,
    LogLevelOption,
    ModuleOption,
    named_database,
    open_app,
    refuse_both,
)
from horsies.config.postgres import PostgresConfig
from horsies.database_url import URL_VARIABLES
from horsies.db import blockers
from horsies.db.database import Database
from horsies.db.errors import describe
from horsies.db.limits import Limits
from horsies.db.migrate import (
    Migration,
    UnusableSchemaError,
    apply_migrations,
    known_migrations,
    migration_script,
    pending_migrations,
    schema_version,
)
from horsies.errors import ErrorCode, HorsiesError
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.modules import failure_at


def migrate(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL of the missing migrations; change nothing.")
    ] = False,
    check_only: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a migration is missing; change nothing.")
    ] = False,
    loglevel: LogLevelOption = LogLevel.WARNING,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Create or update the tables of horsies, or show the missing migrations.

    Exit codes: 0 up to date, 1 failure, or a migration is missing with --check.

    Example:
        horsies migrate shop.background:app
        horsies migrate --check
    """
    attach_handler(loglevel, log_format)
    refuse_both("--sql", sql, "--check", check_only)
    refuse_both("LOCATOR", module or locator, "--database-url", database_url)
    config = _database(module or locator, database_url, is_optional=sql)
    if sql:
        _print_script(config)
        return
    assert config is not None
    # A migration waits for locks on the tables; --check has the time limits of a read-only command.
    limits = session.READING if check_only else None
    with schema_connection(config, limits) as connection:
        do = pending_migrations if check_only else apply_migrations
        migrations = do(connection, replaces=True)
    for migration in migrations:
        typer.echo(f"{'missing' if check_only else 'applied'} {migration.title}", err=check_only)
    if check_only and migrations:
        raise typer.Exit(1)
    typer.echo(f"the schema is at version {schema_version()}")


def _database(
    locator: str | None, database_url: str | None, *, is_optional: bool
) -> PostgresConfig | None:
    if locator:
        return open_app("migrate", locator).config.broker
    is_named = database_url is not None or any(map(os.environ.get, URL_VARIABLES))
    return None if is_optional and not is_named else named_database(database_url)


def _print_script(config: PostgresConfig | None) -> None:
    missing = known_migrations() if config is None else _missing_or_all(config)
    if missing:
        named = config or PostgresConfig.from_env(database_url="postgresql:///")
        typer.echo(migration_script(missing, named.schema_name), nl=False)
    else:
        typer.echo("-- nothing is missing")


def _missing_or_all(config: PostgresConfig) -> Sequence[Migration]:
    try:
        with schema_connection(config, session.READING) as connection:
            return pending_migrations(connection, replaces=True)
    except HorsiesError as error:
        if error.code is not ErrorCode.BROKER_INVALID_URL:
            raise
        typer.echo(f"{error.message} This is the script for an empty database.", err=True)
        return known_migrations()


@contextmanager
def schema_connection(
    config: PostgresConfig, limits: Limits | None = None
) -> Iterator[Connection[Any]]:
    database = Database(config, "migrate", limits=limits)
    try:
        opened = database.connect("migrate", session=True)
    except HorsiesError as error:
        error.location = None  # The database URL is wrong, not the code.
        raise
    except Exception as error:
        message = f"The database is unreachable. {describe(error)}"
        raise failure_at(None, message, code=ErrorCode.BROKER_INVALID_URL) from error
    try:
        with opened as connection:
            yield connection
    except UnusableSchemaError as error:
        raise failure_at(None, str(error), code=ErrorCode.BROKER_INIT_FAILED) from error
    except psycopg.Error as error:
        cause = blockers.named(database, error)
        message = f"The schema cannot be read or changed. {describe(cause)}"
        raise failure_at(None, message, code=ErrorCode.BROKER_INIT_FAILED) from error
