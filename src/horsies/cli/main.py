"""The `horsies` command: check an application, migrate its database, run workers, and operate them.

An error ends in one report on standard error and exit status 1, never in a traceback. Arguments that
typer itself refuses end in exit status 2.
"""

from __future__ import annotations

import gc
import inspect
import io
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import typer

from horsies._version import __version__
from horsies.cli.options import show_causes
from horsies.errors import HorsiesError

# The commands in the order of the help text, with their modules. A command line loads one of them.
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
    "tasks": "tasks",
    "show": "tasks",
    "run": "run",
    "explain": "explain",
    "cancel": "changes",
    "retry": "changes",
    "history": "changes",
    "workflows": "workflows",
    "schedules": "schedules",
    "doctor": "doctor",
    "web": "web",
    "health": "health",
    "metrics": "health",
    "version": "main",
    "workflow": "workflows",
}
# Commands that run code of the application, whose models may use plugins of pydantic.
_RUNNING_TASKS = ("dev", "check", "worker", "scheduler", "run", "web")


def main() -> None:
    """Run the command line; the entry point of `horsies` and of `python -m horsies`."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # stored text may not fit its encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _load(sys.argv[1:2])(prog_name="horsies")
    except HorsiesError as error:
        typer.echo(str(error), err=True)
        show_causes([error])
        sys.exit(1)


def _load(named: list[str]) -> typer.Typer:
    """Load the command that the arguments name, or all of them for the help text."""
    if named and named[0] not in _RUNNING_TASKS:
        # Else pydantic reads the entry points of all installed distributions, which takes 20 ms.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.disable()  # imports create much and drop nothing
    try:
        return command_line(named if named and named[0] in _MODULES else _MODULES)
    finally:
        gc.enable()


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


def overview(context: typer.Context) -> None:
    """A task queue and workflow engine whose only server is PostgreSQL."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(1)


def version() -> None:
    """Print the version of horsies."""
    typer.echo(f"horsies {__version__}")


def command_line(names: Iterable[str] = _MODULES) -> typer.Typer:
    """Return the command line with these commands; the help text needs all of them."""
    cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    cli.callback(invoke_without_command=True)(overview)
    for name in names:
        command: Any = getattr(import_module(f"horsies.cli.{_MODULES[name]}"), name)
        if isinstance(command, typer.Typer):
            cli.add_typer(command, name=name)
        else:
            cli.command()(command)
    for group in (cli, *(one.typer_instance for one in cli.registered_groups)):
        for info in group.registered_commands if group else ():
            info.help = _unwrapped(inspect.getdoc(info.callback) or "")
    return cli


def _unwrapped(docstring: str) -> str:
    # Typer keeps the line breaks of a docstring, which look ragged in a terminal of another width.
    return "\n\n".join(" ".join(part.split()) for part in docstring.split("\n\n"))
