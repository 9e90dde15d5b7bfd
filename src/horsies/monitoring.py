"""Task statistics, and the types used by an application's queries: ``app.tasks_where``,
``app.runs_where`` and their pages, and ``app.explain``.

Programs that only define and send tasks need not import this module.

Example:
    from horsies.monitoring import TaskPage

    def failed_mails(cursor: str | None = None) -> TaskPage:
        return app.tasks_where(status="FAILED", queue="mail", after=cursor).unwrap()
"""

from __future__ import annotations

from horsies.db.statements.actions import ActionRow
from horsies.db.statements.monitor import TaskSummary
from horsies.db.statements.workflows import RunSummary
from horsies.findings import Explanation
from horsies.findings import Finding as Reason
from horsies.monitor.defaults import LIMIT_MAX
from horsies.monitor.measures import Percentiles, Series, Slot
from horsies.monitor.metrics import count_sends
from horsies.monitor.paging import Page
from horsies.monitor.queries import OneOrMore, RunPage, TaskPage
from horsies.monitor.statistics import (
    TaskFacets,
    task_breakdown,
    task_breakdown_async,
    task_facets,
    task_facets_async,
    task_statistics,
    task_statistics_async,
)
from horsies.tasks.recording import Actor, acting_as

__all__ = [
    "LIMIT_MAX",
    "ActionRow",
    "Actor",
    "Explanation",
    "OneOrMore",
    "Page",
    "Percentiles",
    "Reason",
    "RunPage",
    "RunSummary",
    "Series",
    "Slot",
    "TaskFacets",
    "TaskPage",
    "TaskSummary",
    "acting_as",
    "count_sends",
    "task_breakdown",
    "task_breakdown_async",
    "task_facets",
    "task_facets_async",
    "task_statistics",
    "task_statistics_async",
]
