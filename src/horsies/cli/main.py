"""The `horsies` command: check an application, migrate its database, run workers, and operate them.

An error ends in one report on standard error and exit status 1, never in a traceback. Arguments that
typer itself refuses end in exit status 2.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import psycopg
import typer
from psycopg import Connection

from horsies._version import __version__
from horsies.check import live_errors
from horsies.cli.changes import cancel, history, retry
from horsies.cli.doctor import doctor
from horsies.cli.explain import explain
from horsies.cli.health import health, metrics
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
from horsies.cli.queues_workers import queues, status, workers
from horsies.cli.scheduler import scheduler
from horsies.cli.schedules import schedules
from horsies.cli.tasks import show, tasks
from horsies.cli.web import web
from horsies.cli.worker import worker
from horsies.cli.workflows import workflow, workflows
from horsies.config.postgres import URL_VARIABLES, PostgresConfig
from horsies.database_url import mask_url
from horsies.db.database import Database
from horsies.db.errors import describe
from horsies.db.migrate import (
    Migration,
    UnusableSchemaError,
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
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # stored text may not fit its encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="horsies")
    except HorsiesError as error:
        typer.echo(str(error), err=True)
        _show_causes([error])
        sys.exit(1)


def _open_missing_streams() -> None:
    """Open standard streams that the caller closed on /dev/null.

    Otherwise sockets would get their numbers, and a task that writes to standard error would write to
    one of them.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null_fd = os.open(os.devnull, os.O_RDWR)
            if null_fd != number:
                os.dup2(null_fd, number)
                os.close(null_fd)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


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
        bool,
        typer.Option(
            "--live",
            help="Also connect to the database, check its tables and rights, and test LISTEN.",
        ),
    ] = False,
    loglevel: LogLevelOption = LogLevel.WARNING,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Validate an application before it runs: imports, tasks, workflows, error codes, retry policies,
    schedules.

    Exit codes: 0 valid, 1 errors were found.
    """
    attach_handler(loglevel, log_format)
    app = open_app("check", module or locator)
    errors = app.check(live=live)
    if errors:
        typer.echo(ValidationReport("check", errors).format(), err=True)
        _show_causes(errors)
        raise typer.Exit(1)
    typer.echo("ok: all validations passed")
    typer.echo(f"{len(app.list_tasks())} task(s) registered")
    if live:
        for error in live_errors(app.config.broker, role="worker", migrates=app.migrates):
            typer.echo(f"note: {error.message}")


def _show_causes(errors: Sequence[HorsiesError]) -> None:
    if os.environ.get("HORSIES_DEBUG_IMPORTS") != "1":
        return
    for error in errors:
        if error.__cause__ is not None:
            typer.echo(_traceback(error.__cause__), err=True)


def _traceback(cause: BaseException) -> str:
    """Format a traceback, with passwords masked in its messages and source lines."""
    text = "".join(traceback.format_exception(cause))
    for error in revealing(cause):
        text = text.replace(str(error), describe(error))
    return mask_url(text)


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
    """
    attach_handler(loglevel, log_format)
    refuse_both("--sql", sql, "--check", check_only)
    refuse_both("LOCATOR", module or locator, "--database-url", database_url)
    config = _database(module or locator, database_url, is_optional=sql)
    if sql:
        _print_script(config)
        return
    assert config is not None
    with _schema_connection(config) as connection:
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
        with _schema_connection(config) as connection:
            return pending_migrations(connection, replaces=True)
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
        error.location = None  # the database URL is wrong, not a line of code
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
        message = f"The schema cannot be read or changed. {describe(error)}"
        raise failure_at(None, message, code=ErrorCode.BROKER_INIT_FAILED) from error


def version() -> None:
    """Print the version of horsies."""
    typer.echo(f"horsies {__version__}")


for _command in (
    *(check, migrate, worker, scheduler, status, workers, queues),
    *(tasks, show, explain, cancel, retry, history, workflows, schedules, doctor, web),
    *(health, metrics, version),
):
    cli.command()(_command)
cli.add_typer(workflow, name="workflow")

# Typer keeps the line breaks of a docstring, which look ragged in a terminal of another width.
for _info in (*cli.registered_commands, *workflow.registered_commands):
    _paragraphs = inspect.cleandoc(getattr(_info.callback, "__doc__", None) or "").split("\n\n")
    _info.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)
