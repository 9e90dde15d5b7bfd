"""The pages for tasks and for one task."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from unicodedata import normalize
from urllib.parse import quote, urlencode
from uuid import UUID

from starlette.responses import RedirectResponse, Response

from horsies.database_url import mask_url
from horsies.db.statement import Script, one_or_none, read_rows
from horsies.db.statements.dashboard import estimate_rows
from horsies.db.statements.durable import RunRow, ShownStep, list_newest_steps, read_run
from horsies.db.statements.lookup import (
    ResentTask,
    find_subject,
    list_resent,
    newest_heartbeat,
    newest_trace,
)
from horsies.db.statements.monitor import (
    TaskDetail,
    list_known_queues,
    read_task_detail,
)
from horsies.db.statements.tasks import TaskAttemptInfo
from horsies.error_codes import OutcomeCode, docs_command
from horsies.errors import UNLIMITED_RETRIES
from horsies.ids import stored_form
from horsies.monitor.diagnose.explain import Explanation, explain_task_script
from horsies.monitor.documents import stored_json
from horsies.monitor.edited_calls import is_reserved
from horsies.monitor.order_plan import SCOPES, OrderVerb
from horsies.monitor.overview import TaskReport, declared_transaction, task_script
from horsies.monitor.paging import LIST_WINDOW
from horsies.monitor.paging import Page as Listing
from horsies.monitor.queries import SEARCH_WINDOW, TaskFilters, TaskPage, sent_time, tasks_script
from horsies.monitor.task_logs import AttemptLog, logs_script
from horsies.retry import decide_retry, policy_from_options, rule_text
from horsies.states import TaskStatus
from horsies.web.access import Verb
from horsies.web.filters import TASK_FILTERS, refuse_unknown, task_filters_of, text_of, texts_of
from horsies.web.masking import SHOWN_CHARACTERS_MAX, Masking, Shown, visible
from horsies.web.reading import BadRequest, Locked, NotFound, TookTooLong
from horsies.web.rendering import Page, Route, View
from horsies.web.task_life import draw_life, life_of
from horsies.web.tracebacks import Folded, Frame, Text, read_traceback
from horsies.web.words import duration

CSV_LIMIT = 1_000
STEPS_SHOWN = 200
NEWER_MAX = 100
_WAITS_SHOWN = 5
PAYLOAD_PARTS = ("args", "kwargs", "result")

_SINCE_CHOICES = ("15m", "1h", "6h", "1d", "7d")
_CSV_COLUMNS = (
    *("id", "task_name", "queue_name", "status", "retry_count", "max_retries", "error_code"),
    *("created_at", "enqueued_at", "started_at", "finished_at", "worker_hostname", "worker_pid"),
)


# Lists


async def tasks(view: View) -> Page | Response:
    """List tasks by the filters in the URL; ``q`` redirects to a task, a run or the search."""
    if (asked := text_of(view, "q")) is not None:
        return await _jump(view, asked.strip())
    refuse_unknown(view, TASK_FILTERS | {"q", "first"})
    filters = task_filters_of(view)
    listed, problem = await _list(view, filters)
    first = listed.rows[0].id if listed.rows else None
    queues, estimated = await view.read(_choices_script())
    context = {
        "tasks": listed.rows,
        "problem": problem,
        "note": _note(listed, filters),
        "estimated": estimated,
        "filters": filters,
        "argument": text_of(view, "argument") or "",
        "since": text_of(view, "since") or "",
        "until": text_of(view, "until") or "",
        "queues": sorted({*queues, *view.site.queue_caps, *filters.queues}),
        "names": sorted(view.site.app.list_tasks()) if view.site.app else [],
        "can_send": view.site.app is not None,
        "statuses": list(TaskStatus),
        "since_choices": _SINCE_CHOICES,
        "newer": await _count_newer(view, filters),
        "is_filtered": any(texts_of(view, name) for name in TASK_FILTERS - {"limit"}),
        "next_url": view.url("/tasks") + _with(view, before=listed.next_cursor),
        "next_cursor": listed.next_cursor,
        "bulk_orders": _bulk_orders(filters),
        "filter_query": _with(view, before=None, limit=None).removeprefix("?"),
        "narrowed": lambda **changes: view.url("/tasks") + _with(view, before=None, **changes),
        "live_url": view.url("/live/tasks") + _with(view, first=text_of(view, "first") or first),
    }
    return Page("tasks.html", "Tasks", context)


def _bulk_orders(filters: TaskFilters) -> list[tuple[Verb, str]]:
    """Return the rights for orders that apply to the statuses of the filters, with their links' words."""
    orders: tuple[tuple[Verb, str, OrderVerb], ...] = (
        ("retry_task", "send again…", OrderVerb.RETRY_TASKS),
        ("cancel_task", "cancel…", OrderVerb.CANCEL_TASKS),
    )
    chosen = set(filters.statuses)
    return [(right, words) for right, words, verb in orders if chosen <= {*SCOPES[verb].allowed}]


def _choices_script() -> Script[tuple[list[str], float | None]]:
    """Read the queue names, and the estimated number of tasks."""
    queues = yield list_known_queues()
    (estimated,) = yield estimate_rows()
    return [row.name for row in queues], estimated.tasks


async def _list(view: View, filters: TaskFilters) -> tuple[TaskPage, str | None]:
    """Read the page; live updates request the viewer's current rows, from ``first`` on."""
    first = _first(view)
    if first is not None and filters.after is None:
        filters = replace(filters, after=str(UUID(int=UUID(first).int + 1)))
    try:
        return await view.read(tasks_script(filters)), None
    except Locked:
        raise
    except TookTooLong as problem:
        return Listing([]), problem.sentence


async def _count_newer(view: View, filters: TaskFilters) -> int:
    """Count the tasks that are newer than the viewer's first row."""
    first = _first(view)
    if first is None or filters.after is not None or filters.search is not None:
        return 0
    since = max(sent_time(first), filters.since or sent_time(first))
    newer = replace(filters, since=since, limit=NEWER_MAX)
    try:
        found = await view.read(tasks_script(newer))
    except TookTooLong:
        return 0
    return sum(task.id > first for task in found.rows)


def _first(view: View) -> str | None:
    first = stored_form(text_of(view, "first"))
    if first is None and text_of(view, "first"):
        raise BadRequest("first must be the id of a task.", code="INVALID_FILTER")
    return None if first is None or UUID(first).int == 2**128 - 1 else first


def _with(view: View, **changes: str | None) -> str:
    """Return this page's query with some filters changed; None removes a filter."""
    kept = [
        (name, value)
        for name, value in view.query.multi_items()
        if name not in changes and name != "first" and value.strip()
    ]
    pairs = [*kept, *((name, value) for name, value in changes.items() if value is not None)]
    return f"?{urlencode(pairs)}" if pairs else ""


@dataclass(frozen=True, slots=True)
class Note:
    """The extent of a list's search: the number of tasks, and the time of the oldest one."""

    looked_at: int
    back_to: datetime


def _note(listed: TaskPage, filters: TaskFilters) -> Note | None:
    if listed.looked_at_all or listed.next_cursor is None:
        return None
    window = LIST_WINDOW if filters.search is None else SEARCH_WINDOW
    return Note(window, sent_time(listed.next_cursor))


async def _jump(view: View, asked: str) -> Response:
    """Redirect from the search box to a task or run by its id, to the tasks with an argument, or to the
    search.
    """
    if (stored := stored_form(asked)) is not None:
        found = await view.read(read_rows(find_subject(stored)))
        if not found:
            sentence, link = f"There is no task or workflow run {stored}.", f"/explain?id={stored}"
            raise NotFound(sentence, code="TASK_NOT_FOUND", explained_at=link)
        page = "tasks" if found[0].kind == "task" else "workflows"
        return RedirectResponse(view.url(f"/{page}/{stored}"), 303)
    if "=" in asked and view.access.sees_payload:
        return RedirectResponse(view.url("/tasks") + f"?{urlencode({'argument': asked})}", 303)
    return RedirectResponse(view.url("/search") + f"?{urlencode({'q': asked})}", 303)


async def tasks_csv(view: View) -> Response:
    """Return the list's tasks as CSV, without arguments and results."""
    refuse_unknown(view, TASK_FILTERS)
    filters = replace(task_filters_of(view), limit=CSV_LIMIT)
    listed = await view.read(tasks_script(filters))
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_CSV_COLUMNS)
    writer.writerows([_cell(getattr(task, name)) for name in _CSV_COLUMNS] for task in listed.rows)
    headers = {"Content-Disposition": 'attachment; filename="tasks.csv"'}
    return Response(text.getvalue(), 200, headers, "text/csv; charset=utf-8")


def _cell(value: Any) -> str:
    """Return a cell's text, escaped so that a spreadsheet does not run it as a formula."""
    text = "" if value is None else value.isoformat() if isinstance(value, datetime) else str(value)
    # Some spreadsheets ignore white space before the sign, or accept its full-width form, such as
    # U+FF0B.
    first = normalize("NFKC", text[:1])
    return f"'{text}" if first.isspace() or first in tuple("=+-@") else text


# One task


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """All facts that one task's page shows."""

    report: TaskReport
    heartbeat_at: datetime | None = None
    resent: Sequence[ResentTask] = ()
    # The obstacles; None once the task has ended.
    explanation: Explanation | None = None
    traceparent: str | None = None
    # The newest steps of a durable function's run.
    steps: Sequence[ShownStep] = ()
    logs: Sequence[AttemptLog] = ()
    # The unfinished run of a durable function.
    run: RunRow | None = None

    @property
    def task(self) -> TaskDetail:
        return self.report.task

    @property
    def is_open(self) -> bool:
        return not TaskStatus(self.task.status).is_terminal


def _facts_script(task_id: str, payload: bool) -> Script[TaskFacts | None]:
    report = yield from task_script(task_id, payload)
    if report is None:
        return None
    task = report.task
    if not payload and task.status == TaskStatus.FAILED.value:
        # The traceback is read from the result; the rest of the result is not shown.
        whole = one_or_none((yield read_task_detail(task.id, True)))
        report = replace(report, task=task._replace(result=whole.result if whole else None))
    beat = None
    if task.status == TaskStatus.RUNNING.value:
        beat = one_or_none((yield newest_heartbeat(task.id)))
    resent = yield list_resent(task.id)
    explanation = None
    if not TaskStatus(task.status).is_terminal:
        explanation = yield from explain_task_script(task.id)
    trace = one_or_none((yield newest_trace(task.id)))
    traceparent = trace.traceparent if trace else None
    steps = yield list_newest_steps(task.id, payload, SHOWN_CHARACTERS_MAX, STEPS_SHOWN)
    logs = (yield from logs_script(task.id)) if payload else None
    run = None
    if explanation is not None and (steps or _is_parked(explanation)):
        run = one_or_none((yield read_run(task.id)))
    beat_at = beat.sent_at if beat else None
    found = (report, beat_at, resent, explanation, traceparent, steps)
    return TaskFacts(*found, logs or (), run)


def _is_parked(explanation: Explanation) -> bool:
    return any(one.code in ("PARKED_RUN", "HELD_BY_RECORD") for one in explanation.reasons)


async def task(view: View) -> Page:
    """Show one task: its life, attempts, error and options; show arguments only to users who may see
    them.
    """
    facts = await _read_facts(view)
    found = facts.task
    masking = view.site.masking
    options = stored_json(found.task_options)
    trace_id = _trace_id(facts.traceparent, options)
    context = {
        "facts": facts,
        "explanation": facts.explanation,
        "task": found,
        "life": draw_life(life_of(found, facts.report.attempts)),
        "attempts": [_attempt(found, attempt) for attempt in facts.report.attempts],
        "error": _error(found, view.access.sees_payload),
        "docs_command": docs_command(found.error_code),
        "payload": _payload(view, found, masking) if view.access.sees_payload else None,
        "logs": [(log, "\n".join(masking.log_lines(log.lines))) for log in facts.logs],
        "headers": _headers(options, masking),
        "can_edit": view.site.app is not None
        and view.site.app.get_task(found.task_name) is not None
        and not is_reserved(found.task_name),
        "steps": [_step(view, step) for step in facts.steps],
        "steps_shown": STEPS_SHOWN,
        "run": None if facts.run is None else _run_view(view, facts.run, facts.steps),
        "policy": _policy(found),
        "retries": _retries(found),
        "transaction": _transaction(view, found),
        "trace_id": trace_id,
        "links": _links(view.site.settings.links, found, trace_id),
    }
    title = visible(f"Task {found.task_name} on {found.queue_name}")
    return Page("task.html", title, context, live_seconds=1.0 if facts.is_open else None)


@dataclass(frozen=True, slots=True)
class RunView:
    """The operations on a durable function's run: the signals to send, if their names are known, and the
    steps to which it can be reset.
    """

    signals: Sequence[str]
    is_held: bool
    steps: Sequence[str]


def _run_view(view: View, run: RunRow, steps: Sequence[ShownStep]) -> RunView:
    definition = view.site.app and view.site.app.definitions().get(run.task_name)
    declared = definition.durable.signals if definition and definition.durable else None
    is_waiting = run.status == TaskStatus.PENDING.value
    # A row with "!" in its name belongs to another step.
    own = [step.name for step in steps if "!" not in step.name] if is_waiting else []
    names = run.signals or declared or run.declared or ()
    return RunView(list(names), run.problem is not None, own)


@dataclass(frozen=True, slots=True)
class StepView:
    """A recorded step with its duration; its value or error is set for users who may see it."""

    info: ShownStep
    seconds: float
    error_code: str | None
    error_message: str
    result: Shown | None


def _step(view: View, info: ShownStep) -> StepView:
    failed = stored_json(info.error)
    code, message = None, ""
    if isinstance(failed, dict):
        code = str(failed.get("code"))
        message = mask_url(str(failed.get("message"))) if view.access.sees_payload else ""
    seconds = (info.ended_at - info.started_at).total_seconds()
    shown = None if info.result is None else view.site.masking.shown(info.result)
    return StepView(info, seconds, code, message, shown)


def _transaction(view: View, found: TaskDetail) -> str | None:
    app = view.site.app
    return None if app is None else declared_transaction(app.definitions().get(found.task_name))


async def _read_facts(view: View) -> TaskFacts:
    task_id = view.params["id"]
    facts = await view.read(_facts_script(task_id, view.access.sees_payload))
    if facts is None:
        sentence, link = f"There is no task {task_id}.", f"/tasks/{task_id}/explain"
        raise NotFound(sentence, code="TASK_NOT_FOUND", explained_at=link)
    return facts


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt with its duration, and the reason for or against a retry."""

    info: TaskAttemptInfo
    seconds: float | None
    message: str
    why: str


def _attempt(found: TaskDetail, info: TaskAttemptInfo) -> Attempt:
    seconds = (info.finished_at - info.started_at).total_seconds() if info.started_at else None
    return Attempt(info, seconds, mask_url(info.error_message or ""), _why(found, info))


def _why(found: TaskDetail, info: TaskAttemptInfo) -> str:
    """Return the stored reason; for an attempt without one, derive it from the stored policy."""
    if info.retry_reason is not None or info.outcome == "COMPLETED":
        return mask_url(info.retry_reason or "")
    if info.will_retry:
        return "retried"
    if info.error_code == OutcomeCode.TASK_CANCELLED.value:
        return "not retried: the task was cancelled"
    decision = decide_retry(
        task_options=found.task_options,
        error_code=info.error_code,
        retry_count=info.attempt - 1,
        max_retries=found.max_retries,
    )
    is_final = decision.delay_seconds is None
    reason = decision.reason or "not retried: the task has no retry policy"
    return mask_url(reason) if is_final else "not retried"


@dataclass(frozen=True, slots=True)
class ErrorView:
    """The last attempt's error. ``parts`` is its traceback, with messages only for users who may see
    them.
    """

    code: str | None
    message: str
    kind: str
    parts: Sequence[Frame | Text | Folded]


def _error(found: TaskDetail, sees_payload: bool) -> ErrorView | None:
    match stored_json(found.result):
        case {"err": dict(stored)}:
            raised = stored.get("exception")
        case _:
            return None
    raised = raised if isinstance(raised, dict) else {}
    traceback = raised.get("traceback")
    text = mask_url(traceback) if isinstance(traceback, str) else ""
    message = stored.get("message")
    kind = raised.get("type")
    return ErrorView(
        found.error_code,
        mask_url(message) if isinstance(message, str) else "",
        kind if isinstance(kind, str) else "",
        read_traceback(text, with_messages=sees_payload),
    )


def _payload(view: View, found: TaskDetail, masking: Masking) -> dict[str, Shown | None]:
    names = view.site.parameter_names(found.task_name)
    stored = {"args": found.args, "kwargs": found.kwargs, "result": found.result}
    return {
        part: None if text is None else masking.shown(text, names=names if part == "args" else ())
        for part, text in stored.items()
    }


def _headers(options: Any, masking: Masking) -> Mapping[str, str]:
    stored = options.get("headers") if isinstance(options, dict) else None
    headers = stored if isinstance(stored, dict) else {}
    return {
        key: "•••" if masking.hides(key) else mask_url(str(value)) for key, value in headers.items()
    }


def _retries(found: TaskDetail) -> str:
    if found.max_retries == 0:
        return "none"
    is_endless = found.max_retries >= UNLIMITED_RETRIES
    return f"{found.retry_count:,} " + (
        "without limit" if is_endless else f"of {found.max_retries:,}"
    )


def _policy(found: TaskDetail) -> str | None:
    """Describe the stored retry policy in one line."""
    policy = policy_from_options(found.task_options)
    if policy is None:
        return None
    rules = ", ".join(rule_text(rule) for rule in policy.auto_retry_for)
    waits = ", ".join(duration(seconds) for seconds in policy.intervals[:_WAITS_SHOWN])
    more = ", …" if len(policy.intervals) > _WAITS_SHOWN else ""
    doubled = ", doubled each time" if policy.backoff_strategy == "exponential" else ""
    return f"{rules}; after {waits}{more}{doubled}"


def _trace_id(traceparent: str | None, options: Any) -> str | None:
    """Return the newest attempt's trace id, otherwise the send's trace id."""
    match options:
        case {"trace": {"traceparent": str(sent)}} if traceparent is None:
            traceparent = sent
    found = re.fullmatch(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-.*", traceparent or "")
    return found[1] if found else None


def _links(templates: Mapping[str, str], found: TaskDetail, trace_id: str | None) -> dict[str, str]:
    """Fill in the URL templates of other tools; leave out a template with missing values."""
    values = {
        "task_id": found.id,
        "task_name": found.task_name,
        "queue": found.queue_name,
        "worker_id": found.claimed_by_worker_id,
        "workflow_id": found.workflow_id,
        "trace_id": trace_id,
    }
    known = {name: quote(value, safe="") for name, value in values.items() if value}
    filled = {}
    for name, template in templates.items():
        try:
            filled[name] = template.format_map(known)
        except (KeyError, IndexError, ValueError):
            continue
    return filled


async def download(view: View) -> Response:
    """Return one part of the payload, masked but complete, as a file."""
    if not view.access.sees_payload:
        raise NotFound("There is no page for arguments and results: you may not see them.")
    part = view.params["part"]
    if part not in PAYLOAD_PARTS:
        raise NotFound(f"A task has no part {part!r}; it has {', '.join(PAYLOAD_PARTS)}.")
    found = (await _read_facts(view)).task
    text = getattr(found, part)
    if text is None:
        raise NotFound(f"Task {found.id} has no {part}.")
    names = view.site.parameter_names(found.task_name) if part == "args" else ()
    shown = view.site.masking.shown(text, None, names)
    disposition = {"Content-Disposition": f'attachment; filename="{found.id}-{part}.txt"'}
    return Response(shown.text, 200, disposition, "text/plain; charset=utf-8")


ROUTES: tuple[Route, ...] = (
    Route("GET", "/tasks", None, tasks),
    Route("GET", "/tasks.csv", None, tasks_csv),
    Route("GET", "/tasks/{id}", None, task),
    Route("GET", "/tasks/{id}/payload/{part}", None, download),
)
