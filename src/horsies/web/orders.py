"""Bulk orders from the dashboard: dry run, start, progress and stop. A dry run is stored as its order's
draft, and the form refers to the draft, so that exactly the displayed changes are made. The page of the
dry run is the only GET that writes. A draft changes no task or run, and only its author can start it,
through a form. An author has at most ``DRAFTS_MAX`` drafts, and a draft can be started for an hour. A
process executes one order at a time in the background. The order's progress is stored in the database,
so any process can show, stop and continue it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode
from weakref import WeakKeyDictionary

from starlette.responses import Response

from horsies.monitor.actions import known_queue_script, retry_task_async
from horsies.monitor.order_plan import (
    Order,
    OrderState,
    OrderVerb,
    Preview,
    draft_order,
)
from horsies.monitor.orders import (
    batch_script,
    carry_out_async,
    order_script,
    preview_script,
    resent_id,
    run_batches_async,
    stop_script,
    store_script,
)
from horsies.monitor.queries import RunFilters, TaskFilters, run_filters, task_filters
from horsies.result import Err, Ok
from horsies.task_result import storable_text
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.recording import Action, Actor, acting_as, perform_action_async
from horsies.web.access import Verb
from horsies.web.answers import (
    answer_document,
    both,
    fields_of,
    is_api,
    is_on,
    keyed_id,
    origin,
    problem_of,
    text_field,
    unwrapped,
)
from horsies.web.filters import (
    TASK_FILTERS,
    accepted,
    parsed_time,
    refuse_unknown,
    run_filter_values,
    task_filters_of,
    texts_of,
)
from horsies.web.pages_edit import send_edited, sent_again
from horsies.web.reading import BadRequest, Forbidden, NotFound, Refused
from horsies.web.rendering import Page, Route, View
from horsies.web.undoing import Undoing, undo_order

WAITING_MAX = 10

_WORKING = BrokerErrorCode.ENQUEUE_FAILED
_TASK_FILTERS = frozenset(
    {"status", "queue", "task_name", "error_code", "fingerprint", "since", "until"}
)
_RUN_FILTERS = frozenset({"status", "name", "workflow_key", "since", "until"})
# The members of the JSON body that creates a dry run or starts an order.
_MEMBERS = frozenset({"verb", "filters", "ids", "include_running", "reason", "dry_run", "order"})
# The permission that an order needs.
_RIGHTS: Mapping[OrderVerb, Verb] = {
    OrderVerb.RETRY_TASKS: "retry_task",
    OrderVerb.CANCEL_TASKS: "cancel_task",
    OrderVerb.PURGE_QUEUE: "purge_queue",
    OrderVerb.DELETE_TASKS: "erase_task",
    OrderVerb.REDACT_TASKS: "erase_task",
    **dict.fromkeys([verb for verb in OrderVerb if verb.is_of_runs], "control_run"),
}
_NAMES = {"retry_task": OrderVerb.RETRY_TASKS, "cancel_task": OrderVerb.CANCEL_TASKS}

# The orders that this process executes, and the lock that admits one of them at a time.
_running: dict[str, asyncio.Task[None]] = {}
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def _verb_named(name: object) -> OrderVerb:
    try:
        return _NAMES.get(str(name)) or OrderVerb(str(name))
    except ValueError:
        known = ", ".join([*_NAMES, *(verb.value for verb in OrderVerb)])
        raise BadRequest(
            f"There is no order {str(name)[:40]!r}; the verbs are {known}.", code="UNKNOWN_VERB"
        ) from None


async def _verb_of(view: View) -> Verb:
    """Return the permission that the stored order needs, otherwise the permission for the request's
    verb, otherwise the least permission.
    """
    try:
        # An order in the path takes precedence over an order in the body.
        order_id = view.params.get("id") or (await fields_of(view)).get("order")
        if order_id is not None:
            state = await view.read(order_script(str(order_id)))
            return "retry_task" if state is None else _RIGHTS[state.order.verb]
        verb = (await fields_of(view)).get("verb") or view.query.get("verb")
        return _RIGHTS[_verb_named(verb)]
    except BadRequest:
        return "retry_task"


async def _verb_of_selected(view: View) -> Verb:
    """Return the permission that the form's verb needs; ignore an order that the form names."""
    try:
        return _RIGHTS[await _selected_verb(view)]
    except BadRequest:
        return "retry_task"


async def _selected_verb(view: View) -> OrderVerb:
    return _verb_named((await view.form()).get("verb") or view.query.get("verb"))


# The dry run


async def new_order(view: View) -> Page:
    """Show an order's dry run, with the button that starts it."""
    verb = await _selected_verb(view)
    if texts_of(view, "argument"):
        raise BadRequest(
            "A bulk order cannot filter by argument; select the tasks in the list instead.",
            code="INVALID_FILTER",
        )
    preview = await _preview(view, verb, _filters_of(view, verb))
    return await _dry_run(view, preview, _list_page(preview.order) + _filter_query(view))


async def _dry_run(view: View, preview: Preview, back: str) -> Page:
    """Store a dry run as its order's draft, and show it with the confirmation question."""
    order = preview.order
    await _stored(view, order, "draft")
    question = order.words.question.format(order.counted(preview.eligible))
    context = {
        "preview": preview,
        "order": order,
        "question": question,
        "undoing": Undoing.of(undo_order(order)),
        "right": _RIGHTS[order.verb],
        "back": view.url(back),
    }
    return Page("order_new.html", question, context, live_seconds=None)


async def _stored(view: View, order: Order, outcome: Literal["draft", "running"]) -> OrderState:
    script = store_script(order, outcome, Actor(view.access.user, "web"))
    done = await view.site.broker.perform_async(_WORKING, script, atomic=True)
    if isinstance(done, Err):
        raise problem_of(done.err_value)
    return done.ok_value


def _filters_of(view: View, verb: OrderVerb) -> TaskFilters | RunFilters:
    if not verb.is_of_runs:
        refuse_unknown(view, TASK_FILTERS | {"verb"})
        return task_filters_of(view)
    refuse_unknown(view, _RUN_FILTERS | {"verb"})
    return accepted(run_filters(**run_filter_values(view)))


async def _preview(
    view: View, verb: OrderVerb, filters: TaskFilters | RunFilters, **options: Any
) -> Preview:
    if verb is OrderVerb.PURGE_QUEUE and not (
        isinstance(filters, TaskFilters) and len(filters.queues) == 1
    ):
        raise BadRequest("A purge needs the name of one queue.", code="INVALID_FILTER")
    draft = accepted(draft_order(verb, filters, **options))
    return await view.read(preview_script(draft))


def _list_page(order: Order) -> str:
    return "/workflows" if order.verb.is_of_runs else "/tasks"


def _filter_query(view: View) -> str:
    rest = "&".join(
        part for part in view.request.url.query.split("&") if not part.startswith("verb=")
    )
    return f"?{rest}" if rest else ""


# Start, progress, stop


async def start_order(view: View) -> Response:
    """Start a dry run's order; a repeated submission of the form shows the same order."""
    state = await view.read(order_script(str((await fields_of(view)).get("order"))))
    if state is None:
        raise Refused("The dry run is out of date; count again.", code="STALE_ORDER")
    if not _may_start(view, state):
        raise Forbidden(
            "Another user made this dry run; make your own to start the order.",
            code="DRAFT_OF_ANOTHER_USER",
        )
    reason = await text_field(view, "reason") or state.order.reason
    return await _started(view, replace(state.order, reason=reason))


def _may_start(view: View, state: OrderState) -> bool:
    """Return whether this user created the draft. Every permitted user may continue a started order."""
    return state.outcome != "draft" or state.actor == Actor(view.access.user).stored_name


async def start_selected(view: View) -> Page | Response:
    """Show the dry run of an order for the selected tasks of a list."""
    verb = await _selected_verb(view)
    fields = parse_qsl(view.body.decode(errors="replace"))
    ids = [value for name, value in fields if name == "id"]
    if not ids:
        return view.redirect("/tasks", "No task is selected.")
    preview = await _preview(view, verb, TaskFilters(), ids=ids)
    return await _dry_run(view, preview, origin(view) or "/tasks")


async def _started(view: View, order: Order) -> Response:
    """Start or continue an order, and return its state."""
    if len(_running) >= WAITING_MAX:
        raise Refused(f"{WAITING_MAX} orders are waiting; try again later.", code="BUSY")
    state = await _stored(view, order, "running")
    if state.is_open and order.id not in _running:
        with acting_as(view.access.user, "web"):  # The asyncio task inherits the author.
            _running[order.id] = asyncio.create_task(_carry_out(view, state))
    if is_api(view):
        return answer_document(state.document(), 202 if state.is_open else 200)
    return view.redirect(f"/orders/{order.id}")


async def _carry_out(view: View, state: OrderState | None) -> None:
    """Run a started order's batches when the previous orders are finished. Do not start the order again,
    because that would undo a stop requested while it waited. A request that continues the order relies
    on this task while the task is in ``_running``, so the task reads the order again after it has left
    ``_running``.
    """
    broker, this = view.site.broker, asyncio.current_task()
    turn = _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    while this is not None and state is not None and state.is_open:
        order_id = state.order.id
        if _running.setdefault(order_id, this) is not this:
            return
        try:
            async with turn:
                ended = await run_batches_async(broker, state.order, Ok(state))
        finally:
            del _running[order_id]
        if isinstance(ended, Err):
            return
        stored = await broker.perform_async(_WORKING, order_script(order_id))
        state = stored.unwrap_or(None)


async def show_order(view: View) -> Page:
    state = await _state(view)
    context = {
        "state": state,
        "order": state.order,
        "undoing": Undoing.of(undo_order(state.order)),
        "right": _RIGHTS[state.order.verb],
        "may_start": _may_start(view, state) and state.order.id not in _running,
        "list_page": _list_page(state.order),
    }
    title = f"{state.order.words.title}: {state.order.subject}"
    return Page("order.html", title, context, live_seconds=1.0 if state.is_open else None)


async def _state(view: View) -> OrderState:
    state = await view.read(order_script(view.params["id"]))
    if state is None:
        raise NotFound(f"There is no order {view.params['id']}.", code="ORDER_NOT_FOUND")
    return state


async def stop_order(view: View) -> Response:
    state = await _state(view)
    action = Action("stop_order", f"order {state.order.id}")
    with acting_as(view.access.user, "web"):
        done = await perform_action_async(
            view.site.broker, _WORKING, action, stop_script(state.order.id)
        )
    result = unwrapped(view, done.and_then(lambda stopped: stopped), "/history")
    # Run one more batch, which records the stop if the order's process is gone.
    if result and state.order.id not in _running:
        script = batch_script(state.order.id)
        await view.site.broker.perform_async(_WORKING, script, atomic=True)
    if is_api(view):
        return answer_document((await _state(view)).document())
    notice = "The order stops after its current batch." if result else "The order does not run."
    return view.redirect(f"/orders/{state.order.id}", notice)


# Below /api


async def post_order(view: View) -> Response:
    """Create a dry run or start an order: ``{verb, filters, ids, dry_run, order, reason}``."""
    fields = await fields_of(view)
    _refuse_members(fields)
    if fields.get("order") is not None:
        return await start_order(view)
    verb = _verb_named(fields.get("verb"))
    options = {
        "ids": _texts(fields.get("ids")),
        "reason": await text_field(view, "reason"),
        "include_running": await is_on(view, "include_running", True),
        "order_id": keyed_id(view),
    }
    filters = _json_filters(verb, fields.get("filters") or {})
    preview = await _preview(view, verb, filters, **options)
    if await is_on(view, "dry_run", False):
        await _stored(view, preview.order, "draft")
        return answer_document(preview.document() | {"order": preview.order.id})
    known = await view.read(order_script(preview.order.id))
    # The permission was checked for this verb; a draft is replaced.
    if known is not None and known.outcome != "draft" and known.order.verb is not verb:
        raise Refused("The Idempotency-Key stands for another order.", code="KEY_REUSED")
    return await _started(view, preview.order)


def _refuse_members(fields: Mapping[str, Any]) -> None:
    """Reject a member that would be ignored, because it is misspelt or conflicts with another member."""
    if unknown := sorted(fields.keys() - _MEMBERS):
        known = ", ".join(sorted(_MEMBERS))
        raise BadRequest(
            f"An order has no member {unknown[0][:40]!r}; the members are {known}.",
            code="INVALID_VALUE",
        )
    ignored = sorted({name for name, value in fields.items() if value} - {"order", "reason"})
    if fields.get("order") is not None and ignored:
        raise BadRequest(
            "A request that names an order starts it as it was counted; leave out "
            f"{', '.join(ignored)}.",
            code="INVALID_VALUE",
        )


def _texts(value: object) -> list[str]:
    given = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise BadRequest("ids and filters are texts or lists of texts.", code="INVALID_VALUE")
    if any(storable_text(one) != one for one in given):
        raise BadRequest(
            "ids and filters must not contain NUL or a lone surrogate.", code="INVALID_VALUE"
        )
    return given


def _json_filters(verb: OrderVerb, given: object) -> TaskFilters | RunFilters:
    known = _RUN_FILTERS if verb.is_of_runs else _TASK_FILTERS
    if not isinstance(given, dict) or (unknown := sorted(set(given) - known)):
        wrong = unknown[0] if isinstance(given, dict) else given
        raise BadRequest(
            f"There is no filter {str(wrong)[:40]!r}; the filters are {', '.join(sorted(known))}.",
            code="UNKNOWN_FILTER",
        )
    values: dict[str, Any] = {
        name: parsed_time(name, str(value)) if name in ("since", "until") else _texts(value) or None
        for name, value in given.items()
        if value is not None
    }
    if "task_name" in values:
        values["name"] = values.pop("task_name")
    if "fingerprint" in values:
        values["fingerprint"] = next(reversed(values["fingerprint"]))
    if verb.is_of_runs:
        return accepted(run_filters(**values))
    return accepted(task_filters(**values))


async def get_order(view: View) -> Response:
    return answer_document((await _state(view)).document())


# One task, one queue


async def purge_queue(view: View) -> Response:
    """Redirect a form to the dry run of a purge; a request below ``/api`` purges immediately."""
    name = view.params["name"]
    known = list(view.site.queue_caps) if view.site.app else None
    unwrapped(view, await view.read(known_queue_script(name, known)), "/queues")
    if not is_api(view):
        query = urlencode({"verb": OrderVerb.PURGE_QUEUE.value, "queue": name})
        return view.redirect(f"/orders/new?{query}")
    options = {"reason": await text_field(view, "reason"), "order_id": keyed_id(view)}
    preview = await _preview(view, OrderVerb.PURGE_QUEUE, TaskFilters(queues=[name]), **options)
    return await _started(view, preview.order)


async def retry_task(view: View) -> Page | Response:
    """Send a finished task again. A request with an Idempotency-Key is safe to repeat."""
    task_id, reason = view.params["id"], await text_field(view, "reason")
    if (await fields_of(view)).get("arguments") is not None:
        return await send_edited(view)
    if (order_id := keyed_id(view)) is not None:
        return await _retry_once(view, order_id, task_id, reason)
    with acting_as(view.access.user, "web"):
        result = await retry_task_async(view.site.broker, task_id, reason=reason)
    retried = unwrapped(view, result, f"/tasks/{task_id}")
    if is_api(view):
        return answer_document(asdict(retried))
    return view.redirect(f"/tasks/{retried.task_id}", sent_again(task_id, retried.task_id))


async def _retry_once(view: View, order_id: str, task_id: str, reason: str | None) -> Response:
    options = {"ids": [task_id], "reason": reason, "order_id": order_id}
    preview = await _preview(view, OrderVerb.RETRY_TASKS, TaskFilters(), **options)
    with acting_as(view.access.user, "web"):
        done = await carry_out_async(view.site.broker, replace(preview.order, once=False))
    if isinstance(done, Err):
        raise problem_of(done.err_value)
    state = done.ok_value
    if not state.progress.done:
        raise Refused(f"Task {task_id} is not sent again: {state.summary}", code="REFUSED")
    new_task_id = resent_id(state.order, state.order.ids[0])
    return answer_document({"task_id": new_task_id, "retried_from_task_id": task_id})


ROUTES: tuple[Route, ...] = (
    *both("/tasks/{id}/retry", "retry_task", retry_task),
    *both("/queues/{name}/purge", "purge_queue", purge_queue),
    Route("GET", "/orders/new", _verb_of_selected, new_order),
    Route("POST", "/orders", _verb_of, start_order),
    Route("POST", "/orders/selected", _verb_of_selected, start_selected),
    Route("GET", "/orders/{id}", None, show_order),
    *both("/orders/{id}/stop", _verb_of, stop_order),
    Route("POST", "/api/orders", _verb_of, post_order),
    Route("GET", "/api/orders/{id}", None, get_order),
)
