"""Pages of tasks or workflow runs, newest first.

A list reads the newest ``LIST_WINDOW`` rows, which limits its statement to about 50 ms for any number of
stored rows. Rows in an unfinished status are found at any age, through their own index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from horsies.db.statement import Script, Step
from horsies.db.statements.workflows import RunPosition, RunSummary
from horsies.ids import stored_form
from horsies.states import TaskStatus, WorkflowStatus
from horsies.task_result import json_object

Row = TypeVar("Row")
StepForStatuses = Callable[[list[str]], Step]

LIST_WINDOW = 50_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """One page of a list, newest first.

    ``next_cursor`` is the start of the next page, or None at the end. ``looked_at_all`` is False if the
    search stopped before the page was full; the next page continues further back.
    """

    rows: list[Row]
    next_cursor: str | None = None
    looked_at_all: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the page as plain JSON values."""
        return json_object(self)


@dataclass(frozen=True, slots=True)
class ListSteps:
    """The statements that list one kind of row, the position that orders its rows, and the position's
    text form.

    ``window_edge`` returns the last position inside the window and the first position beyond it.
    ``by_index`` reads an index instead if the window was too small.
    """

    unfinished: StepForStatuses
    newest: StepForStatuses
    window_edge: Step
    position: Callable[[Any], Any]
    cursor: Callable[[Any], str]
    by_index: StepForStatuses | None = None


def page_script(
    steps: ListSteps, statuses: Sequence[TaskStatus | WorkflowStatus], limit: int
) -> Script[Page[Any]]:
    """Read one page of the rows in any of these statuses; without statuses, read all rows."""
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
    return _page(found, steps, limit, edge)


def _page(found: list[Any], steps: ListSteps, limit: int, edge: Any) -> Page[Any]:
    position = steps.position
    # Leave unfinished rows beyond the window to a later page, because that page lists them too.
    within = [row for row in found if edge is None or position(row) >= position(edge)]
    rows = sorted(within, key=position, reverse=True)[:limit]
    if len(rows) == limit:
        return Page(rows, steps.cursor(rows[-1]))
    return Page(rows, None if edge is None else steps.cursor(edge), edge is None)


# Cursors: the position of a row as text. A task's cursor is its id.


def run_cursor(run: RunPosition | RunSummary) -> str:
    """Return a run's position as text, which stays valid after the run is deleted."""
    return f"{run.id}@{(run.created_at - _EPOCH) // _MICROSECOND}"


def run_position(cursor: object) -> RunPosition | None:
    """Parse a position that ``run_cursor`` returned; return None for any other text."""
    run_id, _, microseconds = cursor.partition("@") if isinstance(cursor, str) else ("", "", "")
    stored = stored_form(run_id)
    if stored is None or not (microseconds.isascii() and microseconds.isdigit()):
        return None
    try:
        return RunPosition(stored, _EPOCH + int(microseconds) * _MICROSECOND)
    except (OverflowError, ValueError):
        return None


def cursor_rank(cursor: str) -> tuple[datetime | str, ...]:
    """Return the position of a cursor in its list; newer rows rank higher."""
    run = run_position(cursor)
    return (cursor,) if run is None else (run.created_at, run.id)
