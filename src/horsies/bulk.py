"""Sending many: all rows of one task in one statement, one transaction, one notification.

Beside ``send.py`` on the line. All or nothing: one bad call and nothing is stored; the error names
its position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from horsies.broker import (
    BrokerOperationError,
    BrokerResult,
    PayloadMismatchError,
    PostgresBroker,
)
from horsies.codec import EncodedCall
from horsies.db.query import Script
from horsies.db.tasks import InsertTasks, TaskIds, find_sent_tasks, insert_tasks
from horsies.definition import TaskDefinition
from horsies.handle import TaskHandle
from horsies.ids import new_id
from horsies.request import (
    SendOptions,
    TaskSendError,
    TaskSendErrorCode,
    TaskSendResult,
    max_retries,
    option_problem,
    refused,
    shared_values,
    size_problem,
    suppressed,
)
from horsies.result import Err, Ok
from horsies.send import Producer, broker_of, insert, insert_async, send_error_code

T = TypeVar("T")


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
            return Err(_not_stored(error))
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
            return Err(_not_stored(error))
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
            return Err(_not_stored(error))


def _not_stored(error: BrokerOperationError) -> TaskSendError:
    return TaskSendError(
        send_error_code(error), error.message, error.retryable, exception=error.exception
    )
