"""Reads the fields of a change's request, and builds its response.

A form's response is a redirect to the form's page with a notice; the same change below ``/api`` returns
a document. A refused form shows the same sentence as the command line; a refused request below ``/api``
returns a problem document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psycopg
from starlette.responses import Response

from horsies.db.blockers import LockedError
from horsies.ids import fixed_id
from horsies.monitor.documents import json_text
from horsies.result import Err, Result
from horsies.task_result import storable_text
from horsies.web.access import net_location
from horsies.web.reading import BadRequest, NotFound, Problem, Refused, Unavailable, locked
from horsies.web.rendering import Handler, RefusedForm, Route, RouteVerb, View

T = TypeVar("T")

REASON_MAX = 500
_KEYS_SINCE = datetime(1970, 1, 1, tzinfo=UTC)

_MISSING = frozenset(
    {"UNKNOWN_QUEUE", "UNKNOWN_SCHEDULE", "TASK_NOT_FOUND", "WORKFLOW_NOT_FOUND", "NODE_NOT_FOUND"}
)
_BROKEN = frozenset({"DB_OPERATION_FAILED", "SCHEMA_INIT_FAILED"})


def is_api(view: View) -> bool:
    return view.path.startswith("/api/")


async def fields_of(view: View) -> Mapping[str, Any]:
    """Return a form's fields, or the members of a JSON body."""
    if not is_api(view):
        return await view.form()
    body = await view.json()
    if not isinstance(body, dict):
        raise BadRequest("The body is not a JSON object.")
    return body


async def text_field(view: View, name: str) -> str | None:
    """Return a string from the request, or None if it is missing or blank."""
    value = (await fields_of(view)).get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be text.", code="INVALID_VALUE")
    if storable_text(value) != value:
        raise BadRequest(
            f"{name} must not contain NUL or a lone surrogate, which PostgreSQL cannot store.",
            code="INVALID_VALUE",
        )
    return value.strip()[:REASON_MAX]


async def json_field(view: View, name: str, page: str) -> Any:
    """Return a JSON value from the request: a member of its body, or a form field parsed as JSON."""
    value = (await fields_of(view)).get(name)
    if is_api(view):
        return value
    try:
        return json.loads(value or "null")
    except (ValueError, RecursionError):
        sentence = 'The value is not JSON; text needs quotes of its own: "yes".'
        raise bad_input(view, page, sentence) from None


def bad_input(view: View, page: str, sentence: str) -> Exception:
    """Return the refusal of a value: a problem, or for a form a redirect to its page with the sentence."""
    if is_api(view):
        return BadRequest(sentence, code="INVALID_VALUE")
    return RefusedForm(view.redirect(origin(view) or page, sentence))


async def is_on(view: View, name: str, default: bool) -> bool:
    """Return the value of a switch: a form's checkbox, or a JSON true or false."""
    value = (await fields_of(view)).get(name, default)
    return value if isinstance(value, bool) else str(value).lower() in ("1", "true", "on")


def answer_document(document: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json_text(dict(document)), status, media_type="application/json")


def done(view: View, fallback: str, notice: str, document: Mapping[str, Any]) -> Response:
    """Return the response to a change: a document, or a redirect to the form's page with a notice."""
    if is_api(view):
        return answer_document(document)
    return view.redirect(origin(view) or fallback, notice)


def unwrapped(view: View, result: Result[T, Any], page: str) -> T:
    """Return a change's value; raise a refusal as a redirect for a form, otherwise as a problem."""
    if not isinstance(result, Err):
        return result.ok_value
    error = result.err_value
    status = getattr(error, "current_status", None)
    problem = problem_of(error, **({} if status is None else {"task_status": status.value}))
    if isinstance(problem, Refused) and not is_api(view):
        raise RefusedForm(view.redirect(origin(view) or page, error.message))
    raise problem


def problem_of(error: Any, **members: object) -> Problem:
    code = error.code.value
    if code in _MISSING:
        return NotFound(error.message, code=code)
    cause = getattr(error, "exception", None)
    if isinstance(cause, LockedError):
        return locked(cause)
    if error.retryable or code in _BROKEN or isinstance(cause, psycopg.Error):
        return Unavailable(error.message, code=code, retryable=error.retryable)
    return Refused(error.message, code=code, **members)


def origin(view: View) -> str | None:
    """Return the form's page below the mount point; ignore a Referer from another site."""
    referer = view.request.headers.get("referer", "")
    root = view.url("")
    if net_location(referer) != view.request.headers.get("host", "").lower():
        return None
    found = urlsplit(referer)
    path = found.path.removeprefix(root)
    # A path that begins with // would redirect to another host.
    if not path.startswith("/") or path.startswith("//") or not found.path.startswith(root):
        return None
    return f"{path}?{found.query}" if found.query else path


def keyed_id(view: View) -> str | None:
    """Return the task id derived from the Idempotency-Key, the user and the path, or None without the
    header.
    """
    key = view.request.headers.get("idempotency-key") if is_api(view) else None
    if key is None:
        return None
    return fixed_id(_KEYS_SINCE, "\x1f".join((view.access.user, view.path, key)))


def both(path: str, verb: RouteVerb, handler: Handler) -> tuple[Route, ...]:
    """Return a change's two routes: one for its form, and one for the JSON API."""
    return Route("POST", path, verb, handler), Route("POST", f"/api{path}", verb, handler)
