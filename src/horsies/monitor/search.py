"""Searches tasks, runs, task names, queues, schedules and error messages by name. Every statement reads
a bounded number of rows. A match has the path of its page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urlencode
from uuid import UUID

from horsies.db.statement import Script
from horsies.db.statements.explain import DueCount, count_due
from horsies.db.statements.monitor import QueueName, list_known_queues
from horsies.db.statements.search import (
    FoundError,
    FoundName,
    FoundRow,
    FoundRun,
    find_by_prefix,
    search_errors,
    search_runs,
    search_schedules,
    search_task_names,
)
from horsies.words import counted

# The maximum number of matches of one kind.
SHOWN = 10
# The number of newest runs and attempts to search.
RUNS_WINDOW = 20_000
ATTEMPTS_WINDOW = 10_000
# The maximum number of a queue's waiting tasks to count.
WAITING_MOST = 1_000
# A shorter prefix of an id would match all tasks of several hours.
PREFIX_MIN = 6
_HEX = re.compile(r"[0-9a-f]+")
_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Match:
    """A search result: its ``kind``, its name, the path of its page, and a number with its noun."""

    kind: str
    name: str
    path: str
    detail: str = ""


def id_range(text: str) -> tuple[str, str] | None:
    """Return the first and the last id that begin with this text, or None if no id can.

    Example:
        >>> id_range("01a1dd42-fb")
        ('01a1dd42-fb00-0000-0000-000000000000', '01a1dd42-fbff-ffff-ffff-ffffffffffff')
    """
    digits = text.strip().lower().replace("-", "")
    if not PREFIX_MIN <= len(digits) <= _DIGITS or not _HEX.fullmatch(digits):
        return None
    return str(UUID(digits.ljust(_DIGITS, "0"))), str(UUID(digits.ljust(_DIGITS, "f")))


def prefix_script(text: str, limit: int = SHOWN) -> Script[list[FoundRow]]:
    """Read the newest tasks and runs whose ids begin with this text."""
    found: list[FoundRow] = []
    if (ids := id_range(text)) is not None:
        found = yield find_by_prefix(*ids, limit)
    return found


def search_script(text: str) -> Script[list[Match]]:
    """Search for a text in all places, ignoring case; the most specific matches come first."""
    wanted = text.strip().lower()
    rows = yield from prefix_script(wanted)
    queues = yield from _queues_script(wanted)
    names: list[FoundName] = yield search_task_names(wanted, SHOWN)
    schedules: list[FoundName] = yield search_schedules(wanted, SHOWN)
    runs: list[FoundRun] = yield search_runs(wanted, RUNS_WINDOW, SHOWN)
    errors: list[FoundError] = yield search_errors(wanted, ATTEMPTS_WINDOW, SHOWN)
    return [
        *map(_row, rows),
        *map(_queue, queues),
        *map(_task_name, names),
        *map(_schedule, schedules),
        *map(_run, runs),
        *map(_error, errors),
    ]


def _queues_script(wanted: str) -> Script[list[DueCount]]:
    """Read the first queues whose names contain the text, with their waiting tasks."""
    known: list[QueueName] = yield list_known_queues()
    names = [one.name for one in known if wanted in one.name.lower()][:SHOWN]
    found: list[DueCount] = []
    if names:
        found = yield count_due(names, WAITING_MOST)
    return sorted(found)


def _row(row: FoundRow) -> Match:
    page = "tasks" if row.kind == "task" else "workflows"
    return Match(row.kind, row.id, f"/{page}/{row.id}", f"{row.name}, {row.status}")


def _queue(found: DueCount) -> Match:
    due = f"{found.due:,}+" if found.due >= WAITING_MOST else f"{found.due:,}"
    return Match("queue", found.name, f"/queues/{quote(found.name, safe='')}", f"{due} due")


def _task_name(found: FoundName) -> Match:
    path = f"/tasks?{urlencode({'task_name': found.name})}"
    return Match("task name", found.name, path, f"{found.total:,} attempts in a day")


def _schedule(found: FoundName) -> Match:
    path = f"/schedules/{quote(found.name, safe='')}"
    return Match("schedule", found.name, path, f"fired {counted(found.total, 'time')}")


def _run(run: FoundRun) -> Match:
    detail = f"{run.name}, {run.status}; {counted(run.total, 'run')} found"
    return Match("run", run.key or run.name, f"/workflows/{run.id}", detail)


def argument_match(text: str) -> Match:
    """Return a match that searches the arguments of tasks for the text."""
    path = f"/tasks?{urlencode({'argument': text})}"
    return Match("arguments", text, path, "search the arguments of the newest tasks")


def _error(found: FoundError) -> Match:
    by_code = {"task_name": found.name, "status": "FAILED", "error_code": found.error_code or ""}
    path = f"/failures/{found.fingerprint}" if found.fingerprint else f"/tasks?{urlencode(by_code)}"
    times = "1 failure" if found.total == 1 else f"{found.total:,} failures"
    sentence = f"{times}, the last one: {found.message or 'without a message'}"
    name = f"{found.name}: {found.exception_type or found.error_code or 'without a code'}"
    return Match("error", name, path, sentence)
