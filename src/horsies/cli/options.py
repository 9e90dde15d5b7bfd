"""What the commands have in common: the application or database they name, and how they log.

Each command of `horsies` declares its parameters with the types made here, and opens its
application through `open_app`. Stands between the command line and `locate`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from horsies.app import SUPPRESSION_VARIABLES, Horsies
from horsies.config.postgres import PostgresConfig
from horsies.errors import ErrorCode, HorsiesError
from horsies.locate import load_app
from horsies.logs import LogFormat, LogLevel
from horsies.modules import add_project_root, failure_at

LocatorArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="LOCATOR",
        help="The application: package.module:app or path/to/file.py:app; without :app the module "
        "must hold exactly one.",
        show_default=False,
    ),
]
ModuleOption = Annotated[
    str | None,
    typer.Option(
        "--module",
        "-m",
        metavar="LOCATOR",
        help="The same as LOCATOR, and wins over it.",
        show_default=False,
    ),
]
DatabaseUrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The database, when no application is named; else HORSIES_DATABASE_URL or "
        "DATABASE_URL counts.",
        show_default=False,
    ),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--loglevel", case_sensitive=False, help="How much to log.")
]
LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", case_sensitive=False, help="What log lines look like.")
]


def open_app(command: str, locator: str | None) -> Horsies:
    """Import the application a command was given, without sending what its modules send."""
    if locator is None:
        raise failure_at(
            None,
            f"horsies {command} needs to know the application.",
            help_text=f"horsies {command} package.module:app",
        )
    add_project_root()
    with _sends_suppressed():
        return load_app(locator)


def refuse_both(name: str, value: object, other_name: str, other_value: object) -> None:
    """Refuse two arguments that contradict each other."""
    if value and other_value:
        raise failure_at(
            None,
            f"{name} and {other_name} exclude each other.",
            help_text=f"leave out {name} or {other_name}",
        )


def named_database(database_url: str | None) -> PostgresConfig:
    """Return the database of ``--database-url``, or else of the environment."""
    if database_url is not None and not database_url.strip():
        raise failure_at(
            None,
            "--database-url names no database.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="pass --database-url postgresql://..., or leave it out to use the environment",
        )
    try:
        named = {} if database_url is None else {"database_url": database_url}
        return PostgresConfig.from_env(**named)
    except HorsiesError as error:
        error.location = None  # it was the command line or the environment, not a line of code
        error.help_text = "name the application, or pass --database-url postgresql://..."
        raise


@contextmanager
def _sends_suppressed() -> Iterator[None]:
    # Through the environment, because the application whose sends these are does not exist yet.
    name = SUPPRESSION_VARIABLES[0]
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
