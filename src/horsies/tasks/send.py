"""Sending: insert PENDING rows for valid requests and return handles.

A send has two steps. ``Sender`` checks the request and returns a ``PreparedSend``; ``store_prepared`` and
``store_prepared_async`` run its script through the broker. The conflict rules are in the scripts. Nothing
here raises for operational reasons.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from horsies.codec.calls import EncodedCall
from horsies.config.app import AppConfig
from horsies.config.tracing import TracingConfig
from horsies.db.statement import Script, Step
from horsies.db.statements.tasks import (
    IdempotencyKey,
    InsertTask,
    InsertTasks,
    TaskIds,
    find_idempotent_task,
    find_sent_tasks,
    find_unique_task,
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
from horsies.tasks.options import UNSET, SendHook, SendOptions, Unset, option_problem
from horsies.tasks.request import (
    Request,
    TaskSendError,
    TaskSendErrorCode,
    TaskSendResult,
    encode,
    prepare,
    refused,
    replay,
    run_hooks,
    shared_values,
    suppressed,
)
from horsies.tracing import Sending, with_carrier

logger = logging.getLogger("horsies.send")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Sent(NamedTuple):
    """A send that is over: its task and queue, how many tasks it stored or found, and how long it took."""

    task_name: str
    queue_name: str
    result: Literal["stored", "duplicate", "failed"]
    tasks: int
    seconds: float


SendObserver = Callable[[Sent], None]


@dataclass(frozen=True, slots=True)
class Producer:
    """The parts of the application that sending needs."""

    config: AppConfig
    get_broker: Callable[[], PostgresBroker]
    are_sends_suppressed: Callable[[], bool]
    hooks: list[SendHook] = field(default_factory=list)
    # Called after every send with its result and duration.
    observers: list[SendObserver] = field(default_factory=list)

    def broker(self) -> BrokerResult[PostgresBroker]:
        """Return the application's broker; one that cannot be built is a failed send."""
        try:
            return Ok(self.get_broker())
        except HorsiesError as error:
            code = BrokerErrorCode.ENQUEUE_FAILED
            return Err(BrokerOperationError(code, error.message, exception=error))


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[T_co]):
    """The arguments of one future task, made by ``task.bind(...)`` for ``send_many``."""

    task_name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        return f"TaskCall({self.task_name!r}, ...)"


class PreparedSend(NamedTuple, Generic[T]):
    """A checked send: the script that stores its tasks and returns handles, and the broker to run it.

    ``request`` is None for ``send_many``, which cannot be retried from its error.
    """

    broker: PostgresBroker
    resend: bool
    transaction: object
    request: Request | None
    make_script: Callable[[], Script[T]]
    sending: Sending | None = None

    def end(self, stored: BrokerResult[T]) -> TaskSendResult[T]:
        """Return the handles or the error, and end the span of the send."""
        sent = stored.map_err(self.error)
        if self.sending is not None:
            self.sending.end(sent.err_value.code.value if isinstance(sent, Err) else None)
        return sent

    def error(self, error: BrokerOperationError) -> TaskSendError:
        return _not_stored(error, self.request, self.transaction)


def store_prepared(sender: Sender, ready: TaskSendResult[PreparedSend[T]]) -> TaskSendResult[T]:
    """Store the tasks and return their handles, or the error that ``retry_send`` takes."""
    if isinstance(ready, Err):
        return _logged(sender, ready)
    prepared, started = ready.value, time.perf_counter()
    store = prepared.broker.store
    stored = store(prepared.make_script, prepared.transaction, resend=prepared.resend)
    return _logged(sender, prepared.end(stored), prepared.request, started)


async def store_prepared_async(
    sender: Sender, ready: TaskSendResult[PreparedSend[T]]
) -> TaskSendResult[T]:
    """``store_prepared`` without blocking the event loop."""
    if isinstance(ready, Err):
        return _logged(sender, ready)
    prepared, started = ready.value, time.perf_counter()
    store = prepared.broker.store_async
    stored = await store(prepared.make_script, prepared.transaction, resend=prepared.resend)
    return _logged(sender, prepared.end(stored), prepared.request, started)


def _logged(
    sender: Sender,
    sent: TaskSendResult[T],
    request: Request | None = None,
    started: float | None = None,
) -> TaskSendResult[T]:
    """Log a failed send, because callers may ignore the value; messages may quote arguments."""
    if sender.producer.observers:
        seconds = 0.0 if started is None else time.perf_counter() - started
        observed = _observed(sender, sent, request, seconds)
        for observer in sender.producer.observers:
            observer(observed)
    if isinstance(sent, Err):
        # The caller's own changes may be committed without the task.
        level = logging.WARNING if sender.options.transaction is None else logging.ERROR
        name, code = sender.definition.name, sent.err_value.code.value
        logger.log(level, "a send of task %r failed with %s", name, code)
    return sent


def _observed(
    sender: Sender, sent: TaskSendResult[Any], request: Request | None, seconds: float
) -> Sent:
    definition = sender.definition
    if isinstance(sent, Err):  # its queue may not exist
        return Sent(definition.name, definition.queue_name, "failed", 1, seconds)
    queue_name = sender.options.queue_name or definition.queue_name
    handles = sent.ok_value if isinstance(sent.ok_value, list) else [sent.ok_value]
    # With an idempotency key, the handle may be that of an earlier task.
    is_found = request is not None and handles[0].task_id != request.row.id
    result: Literal["stored", "duplicate"] = "duplicate" if is_found else "stored"
    return Sent(definition.name, queue_name, result, len(handles), seconds)


def _not_stored(
    error: BrokerOperationError, request: Request | None, transaction: object
) -> TaskSendError:
    mismatch = error.code is BrokerErrorCode.PAYLOAD_MISMATCH
    return TaskSendError(
        TaskSendErrorCode.PAYLOAD_MISMATCH if mismatch else TaskSendErrorCode.ENQUEUE_FAILED,
        error.message,
        error.retryable,
        request.row.id if request else None,
        # A retry needs the payload and would store the task outside the caller's transaction.
        request.payload if request and transaction is None else None,
        error.exception,
    )


@dataclass(frozen=True, slots=True)
class Sender:
    """One task with its send options: checks calls and prepares them for the broker."""

    producer: Producer
    definition: TaskDefinition
    options: SendOptions

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        delay_seconds: float | Unset = UNSET,
    ) -> TaskSendResult[PreparedSend[TaskHandle[Any]]]:
        """Check one call of ``send`` or ``schedule``."""
        if self.producer.are_sends_suppressed():
            return Err(suppressed())
        config, hooks = self.producer.config, self.producer.hooks
        prepared = prepare(
            config, self.definition, self.options, args, kwargs, delay_seconds, hooks=hooks
        )
        if config.tracing is not None and isinstance(prepared, Ok):
            request, sending = self._traced(config.tracing, prepared.value)
            return self._single(Ok(request), sending)
        return self._single(prepared)

    def prepare_retry(
        self, error: TaskSendError, *, scheduled: bool | None
    ) -> TaskSendResult[PreparedSend[TaskHandle[Any]]]:
        """Replay a failed send with the same id and fingerprint: it stores the task at most once."""
        if self.producer.are_sends_suppressed():
            return Err(suppressed())
        return self._single(replay(self.definition, error, scheduled=scheduled))

    def prepare_many(
        self, calls: Iterable[TaskCall[T]]
    ) -> TaskSendResult[PreparedSend[list[TaskHandle[T]]]]:
        """Check all calls of ``send_many``; one statement stores them all or none."""
        definition, options, config = self.definition, self.options, self.producer.config
        if self.producer.are_sends_suppressed():
            return Err(suppressed())
        if problem := self._many_problem(calls):
            return Err(refused(definition, problem))
        encoded: list[EncodedCall] = []
        for position, call in enumerate(calls):
            match self._encode(call):
                case Err(error):
                    message = f"Call {position} of send_many: {error.message}"
                    return Err(TaskSendError(error.code, message))
                case Ok(one):
                    encoded.append(one)
        if self.producer.hooks:
            hooked = run_hooks(self.producer.hooks, config, definition, options, len(encoded))
            if isinstance(hooked, Err):
                return hooked
            options = hooked.value
        batch = _batch(config, definition, options, encoded)
        sending = None
        if config.tracing is not None and encoded:
            batch, sending = self._traced_many(config.tracing, batch)

        def script(broker: PostgresBroker) -> Script[list[TaskHandle[T]]]:
            ids = yield from _insert_many_script(batch)
            return [TaskHandle(one, broker, definition.results) for one in ids]

        return self._prepared(None, script, sending)

    def _many_problem(self, calls: object) -> str | None:
        if problem := option_problem(self.producer.config, self.options):
            return problem
        if self.options.idempotency_key is not None:
            return "an idempotency_key names one request; send_many takes none"
        if not isinstance(calls, Iterable):
            return f"send_many takes a list of calls made by bind(...), not {type(calls).__name__}"
        return None

    def _encode(self, call: TaskCall[Any]) -> TaskSendResult[EncodedCall]:
        if getattr(call, "task_name", None) != self.definition.name:
            problem = "send_many takes calls made by this task's bind(...)"
            return Err(refused(self.definition, problem))
        return encode(self.producer.config.payload, self.definition, call.args, call.kwargs)

    def _traced(self, tracing: TracingConfig, request: Request) -> tuple[Request, Sending]:
        """Start the span of a send and add its carrier to the row, after the fingerprint was made."""
        row, payload = request
        size = len(row.args) + len(row.kwargs)
        is_later = row.enqueue_at is not None or row.delay_seconds > 0
        sending = self._sending(tracing, row.queue_name, size, is_later, task_id=row.id)
        traced = with_carrier(row.task_options, sending.carrier)
        row = row._replace(task_options=traced)
        return Request(row, replace(payload, task_options=traced)), sending

    def _traced_many(self, tracing: TracingConfig, batch: _Batch) -> tuple[_Batch, Sending]:
        rows, count = batch.rows, len(batch.ids)
        is_later = rows.enqueue_at is not None or rows.delay_seconds > 0
        size = len(rows.args) + len(rows.kwargs)
        sending = self._sending(tracing, rows.queue_name, size, is_later, count=count)
        traced = with_carrier(rows.task_options, sending.carrier)
        return batch._replace(rows=rows._replace(task_options=traced)), sending

    def _sending(
        self,
        tracing: TracingConfig,
        queue_name: str,
        size: int,
        is_later: bool,
        *,
        task_id: str | None = None,
        count: int | None = None,
    ) -> Sending:
        name = self.definition.name
        attributes: dict[str, str | int] = {
            "messaging.destination.name": queue_name,
            "messaging.message.body.size": size,
            "horsies.task.name": name,
        }
        if task_id is not None:
            attributes["messaging.message.id"] = task_id
        if count is not None:
            attributes["messaging.batch.message_count"] = count
        return Sending(tracing, f"send {name}", attributes, is_later=is_later)

    def _single(
        self, prepared: TaskSendResult[Request], sending: Sending | None = None
    ) -> TaskSendResult[PreparedSend[TaskHandle[Any]]]:
        if isinstance(prepared, Err):
            return prepared
        request, results = prepared.value, self.definition.results

        def script(broker: PostgresBroker) -> Script[TaskHandle[Any]]:
            return TaskHandle((yield from insert_script(request.row)), broker, results)

        return self._prepared(request, script, sending)

    def _prepared(
        self,
        request: Request | None,
        make_script: Callable[[PostgresBroker], Script[T]],
        sending: Sending | None = None,
    ) -> TaskSendResult[PreparedSend[T]]:
        transaction = self.options.transaction
        match self.producer.broker():
            case Err(error):
                if sending is not None:
                    sending.end(error.code.value)
                return Err(_not_stored(error, request, transaction))
            case Ok(broker):
                resend = self.producer.config.resend_on_transient_err
                script = functools.partial(make_script, broker)
                return Ok(PreparedSend(broker, resend, transaction, request, script, sending))


def insert_script(row: InsertTask) -> Script[str]:
    """Insert the row; on a conflict compare fingerprints with the stored task."""
    while True:
        inserted = yield insert_task, row
        if inserted:
            return row.id
        # A key that is unique for a time may belong to a later task by now: the own id comes first.
        if row.unique_key is not None and (found := (yield find_sent_tasks, TaskIds([row.id]))):
            return _same_request(row.id, found[0].enqueue_sha, row.enqueue_sha)
        if row.idempotency_sha is not None:
            holders = yield _find_holder(row)
            if holders:
                return _same_request(holders[0].id, holders[0].idempotency_sha, row.idempotency_sha)
        found = yield find_sent_tasks, TaskIds([row.id])
        if found:
            return _same_request(row.id, found[0].enqueue_sha, row.enqueue_sha)
        if row.idempotency_sha is None:
            logger.warning("task %s was stored earlier and has been deleted since", row.id)
            return row.id
        # The task that held the key was deleted, or ended, in between; nothing of ours is stored yet.


def _find_holder(row: InsertTask) -> Step:
    if row.unique_key is not None:
        return find_unique_task, IdempotencyKey(row.task_name, row.unique_key)
    assert row.idempotency_key is not None
    return find_idempotent_task, IdempotencyKey(row.task_name, row.idempotency_key)


def _same_request(task_id: str, stored_sha: str | None, sha: str | None) -> str:
    if stored_sha != sha:
        raise PayloadMismatchError(
            f"Task {task_id} already exists with a different request; use a new idempotency key for it."
        )
    return task_id


class _Batch(NamedTuple):
    """The rows to insert, and their ids and fingerprints for the case of a conflict."""

    ids: Sequence[str]
    shas: Sequence[str]
    rows: InsertTasks


def _batch(
    config: AppConfig,
    definition: TaskDefinition,
    options: SendOptions,
    encoded: Sequence[EncodedCall],
) -> _Batch:
    shared = shared_values(config, definition, options, None, datetime.now(UTC))
    ids = [new_id() for _ in encoded]
    shas = [shared.fingerprint(call) for call in encoded]
    rows = InsertTasks(
        task_name=definition.name,
        queue_name=shared.queue_name,
        priority=shared.priority,
        sent_at=shared.sent_at,
        enqueue_at=options.at,
        delay_seconds=options.delay.total_seconds() if options.delay else 0.0,
        good_until=shared.good_until,
        max_retries=shared.max_retries,
        task_options=shared.task_options,
        timeout_ms=shared.timeout_ms,
        retention_seconds=shared.retention_seconds,
        ids="\n".join(ids),
        args="\n".join([call.args_json for call in encoded]),
        kwargs="\n".join([call.kwargs_json for call in encoded]),
        enqueue_shas="\n".join(shas),
    )
    return _Batch(ids, shas, rows)


def _insert_many_script(batch: _Batch) -> Script[Sequence[str]]:
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
