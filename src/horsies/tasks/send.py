"""Sending: insert one PENDING row for a valid request and hand back a handle.

The first station of the line that talks to the database. The conflict rules are a script shared by
the synchronous and asynchronous faces, which differ only in how they wait. Nothing here raises for
operational reasons.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from horsies.codec.calls import EncodedCall
from horsies.config.app import AppConfig
from horsies.db.statement import Script
from horsies.db.statements.tasks import (
    IdempotencyKey,
    InsertTask,
    InsertTasks,
    TaskIds,
    find_idempotent_task,
    find_sent_tasks,
    insert_task,
    insert_tasks,
)
from horsies.errors import HorsiesError
from horsies.ids import new_id
from horsies.result import Err, Ok
from horsies.tasks.broker import (
    BrokerErrorCode,
    BrokerOperationError,
    BrokerResult,
    PayloadMismatchError,
    PostgresBroker,
)
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.handle import TaskHandle
from horsies.tasks.request import (
    UNSET,
    Request,
    SendOptions,
    TaskSendError,
    TaskSendErrorCode,
    TaskSendResult,
    Unset,
    max_retries,
    option_problem,
    prepare,
    refused,
    replay,
    shared_values,
    size_problem,
    suppressed,
)

logger = logging.getLogger("horsies.send")

T = TypeVar("T")

RESEND_DELAYS_SECONDS = (0.2, 0.4, 0.8)


@dataclass(frozen=True, slots=True)
class Producer:
    """What sending needs from the application."""

    config: AppConfig
    get_broker: Callable[[], PostgresBroker]
    are_sends_suppressed: Callable[[], bool]


def send_one(
    producer: Producer,
    definition: TaskDefinition,
    options: SendOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    delay_seconds: float | Unset = UNSET,
) -> TaskSendResult[TaskHandle[Any]]:
    """Validate, insert, and return the handle."""
    match _prepared(producer, definition, options, args, kwargs, delay_seconds):
        case Err() as refused:
            return refused
        case Ok(request):
            return deliver(producer, definition, request, options.transaction)


async def send_one_async(
    producer: Producer,
    definition: TaskDefinition,
    options: SendOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    delay_seconds: float | Unset = UNSET,
) -> TaskSendResult[TaskHandle[Any]]:
    """The same without blocking the event loop."""
    match _prepared(producer, definition, options, args, kwargs, delay_seconds):
        case Err() as refused:
            return refused
        case Ok(request):
            return await deliver_async(producer, definition, request, options.transaction)


def _prepared(
    producer: Producer,
    definition: TaskDefinition,
    options: SendOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    delay_seconds: float | Unset,
) -> TaskSendResult[Request]:
    if producer.are_sends_suppressed():
        return Err(suppressed())
    return prepare(producer.config.payload, definition, options, args, kwargs, delay_seconds)


def send_again(
    producer: Producer, definition: TaskDefinition, error: TaskSendError, *, scheduled: bool
) -> TaskSendResult[TaskHandle[Any]]:
    """Replay a failed send with the same id and fingerprint: it stores the task at most once."""
    match _replayed(producer, definition, error, scheduled):
        case Err() as refused:
            return refused
        case Ok(request):
            return deliver(producer, definition, request)


async def send_again_async(
    producer: Producer, definition: TaskDefinition, error: TaskSendError, *, scheduled: bool
) -> TaskSendResult[TaskHandle[Any]]:
    """The same without blocking the event loop."""
    match _replayed(producer, definition, error, scheduled):
        case Err() as refused:
            return refused
        case Ok(request):
            return await deliver_async(producer, definition, request)


def _replayed(
    producer: Producer, definition: TaskDefinition, error: TaskSendError, scheduled: bool
) -> TaskSendResult[Request]:
    if producer.are_sends_suppressed():
        return Err(suppressed())
    return replay(definition, error, scheduled=scheduled)


def deliver(
    producer: Producer, definition: TaskDefinition, request: Request, transaction: object = None
) -> TaskSendResult[TaskHandle[Any]]:
    """Insert the row and return its handle, or the error with all it takes to try again."""
    match broker_of(producer):
        case Err(error):
            return Err(_not_stored(request, error, transaction))
        case Ok(broker):
            stored = insert(producer, broker, lambda: insert_script(request.row), transaction)
            return _outcome(broker, definition, request, stored, transaction)


async def deliver_async(
    producer: Producer, definition: TaskDefinition, request: Request, transaction: object = None
) -> TaskSendResult[TaskHandle[Any]]:
    """The same without blocking the event loop."""
    match broker_of(producer):
        case Err(error):
            return Err(_not_stored(request, error, transaction))
        case Ok(broker):
            stored = await insert_async(
                producer, broker, lambda: insert_script(request.row), transaction
            )
            return _outcome(broker, definition, request, stored, transaction)


def broker_of(producer: Producer) -> BrokerResult[PostgresBroker]:
    """Return the application's broker; one that cannot be built is a failed send."""
    try:
        return Ok(producer.get_broker())
    except HorsiesError as error:
        return Err(
            BrokerOperationError(
                BrokerErrorCode.ENQUEUE_FAILED, error.message, retryable=False, exception=error
            )
        )


def insert(
    producer: Producer,
    broker: PostgresBroker,
    make_script: Callable[[], Script[T]],
    transaction: object,
) -> BrokerResult[T]:
    """Run the script, again after passing failures when the application asks for it."""
    return store(broker, make_script, transaction, producer.config.resend_on_transient_err)


async def insert_async(
    producer: Producer,
    broker: PostgresBroker,
    make_script: Callable[[], Script[T]],
    transaction: object,
) -> BrokerResult[T]:
    """The same without blocking the event loop."""
    resend = producer.config.resend_on_transient_err
    return await store_async(broker, make_script, transaction, resend)


def store(
    broker: PostgresBroker, make_script: Callable[[], Script[T]], transaction: object, resend: bool
) -> BrokerResult[T]:
    """Run the script, and with ``resend`` up to three times more after passing failures.

    The same ids and fingerprints every time, so that no answer that got lost stores anything twice.
    """
    for delay_seconds in _resend_delays(resend, transaction):
        stored = broker.perform(BrokerErrorCode.ENQUEUE_FAILED, make_script(), transaction)
        if not _is_passing(stored):
            return stored
        time.sleep(delay_seconds)
    return broker.perform(BrokerErrorCode.ENQUEUE_FAILED, make_script(), transaction)


async def store_async(
    broker: PostgresBroker, make_script: Callable[[], Script[T]], transaction: object, resend: bool
) -> BrokerResult[T]:
    """The same without blocking the event loop."""
    for delay_seconds in _resend_delays(resend, transaction):
        stored = await broker.perform_async(
            BrokerErrorCode.ENQUEUE_FAILED, make_script(), transaction
        )
        if not _is_passing(stored):
            return stored
        await asyncio.sleep(delay_seconds)
    return await broker.perform_async(BrokerErrorCode.ENQUEUE_FAILED, make_script(), transaction)


def _resend_delays(resend: bool, transaction: object) -> Sequence[float]:
    # Inside the caller's transaction there is nothing to resend: it failed or lives as a whole.
    return RESEND_DELAYS_SECONDS if resend and transaction is None else ()


def _is_passing(stored: BrokerResult[Any]) -> bool:
    return isinstance(stored, Err) and stored.err_value.retryable


def insert_script(row: InsertTask) -> Script[str]:
    """Insert the row; when something is in the way, find out whether it is the same request."""
    while True:
        inserted = yield insert_task, row
        if inserted:
            return row.id
        if row.idempotency_key is not None:
            key = IdempotencyKey(row.task_name, row.idempotency_key)
            holders = yield find_idempotent_task, key
            if holders:
                return _same_request(holders[0].id, holders[0].idempotency_sha, row.idempotency_sha)
        found = yield find_sent_tasks, TaskIds([row.id])
        if found:
            return _same_request(row.id, found[0].enqueue_sha, row.enqueue_sha)
        if row.idempotency_key is None:
            logger.warning("task %s was stored before and is gone since", row.id)
            return row.id
        # The task that held the key was deleted in between; nothing of ours is stored yet.


def _same_request(task_id: str, stored_sha: str | None, sha: str | None) -> str:
    if stored_sha != sha:
        raise PayloadMismatchError(
            f"Task {task_id} already exists with a different request; use a new idempotency key for it."
        )
    return task_id


def _outcome(
    broker: PostgresBroker,
    definition: TaskDefinition,
    request: Request,
    stored: BrokerResult[str],
    transaction: object,
) -> TaskSendResult[TaskHandle[Any]]:
    match stored:
        case Ok(task_id):
            return Ok(TaskHandle(task_id, broker, definition.results))
        case Err(error):
            return Err(_not_stored(request, error, transaction))


def _not_stored(
    request: Request, error: BrokerOperationError, transaction: object
) -> TaskSendError:
    # Without a payload there is no replay: it would store the task outside the caller's transaction.
    payload = request.payload if transaction is None else None
    return TaskSendError(
        send_error_code(error),
        error.message,
        error.retryable,
        request.task_id,
        payload,
        error.exception,
    )


def send_error_code(error: BrokerOperationError) -> TaskSendErrorCode:
    """Return what a broker's failure is called by a send."""
    mismatch = error.code is BrokerErrorCode.PAYLOAD_MISMATCH
    return TaskSendErrorCode.PAYLOAD_MISMATCH if mismatch else TaskSendErrorCode.ENQUEUE_FAILED


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[T]):
    """The arguments of one future task, made by ``task.bind(...)`` for ``send_many``."""

    task_name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        return f"TaskCall({self.task_name!r}, ...)"


def send_all(
    producer: Producer,
    definition: TaskDefinition,
    options: SendOptions,
    calls: Iterable[TaskCall[T]],
) -> TaskSendResult[list[TaskHandle[T]]]:
    """Store all calls in one statement and return their handles in the same order."""
    prepared = _prepare_all(producer, definition, options, calls)
    if isinstance(prepared, Err):
        return prepared
    match broker_of(producer):
        case Err(error):
            return Err(_batch_not_stored(error))
        case Ok(broker):
            batch, transaction = prepared.value, options.transaction
            stored = insert(producer, broker, lambda: _script(batch), transaction)
            return _handles(broker, definition, stored)


async def send_all_async(
    producer: Producer,
    definition: TaskDefinition,
    options: SendOptions,
    calls: Iterable[TaskCall[T]],
) -> TaskSendResult[list[TaskHandle[T]]]:
    """The same without blocking the event loop."""
    prepared = _prepare_all(producer, definition, options, calls)
    if isinstance(prepared, Err):
        return prepared
    match broker_of(producer):
        case Err(error):
            return Err(_batch_not_stored(error))
        case Ok(broker):
            batch, transaction = prepared.value, options.transaction
            stored = await insert_async(producer, broker, lambda: _script(batch), transaction)
            return _handles(broker, definition, stored)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The rows to insert, with what is needed to tell them apart afterwards."""

    ids: Sequence[str]
    shas: Sequence[str]
    rows: InsertTasks


def _prepare_all(
    producer: Producer,
    definition: TaskDefinition,
    options: SendOptions,
    calls: Iterable[TaskCall[T]],
) -> TaskSendResult[_Batch]:
    if producer.are_sends_suppressed():
        return Err(suppressed())
    if problem := option_problem(options):
        return Err(refused(definition, problem))
    if options.idempotency_key is not None:
        return Err(
            refused(definition, "an idempotency_key names one request; send_many takes none")
        )
    if not isinstance(calls, Iterable):
        wrong = f"send_many takes a list of calls made by bind(...), not {type(calls).__name__}"
        return Err(refused(definition, wrong))
    encoded: list[EncodedCall] = []
    for position, call in enumerate(calls):
        match _encode(producer, definition, call):
            case Err(error):
                return Err(
                    TaskSendError(error.code, f"Call {position} of send_many: {error.message}")
                )
            case Ok(one):
                encoded.append(one)
    return Ok(_batch(definition, options, encoded))


def _encode(
    producer: Producer, definition: TaskDefinition, call: TaskCall[Any]
) -> TaskSendResult[EncodedCall]:
    if getattr(call, "task_name", None) != definition.name:
        return Err(refused(definition, "send_many takes calls made by this task's bind(...)"))
    match definition.signature.encode_call(call.args, call.kwargs):
        case Err(error):
            return Err(refused(definition, error.message))
        case Ok(encoded):
            if problem := size_problem(producer.config.payload, definition.name, encoded):
                return Err(TaskSendError(TaskSendErrorCode.PAYLOAD_TOO_LARGE, problem))
            return Ok(encoded)


def _batch(
    definition: TaskDefinition, options: SendOptions, encoded: Sequence[EncodedCall]
) -> _Batch:
    shared = shared_values(definition, options, None, datetime.now(UTC))
    ids = [new_id() for _ in encoded]
    shas = [shared.fingerprint(call) for call in encoded]
    rows = InsertTasks(
        task_name=definition.name,
        queue_name=definition.queue_name,
        priority=shared.priority,
        sent_at=shared.sent_at,
        delay_seconds=0.0,
        good_until=shared.good_until,
        max_retries=max_retries(definition),
        task_options=shared.task_options,
        timeout_ms=definition.timeout_ms,
        ids="\n".join(ids),
        args="\n".join([call.args_json for call in encoded]),
        kwargs="\n".join([call.kwargs_json for call in encoded]),
        enqueue_shas="\n".join(shas),
    )
    return _Batch(ids, shas, rows)


def _script(batch: _Batch) -> Script[Sequence[str]]:
    if not batch.ids:
        return []
    (answer,) = yield insert_tasks, batch.rows
    if answer.inserted < len(batch.ids):
        present = yield find_sent_tasks, TaskIds(batch.ids)
        shas = {row.id: row.enqueue_sha for row in present}
        for task_id, sha in zip(batch.ids, batch.shas, strict=True):
            if shas.get(task_id, sha) != sha:
                raise PayloadMismatchError(
                    f"Task {task_id} already exists with a different request."
                )
    return batch.ids


def _handles(
    broker: PostgresBroker, definition: TaskDefinition, stored: BrokerResult[Sequence[str]]
) -> TaskSendResult[list[TaskHandle[Any]]]:
    match stored:
        case Ok(task_ids):
            return Ok([TaskHandle(task_id, broker, definition.results) for task_id in task_ids])
        case Err(error):
            return Err(_batch_not_stored(error))


def _batch_not_stored(error: BrokerOperationError) -> TaskSendError:
    return TaskSendError(
        send_error_code(error), error.message, error.retryable, exception=error.exception
    )
