"""Pages that answer questions: why something does not move."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import quote

from starlette.responses import Response

from horsies.db.statement import Script
from horsies.monitor.documents import json_text
from horsies.monitor.explain import (
    Explanation,
    explain_node_script,
    explain_queue_script,
    explain_run_script,
    explain_schedule_script,
    explain_task_script,
)
from horsies.monitor.reasons import command
from horsies.web.rendering import Page, View
from horsies.web.routes import Route

# Explanations


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
    """Return the page of the explained row."""
    if kind in ("task", "run", "node"):
        return f"/{'tasks' if kind == 'task' else 'workflows'}/{view.params['id']}"
    return f"/{kind}s/{quote(view.params['name'], safe='')}"


def _explain_command(view: View, kind: str) -> str:
    words = [view.params[name] for name in ("id", "node", "name") if name in view.params]
    return command("explain", *([kind] if kind in ("queue", "schedule") else []), *words)


def _explain_page(kind: str) -> Callable[[View], Awaitable[Page]]:
    async def handler(view: View) -> Page:
        explanation = await view.read(_explain_script(view, kind))
        context = {
            "explanation": explanation,
            "subject_path": _subject_path(view, kind),
            "command": _explain_command(view, kind),
        }
        status = 404 if explanation.status is None else 200
        title = f"Why does {explanation.subject} not move?"
        return Page("explain.html", title, context, status=status)

    return handler


def _explain_document(kind: str) -> Callable[[View], Awaitable[Response]]:
    async def handler(view: View) -> Response:
        explanation = await view.read(_explain_script(view, kind))
        status = 404 if explanation.status is None else 200
        text = json_text(explanation.to_dict())
        return Response(text, status, media_type="application/json")

    return handler


EXPLAINED = {
    "/tasks/{id}/explain": "task",
    "/workflows/{id}/explain": "run",
    "/workflows/{id}/nodes/{node:path}/explain": "node",
    "/queues/{name}/explain": "queue",
    "/schedules/{name}/explain": "schedule",
}


ROUTES: tuple[Route, ...] = (
    *(Route("GET", path, None, _explain_page(kind)) for path, kind in EXPLAINED.items()),
    *(
        Route("GET", f"/api{path}", None, _explain_document(kind))
        for path, kind in EXPLAINED.items()
    ),
)
