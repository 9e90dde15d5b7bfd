"""`/names/{name}`: all tasks with one name: rates, durations, and failures by reason."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from horsies.db.statement import read_rows
from horsies.db.statements.dashboard import NameMemory, memory_of_name
from horsies.monitor.failures import Failures, failures_script
from horsies.monitor.measures import Series, read_measures_script
from horsies.monitor.panels import Rates
from horsies.web.charts import Chart, Column, line_chart
from horsies.web.filters import refuse_unknown
from horsies.web.masking import visible
from horsies.web.pages import (
    PERCENTILES,
    RANGES,
    charts_of,
    range_of,
    slots_over,
    within_time,
)
from horsies.web.pages_failures import group_words
from horsies.web.reading import NotFound, TookTooLong
from horsies.web.rendering import Page, Route, View

_NAME_LENGTH_MAX = 255


async def name_page(view: View) -> Page:
    """Show how often the tasks of a name run, their waiting and running times, their memory, and their
    failures.
    """
    refuse_unknown(view, {"range"})
    name = view.params["name"]
    range_name, since, step = range_of(view)
    if len(name) > _NAME_LENGTH_MAX or "\0" in name:
        raise NotFound("There is no task with such a name.")
    series = await within_time(view, read_measures_script(since, step, (), [name]))
    found = await within_time(view, failures_script([name]))
    memory = await within_time(view, read_rows(memory_of_name(name)))
    rates = series if isinstance(series, TookTooLong) else Rates(series)
    task = view.site.app.get_task(name) if view.site.app else None
    context = {
        "name": name,
        **_memory_of(memory),
        "memory_limit_mb": task.definition.memory_limit_mb if task else None,
        "charts": charts_of(view, range_name, rates, {"task_name": name}),
        **_totals_of(series),
        "ranges": RANGES,
        **_failures_of(found),
        "parameters": task.definition.signature.names.shown if task else None,
        "queue": task.definition.queue_name if task else None,
        "path_of": f"/names/{quote(name, safe='')}",
    }
    return Page("name.html", visible(f"Tasks named {name}"), context)


def _memory_of(found: Sequence[NameMemory] | TookTooLong) -> dict[str, Any]:
    if isinstance(found, TookTooLong):
        return {"memory": None, "memory_unread": found}
    return {"memory": found[0] if found and found[0].children else None, "memory_unread": None}


def _totals_of(series: Series | TookTooLong) -> dict[str, Any]:
    if isinstance(series, TookTooLong):
        return {"total": None}
    per_minute = series.per_minute(series.total.attempts)
    return {"total": series.total, "per_minute": per_minute, "runs": line_chart(_runs(series))}


def _failures_of(found: Failures | TookTooLong) -> dict[str, Any]:
    if isinstance(found, TookTooLong):
        return {"groups": [], "failures_unread": found}
    now = datetime.now(UTC)
    return {"groups": [group_words(one, now) for one in found.groups], "failures_unread": None}


def _runs(series: Series) -> Chart:
    columns = [
        Column(slot.at, (slot.ran.p50, slot.ran.p95, slot.ran.p99)) for slot in slots_over(series)
    ]
    return Chart("runs", "Run: time from start to end", PERCENTILES, columns)


ROUTES: tuple[Route, ...] = (Route("GET", "/names/{name:path}", None, name_page),)
