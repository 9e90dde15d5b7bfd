"""Bulk orders: apply one verb to all tasks or runs that match filters, after a dry run. The dry run
fixes an order's bounds: the newest and the oldest matching row, and the time. Rows that end or are sent
later are not affected. The dashboard stores a dry run as a draft order (a row in
``horsies_actions``); submitting a form starts the draft by its id. An order is executed in batches. Each
batch is one transaction that also stores the order's position. After a repeated request, a lost response
or a crash, no row is changed twice, and any process can continue the order by its id. The ids of tasks
that are sent again are derived from the order and the old id.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal, NamedTuple
from uuid import UUID

from psycopg.errors import LockNotAvailable

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
    stop_order,
    store_order,
)
from horsies.db.statements.erasing import meet_erasures
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
from horsies.monitor.erasing import (
    ERASE_BATCH,
    REDACTED,
    erase_script,
    judge_erasures_script,
)
from horsies.monitor.order_plan import (
    ENDLESS,
    NO_PROGRESS,
    PAGE,
    SCOPES,
    Order,
    OrderState,
    OrderVerb,
    Preview,
    Progress,
    order_text,
    progress_text,
    read_order_text,
    read_progress_text,
)
from horsies.monitor.paging import cursor_rank, run_cursor, run_position
from horsies.monitor.queries import RunFilters, runs_script, tasks_script
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
# The number of an author's newest dry runs that can be started.
DRAFTS_MAX = 20
# The pause between two batches, which leaves capacity for workers' transactions.
PAUSE_SECONDS = 0.05
# The maximum number of pages of a dry run; a page has up to 50,000 rows.
_PAGES_MAX = 40

_WORKING = BrokerErrorCode.ENQUEUE_FAILED

NOT_FOUND = "not found"
IN_WORKFLOW = "part of a workflow (retry the run)"
SENT_AGAIN = "sent again already"
IS_RUNNING = "running"
CHANGED = "in another status by now"


# The dry run


def preview_script(draft: Order) -> Script[Preview]:
    """Count an order's rows and fix its bounds, without changing any row."""
    (clock,) = yield read_clock()
    order = replace(draft, at=clock.at)
    first: _Found | None = None
    last: _Found | None = None
    matching, refused = 0, Counter[str]()
    cursor: str | None = None
    has_more, pages = True, 0
    while pages < _PAGES_MAX or order.limit == ENDLESS:
        found, cursor = yield from _page_script(order, cursor, PAGE)
        has_more = cursor is not None or matching + len(found) > order.limit
        found = found[: order.limit - matching]
        refused += yield from _judge_script(order, found)
        pages, matching = pages + 1, matching + len(found)
        if found:
            first, last = first or found[0], found[-1]
        if cursor is None or matching == order.limit:
            break
    if first and last and not order.ids:
        order = replace(order, newest=_just_above(first), oldest=last.cursor)
    return Preview(
        order=replace(order, matching=matching),
        matching=matching,
        eligible=matching - refused.total(),
        refused=dict(refused),
        newest_at=first.row.created_at if first else None,
        oldest_at=last.row.created_at if last else None,
        has_more=has_more,
        newest_id=first.row.id if first else None,
    )


class _Found(NamedTuple):
    row: Candidate
    cursor: str


def _page_script(
    order: Order, after: str | None, limit: int
) -> Script[tuple[list[_Found], str | None]]:
    """Read an order's rows from a position on, newest first; return the rows and the next position."""
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
    if order.at is not None:  # Exclude rows that were sent, or have ended, after the dry run.
        found = [one for one in found if (one.row.finished_at or one.row.created_at) <= order.at]
    if order.oldest is not None:
        oldest = cursor_rank(order.oldest)
        found = [one for one in found if cursor_rank(one.cursor) >= oldest]
        cursor = None if cursor is None or cursor_rank(cursor) < oldest else cursor
    return found, cursor


def _named_script(order: Order, start: int, limit: int) -> Script[tuple[list[_Found], str | None]]:
    ids = order.ids[start : start + limit]
    valid = [one for one in ids if stored_form(one) is not None]
    rows = yield (meet_erasures if order.verb.erases else read_candidates)(valid)
    known = {row.id: Candidate(*row[:4]) for row in rows}
    missing = datetime.min.replace(tzinfo=UTC)
    found = [_Found(known.get(one) or Candidate(one, "", missing, None), one) for one in ids]
    following = start + len(ids)
    return found, str(following) if following < len(order.ids) else None


def _just_above(found: _Found) -> str:
    """Return the cursor directly before a row."""
    above = str(UUID(int=min(UUID(found.row.id).int + 1, (1 << 128) - 1)))
    is_run = run_position(found.cursor) is not None
    return run_cursor(RunPosition(above, found.row.created_at)) if is_run else above


def _judge_script(order: Order, found: Sequence[_Found]) -> Script[Counter[str]]:
    """Count the rows that the order would reject, per reason."""
    if order.verb.erases:
        known = [one.row.id for one in found if one.row.status]
        missing = Counter({NOT_FOUND: len(found) - len(known)})
        return +(missing + (yield from judge_erasures_script(order, known)))
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
        refused[REDACTED] += judged.is_redacted
        refused[SENT_AGAIN] += judged.was_resent if order.once else 0
    return +refused


# Carrying it out


def carry_out(
    broker: PostgresBroker, order: Order, note: Callable[[OrderState], object] = bool
) -> BrokerResult[OrderState]:
    """Start or continue an order and run all its batches; call ``note`` after each batch.

    Transient database failures are retried a few times, except for waits for a locked table or row. The order
    can be continued after any failure.
    """
    actor = current_actor()
    start = store_script(order, "running", actor)
    done = broker.perform(_WORKING, start, atomic=True)
    while (state := done.ok()) is not None and state.is_open:
        note(state)
        time.sleep(PAUSE_SECONDS)
        for delay_seconds in (*RESEND_DELAYS_SECONDS, None):
            batch = broker.perform(_WORKING, batch_script(order.id), atomic=True)
            done = batch.and_then(lambda carried_out: carried_out)
            if delay_seconds is None or not _may_succeed_now(done):
                break
            time.sleep(delay_seconds)
    _log_end(order, actor, done)
    return done


async def carry_out_async(broker: PostgresBroker, order: Order) -> BrokerResult[OrderState]:
    """Run ``carry_out`` without blocking the event loop."""
    start = store_script(order, "running", current_actor())
    started = await broker.perform_async(_WORKING, start, atomic=True)
    return await run_batches_async(broker, order, started)


async def run_batches_async(
    broker: PostgresBroker, order: Order, done: BrokerResult[OrderState]
) -> BrokerResult[OrderState]:
    """Run all batches of an order that ``store_script`` has started.

    If the order is stopped before its first batch, that batch only records the stop.
    """
    actor = current_actor()
    while (state := done.ok()) is not None and state.is_open:
        await asyncio.sleep(PAUSE_SECONDS)
        for delay_seconds in (*RESEND_DELAYS_SECONDS, None):
            batch = await broker.perform_async(_WORKING, batch_script(order.id), atomic=True)
            done = batch.and_then(lambda carried_out: carried_out)
            if delay_seconds is None or not _may_succeed_now(done):
                break
            await asyncio.sleep(delay_seconds)
    _log_end(order, actor, done)
    return done


def _may_succeed_now(done: BrokerResult[OrderState]) -> bool:
    """Return whether to repeat a failed batch immediately. After a lock timeout, the order should be
    continued later instead, because the next try would wait just as long.
    """
    if isinstance(done, Ok):
        return False
    return done.err_value.retryable and not isinstance(done.err_value.exception, LockNotAvailable)


def _log_end(order: Order, actor: Actor, done: BrokerResult[OrderState]) -> None:
    action = Action(order.verb.value, f"{order.subject} (order {order.id})")
    if isinstance(done, Err):
        log_action(action, actor, "failed", done.err_value.message)
    else:
        log_action(action, actor, done.ok_value.outcome, done.ok_value.summary)


def store_script(
    order: Order, outcome: Literal["draft", "running"], actor: Actor
) -> Script[OrderState]:
    """Store an order as a draft, or start it; ``batch_script`` executes it. A stopped order continues
    where it stopped; a started order does not become a draft again. Starting an order replaces its
    draft, because an order's row is as old as its start.
    """
    columns = Columns.of(Action(order.verb.value, order.subject), actor, order.reason)
    if outcome == "draft":
        yield delete_drafts(columns.actor, DRAFTS_MAX - 1)
    yield discard_draft(order.id)
    yield store_order(*columns, outcome, order.id, order_text(order), NO_PROGRESS)
    state = yield from _stored_script(order.id)
    assert state is not None
    return state


def order_script(order_id: str) -> Script[OrderState | None]:
    """Read the order with an id from a user; return None if it does not exist or is an outdated draft."""
    stored = stored_form(order_id)
    return None if stored is None else (yield from _stored_script(stored))


def _stored_script(order_id: str) -> Script[OrderState | None]:
    row: OrderRow | None = one_or_none((yield read_order(order_id)))
    if row is None:
        return None
    order, progress = read_order_text(row.plan), read_progress_text(row.progress)
    return OrderState(order, row.outcome, progress, row.actor, row.at)


def stop_script(order_id: str) -> Script[BrokerResult[bool]]:
    """Make a running order stop at its next batch; return False if the order is not running."""
    state = yield from _stored_script(order_id)
    if state is None:
        return Err(no_such_order(order_id))
    return Ok(bool((yield stop_order(state.order.id))))


def no_such_order(order_id: str) -> BrokerOperationError:
    message = f"There is no order {order_id}; nothing was changed in its name."
    return BrokerOperationError(BrokerErrorCode.INVALID_QUERY, message)


def batch_script(order_id: str) -> Script[BrokerResult[OrderState]]:
    """Execute an order's next batch; run this script as one transaction."""
    yield lock_orders()
    state = yield from _stored_script(order_id)
    if state is None:
        return Err(no_such_order(order_id))
    if not state.is_open:
        return Ok(state)
    if state.outcome == "stopping":
        state = replace(state, outcome="stopped")
    else:
        state = yield from _advanced_script(state)
    order, progress = state.order, progress_text(state.progress)
    detail = f"{state.summary} {order.reason}" if order.reason else state.summary
    yield save_order(order.id, state.outcome, detail, progress)
    return Ok(state)


def _advanced_script(state: OrderState) -> Script[OrderState]:
    """Change an order's next rows; the order is done after the last of them."""
    order, progress = state.order, state.progress
    found, cursor = list[_Found](), None
    if order.matching:
        limit = ERASE_BATCH if order.verb.erases and not order.ids else BATCH
        found, cursor = yield from _page_script(order, progress.cursor, limit)
    ids = [one.row.id for one in found if one.row.status]
    refused = yield from _CHANGES[order.verb](order, ids)
    done = progress.done + len(ids) - refused.total()
    refused += Counter(progress.refused) + Counter({NOT_FOUND: len(found) - len(ids)})
    outcome = "done" if cursor is None else "running"
    return replace(state, progress=Progress(cursor, done, dict(refused)), outcome=outcome)


def resent_id(order: Order, task_id: str) -> str:
    """Return the id of a task that an order sends again; the same order and task always give the same
    id.
    """
    assert order.at is not None
    return fixed_id(order.at, f"{order.id} {task_id}")


def _resend_script(order: Order, ids: Sequence[str]) -> Script[Counter[str]]:
    new_ids = [resent_id(order, one) for one in ids]
    rows: list[ResentTask] = yield resend_tasks(ids, new_ids, order.once)
    reasons = (_resend_refusal(row) for row in rows if row.new_id is None)
    return Counter(reasons) + Counter({NOT_FOUND: len(ids) - len(rows)})


def _resend_refusal(row: ResentTask) -> str:
    if row.in_workflow:
        return IN_WORKFLOW
    if row.is_redacted:
        return REDACTED
    return SENT_AGAIN if row.was_resent else CHANGED


def _cancel_script(order: Order, ids: Sequence[str]) -> Script[Counter[str]]:
    rows: list[CancelledTask] = yield cancel_tasks(ids, order.include_running)
    reasons = (
        IS_RUNNING if row.was_status == TaskStatus.RUNNING else CHANGED
        for row in rows
        if not row.applied
    )
    return Counter(reasons) + Counter({NOT_FOUND: len(ids) - len(rows)})


def _control_script(order: Order, ids: Sequence[str]) -> Script[Counter[str]]:
    """Change runs one by one, after locking all their trees in the order in which workers lock them."""
    yield lock_runs(ids)
    change = _RUN_CHANGES[order.verb]
    refused: Counter[str] = Counter()
    for run_id in ids:
        (row,) = yield change.step(order, run_id)
        if row.answer not in change.answers:
            refused[NOT_FOUND if row.answer is None else CHANGED] += 1
    return refused


def _cancel_step(order: Order, run_id: str) -> Step:
    why = f": {order.reason}" if order.reason else "."
    error = TaskError(
        error_code=OutcomeCode.WORKFLOW_CANCELLED,
        message=f"Workflow {run_id} was cancelled{why}",
        data={"workflow_id": run_id, "reason": order.reason},
    )
    return cancel_run(run_id, encode_task_error(error).removeprefix('{"err":')[:-1], False)


class _RunChange(NamedTuple):
    """Return the statement that changes one run, and the return values that mean success."""

    step: Callable[[Order, str], Step]
    answers: Collection[str]


_RUN_CHANGES: Mapping[OrderVerb, _RunChange] = {
    OrderVerb.PAUSE_RUNS: _RunChange(
        lambda _, run_id: pause_run(run_id), (WorkflowStatus.RUNNING,)
    ),
    OrderVerb.RESUME_RUNS: _RunChange(
        lambda _, run_id: resume_run(run_id), ("resumed", WorkflowStatus.PAUSED)
    ),
    OrderVerb.RETRY_RUNS: _RunChange(lambda _, run_id: retry_run(run_id, None), ("retried",)),
    OrderVerb.CANCEL_RUNS: _RunChange(_cancel_step, SCOPES[OrderVerb.CANCEL_RUNS].allowed),
}

# The script that changes the tasks or runs of one batch, and counts the refused ones per reason.
_CHANGES: Mapping[OrderVerb, Callable[[Order, Sequence[str]], Script[Counter[str]]]] = {
    OrderVerb.RETRY_TASKS: _resend_script,
    OrderVerb.CANCEL_TASKS: _cancel_script,
    OrderVerb.PURGE_QUEUE: _cancel_script,
    OrderVerb.DELETE_TASKS: erase_script,
    OrderVerb.REDACT_TASKS: erase_script,
    **dict.fromkeys(_RUN_CHANGES, _control_script),
}
