"""An example of every command that reads or changes the database, and a reason for every command without
an example. A test compares them with the command line's own list, so it fails for a new command that is
in neither table.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import typer.main

from horsies.cli.main import command_line

APPLICATION = "tests.support.apps.programs:app"
# The words after each command; TASK and RUN stand for ids, APP stands for APPLICATION.
READS: dict[str, tuple[str, ...]] = {
    "status": (),
    "workers": (),
    "queues": (),
    "keys list": ("mail",),
    "keys show": ("mail", "tenant"),
    "tasks": (),
    "show": ("TASK",),
    "logs": ("TASK",),
    "explain": ("TASK",),
    "explain RUN": (),
    "explain queue": ("mail",),
    "explain schedule": ("nightly",),
    "failures": (),
    "export": ("TASK",),
    "history": (),
    "workflows": (),
    "schedules list": (),
    "schedules next": ("nightly",),
    "schedules runs": ("nightly",),
    "doctor": (),
    "check --live": ("APP",),
    "run": ("TASK", "APP"),
    "health": ("--timeout", "0.1"),
    "migrate --check": (),
    "workflow show": ("RUN",),
    "workflow audit": (),
    "durable show": ("TASK",),
    "durable export": ("TASK",),
    "durable export --failed": (),
}
CHANGES: dict[str, tuple[str, ...]] = {
    "migrate": (),
    "cancel": ("TASK",),
    "retry": ("TASK",),
    "delete": ("TASK", "--yes"),
    "redact": ("TASK", "--yes"),
    "queues pause": ("mail",),
    "queues resume": ("mail",),
    "queues purge": ("mail", "--yes"),
    "keys pause": ("mail", "tenant"),
    "keys resume": ("mail", "tenant"),
    "keys set": ("mail", "tenant", "--max-concurrency", "1"),
    "keys clear": ("mail", "tenant"),
    "schedules pause": ("nightly",),
    "schedules resume": ("nightly",),
    "schedules edit": ("nightly", "--pattern", "every 2 hours"),
    "schedules reset": ("nightly",),
    "schedules run": ("nightly", "APP"),
    "workflow pause": ("RUN",),
    "workflow resume": ("RUN",),
    "workflow cancel": ("RUN",),
    "workflow retry": ("RUN",),
    "workflow signal": ("RUN", "go"),
    "durable signal": ("TASK", "go"),
    "durable resume": ("TASK",),
    "durable reset": ("TASK", "first"),
}
WITHOUT: dict[str, str] = {
    "dev": "runs until it is stopped, and reconnects",
    "worker": "runs until it is stopped, and reconnects",
    "scheduler": "runs until it is stopped, and reconnects",
    "web": "runs until it is stopped; its pages have a test of their own",
    "metrics": "runs until it is stopped; a scrape has the limits of a command that reads",
    "demo": "has its own database",
    "check": "reads code; --live has an example",
    "init": "no database",
    "docs": "no database",
    "version": "no database",
    "db url": "no database",
    "db psql": "becomes psql",
    "webhooks test": "no database",
}


def words_of(name: str) -> list[str]:
    """Return the command of an example as typed, with TASK and RUN for ids."""
    return [*name.split(), *(READS | CHANGES)[name]]


def every_command() -> set[str]:
    """Return the names of all commands, with their actions where a command has a list of actions."""
    return set(_names(typer.main.get_command(command_line())))


def _names(command: Any, before: tuple[str, ...] = ()) -> Iterator[str]:
    if below := getattr(command, "commands", None):
        for name, child in below.items():
            yield from _names(child, (*before, name))
        return
    name = " ".join(before)
    actions = list(_actions(command.callback))
    if not actions or "list" not in actions:
        yield name
    yield from (f"{name} {action}" for action in actions)


def _actions(callback: Any) -> Iterator[str]:
    """Yield the values of a command's argument `action`."""
    action = typing.get_type_hints(callback).get("action")
    for one in (action, *typing.get_args(action)):
        if isinstance(one, type) and issubclass(one, Enum):
            yield from (member.value for member in one)


# The width of the help texts that the tests read.
HELP_COLUMNS = 80


def _walk(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, Any]]:
    context = command.make_context(
        name,
        [],
        parent=parent,
        resilient_parsing=True,
        terminal_width=HELP_COLUMNS,
        max_content_width=HELP_COLUMNS,
    )
    yield context.command_path, context
    for child_name, child in getattr(command, "commands", {}).items():
        yield from _walk(child, child_name, context)


# Return every command by its path, with its context.
CONTEXTS = dict(_walk(typer.main.get_command(command_line()), "horsies"))


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line of horsies, without its first word, as the program does; return its parameters.
    Nothing is run. A mistake in the words is raised.
    """
    of_two = " ".join(["horsies", *words[:2]])
    count = 2 if len(words) > 1 and of_two in CONTEXTS else 1
    path = " ".join(["horsies", *words[:count]])
    params: dict[str, Any] = CONTEXTS[path].command.make_context(path, list(words[count:])).params
    return params
