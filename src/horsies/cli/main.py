"""The `horsies` command: check an application, bring its database up to date, run it, watch it.

The outermost layer. A mistake ends in one report on standard error and exit status 1, never in a
traceback; only arguments that typer itself refuses end in 2.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import psycopg
import typer
from psycopg import Connection

from horsies._version import __version__
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
from horsies.cli.scheduler import scheduler
from horsies.cli.schedules import schedules
from horsies.cli.tasks_queues_workers import cancel, queues, retry, show, status, tasks, workers
from horsies.cli.worker import worker
from horsies.cli.workflows import workflow, workflows
from horsies.config.postgres import URL_VARIABLES, PostgresConfig
from horsies.database_url import mask_url
from horsies.db.database import Database
from horsies.db.errors import describe
from horsies.db.migrate import (
    Migration,
    SchemaTooNewError,
    apply_migrations,
    known_migrations,
    migration_script,
    pending_migrations,
    schema_version,
)
from horsies.errors import ErrorCode, HorsiesError, ValidationReport
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.modules import failure_at
from horsies.tasks.broker import revealing

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command line; the entry point of `horsies` and of `python -m horsies`."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may not know every character stored
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="horsies")
    except HorsiesError as error:
        typer.echo(str(error), err=True)
        _show_causes([error])
        sys.exit(1)


@cli.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    """A task queue and workflow engine whose only server is PostgreSQL."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(1)


def check(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    live: Annotated[
        bool, typer.Option("--live", help="Also connect to the database and try LISTEN.")
    ] = False,
    loglevel: LogLevelOption = LogLevel.WARNING,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Validate an application before it runs: imports, tasks, error codes, retry policies."""
    attach_handler(loglevel, log_format)
    app = open_app("check", module or locator)
    errors = app.check(live=live)
    if errors:
        typer.echo(ValidationReport("check", errors).format(), err=True)
        _show_causes(errors)
        raise typer.Exit(1)
    typer.echo("ok: all validations passed")
    typer.echo(f"{len(app.list_tasks())} task(s) registered")


def _show_causes(errors: Sequence[HorsiesError]) -> None:
    if os.environ.get("HORSIES_DEBUG_IMPORTS") != "1":
        return
    for error in errors:
        if error.__cause__ is not None:
            typer.echo(_traceback(error.__cause__), err=True)


def _traceback(cause: BaseException) -> str:
    """The traceback, without what the messages and source lines in it tell of a password."""
    text = "".join(traceback.format_exception(cause))
    for error in revealing(cause):
        text = text.replace(str(error), describe(error))
    return mask_url(text)


def migrate(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL of what is missing; change nothing.")
    ] = False,
    check_only: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if something is missing; change nothing.")
    ] = False,
    loglevel: LogLevelOption = LogLevel.WARNING,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Bring the tables of horsies up to date, or tell what that would take."""
    attach_handler(loglevel, log_format)
    refuse_both("--sql", sql, "--check", check_only)
    refuse_both("LOCATOR", module or locator, "--database-url", database_url)
    if sql:
        _print_script(_database(module or locator, database_url, required=False))
        return
    config = _database(module or locator, database_url)
    assert config is not None
    if check_only:
        _compare_schema(config)
    else:
        _update_schema(config)


def _database(
    locator: str | None, database_url: str | None, *, required: bool = True
) -> PostgresConfig | None:
    if locator:
        return open_app("migrate", locator).config.broker
    if not (required or database_url is not None or any(map(os.environ.get, URL_VARIABLES))):
        return None
    return named_database(database_url)


def _update_schema(config: PostgresConfig) -> None:
    with _schema_connection(config) as connection:
        applied = apply_migrations(connection)
    for migration in applied:
        typer.echo(f"applied {migration.title}")
    typer.echo(f"the schema is at version {schema_version()}")


def _compare_schema(config: PostgresConfig) -> None:
    with _schema_connection(config) as connection:
        missing = pending_migrations(connection)
    for migration in missing:
        typer.echo(f"missing {migration.title}", err=True)
    if missing:
        raise typer.Exit(1)
    typer.echo(f"the schema is at version {schema_version()}")


def _print_script(config: PostgresConfig | None) -> None:
    missing = known_migrations() if config is None else _missing_or_all(config)
    if missing:
        typer.echo(migration_script(missing), nl=False)
    else:
        typer.echo("-- nothing is missing")


def _missing_or_all(config: PostgresConfig) -> Sequence[Migration]:
    try:
        with _schema_connection(config) as connection:
            return pending_migrations(connection)
    except HorsiesError as error:
        if error.code is not ErrorCode.BROKER_INVALID_URL:
            raise
        typer.echo(f"{error.message} This is the script for an empty database.", err=True)
        return known_migrations()


@contextmanager
def _schema_connection(config: PostgresConfig) -> Iterator[Connection[Any]]:
    try:
        opened = Database(config, "migrate").connect("migrate", session=True)
    except HorsiesError as error:
        error.location = None  # the address is wrong, not the line that led here
        raise
    except Exception as error:
        message = f"The database does not answer. {describe(error)}"
        raise failure_at(None, message, code=ErrorCode.BROKER_INVALID_URL) from error
    try:
        with opened as connection:
            yield connection
    except SchemaTooNewError as error:
        raise failure_at(None, str(error), code=ErrorCode.BROKER_INIT_FAILED) from error
    except psycopg.Error as error:
        message = f"The schema cannot be read or changed. {describe(error)}"
        raise failure_at(None, message, code=ErrorCode.BROKER_INIT_FAILED) from error


def version() -> None:
    """Print the version of horsies."""
    typer.echo(f"horsies {__version__}")


COMMANDS: dict[str, Callable[..., None]] = {
    "check": check,
    "migrate": migrate,
    "worker": worker,
    "scheduler": scheduler,
    "status": status,
    "workers": workers,
    "queues": queues,
    "tasks": tasks,
    "show": show,
    "cancel": cancel,
    "retry": retry,
    "workflows": workflows,
    "schedules": schedules,
    "version": version,
}

for _name, _command in COMMANDS.items():
    cli.command(_name)(_command)
cli.add_typer(workflow, name="workflow")
