"""Pages of tasks or workflow runs, newest first.

A list looks at the newest ``LIST_WINDOW`` rows, which bounds its statement to about 50 ms however long
the history is. Rows in an unfinished status are found at any age, through an index of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from horsies.db.statement import Script, Step
from horsies.states import TaskStatus, WorkflowStatus

Row = TypeVar("Row")
StepForStatuses = Callable[[list[str]], Step]

LIST_WINDOW = 50_000


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """One page of a list.

    ``next_before`` is the id to continue from, None at the end. ``looked_at_all`` is False when the
    window ended before the page was full.
    """

    rows: list[Row]
    next_before: str | None = None
    looked_at_all: bool = True


@dataclass(frozen=True, slots=True)
class ListSteps:
    """The statements that list one kind of row, and the position by which they order rows.

    ``window_edge`` returns the last position inside the window and the first one beyond it. With
    ``by_index`` an index replaces the window when that was too small.
    """

    unfinished: StepForStatuses
    newest: StepForStatuses
    window_edge: Step
    position: Callable[[Any], Any]
    by_index: StepForStatuses | None = None


def page_script(
    steps: ListSteps, statuses: Sequence[TaskStatus | WorkflowStatus], limit: int
) -> Script[Page[Any]]:
    """Read one page of the rows in any of these statuses, or in all statuses if none is given."""
    unfinished = [status.value for status in statuses if not status.is_terminal]
    finished = [status.value for status in statuses if status.is_terminal]
    found: list[Any] = []
    edge = None
    if unfinished:
        found += yield steps.unfinished(unfinished)
    if finished or not unfinished:
        newest = yield steps.newest(finished)
        edges = (yield steps.window_edge) if len(newest) < limit else []
        is_cut = len(edges) == 2
        if is_cut and steps.by_index is not None:
            newest = yield steps.by_index(finished)
        elif is_cut:
            edge = edges[0]
        found += newest
    return _page(found, steps.position, limit, edge)


def _page(found: list[Any], position: Callable[[Any], Any], limit: int, edge: Any) -> Page[Any]:
    # Unfinished rows beyond the window belong to a later page, which would repeat them.
    within = [row for row in found if edge is None or position(row) >= position(edge)]
    rows = sorted(within, key=position, reverse=True)[:limit]
    if len(rows) == limit:
        return Page(rows, rows[-1].id)
    return Page(rows, None if edge is None else edge.id, edge is None)
