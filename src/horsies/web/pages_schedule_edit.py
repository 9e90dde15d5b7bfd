"""`/schedules/{name}/edit`: changes a schedule's timing, and shows its slots before and after."""

from __future__ import annotations

from dataclasses import dataclass, replace

from starlette.responses import Response

from horsies.db.statement import read_rows
from horsies.db.statements.schedules import ScheduleState, list_schedules
from horsies.errors import HorsiesError
from horsies.result import Err
from horsies.scheduler.api import (
    EditedSchedule,
    change_async,
    edit_document,
    edited_script,
    previewed_script,
)
from horsies.scheduler.edit import NewTiming, new_timing, original_timing, undo_edit
from horsies.scheduler.timing import read_fields, timing_words
from horsies.tasks.recording import Action, acting_as
from horsies.timetable.texts import FORMS, pattern_text
from horsies.web.answers import (
    answer_document,
    both,
    is_api,
    is_on,
    problem_of,
    text_field,
    unwrapped,
)
from horsies.web.filters import refuse_unknown
from horsies.web.pages_schedules import schedule_path
from horsies.web.reading import BadRequest, NotFound, Refused
from horsies.web.rendering import Page, Route, View
from horsies.web.undoing import undo

STATUS_UNFIT = 422


@dataclass(frozen=True, slots=True)
class EditForm:
    """The content of the form, typed or stored, and the resulting edit or problem."""

    pattern: str
    timezone: str
    found: EditedSchedule | None = None
    problem: str | None = None


async def edit_page(view: View) -> Page:
    """Show the form with the stored timing."""
    refuse_unknown(view, ())
    state = await _stored(view)
    try:
        fields = read_fields(state.timing)
    except ValueError:
        return _edit_form(state, EditForm("", "UTC"))
    return _edit_form(state, EditForm(pattern_text(fields.pattern), fields.timezone))


def _edit_form(state: ScheduleState, form: EditForm) -> Page:
    context = {
        "state": state,
        "form": form,
        "edit": None if form.found is None else form.found.edit,
        "words": timing_words,
        "forms": FORMS,
        "path_of": schedule_path(state.name),
    }
    status = STATUS_UNFIT if form.problem else 200
    return Page("schedule_edit.html", f"Edit schedule {state.name}", context, None, status)


async def _stored(view: View) -> ScheduleState:
    name = view.params["name"]
    states: list[ScheduleState] = await view.read(read_rows(list_schedules(name)))
    if not states:
        raise NotFound(f"There is no schedule {name!r} on record.", code="UNKNOWN_SCHEDULE")
    return states[0]


async def edit_schedule(view: View) -> Page | Response:
    """Store another timing; with ``dry_run``, only show the resulting slots."""
    state = await _stored(view)
    form = EditForm(
        await text_field(view, "pattern") or "", await text_field(view, "timezone") or ""
    )
    if not (form.pattern or form.timezone):
        return _unfit(view, state, form, "An edit needs a pattern or a timezone.")
    try:
        new = new_timing(form.pattern or None, form.timezone or None)
    except HorsiesError as problem:
        return _unfit(view, state, form, problem.message)
    if await is_on(view, "dry_run", False):
        return await _preview(view, state, form, new)
    action = Action("edit_schedule", f"schedule {state.name}", await text_field(view, "reason"))
    with acting_as(view.access.user, "web"):
        result = await change_async(view.site.broker, action, edited_script(state.name, new))
    if isinstance(result, Err) and isinstance(problem_of(result.err_value), Refused):
        return _unfit(view, state, form, result.err_value.message)
    return _edited(view, unwrapped(view, result, schedule_path(state.name)).state)


async def _preview(
    view: View, state: ScheduleState, form: EditForm, new: NewTiming
) -> Page | Response:
    found = await view.read(previewed_script(state.name, new))
    if isinstance(found, Err):
        return _unfit(view, state, form, found.err_value.message)
    if is_api(view):
        return answer_document(edit_document(found.ok_value, is_stored=False))
    return _edit_form(state, replace(form, found=found.ok_value))


def _unfit(view: View, state: ScheduleState, form: EditForm, sentence: str) -> Page:
    if is_api(view):
        raise BadRequest(f"{sentence} Nothing was changed.", code="INVALID_VALUE")
    return _edit_form(state, replace(form, problem=sentence))


async def reset_schedule(view: View) -> Response:
    """Reset a schedule to its configured timing."""
    name = view.params["name"]
    action = Action("reset_schedule", f"schedule {name}", await text_field(view, "reason"))
    with acting_as(view.access.user, "web"):
        result = await change_async(view.site.broker, action, edited_script(name, original_timing))
    return _edited(view, unwrapped(view, result, schedule_path(name)).state)


def _edited(view: View, found: EditedSchedule) -> Response:
    name, edit = found.state.name, found.edit
    if is_api(view):
        return answer_document(edit_document(found, is_stored=True))
    if edit is None or not edit.is_changed:
        return view.redirect(schedule_path(name), f"Schedule {name} has this timing already.")
    notice = f"Schedule {name} fires {timing_words(edit.new_timing)}.{undo(undo_edit(name, edit))}"
    return view.redirect(schedule_path(name), notice)


ROUTES: tuple[Route, ...] = (
    Route("GET", "/schedules/{name:path}/edit", "control_schedule", edit_page),
    *both("/schedules/{name:path}/edit", "control_schedule", edit_schedule),
    *both("/schedules/{name:path}/reset", "control_schedule", reset_schedule),
)
