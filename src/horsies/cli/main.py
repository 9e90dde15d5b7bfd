"""The `horsies` command: check an application, migrate its database, run workers, and operate them.

An error is reported once on standard error without a traceback, and the exit status is 1. Typer exits
with status 2 for arguments that it rejects.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer

from horsies._version import __version__
from horsies.cli.help import ScreenCommand, ScreenGroup, Sections, describe
from horsies.cli.options import show_causes
from horsies.cli.streams import usable_streams
from horsies.errors import HorsiesError

# The commands and their modules. A command line loads only one of them.
_MODULES = {
    "dev": "dev",
    "check": "check",
    "migrate": "migrate",
    "demo": "demo",
    "init": "init",
    "db": "database",
    "worker": "worker",
    "scheduler": "scheduler",
    "status": "status",
    "workers": "queues_workers",
    "queues": "queues_workers",
    "keys": "keys",
    "tasks": "tasks",
    "show": "tasks",
    "logs": "logs",
    "run": "run",
    "explain": "explain",
    "failures": "failures",
    "cancel": "changes",
    "retry": "changes",
    "delete": "erase",
    "redact": "erase",
    "export": "export",
    "history": "changes",
    "workflows": "workflows",
    "schedules": "schedules",
    "doctor": "doctor",
    "web": "web",
    "health": "health",
    "metrics": "health",
    "docs": "docs",
    "version": "main",
    "workflow": "workflows",
    "durable": "durable",
    "webhooks": "webhooks",
}
# The lines of `horsies --help` in groups; two commands may share a line.
_GROUPS = {
    "Develop": {
        "init": "Create a project that runs",
        "dev": "Run worker, scheduler and dashboard, and reload on changes",
        "demo": "Watch tasks, a workflow and a crash",
        "check": "Validate an application before it runs",
        "run": "Execute a stored task in this terminal",
        "db": "Print the URL of the database, or open psql",
        "docs": "Read the documentation",
    },
    "Serve": {
        "migrate": "Create or update the tables",
        "worker": "Run tasks",
        "scheduler": "Send tasks and start workflows when they are due",
        "web, metrics": "Serve the dashboard; serve metrics for Prometheus",
    },
    "Look": {
        "status": "Queues, workers, blocked tasks and runs",
        "workers, tasks": "List the workers; list tasks",
        "show": "One task with its attempts",
        "logs": "What the attempts of a task have logged",
        "explain": "Why a task, run, queue or schedule is not making progress",
        "failures": "Failed attempts by exception class and place",
        "workflows": "List runs of workflows",
        "history": "List manual changes",
        "export": "Everything about one person's key, as JSON lines",
        "doctor": "Check server, schema, workers, queues, runs, schedules",
        "health": "Ping the workers, for probes",
    },
    "Change": {
        "cancel, retry": "Cancel tasks; send finished tasks again",
        "delete, redact": "Delete ended tasks; remove personal data from them",
        "queues": "List, pause, resume or purge queues",
        "keys": "List the keys of a queue; limit, pause or resume one",
        "schedules": "List, run, pause or resume schedules",
        "workflow": "Show, pause, resume, cancel, retry or signal a run",
        "durable": "Show, signal, resume, reset or export a durable run",
        "webhooks": "Send a test event to a webhook",
    },
}
# Commands that run the application's code, whose models may use pydantic plugins.
_RUNNING_TASKS = ("dev", "check", "worker", "scheduler", "run", "web")


def main() -> None:
    """Run the command line; the entry point of `horsies` and of `python -m horsies`."""
    with usable_streams():
        try:
            _load(sys.argv[1:2])(prog_name="horsies")
        except HorsiesError as error:
            typer.echo(str(error), err=True)
            show_causes([error])
            sys.exit(1)


def _load(named: list[str]) -> typer.Typer:
    """Load the command that the arguments name, or all commands to suggest one for a typo."""
    if named and named[0] not in _RUNNING_TASKS:
        # With plugins, pydantic reads the entry points of all distributions, which takes 20 ms.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.disable()  # Imports create many objects and free none.
    try:
        if _completes(named):
            return command_line(completes=True)
        if not named or named[0].startswith("-"):
            return command_line(())
        return command_line(named if named[0] in _MODULES else _MODULES)
    finally:
        # Without this freeze, the collection at exit scans all modules and takes a quarter of a
        # short command's time.
        gc.freeze()
        gc.enable()


def _completes(named: list[str]) -> bool:
    """Return whether a shell asks for completions, or the user asks for the completion script."""
    asked = named[:1] in (["--install-completion"], ["--show-completion"])
    return asked or "_HORSIES_COMPLETE" in os.environ


class Overview(ScreenGroup):
    """The command line as a whole; its help text loads no command."""

    def sections(self) -> Sections:
        return {f"{title}:": list(commands.items()) for title, commands in _GROUPS.items()}

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[--version]", "COMMAND", "..."]


def overview(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version of horsies.")
    ] = False,
) -> None:
    """A task queue and workflow engine whose only server is PostgreSQL.

    Example:
        horsies worker shop.background:app
    """
    if show_version:
        version()
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(1)


def version() -> None:
    """Print the version of horsies.

    Example:
        horsies version
    """
    typer.echo(f"horsies {__version__}")


def command_line(names: Iterable[str] = _MODULES, *, completes: bool = False) -> typer.Typer:
    cli = typer.Typer(
        cls=Overview,
        add_completion=completes,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    cli.callback(invoke_without_command=True)(overview)
    assert cli.registered_callback is not None
    describe(cli.registered_callback)
    for name in names:
        command: Any = getattr(import_module(f"horsies.cli.{_MODULES[name]}"), name)
        if isinstance(command, typer.Typer):
            cli.add_typer(command, name=name, cls=ScreenGroup)
        else:
            cli.command(cls=ScreenCommand)(command)
    for group in (cli, *(one.typer_instance for one in cli.registered_groups)):
        for info in group.registered_commands if group else ():
            info.cls = ScreenCommand
            describe(info)
    return cli
