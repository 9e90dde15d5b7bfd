"""`/tasks/{id}/edit`: send a finished task again with other arguments, checked by its parameters.

Only viewers who may see arguments can edit them. Masked values stay masked in the form; unedited parts
keep their stored values.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from starlette.responses import Response

from horsies.codec.calls import EncodedCall
from horsies.db.statement import one_or_none, read_rows
from horsies.db.statements.monitor import TaskDetail, read_task_detail
from horsies.ids import stored_form
from horsies.monitor.actions import retry_task_async
from horsies.monitor.arguments import MASKED
from horsies.monitor.edited_calls import (
    EditProblem,
    changed_names,
    edit_reason,
    edited_call,
    named_arguments,
    unmasked,
)
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.recording import acting_as
from horsies.web.answers import answer_document, fields_of, is_api, text_field, unwrapped
from horsies.web.filters import refuse_unknown
from horsies.web.masking import NotJson
from horsies.web.reading import BadRequest, Forbidden, NotFound, Refused
from horsies.web.rendering import Page, Route, View
from horsies.web.undoing import undo

# A form's body is limited to 64 KB, and form encoding writes most punctuation as three characters.
EDITED_CHARACTERS_MAX = 16_000
STATUS_UNFIT = 422


@dataclass(frozen=True, slots=True)
class _Editable:
    """A stored call's arguments by name, in their stored form and in the form that the viewer sees."""

    task: TaskDetail
    definition: TaskDefinition
    stored: dict[str, Any]
    shown: dict[str, Any]

    @property
    def text(self) -> str:
        return json.dumps(self.shown, indent=2, ensure_ascii=False)


async def _editable(view: View) -> _Editable:
    """Read the task; reject viewers, tasks and calls that do not allow editing."""
    if not view.access.sees_payload:
        raise Forbidden("You may not see arguments, so you cannot edit them.", code="NO_PAYLOAD")
    task_id = view.params["id"]
    stored_id = stored_form(task_id)
    rows = (
        [] if stored_id is None else await view.read(read_rows(read_task_detail(stored_id, True)))
    )
    task: TaskDetail | None = one_or_none(rows)
    if task is None:
        raise NotFound(f"There is no task {task_id}.", code="TASK_NOT_FOUND")
    found = view.site.app.get_task(task.task_name) if view.site.app else None
    if found is None:
        raise Refused(
            f"To edit arguments, the dashboard needs the application that has task {task.task_name!r}: "
            "horsies web package.module:app, or create_app(app, ...).",
            code="NO_APPLICATION",
        )
    try:
        stored = named_arguments(found.definition.signature, task)
        shown = view.site.masking.value(stored)
    except (EditProblem, NotJson) as problem:
        raise Refused(
            str(problem) or "The arguments are nested too deeply.", code="REFUSED"
        ) from None
    return _Editable(task, found.definition, stored, shown)


async def edit(view: View) -> Page:
    """Show the form with the stored arguments by name."""
    refuse_unknown(view, ())
    editable = await _editable(view)
    if len(editable.text) > EDITED_CHARACTERS_MAX:
        raise Refused(
            f"The arguments are too large to be edited here; use horsies retry {editable.task.id} --set.",
            code="PAYLOAD_TOO_LARGE",
        )
    return _form(editable, editable.text, None)


def _form(editable: _Editable, text: str, problem: str | None) -> Page:
    context = {
        "task": editable.task,
        "text": text,
        "problem": problem,
        "parameters": editable.definition.signature.names.shown,
    }
    status = STATUS_UNFIT if problem else 200
    return Page("task_edit.html", "Send again with other arguments", context, None, status)


async def send_edited(view: View) -> Page | Response:
    """Send the task with the form's arguments, or with the changes of a JSON request."""
    editable = await _editable(view)
    given = (await fields_of(view))["arguments"]
    try:
        arguments = _arguments(view, editable, given)
        call = _call(view, editable, arguments)
    except EditProblem as problem:
        if is_api(view):
            raise BadRequest(f"{problem} Nothing was sent.", code="INVALID_ARGUMENTS") from None
        return _form(editable, str(given), f"{problem} Nothing was sent.")
    task_id = editable.task.id
    names = changed_names(editable.stored, arguments)
    reason = edit_reason(names, await text_field(view, "reason"))
    with acting_as(view.access.user, "web"):
        result = await retry_task_async(view.site.broker, task_id, reason=reason, call=call)
    retried = unwrapped(view, result, f"/tasks/{task_id}")
    if is_api(view):
        return answer_document(asdict(retried) | {"edited": names})
    return view.redirect(f"/tasks/{retried.task_id}", sent_again(task_id, retried.task_id))


def _arguments(view: View, editable: _Editable, given: object) -> dict[str, Any]:
    """Return all arguments: a form has every argument, a JSON request only the changed arguments."""
    if not is_api(view):
        try:
            given = json.loads(str(given))
        except (ValueError, RecursionError) as error:
            raise EditProblem(f"The arguments are not JSON: {error}.") from None
    if not isinstance(given, dict):
        raise EditProblem("The arguments are an object: a name and a JSON value for each.")
    if is_api(view):
        given = editable.shown | given
    found: dict[str, Any] = unmasked(given, editable.shown, editable.stored)
    if _has_mask(found):
        raise EditProblem("A masked value can be kept in its place or replaced, but not moved.")
    return found


def _has_mask(value: Any) -> bool:
    match value:
        case dict():
            return value == MASKED or any(_has_mask(part) for part in value.values())
        case list():
            return any(map(_has_mask, value))
        case _:
            return False


def _call(view: View, editable: _Editable, arguments: dict[str, Any]) -> EncodedCall:
    assert view.site.app is not None
    limits = view.site.app.config.payload
    return edited_call(limits, editable.definition, editable.task, arguments)


def sent_again(old_id: str, new_id: str) -> str:
    """Return the notice after a send, with the command that undoes it."""
    return f"Task {old_id} was sent again as this one.{undo(f'horsies cancel {new_id}')}"


ROUTES: tuple[Route, ...] = (Route("GET", "/tasks/{id}/edit", "retry_task", edit),)
