"""The JSON API: the documents of the command line's ``--json``, below ``/api``.

Payloads appear only for users who may see them, with the values of secret keys masked. Every route
rejects unknown filters.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from heapq import nsmallest
from typing import Any, TypeVar

from starlette.responses import Response

from horsies._version import __version__
from horsies.database_url import mask_url
from horsies.db.statement import read_rows
from horsies.db.statements.monitor import (
    ServerVersion,
    WorkerSummary,
    list_workers,
    read_server,
    worker_state_history,
)
from horsies.logs import escape_json
from horsies.monitor.diagnose.attention import figures_script
from horsies.monitor.diagnose.explain import report_script
from horsies.monitor.documents import (
    json_value,
    key_document,
    overview_document,
    page_document,
    queue_document,
    schedule_document,
    snapshot_document,
    task_document,
    worker_document,
)
from horsies.monitor.facts import Facts
from horsies.monitor.failures import failure_document, failures_document, failures_script
from horsies.monitor.keys import LIST_LIMIT as KEYS_LIMIT
from horsies.monitor.keys import LIST_LIMIT_MAX, Keys
from horsies.monitor.measures import read_measures_script
from horsies.monitor.overview import (
    Overview,
    TaskReport,
    WorkerHealth,
    health_of,
    misses_notifications,
    overview_script,
)
from horsies.monitor.paging import LIST_WINDOW
from horsies.monitor.queries import (
    SEARCH_WINDOW,
    RunFilters,
    run_filters,
    runs_script,
    sent_time,
    tasks_script,
)
from horsies.monitor.task_logs import logs_script
from horsies.result import Err, Result
from horsies.scheduler.api import list_script, next_script
from horsies.scheduler.api import runs_script as schedule_runs_script
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError
from horsies.web.attention import attention
from horsies.web.filters import (
    LIMIT_DEFAULT,
    LIMIT_MAX,
    TASK_FILTERS,
    is_on,
    number_of,
    refuse_unknown,
    run_filter_values,
    task_filters_of,
    text_of,
    texts_of,
    time_of,
)
from horsies.web.pages import most_in_need
from horsies.web.pages_failures import group_of
from horsies.web.reading import STATEMENT_TIMEOUT_MS, BadRequest, NotFound, Unavailable
from horsies.web.rendering import Handler, Page, Route, View
from horsies.workflow.run.listing import report_document
from horsies.workflow.run.listing import report_script as run_script

T = TypeVar("T")

HISTORY_LIMIT_MAX = 1_000
MEASURES_MAX = timedelta(days=14)
# The number of ten-minute steps in 14 days.
SLOTS_MAX = 2_016
# Larger documents contain no white space, because indentation takes ten times as long and doubles their
# size.
INDENTED_MAX = 100_000
# The maximum length of the attention list, because thousands of queues may need attention.
ATTENTION_MAX = 200
# The maximum numbers of queues, workers, and queues per worker in the overview without ``all``.
QUEUES_MAX = WORKERS_MAX = 200
QUEUES_OF_WORKER_MAX = 20
# The maximum number of queues on a page of the list of queues.
QUEUES_PAGE = 1_000
RUN_FILTERS = frozenset(
    {
        *("status", "name", "workflow_key", "since", "until"),
        *("include_children", "before", "limit"),
    }
)


def answer(document: dict[str, Any]) -> Response:
    """Return a JSON document with all passwords in addresses masked."""
    value = _masked(json_value(document))
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if len(text) <= INDENTED_MAX:
        text = json.dumps(value, indent=2, ensure_ascii=False)
    return Response(escape_json(text), 200, None, "application/json")


def _masked(value: Any) -> Any:
    match value:
        case str():
            return mask_url(value)
        case dict():
            return {name: _masked(part) for name, part in value.items()}
        case list():
            return [_masked(part) for part in value]
        case _:
            return value


# The dashboard, queues and workers


async def meta(view: View) -> Response:
    """Return versions, the user's permissions and limits. A database of another release is not an error,
    but is reported.
    """
    schema, server = "MATCH", None
    try:
        rows: list[ServerVersion] = await view.read(read_rows(read_server()))
        server = rows[0].server_version
    except Unavailable as problem:
        if problem.members.get("retryable"):
            raise
        schema = "MISMATCH"
    access = view.access
    return answer(
        {
            "version": __version__,
            "server_version": server,
            "schema": schema,
            "base_path": view.url(""),
            "actions_enabled": view.site.settings.actions,
            "access": {
                "user": access.user,
                "may": sorted(access.may),
                "sees_payload": access.sees_payload,
            },
            "limits": {
                "list_window": LIST_WINDOW,
                "search_window": SEARCH_WINDOW,
                "limit": LIMIT_MAX,
                "statement_timeout_ms": STATEMENT_TIMEOUT_MS,
            },
        }
    )


async def overview(view: View) -> Response:
    """Return queues, workers, blocked tasks and runs, as in ``horsies status --json``, and the attention
    list.

    Without ``all``, only the most important queues and workers are included if there are very many.
    """
    is_all = is_on(view, "all")
    facts = Facts(view.site.broker.config.schema_name)
    figures = await view.read(figures_script(view.site.queue_caps, facts))
    found = await attention(view, facts)
    lines = [
        {
            "code": line.code,
            "severity": line.urgency.name.lower(),
            "sentence": line.sentence,
            "subject": line.subject,
            "verbs": [line.verb] if line.verb else [],
        }
        for line in found[:ATTENTION_MAX]
    ]
    totals = {
        "tasks_estimate": figures.estimate.tasks if figures.estimate else None,
        "attention": len(found),
        "queues": len(figures.overview.queues),
        "workers": len(figures.overview.workers),
        "durable_runs": figures.parked._asdict(),
    }
    document = overview_document(figures.overview if is_all else _shortened(figures.overview))
    if not is_all:
        for one in document["workers"]:
            one["queue_count"], one["queues"] = (
                len(one["queues"]),
                one["queues"][:QUEUES_OF_WORKER_MAX],
            )
    return answer(document | {"attention": lines, "totals": totals})


def _shortened(overview: Overview) -> Overview:
    """Return an overview with the most important queues and workers only, or the whole overview if it is
    short.
    """
    queues = most_in_need(overview.queues, QUEUES_MAX)
    workers = nsmallest(WORKERS_MAX, overview.workers, key=_is_well)
    return replace(overview, queues=queues, workers=workers)


def _is_well(worker: WorkerSummary) -> bool:
    return health_of(worker) is WorkerHealth.ALIVE and not misses_notifications(worker)


async def queues(view: View) -> Response:
    """Return a page of queues by name, starting after the name ``after``."""
    after, limit = text_of(view, "after") or "", number_of(view, "limit", QUEUES_PAGE, QUEUES_PAGE)
    every = await view.read(overview_script(view.site.queue_caps))
    found = [one for one in every.queues if one.name > after]
    last = found[limit - 1].name if len(found) > limit else None
    shown = [queue_document(queue) for queue in found[:limit]]
    return answer({"queues": shown, "next_after": last})


async def queue(view: View) -> Response:
    name = view.params["name"]
    every = await view.read(overview_script(view.site.queue_caps))
    found = next((one for one in every.queues if one.name == name), None)
    if found is None:
        raise NotFound(f"There is no queue {name!r}.", code="QUEUE_NOT_FOUND")
    return answer(queue_document(found))


async def keys(view: View) -> Response:
    """Return the keys of a queue, as ``horsies keys list --json`` does."""
    broker, limit = view.site.broker, number_of(view, "limit", KEYS_LIMIT, LIST_LIMIT_MAX)
    known = list(view.site.queue_caps) if view.site.app else None
    script = Keys(lambda: broker, known).list_script(view.params["name"], limit)
    return answer({"keys": [key_document(one) for one in _unwrapped(await view.read(script))]})


async def measures(view: View) -> Response:
    """Return attempts and durations per time slot; ``since`` is the length of the period, ``step`` the
    length of a slot.
    """
    since = _length(view, "since", timedelta(hours=1))
    step = _length(view, "step", max(since / 60, timedelta(minutes=1)))
    queues, names = texts_of(view, "queue"), texts_of(view, "task_name")
    if since / step > SLOTS_MAX:
        raise BadRequest(f"step must leave at most {SLOTS_MAX:,} slots.", code="INVALID_FILTER")
    series = await view.read(read_measures_script(since, step, queues, names))
    slots = [asdict(slot) for slot in series.slots]
    seconds = series.step.total_seconds()
    return answer({"step_seconds": seconds, "until": series.until, "slots": slots})


def _length(view: View, name: str, default: timedelta) -> timedelta:
    now = datetime.now(UTC)
    began = time_of(view, name, now)
    length = default if began is None else now - began
    if not timedelta(minutes=1) <= length <= MEASURES_MAX:
        raise BadRequest(f"{name} must be from 1m to 14d.", code="INVALID_FILTER")
    return length


async def workers(view: View) -> Response:
    """Return the running workers; with ``include_stopped``, also the stopped workers."""
    is_all = is_on(view, "include_stopped")
    found = await view.read(read_rows(list_workers(is_all)))
    return answer({"workers": [worker_document(worker) for worker in found]})


async def worker(view: View) -> Response:
    worker_id = view.params["id"]
    rows = await view.read(read_rows(list_workers(True)))
    found = next((one for one in rows if one.worker_id == worker_id), None)
    if found is None:
        raise NotFound(f"There is no worker {worker_id!r}.", code="WORKER_NOT_FOUND")
    return answer(worker_document(found))


async def worker_history(view: View) -> Response:
    limit = number_of(view, "limit", LIMIT_DEFAULT, HISTORY_LIMIT_MAX)
    asked = worker_state_history(view.params["id"], limit)
    rows = await view.read(read_rows(asked))
    return answer({"snapshots": [snapshot_document(asdict(row)) for row in rows]})


# Tasks and failures


async def tasks(view: View) -> Response:
    page = await view.read(tasks_script(task_filters_of(view)))
    document = page_document(page, "tasks")
    for row in document["tasks"]:
        # Return a page of tasks. A search reads arguments, but the list does not contain them.
        row.pop("args", None), row.pop("kwargs", None)
    back_to = sent_time(page.next_cursor) if page.next_cursor else None
    return answer(document | {"looked_back_to": back_to})


async def _report(view: View, payload: bool) -> TaskReport:
    task_id = view.params["id"]
    report = await view.read(report_script(task_id, payload))
    if report is None:
        raise NotFound(f"There is no task {task_id}.", code="TASK_NOT_FOUND")
    return report


async def task(view: View) -> Response:
    """Return one task with its attempts; include arguments and result only for users who may see them."""
    sees_payload = view.access.sees_payload
    report = await _report(view, sees_payload)
    masking, found = view.site.masking, report.task
    document = task_document(report, payload=False)
    document["options"] = masking.value(document["options"])
    if sees_payload:
        names = view.site.parameter_names(found.task_name)
        document["args"] = masking.stored_value(found.args, names)
        document["kwargs"] = masking.stored_value(found.kwargs)
        document["result"] = masking.stored_value(found.result)
    return answer(document)


async def attempts(view: View) -> Response:
    report = await _report(view, payload=False)
    return answer({"attempts": [asdict(attempt) for attempt in report.attempts]})


async def logs(view: View) -> Response:
    """Return the log lines of a task's attempts, only for users who may see arguments."""
    if not view.access.sees_payload:
        raise NotFound("There is no page for logs: you may not see arguments and results.")
    task_id = view.params["id"]
    found = await view.read(logs_script(task_id))
    if found is None:
        raise NotFound(f"There is no task {task_id}.", code="TASK_NOT_FOUND")
    masked = view.site.masking.log_lines
    shown = [log._replace(first=masked(log.first), last=masked(log.last)) for log in found]
    return answer({"logs": [log.to_dict() for log in shown]})


async def failures(view: View) -> Response:
    """Return the failed attempts by fingerprint: the task, the error code, the exception class and its
    place.
    """
    found = await view.read(failures_script(texts_of(view, "task_name")))
    return answer(failures_document(found))


async def failure(view: View) -> Response:
    """Return one group of failures with its counts over time."""
    return answer(failure_document(await group_of(view), datetime.now(UTC)))


# Workflows and schedules


async def workflows(view: View) -> Response:
    page = await view.read(runs_script(_run_filters(view)))
    if page is None:
        raise NotFound(f"There is no workflow run {text_of(view, 'before')}.", code="RUN_NOT_FOUND")
    return answer(page_document(page, "workflows"))


def _run_filters(view: View) -> RunFilters:
    checked = run_filters(
        **run_filter_values(view),
        include_children=is_on(view, "include_children"),
        limit=number_of(view, "limit", LIMIT_DEFAULT, LIMIT_MAX),
        after=text_of(view, "before"),
    )
    return _unwrapped(checked)


async def workflow(view: View) -> Response:
    """Return one run with its nodes and the runs below it."""
    report = await view.read(run_script(view.params["id"]))
    if report is None:
        raise NotFound(f"There is no workflow run {view.params['id']}.", code="RUN_NOT_FOUND")
    return answer(report_document(report))


async def schedules(view: View) -> Response:
    found = _unwrapped(await view.read(list_script()))
    return answer({"schedules": [schedule_document(state) for state in found]})


async def schedule(view: View) -> Response:
    name = view.params["name"]
    states = _unwrapped(await view.read(list_script()))
    found = next((state for state in states if state.name == name), None)
    if found is None:
        raise NotFound(f"There is no schedule {name!r}.", code="SCHEDULE_NOT_FOUND")
    return answer(schedule_document(found))


async def schedule_slots(view: View) -> Response:
    name, limit = view.params["name"], number_of(view, "limit", 10, LIMIT_MAX)
    slots = _unwrapped(await view.read(next_script(name, limit)))
    return answer({"name": name, "slots": slots})


async def schedule_runs(view: View) -> Response:
    """Return one schedule's newest slots with their tasks or runs."""
    name, limit = view.params["name"], number_of(view, "limit", 20, LIMIT_MAX)
    runs = _unwrapped(await view.read(schedule_runs_script(name, limit)))
    return answer({"name": name, "runs": [run._asdict() for run in runs]})


def _unwrapped(done: Result[T, BrokerOperationError]) -> T:
    if not isinstance(done, Err):
        return done.ok_value
    error = done.err_value
    if error.code in (BrokerErrorCode.UNKNOWN_QUEUE, BrokerErrorCode.UNKNOWN_SCHEDULE):
        raise NotFound(error.message, code=error.code.value)
    raise BadRequest(error.message, code=error.code.value)


def _route(path: str, handler: Handler, filters: Collection[str] = ()) -> Route:
    """Return a route that rejects all other filters."""

    async def checked(view: View) -> Page | Response:
        refuse_unknown(view, filters)
        return await handler(view)

    return Route("GET", f"/api/{path}", None, checked)


ROUTES = (
    _route("meta", meta),
    _route("overview", overview, {"all"}),
    _route("queues", queues, {"after", "limit"}),
    _route("queues/{name}", queue),
    _route("queues/{name}/keys", keys, {"limit"}),
    _route("tasks", tasks, TASK_FILTERS),
    _route("tasks/{id}", task),
    _route("tasks/{id}/attempts", attempts),
    _route("tasks/{id}/logs", logs),
    _route("failures", failures, {"task_name"}),
    _route("failures/{fingerprint}", failure),
    _route("measures", measures, {"since", "step", "queue", "task_name"}),
    _route("workers", workers, {"include_stopped"}),
    _route("workers/schedules", schedules),
    _route("workers/{id}", worker),
    _route("workers/{id}/history", worker_history, {"limit"}),
    _route("workflows", workflows, RUN_FILTERS),
    _route("workflows/{id}", workflow),
    _route("schedules", schedules),
    _route("schedules/{name:path}/next", schedule_slots, {"limit"}),
    _route("schedules/{name:path}/runs", schedule_runs, {"limit"}),
    _route("schedules/{name:path}", schedule),
)
