"""The overview, queue and worker pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from heapq import nlargest
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from markupsafe import Markup

from horsies.db.statement import Script, read_rows
from horsies.db.statements.dashboard import HistoryPoint, WorkerTask
from horsies.db.statements.keys import KeyState
from horsies.db.statements.monitor import WorkerSummary, list_workers
from horsies.monitor.diagnose.attention import (
    SHOWN_MAX,
    Figures,
    figures_script,
    seconds_to_empty,
)
from horsies.monitor.facts import Facts
from horsies.monitor.keys import limit_words
from horsies.monitor.measures import Series, Slot, done_by_minute_script
from horsies.monitor.overview import (
    QueueOverview,
    WorkerHealth,
    counted_places,
    health_of,
    misses_notifications,
)
from horsies.monitor.panels import (
    KEYS_SHOWN,
    Rates,
    WorkerPanel,
    queue_rates_script,
    queue_script,
    rates_script,
    worker_script,
)
from horsies.web.attention import attention
from horsies.web.charts import Chart, Column, column_chart, line_chart, sparkline
from horsies.web.filters import number_of
from horsies.web.reading import BadRequest, NotFound, TookTooLong
from horsies.web.rendering import Page, Route, View
from horsies.web.words import duration

T = TypeVar("T")

# The ranges of charts: name, length and step, with at most 84 columns.
RANGES = {
    "1h": (timedelta(hours=1), timedelta(minutes=1)),
    "6h": (timedelta(hours=6), timedelta(minutes=5)),
    "24h": (timedelta(hours=24), timedelta(minutes=20)),
    "14d": (timedelta(days=14), timedelta(hours=4)),
}
_RATE_SERIES = ("done", "retried", "failed", "stopped")
PERCENTILES = ("p50", "p95", "p99")
# The number of queues on the overview and on a page of the list of queues; a row with its chart has
# about 1 KB.
QUEUES_SHOWN = 50
QUEUES_PER_PAGE = 100
WORKERS_PER_PAGE = 100
PAGES_MAX = 1_000
LINKS_MAX = 20


class QueueRow(NamedTuple):
    """A queue's row in a table: its status as a class and as a word, its tasks in flight, and the time
    until it is empty.
    """

    queue: QueueOverview
    status: str
    word: str
    in_flight: int
    caps: str
    empty_in: str
    recent: Markup


class WorkerRow(NamedTuple):
    """A worker's row in a table; ``note`` is a sentence about a problem."""

    worker: WorkerSummary
    label: str
    status: str
    note: str


class ChildRow(NamedTuple):
    """A child process at its worker's last snapshot, and the task that it is running now."""

    pid: int | None
    rss_mb: float | None
    done: int | None
    since: datetime | None
    task: WorkerTask | None


@dataclass(frozen=True, slots=True)
class Charts:
    """The charts for one range; the sentence ``empty`` or the problem ``unread`` replaces them."""

    range: str
    rates: Markup | None = None
    waits: Markup | None = None
    empty: str = ""
    unread: TookTooLong | None = None


async def overview(view: View) -> Page:
    """Show problems, then figures, charts and queues."""
    name, since, step = range_of(view)
    facts = Facts(view.site.broker.config.schema_name)
    figures = await view.read(figures_script(view.site.queue_caps, facts))
    queues = figures.overview.queues
    shown = most_in_need(queues, QUEUES_SHOWN)
    rates = await within_time(view, rates_script(since, step, [one.name for one in shown]))
    lines = await attention(view, facts)
    context = {
        "lines": lines[:SHOWN_MAX],
        "more": max(len(lines) - SHOWN_MAX, 0),
        "queues": _queue_rows(shown, figures, rates.by_queue if isinstance(rates, Rates) else {}),
        "more_queues": max(len(queues) - QUEUES_SHOWN, 0),
        "charts": charts_of(view, name, rates, {}),
        "ranges": RANGES,
        **totals_of(figures, rates),
    }
    return Page("overview.html", "Overview", context)


async def queues(view: View) -> Page:
    """Show a page of the queues, by name."""
    after = view.query.get("after", "")
    figures = await view.read(figures_script(view.site.queue_caps))
    found = [one for one in figures.overview.queues if one.name > after]
    shown = found[:QUEUES_PER_PAGE]
    script = done_by_minute_script([one.name for one in shown])
    recent = await within_time(view, script)
    unread = recent if isinstance(recent, TookTooLong) else None
    following = shown[-1].name if len(found) > len(shown) else None
    context: dict[str, Any] = {
        "queues": _queue_rows(shown, figures, {} if isinstance(recent, TookTooLong) else recent),
        "unread": unread,
        "after": after,
        "total": len(figures.overview.queues),
        "next_url": None if following is None else view.url(f"/queues?after={quote(following)}"),
    }
    return Page("queues.html", "Queues", context)


def most_in_need(queues: Sequence[QueueOverview], most: int) -> list[QueueOverview]:
    """Return the queues for the overview by name: all of them, or the most important ones if there are
    very many.
    """
    if len(queues) <= most:
        return list(queues)
    return sorted(nlargest(most, queues, key=_need), key=lambda one: one.name)


def _need(queue: QueueOverview) -> tuple[bool, bool, float, float]:
    is_unserved = bool(queue.due) and not queue.workers
    rate = queue.done_per_minute + queue.failed_per_minute
    return is_unserved, queue.paused_at is not None, queue.due + queue.running, rate


async def queue(view: View) -> Page:
    """Show one queue: its rates, its task names, its next tasks and its workers."""
    queue_name = view.params["name"]
    name, since, step = range_of(view)
    panel = await view.read(queue_script(queue_name, view.site.queue_caps))
    if panel is None:
        raise NotFound(f"There is no queue {queue_name!r}: no worker, task or setting names it.")
    rates = await within_time(view, queue_rates_script(queue_name, since, step))
    arrivals = panel.arrivals
    context = {
        "row": _queue_row(panel.queue, arrivals),
        "arrivals": arrivals,
        "panel": panel,
        "servers": [_worker_row(worker) for worker in panel.servers],
        "places": counted_places(panel.servers),
        "p95": _p95_wait(rates),
        "tasks": _busiest(rates) if isinstance(rates, Rates) else [],
        "charts": charts_of(view, name, rates, {"queue": queue_name}),
        "ranges": RANGES,
        "limit_words": limit_words,
        "keys_shown": KEYS_SHOWN,
        "waited": _waited,
    }
    return Page("queue.html", f"Queue {queue_name}", context)


def _waited(key: KeyState) -> float | None:
    """Return the waiting time of a key's first due task in seconds."""
    if key.first_due_at is None:
        return None
    return max(0.0, (datetime.now(UTC) - key.first_due_at).total_seconds())


async def workers(view: View) -> Page:
    """Show a page of the workers, workers with problems first; include stopped workers with
    ``?stopped=1``.
    """
    with_stopped = view.query.get("stopped") == "1"
    page = number_of(view, "page", 1, PAGES_MAX)
    script = read_rows(list_workers(with_stopped))
    found: list[WorkerSummary] = sorted(await view.read(script), key=_place)
    shown = found[(page - 1) * WORKERS_PER_PAGE : page * WORKERS_PER_PAGE]
    # Render the links once per set of queues, because most workers serve the same queues and the
    # links took half of the page's time.
    queue_links = cache(partial(_queue_links, view))
    context = {
        "workers": [(_worker_row(worker), queue_links(tuple(worker.queues))) for worker in shown],
        "with_stopped": with_stopped,
        "page": page,
        "total": len(found),
        "has_more": page * WORKERS_PER_PAGE < len(found),
    }
    return Page("workers.html", "Workers", context)


def _place(worker: WorkerSummary) -> tuple[bool, bool, str, str]:
    """Return a worker's sort key in the list, which must not change with heartbeats."""
    is_well = health_of(worker) is WorkerHealth.ALIVE and not misses_notifications(worker)
    return worker.stopped_at is not None, is_well, worker.label, worker.worker_id


async def worker(view: View) -> Page:
    """Show one worker: its children, its tasks in flight and its last 24 hours."""
    panel = await view.read(worker_script(view.params["id"]))
    if panel is None:
        sentence = f"There is no worker {view.params['id'][:100]!r} on record."
        raise NotFound(sentence)
    context = {
        "row": _worker_row(panel.worker),
        "queue_links": _queue_links(view, tuple(panel.worker.queues)),
        "panel": panel,
        "children": _children(panel),
        "others": _tasks_without_child(panel),
        "history": _history(panel.history),
    }
    return Page("worker.html", f"Worker {panel.worker.label}", context)


def range_of(view: View) -> tuple[str, timedelta, timedelta]:
    """Return the charts' range from the query, with its length and its step."""
    name = view.query.get("range", "1h")
    if name not in RANGES:
        raise BadRequest(f"range must be one of {', '.join(RANGES)}, not {name[:40]!r}.")
    return (name, *RANGES[name])


async def within_time(view: View, script: Script[T]) -> T | TookTooLong:
    """Run one panel's script; return the problem if it takes too long, such as the session that holds a
    lock, so that the page is shown and the panel has the problem.
    """
    try:
        return await view.read(script)
    except TookTooLong as problem:
        return problem


def _p95_wait(rates: Rates | TookTooLong | None) -> float | None:
    return rates.total.total.waited.p95 if isinstance(rates, Rates) else None


def totals_of(figures: Figures, rates: Rates | TookTooLong | None) -> dict[str, Any]:
    """Return the totals over all queues and over all live workers."""
    queues = figures.overview.queues
    alive = [one for one in figures.overview.workers if health_of(one) is WorkerHealth.ALIVE]
    oldest = [one.oldest_waiting_seconds for one in queues if one.oldest_waiting_seconds]
    return {
        "done": sum(one.done_per_minute for one in queues),
        "failed": sum(one.failed_per_minute for one in queues),
        "due": sum(one.due for one in queues),
        "due_at_least": any(one.is_at_least(one.due) for one in queues),
        "running": sum(one.running for one in queues),
        "places": counted_places(alive),
        "alive": len(alive),
        "oldest": max(oldest, default=None),
        "p95": _p95_wait(rates),
        "open_runs": figures.open_runs,
        "parked": figures.parked,
        "estimate": figures.estimate,
    }


def _queue_rows(
    queues: Iterable[QueueOverview], figures: Figures, recent: Mapping[str, Sequence[int]]
) -> list[QueueRow]:
    return [
        _queue_row(one, figures.arrivals.get(one.name, 0.0), recent.get(one.name, ()))
        for one in queues
    ]


def _queue_row(queue: QueueOverview, arrivals: float, done: Sequence[int] = ()) -> QueueRow:
    status, word = "served", "served"
    if not queue.workers:
        status, word = ("unserved" if queue.due else "stopped"), "no worker"
    if queue.paused_at is not None:
        status, word = "paused", "paused"
    return QueueRow(
        queue=queue,
        status=status,
        word=word,
        in_flight=queue.claimed + queue.running,
        caps=", ".join("no cap" if cap is None else f"{cap:,}" for cap in queue.caps) or "no cap",
        empty_in=_empty_in(queue, arrivals, is_stopped=status != "served"),
        recent=sparkline(f"spark-{queue.name}", f"Done in queue {queue.name}", done),
    )


def _empty_in(queue: QueueOverview, arrivals: float, *, is_stopped: bool) -> str:
    if not queue.due:
        return "-"
    seconds = None if is_stopped else seconds_to_empty(queue, arrivals)
    return "never" if seconds is None else duration(seconds)


def charts_of(view: View, name: str, rates: Rates | TookTooLong, filters: dict[str, str]) -> Charts:
    """Draw rates and waiting times; each column links to the tasks of its slot, with these filters."""
    if isinstance(rates, TookTooLong):
        return Charts(name, unread=rates)
    if not rates.total.total.attempts:
        return Charts(
            name,
            empty="No attempt has ended in this time. Workers store their counts every 30 seconds.",
        )
    series = rates.total
    columns, waits = [], []
    for slot in slots_over(series):
        until = min(slot.at + series.step, series.until)
        minutes = max((until - slot.at).total_seconds() / 60, 1 / 60)
        counts = (slot.done, slot.retried, slot.failed + slot.crashed, slot.stopped)
        query = {**filters, "since": _iso(slot.at), "until": _iso(slot.at + series.step)}
        href = view.url("/tasks?" + urlencode(query, safe=":"))
        columns.append(Column(slot.at, [count / minutes for count in counts], href))
        waited = slot.waited
        waits.append(Column(slot.at, (waited.p50, waited.p95, waited.p99)))
    return Charts(
        name,
        column_chart(Chart("rates", "Attempts per minute", _RATE_SERIES, columns)),
        line_chart(Chart("waits", "Wait: time from due to start", PERCENTILES, waits)),
    )


def slots_over(series: Series) -> Sequence[Slot]:
    """Return the slots without the current slot, unless enough of the slot has passed to show a rate.
    Workers store their counts every 30 seconds, so the current minute always has too few counts.
    """
    enough = max(series.step / 2, timedelta(minutes=1))
    is_open = series.until - series.slots[-1].at < enough
    return series.slots[:-1] if is_open else series.slots


def _iso(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M}"


def _busiest(rates: Rates) -> list[tuple[str, Slot]]:
    """Return the 20 tasks with the most attempts in the last hour, and their sums."""
    totals = [(name or "other tasks", series.total) for name, series in rates.by_task.items()]
    return sorted(totals, key=lambda one: (-one[1].attempts, one[0]))[:20]


def _worker_row(worker: WorkerSummary) -> WorkerRow:
    health = health_of(worker)
    status, note = health.value, ""
    held = worker.tasks_running + worker.tasks_claimed
    if misses_notifications(worker):
        status, note = "polling", "receives no notifications, finds work by polling"
    elif health is WorkerHealth.LOST and held:
        note = f"{held:,} of its tasks will be taken over"
    elif health is WorkerHealth.SILENT:
        note = "connected, but without a heartbeat"
    return WorkerRow(worker, worker.label, status, note)


def _queue_links(view: View, names: Sequence[str]) -> Markup:
    """Return links to at most ``LINKS_MAX`` of a worker's queues, and the number of the remaining
    queues.
    """
    link = Markup('<a href="{}"><bdi>{}</bdi></a>')
    shown = (link.format(view.url(f"/queues/{name}"), name) for name in names[:LINKS_MAX])
    more = f" and {len(names) - LINKS_MAX:,} more" if len(names) > LINKS_MAX else ""
    return Markup(", ").join(shown) + more


def _children(panel: WorkerPanel) -> list[ChildRow]:
    """Match the snapshot's children with the running tasks by process id."""
    running = {task.worker_pid: task for task in panel.tasks if task.status == "RUNNING"}
    known = panel.detail.children or []
    return [
        ChildRow(
            pid=child.get("pid"),
            rss_mb=child.get("rss_mb"),
            done=child.get("done"),
            since=datetime.fromisoformat(since) if (since := child.get("since")) else None,
            task=running.get(child.get("pid")),
        )
        for child in known
    ]


def _tasks_without_child(panel: WorkerPanel) -> list[WorkerTask]:
    """Return the tasks that no row of a child shows: prefetched tasks, tasks of children that started
    after the snapshot, and further tasks of a child with several.
    """
    shown = {row.task.id for row in _children(panel) if row.task is not None}
    return [task for task in panel.tasks if task.status != "RUNNING" or task.id not in shown]


def _history(points: Sequence[HistoryPoint]) -> list[tuple[str, str, Markup]]:
    """Return the name, the newest value and the line of each quantity."""
    if not points:
        return []
    last, busy = points[-1], [one.busy for one in points]
    resident = [one.memory_mb for one in points]
    memory = "-" if last.memory_mb is None else f"{last.memory_mb:,.0f} MB"
    cpu = "-" if last.cpu_percent is None else f"{last.cpu_percent:.0f} %"
    return [
        ("Resident memory", memory, sparkline("memory", "Resident memory in MB", resident)),
        ("Tasks running, mean", f"{last.busy:.1f}", sparkline("busy", "Tasks running", busy)),
        ("CPU, mean", cpu, sparkline("cpu", "CPU in percent", [one.cpu_percent for one in points])),
    ]


ROUTES = (
    Route("GET", "/", None, overview),
    Route("GET", "/queues", None, queues),
    Route("GET", "/queues/{name}", None, queue),
    Route("GET", "/workers", None, workers),
    Route("GET", "/workers/{id}", None, worker),
)
