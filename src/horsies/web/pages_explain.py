"""Pages and documents that explain why a task, run, node, queue or schedule is not making progress."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from horsies.db.statement import Script
from horsies.findings import command
from horsies.monitor.diagnose.explain import (
    Explanation,
    explain_node_script,
    explain_queue_script,
    explain_run_script,
    explain_schedule_script,
    explain_script,
    explain_task_script,
)
from horsies.states import (
    TASK_TERMINAL_STATES,
    WORKFLOW_TASK_TERMINAL_STATES,
    WORKFLOW_TERMINAL_STATES,
)
from horsies.web.answers import answer_document
from horsies.web.masking import visible
from horsies.web.rendering import Handler, Page, Route, View
from horsies.web.words import short_id

_ENDED = {*TASK_TERMINAL_STATES, *WORKFLOW_TERMINAL_STATES, *WORKFLOW_TASK_TERMINAL_STATES}


def _explain_script(view: View, kind: str) -> Script[Explanation]:
    params = view.params
    match kind:
        case "task":
            return explain_task_script(params["id"])
        case "run":
            return explain_run_script(params["id"])
        case "node":
            return explain_node_script(params["id"], params["node"])
        case "queue":
            return explain_queue_script(params["name"], list(view.site.queue_caps))
        case _:
            return explain_schedule_script(params["name"])


def _subject_path(view: View, kind: str) -> str:
    """Return the path of the explained row's page."""
    if kind in ("task", "run", "node"):
        return f"/{'tasks' if kind == 'task' else 'workflows'}/{view.params['id']}"
    return f"/{kind}s/{quote(view.params['name'], safe='')}"


def _explain_command(view: View, kind: str) -> str:
    words = [view.params[name] for name in ("id", "node", "name") if name in view.params]
    return command("explain", *([kind] if kind in ("queue", "schedule") else []), *words)


def _explain_page(kind: str) -> Handler:
    async def handler(view: View) -> Page:
        explanation = await view.read(_explain_script(view, kind))
        context = {
            "explanation": explanation,
            "subject_path": _subject_path(view, kind),
            "command": _explain_command(view, kind),
        }
        status = 404 if explanation.status is None else 200
        name = " ".join(short_id(word) for word in explanation.subject.split(" "))
        has_ended = explanation.status in _ENDED
        title = visible(f"How did {name} end?" if has_ended else f"Why does {name} not move?")
        return Page("explain.html", title, context, status=status)

    return handler


def _explain_document(kind: str) -> Handler:
    async def handler(view: View) -> Response:
        explanation = await view.read(_explain_script(view, kind))
        status = 404 if explanation.status is None else 200
        return answer_document(explanation.to_dict(), status)

    return handler


async def explain_any(view: View) -> Page | Response:
    """Show the form for an id, and the explanation of the task or run with this id."""
    row_id = view.query.get("id", "").strip()
    context: dict[str, Any] = {"explanation": None, "subject_path": None, "command": None}
    if row_id:
        explanation = await view.read(explain_script(row_id))
        kind = explanation.subject.partition(" ")[0]
        if explanation.status is not None:
            return view.redirect(f"/{'tasks' if kind == 'task' else 'workflows'}/{row_id}/explain")
        context["explanation"] = explanation
    status = 404 if context["explanation"] else 200
    return Page("explain.html", "Why does it not move?", context, None, status)


EXPLAINED = {
    "/tasks/{id}/explain": "task",
    "/workflows/{id}/explain": "run",
    "/workflows/{id}/nodes/{node:path}/explain": "node",
    "/queues/{name}/explain": "queue",
    "/schedules/{name:path}/explain": "schedule",
}


ROUTES: tuple[Route, ...] = (
    Route("GET", "/explain", None, explain_any),
    *(Route("GET", path, None, _explain_page(kind)) for path, kind in EXPLAINED.items()),
    *(
        Route("GET", f"/api{path}", None, _explain_document(kind))
        for path, kind in EXPLAINED.items()
    ),
)
