"""Personal data: the tasks, runs and schedules about one person, found by a key or an argument.

The search reads all tasks in windows. A key is the key of a task (``key=``), its idempotency key, or the
key of a run; a search for a key also finds the deliveries of findings about it. Arguments of any size are
searched, including the arguments of schedules and of nodes that never ran.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from horsies.db.statement import Script
from horsies.db.statements.erasing import (
    CallPosition,
    Definition,
    ErasedId,
    FoundCall,
    RootOf,
    end_of_calls,
    find_calls,
    find_definitions,
    find_runs_by_key,
    find_tasks_by_key,
    read_roots,
)
from horsies.db.statements.monitor import end_of_window
from horsies.ids import first_id_at
from horsies.monitor.arguments import Argument, NoMask, search_for
from horsies.monitor.diagnose.queues import key_naming
from horsies.monitor.order_plan import PAGE
from horsies.monitor.queries import FIRST_ID, LAST_ID, SEARCH_WINDOW, TaskFilters, tasks_script

_ANY_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """A search: by a key, by an argument, or by filters alone. ``parameters`` are the positional
    parameters of the known tasks.
    """

    key: str | None = None
    argument: Argument | None = None
    filters: TaskFilters = field(default_factory=TaskFilters)
    parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def description(self) -> str | None:
        """The search without its value; None for filters, which have no personal data."""
        if self.key is not None:
            return "a key"
        return None if self.argument is None else self.argument.description


@dataclass(frozen=True, slots=True)
class PersonalData:
    """The ids of tasks outside workflows, the ids of tasks in workflows, the roots of runs, and the
    names of schedules.
    """

    tasks: list[str]
    parts: list[str]
    runs: list[str]
    schedules: list[str] = field(default_factory=list)


def find_script(wanted: Wanted) -> Script[PersonalData]:
    """Find all data about a key or an argument."""
    if wanted.key is not None:
        found = yield from _keyed_script(wanted.key, wanted.filters)
        filters = wanted.filters
        others = yield find_runs_by_key(wanted.key, filters.since, filters.until)
        runs = [one.id for one in others]
    else:
        found = yield from _listed_script(wanted)
        runs = yield from _calls_script(wanted)
    data: PersonalData = yield from sorted_script(found)
    schedules = yield from _schedules_script(wanted)
    return replace(data, runs=list(dict.fromkeys([*data.runs, *runs])), schedules=schedules)


def sorted_script(ids: Sequence[str]) -> Script[PersonalData]:
    """Divide ids into ids of tasks and ids of runs' parts, and find the roots of these runs."""
    roots: dict[str, str] = {}
    for chunk in _chunks(ids):
        rows: list[RootOf] = yield read_roots(chunk)
        roots |= {row.id: row.root_id for row in rows}
    return PersonalData(
        tasks=[one for one in ids if one not in roots],
        parts=[one for one in ids if one in roots],
        runs=list(dict.fromkeys(roots.values())),
    )


def _chunks(ids: Sequence[str]) -> Iterable[list[str]]:
    return (list(ids[start : start + PAGE]) for start in range(0, len(ids), PAGE))


def _keyed_script(key: str, filters: TaskFilters) -> Script[list[str]]:
    since = first_id_at(filters.since) if filters.since else FIRST_ID
    before = first_id_at(filters.until) if filters.until else LAST_ID
    found: list[str] = []
    while True:
        rows: list[ErasedId] = yield find_tasks_by_key(
            key, key_naming(key), before, since, SEARCH_WINDOW
        )
        found += [row.id for row in rows]
        edges = yield end_of_window(before, since, SEARCH_WINDOW)
        if len(edges) < 2:
            return found
        before = edges[0].id


def _listed_script(wanted: Wanted) -> Script[list[str]]:
    filters = replace(wanted.filters, limit=PAGE)
    if wanted.argument is not None:
        search = search_for(wanted.argument, NoMask(), wanted.parameters, _ANY_SIZE)
        filters = replace(filters, search=search)
    found: list[str] = []
    while True:
        page = yield from tasks_script(filters)
        found += [row.id for row in page.rows]
        if page.next_cursor is None:
            return found
        filters = replace(filters, after=page.next_cursor)


def _calls_script(wanted: Wanted) -> Script[list[str]]:
    """Find the runs that have the argument in a node. With filters no nodes are searched, because
    filters apply to tasks only.
    """
    argument = wanted.argument
    if argument is None or wanted.filters != TaskFilters():
        return []
    key, needle = argument.needles[0], argument.needles[-1]
    position: CallPosition | None = CallPosition(FIRST_ID, -1)
    roots: dict[str, None] = {}
    while position is not None:
        calls: list[FoundCall] = yield find_calls(*position, key, needle, SEARCH_WINDOW)
        fitting = [call for call in calls if argument.matches(NoMask(), None, call.kwargs)]
        roots |= dict.fromkeys(call.root_id for call in fitting)
        edges: list[CallPosition] = yield end_of_calls(*position, SEARCH_WINDOW)
        position = edges[0] if edges else None
    return list(roots)


def _schedules_script(wanted: Wanted) -> Script[list[str]]:
    if wanted.argument is None or wanted.filters != TaskFilters():
        return []
    rows: list[Definition] = yield find_definitions()
    return [row.name for row in rows if wanted.argument.is_in(json.loads(row.definition))]
