"""Parameters shared by many commands: the application, the database, and the log options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Never

import typer

from horsies.database_url import mask_url
from horsies.errors import ErrorCode, HorsiesError, ValidationReport
from horsies.logs import LogFormat, LogLevel
from horsies.modules import Deferred, add_project_root, failure_at

if TYPE_CHECKING:
    from horsies import locate
    from horsies.app import Horsies
    from horsies.config import postgres
    from horsies.config.postgres import PostgresConfig
    from horsies.monitor import metrics
else:  # The help text needs none of these modules.
    locate = Deferred("horsies.locate")
    metrics = Deferred("horsies.monitor.metrics")
    postgres = Deferred("horsies.config.postgres")

EXIT_FAILED = 1
EXIT_NOT_FOUND = 4

_LOCATOR_FORM = (
    "package.module:app or path/to/file.py:app; :app may be left out if the module has exactly one "
    "application"
)

RunIdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The id of a run, or its first digits.")
]
SignalNameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the signal.")]
SignalValueArgument = Annotated[
    str,
    typer.Argument(metavar="[VALUE]", help="A JSON value; null by default.", show_default=False),
]
LocatorArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="LOCATOR",
        help=f"{_LOCATOR_FORM}.",
        show_default=False,
    ),
]
# For commands that serve or show several databases.
LocatorsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LOCATOR",
        help=f"{_LOCATOR_FORM}; give several for several databases, each with an optional "
        "name: NAME=LOCATOR.",
        show_default=False,
    ),
]
ModuleOption = Annotated[
    str | None,
    typer.Option(
        "--module",
        "-m",
        metavar="LOCATOR",
        help="Same as LOCATOR; takes precedence.",
        show_default=False,
    ),
]
DatabaseUrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The database, instead of an application; default: HORSIES_DATABASE_URL or "
        "DATABASE_URL.",
        show_default=False,
    ),
]
DatabaseUrlsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--database-url",
        metavar="URL",
        help="The database, instead of an application; default: HORSIES_DATABASE_URL or "
        "DATABASE_URL; repeat it for several databases, as in NAME=URL.",
        show_default=False,
    ),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--loglevel", case_sensitive=False, help="The lowest level to log.")
]
LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", case_sensitive=False, help="The format of log lines.")
]


def open_app(command: str, locator: str | None) -> Horsies:
    """Import a command's application; sends during the import are suppressed."""
    if locator is None:
        raise failure_at(
            None,
            f"horsies {command} needs an application.",
            help_text=f"horsies {command} package.module:app",
        )
    add_project_root()
    with locate.sends_suppressed():
        return locate.load_app(locator)


def refuse_broken_app(app: Horsies) -> None:
    """Report the errors that ``app.check`` finds and exit with 1, or return if it finds none."""
    if errors := app.check(live=False):
        typer.echo(ValidationReport("check", errors).format(), err=True)
        raise typer.Exit(1)


def refuse_both(name: str, value: object, other_name: str, other_value: object) -> None:
    if value and other_value:
        raise failure_at(
            None,
            f"{name} and {other_name} exclude each other.",
            help_text=f"leave out {name} or {other_name}",
        )


def exit_with(message: str, exit_code: int) -> Never:
    """End the command with one sentence on standard error."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(exit_code)


def named_database(database_url: str | None, **fields: Any) -> PostgresConfig:
    """Return the database from ``--database-url`` or the environment, with these fields set."""
    if database_url is not None and not database_url.strip():
        raise failure_at(
            None,
            "--database-url is empty.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="pass --database-url postgresql://..., or leave it out to use the environment",
        )
    try:
        named = {} if database_url is None else {"database_url": database_url}
        return postgres.PostgresConfig.from_env(**named, **fields)
    except HorsiesError as error:
        error.location = None  # The arguments are wrong, not the code.
        if error.code is ErrorCode.BROKER_INVALID_URL:
            error.help_text = "name the application, or pass --database-url postgresql://..."
        raise


def refuse_missing_extra(flag: str) -> None:
    """Reject a flag or command that needs the extra ``metrics``."""
    try:
        metrics.require_prometheus()
    except metrics.MissingExtraError as error:
        raise failure_at(None, f"{flag}: {error}") from None


def show_causes(errors: Sequence[HorsiesError]) -> None:
    """Print the tracebacks of the causes if HORSIES_DEBUG_IMPORTS=1 is set."""
    if os.environ.get("HORSIES_DEBUG_IMPORTS") != "1":
        return
    for error in errors:
        if error.__cause__ is not None:
            typer.echo(_traceback(error.__cause__), err=True)


def _traceback(cause: BaseException) -> str:
    """Format a traceback with the passwords masked in messages and source lines."""
    import traceback

    from horsies.db.errors import describe
    from horsies.tasks.broker import revealing

    text = "".join(traceback.format_exception(cause))
    for error in revealing(cause):
        text = text.replace(str(error), describe(error))
    return mask_url(text)
