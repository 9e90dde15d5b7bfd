"""`/names/{name}`: all tasks with one name: rates, durations, and failures by reason."""

from __future__ import annotations

from datetime import UTC, datetime
from urllib.parse import quote

from horsies.db.statement import read_rows
from horsies.db.statements.dashboard import memory_of_name
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
from horsies.web.reading import NotFound
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
    found = await within_time(view, failures_script([name])) or Failures([])
    memory = await within_time(view, read_rows(memory_of_name(name)))
    rates = None if series is None else Rates(series)
    task, now = view.site.app.get_task(name) if view.site.app else None, datetime.now(UTC)
    context = {
        "name": name,
        "memory": memory[0] if memory and memory[0].children else None,
        "memory_limit_mb": task.definition.memory_limit_mb if task else None,
        "total": None if series is None else series.total,
        "per_minute": None if series is None else series.per_minute(series.total.attempts),
        "charts": charts_of(view, range_name, rates, {"task_name": name}),
        "runs": "" if series is None else line_chart(_runs(series)),
        "ranges": RANGES,
        "groups": [group_words(group, now) for group in found.groups],
        "parameters": task.definition.signature.names.shown if task else None,
        "queue": task.definition.queue_name if task else None,
        "path_of": f"/names/{quote(name, safe='')}",
    }
    return Page("name.html", visible(f"Tasks named {name}"), context)


def _runs(series: Series) -> Chart:
    columns = [
        Column(slot.at, (slot.ran.p50, slot.ran.p95, slot.ran.p99)) for slot in slots_over(series)
    ]
    return Chart("runs", "Run: time from start to end", PERCENTILES, columns)


ROUTES: tuple[Route, ...] = (Route("GET", "/names/{name:path}", None, name_page),)
