"""Changes to the runs of durable functions: send a signal, resume a held run, reset a run to a step."""

from __future__ import annotations

from starlette.responses import Response

from horsies.durable.handle import DurableHandle
from horsies.tasks.recording import acting_as
from horsies.web.answers import both, done, json_field, text_field, unwrapped
from horsies.web.reading import BadRequest
from horsies.web.rendering import Route, View
from horsies.web.undoing import cannot_undo
from horsies.words import counted


def _handle(view: View) -> DurableHandle:
    app = view.site.app
    definitions = {} if app is None else app.definitions()
    remedy = "start the dashboard with the application that has it: horsies web APP"
    return DurableHandle(view.params["id"], view.site.broker, definitions.get, remedy)


async def signal_task(view: View) -> Response:
    """Send a signal with a JSON value to a run; the application checks and encrypts the value."""
    handle, name = _handle(view), await text_field(view, "name")
    if name is None:
        raise BadRequest("A signal needs a name.", code="INVALID_VALUE")
    page = f"/tasks/{handle.task_id}"
    value = await json_field(view, "value", page)
    with acting_as(view.access.user, "web"):
        result = await handle.signal_json_async(name, value)
    delivery = unwrapped(view, result, page)
    notice = f"Signal {name} is {delivery.value}."
    document = {"task_id": handle.task_id, "signal": name, "delivery": delivery.value}
    return done(view, page, notice, document)


async def resume_task(view: View) -> Response:
    """Resume a run that is held because its code does not fit its record."""
    handle, reason = _handle(view), await text_field(view, "reason")
    with acting_as(view.access.user, "web"):
        result = await handle.resume_async(reason=reason)
    unwrapped(view, result, f"/tasks/{handle.task_id}")
    notice = f"Run {handle.task_id} is resumed. It is held again if its code still does not fit its record."
    document = {"task_id": handle.task_id, "changed": True}
    return done(view, f"/tasks/{handle.task_id}", notice, document)


async def reset_task(view: View) -> Response:
    """Forget a step of a parked or held run and all steps recorded after it."""
    handle, step = _handle(view), await text_field(view, "step")
    if step is None:
        raise BadRequest("A reset needs the name of a step.", code="INVALID_VALUE")
    reason = await text_field(view, "reason")
    with acting_as(view.access.user, "web"):
        result = await handle.reset_async(step, reason=reason)
    forgotten = unwrapped(view, result, f"/tasks/{handle.task_id}")
    notice = (
        f"Run {handle.task_id} has forgotten {counted(forgotten, 'step')} and continues with {step}."
        f"{cannot_undo()}"
    )
    document = {"task_id": handle.task_id, "step": step, "forgotten": forgotten}
    return done(view, f"/tasks/{handle.task_id}", notice, document)


ROUTES: tuple[Route, ...] = (
    *both("/tasks/{id}/signal", "signal_run", signal_task),
    *both("/tasks/{id}/resume", "control_run", resume_task),
    *both("/tasks/{id}/reset", "control_run", reset_task),
)
