"""Changes from the dashboard: queues, tasks, runs, schedules and pings, and the record of all changes.

A form's response is a redirect with a notice; the same change below ``/api`` returns a document. A
refusal has the same sentence as on the command line.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from horsies.app import producer_on
from horsies.db.statements.schedules import pause_schedule, resume_schedule
from horsies.ids import stored_form
from horsies.monitor.action_log import list_actions_script
from horsies.monitor.actions import QueueOrder, switch_queue_async
from horsies.monitor.health import ping_workers_async
from horsies.result import Result
from horsies.scheduler.api import Schedules, change_async, switch_script
from horsies.tasks.handle import TaskHandle
from horsies.tasks.recording import Action, acting_as
from horsies.web.answers import (
    answer_document,
    both,
    done,
    is_api,
    is_on,
    json_field,
    text_field,
    unwrapped,
)
from horsies.web.reading import BadRequest, Refused
from horsies.web.rendering import Handler, Page, Route, View
from horsies.web.undoing import cannot_undo, undo
from horsies.workflow.run.handle import WorkflowHandle

HISTORY_LIMIT = 50


# Queues


def _switch_queue(paused: bool) -> Handler:
    async def handler(view: View) -> Response:
        name = view.params["name"]
        known = list(view.site.queue_caps) if view.site.app else None
        order = QueueOrder(name, paused, known, await text_field(view, "reason"))
        with acting_as(view.access.user, "web"):
            result = await switch_queue_async(view.site.broker, order)
        state = unwrapped(view, result, "/queues")
        undoing = f"horsies queues {'resume' if state.is_paused else 'pause'} {name}"
        notice = f"Queue {name} is {'paused' if state.is_paused else 'not paused'}.{undo(undoing)}"
        document = {"paused": state.is_paused, **state._asdict()}
        return done(view, f"/queues/{name}", notice, document)

    return handler


# Tasks


async def cancel_task(view: View) -> Response:
    """Cancel a task, or ask a running task's worker to stop it."""
    task_id = view.params["id"]
    handle = TaskHandle[Any](task_id, view.site.broker)
    reason = await text_field(view, "reason")
    include_running = await is_on(view, "include_running", True)
    with acting_as(view.access.user, "web"):
        result = await handle.cancel_async(include_running=include_running, reason=reason)
    cancelled = unwrapped(view, result, f"/tasks/{task_id}")
    was = cancelled.was_status.value
    notice = f"Task {task_id} was {was}; it is cancelled."
    if was == "RUNNING":
        notice = f"Task {task_id} is running; its worker has been asked to stop it."
    notice += cannot_undo(f"horsies retry {task_id}")
    return done(view, f"/tasks/{task_id}", notice, asdict(cancelled))


# Runs


def _run_answer(view: View, result: Result[Any, Any], notice: str) -> Response:
    run_id = view.params["id"]
    changed = unwrapped(view, result, f"/workflows/{run_id}")
    if changed is False:
        notice = f"Workflow {run_id} is in another status; nothing was changed."
        if is_api(view):
            raise Refused(notice, code="NOTHING_CHANGED")
    return done(view, f"/workflows/{run_id}", notice, {"workflow_id": run_id, "changed": True})


async def pause_run(view: View) -> Response:
    handle, reason = _handle(view), await text_field(view, "reason")
    with acting_as(view.access.user, "web"):
        result = await handle.pause_async(reason=reason)
    undoing = undo(f"horsies workflow resume {handle.workflow_id}")
    return _run_answer(view, result, f"Workflow {handle.workflow_id} is paused.{undoing}")


async def resume_run(view: View) -> Response:
    handle, retry_failed = _handle(view), await is_on(view, "retry_failed", False)
    with acting_as(view.access.user, "web"):
        result = await handle.resume_async(retry_failed=retry_failed)
    undoing = undo(f"horsies workflow pause {handle.workflow_id}")
    return _run_answer(view, result, f"Workflow {handle.workflow_id} is resumed.{undoing}")


async def retry_run(view: View) -> Response:
    """Retry one failed node of a run, or all failed nodes."""
    handle, node = _handle(view), await text_field(view, "node")
    with acting_as(view.access.user, "web"):
        result = await handle.retry_async(node)
    undoing = f" To stop it: horsies workflow pause {handle.workflow_id}"
    return _run_answer(
        view, result, f"Workflow {handle.workflow_id} retries failed nodes.{undoing}"
    )


async def cancel_run(view: View) -> Response:
    handle, reason = _handle(view), await text_field(view, "reason")
    interrupt = await is_on(view, "interrupt", False)
    with acting_as(view.access.user, "web"):
        result = await handle.cancel_async(interrupt=interrupt, reason=reason)
    notice = f"Workflow {handle.workflow_id} is cancelled.{cannot_undo()}"
    return _run_answer(view, result, notice)


async def signal_run(view: View) -> Response:
    """Send a value to the node that waits for a signal."""
    handle, name = _handle(view), await text_field(view, "name")
    if name is None:
        raise BadRequest("A signal needs a name.", code="INVALID_VALUE")
    value = await json_field(view, "value", f"/workflows/{handle.workflow_id}")
    with acting_as(view.access.user, "web"):
        result = await handle.signal_async(name, value)
    delivery = unwrapped(view, result, f"/workflows/{handle.workflow_id}")
    document = {"workflow_id": handle.workflow_id, "signal": name, "delivery": delivery.value}
    notice = f"Signal {name} is {delivery.value}."
    return done(view, f"/workflows/{handle.workflow_id}", notice, document)


def _handle(view: View) -> WorkflowHandle[Any]:
    run_id = view.params["id"]
    return WorkflowHandle(stored_form(run_id) or run_id, view.site.broker)


# Schedules


def _switch_schedule(verb: str) -> Handler:
    switch = pause_schedule if verb == "pause" else resume_schedule

    async def handler(view: View) -> Response:
        name, reason = view.params["name"], await text_field(view, "reason")
        action = Action(f"{verb}_schedule", f"schedule {name}", reason)
        with acting_as(view.access.user, "web"):
            result = await change_async(view.site.broker, action, switch_script(name, switch))
        state = unwrapped(view, result, "/schedules").state
        notice = f"Schedule {name} is {'paused' if state.is_paused else 'not paused'}."
        notice += undo(
            f"horsies schedules {'resume' if state.is_paused else 'pause'} {shlex.quote(name)}"
        )
        document = {"name": name, "paused": state.is_paused}
        return done(view, _schedule_page(name), notice, document)

    return handler


def _schedule_page(name: str) -> str:
    return f"/schedules/{quote(name, safe='')}"


async def run_schedule(view: View) -> Response:
    """Send a schedule's task or start its workflow immediately."""
    name, app, broker = view.params["name"], view.site.app, view.site.broker
    if app is None:
        raise Refused(
            "To run a schedule, the dashboard needs the application: horsies web "
            "package.module:app, or create_app(app, ...).",
            code="NO_APPLICATION",
        )
    with acting_as(view.access.user, "web"):
        result = await Schedules(producer_on(app, broker), app.definitions, app).run_async(name)
    handle = unwrapped(view, result, _schedule_page(name))
    if isinstance(handle, TaskHandle):
        undoing = undo(f"horsies cancel {handle.task_id}")
        notice = f"Schedule {name} was sent as task {handle.task_id}.{undoing}"
        return done(view, _schedule_page(name), notice, {"name": name, "task_id": handle.task_id})
    undoing = undo(f"horsies workflow cancel {handle.workflow_id}")
    notice = f"Schedule {name} was started as workflow {handle.workflow_id}.{undoing}"
    document = {"name": name, "workflow_id": handle.workflow_id}
    return done(view, _schedule_page(name), notice, document)


# Workers


async def ping(view: View) -> Response:
    pongs = unwrapped(view, await ping_workers_async(view.site.broker), "/workers")
    slowest = max((pong.latency_ms for pong in pongs), default=0.0)
    workers = "1 worker" if len(pongs) == 1 else f"{len(pongs)} workers"
    notice = f"{workers} answered the ping, the slowest after {slowest:.0f} ms."
    if not pongs:
        notice = "No worker answered the ping."
    return done(view, "/workers", notice, {"pongs": [asdict(pong) for pong in pongs]})


# The record of changes


async def history(view: View) -> Page:
    """Show the authors and the changes, newest first."""
    subject, actor = view.query.get("subject") or None, view.query.get("actor") or None
    before = _before(view)
    script = list_actions_script(subject, actor, before, HISTORY_LIMIT)
    rows = await view.read(script)
    older = rows[-1].id if len(rows) == HISTORY_LIMIT else None
    context = {"rows": rows, "subject": subject, "actor": actor, "older": older}
    return Page("history.html", "History", context)


async def list_actions(view: View) -> Response:
    script = list_actions_script(
        view.query.get("subject"), view.query.get("actor"), _before(view), HISTORY_LIMIT
    )
    rows = await view.read(script)
    older = rows[-1].id if len(rows) == HISTORY_LIMIT else None
    return answer_document({"actions": [row._asdict() for row in rows], "next_before": older})


def _before(view: View) -> int | None:
    text = view.query.get("before")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadRequest(f"before must be a number of the list, not {text[:40]!r}.")
    return int(text)


ROUTES: tuple[Route, ...] = (
    *both("/queues/{name}/pause", "pause_queue", _switch_queue(True)),
    *both("/queues/{name}/resume", "pause_queue", _switch_queue(False)),
    *both("/tasks/{id}/cancel", "cancel_task", cancel_task),
    *both("/workflows/{id}/pause", "control_run", pause_run),
    *both("/workflows/{id}/resume", "control_run", resume_run),
    *both("/workflows/{id}/retry", "control_run", retry_run),
    *both("/workflows/{id}/cancel", "control_run", cancel_run),
    *both("/workflows/{id}/signal", "signal_run", signal_run),
    *both("/schedules/{name:path}/pause", "control_schedule", _switch_schedule("pause")),
    *both("/schedules/{name:path}/resume", "control_schedule", _switch_schedule("resume")),
    *both("/schedules/{name:path}/run", "run_schedule", run_schedule),
    *both("/workers/ping", "ping", ping),
    Route("GET", "/history", None, history),
    Route("GET", "/api/actions", None, list_actions),
)
