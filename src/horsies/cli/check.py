"""`horsies check`: validate an application before it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from horsies.cli.options import (
    LocatorArgument,
    LogFormatOption,
    LogLevelOption,
    ModuleOption,
    open_app,
    show_causes,
)
from horsies.errors import ValidationReport
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.tasks.check import live_notes


def check(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Also connect to the database, check its tables and privileges, and test LISTEN.",
        ),
    ] = False,
    loglevel: LogLevelOption = LogLevel.WARNING,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Validate an application before it runs: imports, tasks, workflows, error codes, retry policies,
    schedules.

    Exit codes: 0 valid, 1 errors were found.

    Example:
        horsies check shop.background:app --live
    """
    attach_handler(loglevel, log_format)
    app = open_app("check", module or locator)
    errors = app.check(live=live)
    if errors:
        typer.echo(ValidationReport("check", errors).format(), err=True)
        show_causes(errors)
        raise typer.Exit(1)
    typer.echo("ok: all validations passed")
    typer.echo(f"{len(app.list_tasks())} task(s) registered")
    if live:
        for note in live_notes(app.config.broker, migrates=app.migrates):
            typer.echo(f"note: {note}")
