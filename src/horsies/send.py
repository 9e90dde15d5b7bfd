"""Sending: insert one PENDING row for a valid request and hand back a handle.

The first station of the line that talks to the database. The conflict rules are a script shared by
the synchronous and asynchronous faces, which differ only in how they wait. Nothing here raises for
operational reasons.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from horsies.broker import (
    BrokerErrorCode,
    BrokerOperationError,
    BrokerResult,
    PayloadMismatchError,
    PostgresBroker,
)
from horsies.config import AppConfig
from horsies.db.query import Script
from horsies.db.tasks import (
    IdempotencyKey,
    InsertTask,
    TaskIds,
    find_idempotent_task,
    find_sent_tasks,
    insert_task,
)
from horsies.definition import TaskDefinition
from horsies.errors import HorsiesError
from horsies.handle import TaskHandle
from horsies.request import (
    UNSET,
    Request,
    SendOptions,
    TaskSendError,
    TaskSendErrorCode,
    TaskSendResult,
    Unset,
    prepare,
    replay,
    suppressed,
)
from horsies.result import Err, Ok

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
