"""Bulk orders: one verb for all tasks or runs that match filters, with a dry run, a bound and a stop.

A dry run fixes the bounds of an order: the newest and the oldest row that matched, and the time.
Rows that end or are sent later are not affected. The dashboard stores a dry run as a draft of the
order, a row of ``horsies_actions``, and a form starts it by its id. An order is carried out in
batches. Each batch is one transaction that also stores the position of the order, in the same row.
So nothing changes twice after a repeated request, a lost answer or a crash, and any process can
continue an order by its id. The ids of tasks that are sent again are derived from the order and the
old id.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

from pydantic import TypeAdapter

from horsies.codec.results import encode_task_error
from horsies.db.statement import Script, Step, one_or_none
from horsies.db.statements.actions import (
    Candidate,
    OrderRow,
    Refusals,
    delete_drafts,
    discard_draft,
    judge_resends,
    lock_orders,
    read_candidates,
    read_clock,
    read_order,
    save_order,
    start_order,
    stop_order,
    store_draft,
)
from horsies.db.statements.queues import ResentTask, resend_tasks
from horsies.db.statements.tasks import CancelledTask, cancel_tasks
from horsies.db.statements.workflows import (
    RunPosition,
    cancel_run,
    lock_runs,
    pause_run,
    resume_run,
    retry_run,
)
from horsies.error_codes import OutcomeCode
from horsies.ids import fixed_id, stored_form
from horsies.monitor.order_plan import (
    ORDER_MAX,
    PAGE,
    SCOPES,
    Order,
    OrderState,
    OrderVerb,
    Preview,
    Progress,
    order_text,
    read_order_text,
)
from horsies.monitor.queries import RunFilters, run_cursor, run_position, runs_script, tasks_script
from horsies.result import Err, Ok
from horsies.states import TaskStatus, WorkflowStatus
from horsies.task_result import TaskError
from horsies.tasks.broker import (
    RESEND_DELAYS_SECONDS,
    BrokerErrorCode,
    BrokerOperationError,
    BrokerResult,
    PostgresBroker,
)
from horsies.tasks.recording import Action, Actor, Columns, current_actor, log_action

BATCH = 200
# The newest dry runs of one author that can be started.
DRAFTS_MAX = 20
# Pause between two batches, for the transactions of workers.
PAUSE_SECONDS = 0.05
# Pages of a dry run; up to 50,000 rows are read per page.
_PAGES_MAX = 40

_WORKING = BrokerErrorCode.ENQUEUE_FAILED
_PROGRESS = TypeAdapter(Progress)

NOT_FOUND = "not found"
IN_WORKFLOW = "part of a workflow (retry the run)"
SENT_AGAIN = "sent again already"
IS_RUNNING = "running"
CHANGED = "in another status by now"


# The dry run


def preview_script(draft: Order) -> Script[Preview]:
    """Count the rows of an order and fix its bounds; nothing is changed."""
    (clock,) = yield read_clock()
    order = replace(draft, at=clock.at)
    seen: list[_Found] = []
    refused: Counter[str] = Counter()
    cursor: str | None = None
    has_more = True
    for _ in range(_PAGES_MAX):
        found, cursor = yield from _page_script(order, cursor, PAGE)
        has_more = cursor is not None or len(seen) + len(found) > ORDER_MAX
        found = found[: ORDER_MAX - len(seen)]
        refused += yield from _judge_script(order, found)
        seen += found
        if cursor is None or len(seen) == ORDER_MAX:
            break
    if seen and not order.ids:
        order = replace(order, newest=_just_above(seen[0]), oldest=seen[-1].cursor)
    return Preview(
        order=replace(order, matching=len(seen)),
        matching=len(seen),
        eligible=len(seen) - refused.total(),
        refused=dict(refused),
        newest_at=seen[0].row.created_at if seen else None,
        oldest_at=seen[-1].row.created_at if seen else None,
        has_more=has_more,
    )


class _Found(NamedTuple):
    row: Candidate
    cursor: str


def _page_script(
    order: Order, after: str | None, limit: int
) -> Script[tuple[list[_Found], str | None]]:
    """Read rows of an order from a position on, newest first; return them with the next position."""
    if order.ids:
        return (yield from _named_script(order, int(after or 0), limit))
    start, found = after or order.newest, list[_Found]()
    if order.tasks is not None:
        tasks = yield from tasks_script(replace(order.tasks, after=start, limit=limit))
        cursor = tasks.next_cursor
        found = [
            _Found(Candidate(row.id, row.status, row.created_at, row.finished_at), row.id)
            for row in tasks.rows
        ]
    else:
        asked = replace(order.runs or RunFilters(), after=start, limit=limit)
        runs = yield from runs_script(asked)
        cursor = None if runs is None else runs.next_cursor
        found = [
            _Found(Candidate(row.id, row.status, row.created_at, row.completed_at), run_cursor(row))
            for row in (runs.rows if runs else ())
        ]
    if order.oldest is not None and (cursor is None or _is_below(cursor, order.oldest)):
        cursor = None
    return [one for one in found if _is_meant(order, one)], cursor


def _named_script(order: Order, start: int, limit: int) -> Script[tuple[list[_Found], str | None]]:
    ids = order.ids[start : start + limit]
    rows: list[Candidate] = yield read_candidates(
        [one for one in ids if stored_form(one) is not None]
    )
    known = {row.id: row for row in rows}
    missing = datetime.min.replace(tzinfo=UTC)
    found = [_Found(known.get(one) or Candidate(one, "", missing, None), one) for one in ids]
    following = start + len(ids)
    return found, str(following) if following < len(order.ids) else None


def _is_meant(order: Order, found: _Found) -> bool:
    """Return whether a row is within the bounds: it was sent, or has ended, before the dry run."""
    row = found.row
    since = row.finished_at or row.created_at
    if order.at is not None and since > order.at:
        return False
    return order.oldest is None or not _is_below(found.cursor, order.oldest)


def _position(cursor: str) -> tuple[datetime | str, ...]:
    run = run_position(cursor)
    return (cursor,) if run is None else (run.created_at, run.id)


def _is_below(cursor: str, other: str) -> bool:
    return _position(cursor) < _position(other)


def _just_above(found: _Found) -> str:
    """Return the cursor that directly precedes a row."""
    above = str(UUID(int=min(UUID(found.row.id).int + 1, (1 << 128) - 1)))
    is_run = run_position(found.cursor) is not None
    return run_cursor(RunPosition(above, found.row.created_at)) if is_run else above


def _judge_script(order: Order, found: Sequence[_Found]) -> Script[Counter[str]]:
    """Count the rows that the order would refuse, by reason."""
    allowed = {status.value for status in SCOPES[order.verb].allowed}
    spares_running = not order.verb.is_of_runs and not order.include_running
    refused: Counter[str] = Counter()
    fitting: list[str] = []
    for one in found:
        if one.row.status not in allowed:
            refused[CHANGED if one.row.status else NOT_FOUND] += 1
        elif one.row.status == TaskStatus.RUNNING and spares_running:
            refused[IS_RUNNING] += 1
        else:
            fitting.append(one.row.id)
    if order.verb is OrderVerb.RETRY_TASKS and fitting:
        (judged,) = yield judge_resends(fitting)
        assert isinstance(judged, Refusals)
        refused[IN_WORKFLOW] += judged.in_workflow
        refused[SENT_AGAIN] += judged.was_resent if order.once else 0
    return +refused


# Carrying it out


def carry_out(
    broker: PostgresBroker, order: Order, note: Callable[[OrderState], object] = bool
) -> BrokerResult[OrderState]:
    """Start or continue an order and run its batches to the end; ``note`` is called after each.

    A transient failure of the database is tried again a few times. The order can be continued after any
    failure.
    """
    actor = current_actor()
    state = _flat(broker.perform(_WORKING, start_script(order, actor), atomic=True))
    while (open_state := state.ok()) is not None and open_state.is_open:
        note(open_state)
        time.sleep(PAUSE_SECONDS)
        for delay_seconds in (*RESEND_DELAYS_SECONDS, None):
            script = batch_script(order.id)
            state = _flat(broker.perform(_WORKING, script, atomic=True))
            if not _is_transient(state) or delay_seconds is None:
                break
            time.sleep(delay_seconds)
    _log_end(order, actor, state)
    return state


async def carry_out_async(broker: PostgresBroker, order: Order) -> BrokerResult[OrderState]:
    """``carry_out`` without blocking the event loop."""
    script = start_script(order, current_actor())
    state = _flat(await broker.perform_async(_WORKING, script, atomic=True))
    return await run_batches_async(broker, order, state)


async def run_batches_async(
    broker: PostgresBroker, order: Order, state: BrokerResult[OrderState]
) -> BrokerResult[OrderState]:
    """Run the batches of an order that ``start_script`` has stored, to its end.

    If the order is stopped before its first batch, that batch only records the stop.
    """
    actor = current_actor()
    while (open_state := state.ok()) is not None and open_state.is_open:
        await asyncio.sleep(PAUSE_SECONDS)
        for delay_seconds in (*RESEND_DELAYS_SECONDS, None):
            script = batch_script(order.id)
            state = _flat(await broker.perform_async(_WORKING, script, atomic=True))
            if not _is_transient(state) or delay_seconds is None:
                break
            await asyncio.sleep(delay_seconds)
    _log_end(order, actor, state)
    return state


def _flat(done: BrokerResult[BrokerResult[OrderState]]) -> BrokerResult[OrderState]:
    return done.and_then(lambda state: state)


def _is_transient(state: BrokerResult[OrderState]) -> bool:
    return isinstance(state, Err) and state.err_value.retryable


def _log_end(order: Order, actor: Actor, state: BrokerResult[OrderState]) -> None:
    action = Action(order.verb.value, f"{order.subject} (order {order.id})")
    if isinstance(state, Err):
        log_action(action, actor, "failed", state.err_value.message)
    else:
        log_action(action, actor, state.ok_value.outcome, state.ok_value.summary)


def store_draft_script(order: Order, actor: Actor) -> Script[None]:
    """Store the dry run of an order; older drafts of this author are deleted.

    An order that was started under this id meanwhile stays as it is.
    """
    columns = _columns(order, actor)
    yield delete_drafts(columns.actor, DRAFTS_MAX - 1)
    yield store_draft(*columns, order.id, order_text(order), _progress_text(Progress()))


def start_script(order: Order, actor: Actor) -> Script[BrokerResult[OrderState]]:
    """Store an order, or resume a stopped one; ``batch_script`` carries it out.

    A draft of the order is replaced, so that the row of an order is as old as its start.
    """
    columns = _columns(order, actor)
    yield discard_draft(order.id)
    yield start_order(*columns, order.id, order_text(order), _progress_text(Progress()))
    state = yield from order_script(order.id)
    return Err(no_such_order(order.id)) if state is None else Ok(state)


def _columns(order: Order, actor: Actor) -> Columns:
    return Columns.of(Action(order.verb.value, order.subject), actor, order.reason)


def _progress_text(progress: Progress) -> str:
    return _PROGRESS.dump_json(progress).decode()


def order_script(order_id: str) -> Script[OrderState | None]:
    """Read a stored order; None if it does not exist, or is a draft that is out of date."""
    if (stored := stored_form(order_id)) is None:
        return None
    row: OrderRow | None = one_or_none((yield read_order(stored)))
    if row is None:
        return None
    progress = _PROGRESS.validate_json(row.progress)
    return OrderState(read_order_text(row.plan), row.outcome, progress, row.actor, row.at)


def stop_script(order_id: str) -> Script[BrokerResult[bool]]:
    """Make the next batch of a running order stop it; return False for an order that is not
    running.
    """
    state = yield from order_script(order_id)
    if state is None:
        return Err(no_such_order(order_id))
    return Ok(bool((yield stop_order(state.order.id))))


def no_such_order(order_id: str) -> BrokerOperationError:
    message = f"There is no order {order_id}; nothing was changed in its name."
    return BrokerOperationError(BrokerErrorCode.INVALID_QUERY, message)


def batch_script(order_id: str) -> Script[BrokerResult[OrderState]]:
    """Carry out the next batch of an order; run it as one transaction."""
    yield lock_orders()
    state = yield from order_script(order_id)
    if state is None:
        return Err(no_such_order(order_id))
    if state.outcome == "running":
        progress = yield from _advance_script(state.order, state.progress)
        outcome = "running" if progress.cursor is not None else "done"
        state = replace(state, progress=progress, outcome=outcome)
    elif state.outcome == "stopping":
        state = replace(state, outcome="stopped")
    else:
        return Ok(state)
    yield _saving(state)
    return Ok(state)


def _saving(state: OrderState) -> Step:
    detail = state.summary
    if state.order.reason:
        detail += f" {state.order.reason}"
    return save_order(state.order.id, state.outcome, detail, _progress_text(state.progress))


def _advance_script(order: Order, progress: Progress) -> Script[Progress]:
    if order.matching == 0:
        return progress
    found, cursor = yield from _page_script(order, progress.cursor, BATCH)
    done, refused = yield from _apply_script(order, found)
    return Progress(cursor, progress.done + done, dict(Counter(progress.refused) + refused))


def _apply_script(order: Order, found: Sequence[_Found]) -> Script[tuple[int, Counter[str]]]:
    known = [one.row.id for one in found if one.row.status]
    missing = Counter({NOT_FOUND: len(found) - len(known)})
    if order.verb is OrderVerb.RETRY_TASKS:
        refused = yield from _resend_script(order, known)
    elif order.verb.is_of_runs:
        refused = yield from _control_script(order, known)
    else:
        refused = yield from _cancel_script(order, known)
    return len(known) - refused.total(), +(refused + missing)


def resent_id(order: Order, task_id: str) -> str:
    """Return the id under which an order sends a task again, which is always the same."""
    assert order.at is not None
    return fixed_id(order.at, f"{order.id} {task_id}")


def _resend_script(order: Order, ids: list[str]) -> Script[Counter[str]]:
    new_ids = [resent_id(order, one) for one in ids]
    rows: list[ResentTask] = yield resend_tasks(ids, new_ids, order.once)
    reasons = (
        IN_WORKFLOW if row.in_workflow else SENT_AGAIN if row.was_resent else CHANGED
        for row in rows
        if row.new_id is None
    )
    return Counter(reasons) + Counter({NOT_FOUND: len(ids) - len(rows)})


def _cancel_script(order: Order, ids: list[str]) -> Script[Counter[str]]:
    rows: list[CancelledTask] = yield cancel_tasks(ids, order.include_running)
    reasons = (
        IS_RUNNING if row.was_status == TaskStatus.RUNNING else CHANGED
        for row in rows
        if not row.applied
    )
    return Counter(reasons) + Counter({NOT_FOUND: len(ids) - len(rows)})


def _control_script(order: Order, ids: list[str]) -> Script[Counter[str]]:
    """Change runs one by one, after all their trees are locked in the order that workers use."""
    yield lock_runs(ids)
    refused: Counter[str] = Counter()
    for run_id in ids:
        (row,) = yield _control_step(order, run_id)
        if not _is_changed(order.verb, row.answer):
            refused[NOT_FOUND if row.answer is None else CHANGED] += 1
    return refused


def _control_step(order: Order, run_id: str) -> Step:
    match order.verb:
        case OrderVerb.PAUSE_RUNS:
            return pause_run(run_id)
        case OrderVerb.RESUME_RUNS:
            return resume_run(run_id)
        case OrderVerb.RETRY_RUNS:
            return retry_run(run_id, None)
        case _:
            why = f": {order.reason}" if order.reason else "."
            error = TaskError(
                error_code=OutcomeCode.WORKFLOW_CANCELLED,
                message=f"Workflow {run_id} was cancelled{why}",
                data={"workflow_id": run_id, "reason": order.reason},
            )
            stored = encode_task_error(error).removeprefix('{"err":')[:-1]
            return cancel_run(run_id, stored, False)


def _is_changed(verb: OrderVerb, answer: str | None) -> bool:
    match verb:
        case OrderVerb.PAUSE_RUNS:
            return answer == WorkflowStatus.RUNNING
        case OrderVerb.RESUME_RUNS:
            return answer in ("resumed", WorkflowStatus.PAUSED)
        case OrderVerb.RETRY_RUNS:
            return answer == "retried"
        case _:
            return answer in [status.value for status in SCOPES[OrderVerb.CANCEL_RUNS].allowed]
