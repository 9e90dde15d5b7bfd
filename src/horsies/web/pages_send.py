"""`/send`: send a new task manually, with arguments that are checked against its parameters.

The first submission checks the form and shows the call. Only a shown call can be sent: its button has
the new task's id and a digest of the call, so a second click does not send a second task.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from inspect import formatannotation
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from horsies.app import Horsies, producer_on
from horsies.ids import new_id
from horsies.monitor.actions import send_task_async
from horsies.monitor.edited_calls import EditProblem, checked_arguments, is_reserved
from horsies.result import Err
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.options import send_options
from horsies.tasks.recording import acting_as
from horsies.tasks.request import Stamp, encode
from horsies.tasks.send import Sender
from horsies.web.answers import (
    answer_document,
    both,
    fields_of,
    is_api,
    is_on,
    keyed_id,
    problem_of,
    text_field,
)
from horsies.web.filters import refuse_unknown
from horsies.web.masking import NotJson
from horsies.web.reading import BadRequest, NotFound, Refused
from horsies.web.rendering import Page, Route, View
from horsies.web.undoing import undo

STATUS_UNFIT = 422
# The time for which a checked call can be sent by its button, and the number of names on the first
# page.
CHECKED_SECONDS = 3_600
NAMES_MAX = 500
_FIELD = "argument."
_MEMBERS = ("task", "arguments", "reason", "dry_run")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of the form: a text parameter is taken literally, any other value is parsed as JSON."""

    name: str
    type: str
    is_required: bool
    is_text: bool


@dataclass(frozen=True, slots=True)
class SendForm:
    """The content of the form, and the resulting call with its button, or the problem."""

    texts: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None
    checked: str | None = None
    stamp: str = ""
    problem: str | None = None


def _application(view: View) -> Horsies:
    if view.site.app is None:
        raise Refused(
            "To send a task, the dashboard needs the application: horsies web package.module:app, or "
            "create_app(app, ...).",
            code="NO_APPLICATION",
        )
    return view.site.app


def _definition(view: View, name: object) -> TaskDefinition:
    found = _application(view).get_task(name) if isinstance(name, str) else None
    if found is None:
        raise NotFound(
            f"The application has no task {str(name)[:100]!r}.", code="TASK_NOT_REGISTERED"
        )
    if is_reserved(found.task_name):
        raise Refused(f"Task {found.task_name!r} belongs to horsies itself.", code="RESERVED_TASK")
    names = found.definition.signature.names
    if any(one not in names.spots for one in names.required):
        raise Refused(
            f"Task {found.task_name!r} has parameters without names; send it from a program.",
            code="POSITIONAL_ONLY",
        )
    return found.definition


def parameters_of(definition: TaskDefinition) -> list[Parameter]:
    """Return the fields for a task's parameters in order."""
    signature = definition.signature
    known = {name: signature.annotation_of(name) for name in signature.names.spots}
    return [
        Parameter(
            name,
            "" if annotation is None else formatannotation(annotation),
            name in signature.names.required,
            annotation is str,
        )
        for name, annotation in known.items()
    ]


async def send_page(view: View) -> Page:
    """Show the names of the tasks, or the form of one task."""
    refuse_unknown(view, {"task"})
    app, name = _application(view), view.query.get("task")
    if name:
        return _form(_definition(view, name), SendForm())
    names = sorted(one for one in app.definitions() if not is_reserved(one))
    context = {"names": names[:NAMES_MAX], "more": max(len(names) - NAMES_MAX, 0)}
    return Page("send.html", "Send a task", context | {"task": None}, None)


def _form(definition: TaskDefinition, form: SendForm) -> Page:
    context = {
        "task": definition,
        "form": form,
        "parameters": parameters_of(definition),
        "takes_more": definition.signature.names.rest_keyword is not None,
        "name_path": f"/names/{quote(definition.name, safe='')}",
    }
    status = STATUS_UNFIT if form.problem else 200
    return Page("send.html", f"Send {definition.name}", context, None, status)


async def send_task(view: View) -> Page | Response:
    """Check a call and show it, or send a call that was shown before. A request below ``/api`` sends it
    immediately.
    """
    fields = await fields_of(view)
    if is_api(view) and (unknown := sorted(fields.keys() - set(_MEMBERS))):
        raise BadRequest(
            f"A send has no member {unknown[0][:40]!r}; the members are {', '.join(_MEMBERS)}.",
            code="INVALID_VALUE",
        )
    definition = _definition(view, fields.get("task"))
    reason = await text_field(view, "reason")
    texts = {
        name.removeprefix(_FIELD): str(text)
        for name, text in fields.items()
        if name.startswith(_FIELD)
    }
    form = SendForm(texts, reason)
    try:
        given = fields.get("arguments", {}) if is_api(view) else _typed(definition, texts)
        arguments, digest = _checked(view, definition, given)
    except EditProblem as problem:
        sentence = f"{problem} Nothing was sent."
        if is_api(view):
            raise BadRequest(sentence, code="INVALID_ARGUMENTS") from None
        return _form(definition, replace(form, problem=sentence))
    if is_api(view):
        if await is_on(view, "dry_run", False):
            return answer_document({"task_name": definition.name, "dry_run": True})
        return await _send(view, definition, arguments, _new_stamp(), reason)
    stamp = _shown_stamp(view, str(fields.get("stamp", "")), digest)
    if stamp is None:
        return _form(definition, _shown(view, form, given, digest))
    return await _send(view, definition, arguments, stamp, reason)


def _typed(definition: TaskDefinition, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of the form; omit blank fields of optional parameters."""
    found: dict[str, Any] = {}
    parameters = parameters_of(definition)
    # A parameter may have been renamed after the form was opened.
    if unknown := sorted(texts.keys() - {one.name for one in parameters} - {""}):
        shown = definition.signature.names.shown
        raise EditProblem(
            f"There is no parameter {unknown[0][:100]!r}; the parameters are {shown}."
        )
    for one in parameters:
        text = texts.get(one.name, "")
        if one.is_text and (text or one.is_required):
            found[one.name] = text
        elif text.strip():
            found[one.name] = _json(one.name, text)
    if text := texts.get("", "").strip():
        more = _json("More arguments", text)
        if not isinstance(more, dict) or more.keys() & found.keys():
            raise EditProblem("More arguments are an object with names that no other field has.")
        found |= more
    return found


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise EditProblem(f'{name} is not JSON; a text in it needs quotes: "yes".') from None


def _checked(view: View, definition: TaskDefinition, given: Any) -> tuple[dict[str, Any], str]:
    """Return the arguments as values, and the digest of the call."""
    if not isinstance(given, dict):
        raise EditProblem("The arguments are an object: a name and a JSON value for each.")
    arguments = checked_arguments(definition, given)
    encoded = encode(_application(view).config.payload, definition, (), arguments)
    if isinstance(encoded, Err):
        raise EditProblem(encoded.err_value.message)
    call = json.dumps([definition.name, encoded.value.kwargs_json])
    return arguments, hashlib.sha256(call.encode()).hexdigest()


def _shown(view: View, form: SendForm, given: Mapping[str, Any], digest: str) -> SendForm:
    """Return the form with the checked call and the value of its send button."""
    try:
        shown = json.dumps(view.site.masking.value(dict(given)), indent=2, ensure_ascii=False)
    except NotJson:
        shown = "nested too deeply to be shown"
    stamp = _new_stamp()
    text = " ".join((stamp.task_id, stamp.sent_at.isoformat(), digest))
    purpose = f"send {view.access.user}"
    sealed = view.site.signer.sealed(purpose, text, CHECKED_SECONDS)
    return replace(form, checked=shown, stamp=sealed)


def _shown_stamp(view: View, sealed: str, digest: str) -> Stamp | None:
    """Return the stamp of a call that this user was shown, or None for any other call."""
    opened = view.site.signer.opened(f"send {view.access.user}", sealed) if sealed else None
    if opened is None:
        return None
    task_id, sent_at, shown_digest = opened.split(" ")
    return Stamp(task_id, datetime.fromisoformat(sent_at)) if shown_digest == digest else None


def _new_stamp() -> Stamp:
    return Stamp(new_id(), datetime.now(UTC))


async def _send(
    view: View,
    definition: TaskDefinition,
    arguments: Mapping[str, Any],
    stamp: Stamp,
    reason: str | None,
) -> Page | Response:
    producer = producer_on(_application(view), view.site.broker)
    sender = Sender(producer, definition, send_options({"idempotency_key": keyed_id(view)}))
    with acting_as(view.access.user, "web"):
        sent = await send_task_async(sender, arguments, stamp, reason)
    if isinstance(sent, Err):
        raise problem_of(sent.err_value)
    task_id = sent.ok_value.task_id
    if is_api(view):
        names = {"task_name": definition.name, "queue_name": definition.queue_name}
        return answer_document({"task_id": task_id, **names})
    undoing = undo(f"horsies cancel {task_id}")
    return view.redirect(
        f"/tasks/{task_id}", f"Task {definition.name} was sent as this one.{undoing}"
    )


ROUTES: tuple[Route, ...] = (
    Route("GET", "/send", "send_task", send_page),
    *both("/send", "send_task", send_task),
)
