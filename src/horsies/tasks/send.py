"""Sending: insert PENDING rows for valid requests and return handles.

A send has two steps. ``Sender`` checks the request and returns a ``PreparedSend``; ``store_prepared`` and
``store_prepared_async`` run its script through the broker. The scripts contain the rules for conflicts.
No function of this module raises for operational reasons.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from horsies.codec.results import ResultCodec
from horsies.config.app import AppConfig
from horsies.config.tracing import TracingConfig
from horsies.current_task import inherited_headers
from horsies.db.statement import Script, Step
from horsies.db.statements.tasks import (
    DebounceTask,
    InsertTask,
    InsertTasks,
    debounce_task,
    find_idempotent_task,
    find_sent_tasks,
    find_unique_task,
    insert_task,
)
from horsies.encryption import is_keyed
from horsies.errors import HorsiesError
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
from horsies.tasks.options import UNSET, Debounce, SendHook, SendOptions, Unset, option_problem
from horsies.tasks.request import (
    Request,
    SharedValues,
    Stamp,
    TaskSendError,
    TaskSendErrorCode,
    TaskSendResult,
    prepare,
    replay,
    shared_values,
    suppressed,
)
from horsies.tasks.waiters import is_loop_running
from horsies.tracing import Sending, with_carrier

logger = logging.getLogger("horsies.send")
# The tasks whose blocking sends have been logged.
_blocking: set[str] = set()

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Row = TypeVar("Row", InsertTask, InsertTasks)


class Sent(NamedTuple):
    """A record of a finished send: its task and queue, how many tasks it stored or found, and its
    duration.
    """

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
        """Return the application's broker; if it cannot be built, the send fails."""
        try:
            return Ok(self.get_broker())
        except HorsiesError as error:
            code = BrokerErrorCode.ENQUEUE_FAILED
            return Err(BrokerOperationError(code, error.message, exception=error))


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[T_co]):
    """The arguments of one future task, created by ``task.bind(...)`` for ``send_many``."""

    task_name: str
    """The name of the task to send."""
    args: tuple[Any, ...]
    """The positional arguments of the call."""
    kwargs: dict[str, Any]
    """The keyword arguments of the call."""

    def __repr__(self) -> str:
        return f"TaskCall({self.task_name!r}, ...)"


class PreparedSend(NamedTuple):
    """A send that has been checked, and the broker that will store its task."""

    broker: PostgresBroker
    request: Request
    results: ResultCodec
    resend: bool
    transaction: object
    sending: Sending | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a single statement on our own connection can be enough for this send."""
        is_own = self.transaction is None and not self.resend and self.broker.is_direct
        return is_own and self.request.debounce is None

    def script(self) -> Script[str]:
        row, debounce = self.request.row, self.request.debounce
        if debounce is not None:
            return _debounce_script(row, debounce)
        return insert_script(row, self.request.known_shas)

    def end(self, stored: BrokerResult[str]) -> TaskSendResult[TaskHandle[Any]]:
        """Return the handle or the error, and end the send's span."""
        if isinstance(stored, Err):
            error = not_stored(stored.value, self.request, self.transaction)
            if self.sending is not None:
                self.sending.end(error.code.value)
            return Err(error)
        if self.sending is not None:
            self.sending.end()
        return Ok(TaskHandle(stored.value, self.broker, self.results))


def store_prepared(
    sender: Sender, ready: TaskSendResult[PreparedSend]
) -> TaskSendResult[TaskHandle[Any]]:
    """Store the task and return its handle, or the error that ``retry_send`` takes."""
    if isinstance(ready, Err):
        return reported(sender, ready)
    _warn_of_blocked_loop(sender.definition.name)
    prepared, started = ready.value, time.perf_counter()
    broker, row = prepared.broker, prepared.request.row
    stored = broker.insert(insert_task, row) if prepared.is_plain else None
    if stored is None:
        stored = broker.store(prepared.script, prepared.transaction, resend=prepared.resend)
    return reported(sender, prepared.end(stored), prepared.request, started)


async def store_prepared_async(
    sender: Sender, ready: TaskSendResult[PreparedSend]
) -> TaskSendResult[TaskHandle[Any]]:
    """Like ``store_prepared``, but without blocking the event loop."""
    if isinstance(ready, Err):
        return reported(sender, ready)
    prepared, started = ready.value, time.perf_counter()
    broker, row = prepared.broker, prepared.request.row
    stored = await broker.insert_async(insert_task, row) if prepared.is_plain else None
    if stored is None:
        store = broker.store_async
        stored = await store(prepared.script, prepared.transaction, resend=prepared.resend)
    return reported(sender, prepared.end(stored), prepared.request, started)


def _warn_of_blocked_loop(task_name: str) -> None:
    """Log, once per task, that a send blocks the event loop in which it was called."""
    if is_loop_running() and task_name not in _blocking:
        _blocking.add(task_name)
        logger.warning(
            "a send of task %r blocks the running event loop; write `await %s.send_async(...)`",
            *(task_name, task_name.rpartition(".")[2]),
        )


def reported(
    sender: Sender,
    sent: TaskSendResult[T],
    request: Request | None = None,
    started: float | None = None,
) -> TaskSendResult[T]:
    """Log a failed send, because callers may ignore the returned error. The error's message is omitted,
    because it may quote arguments.
    """
    if sender.producer.observers:
        seconds = 0.0 if started is None else time.perf_counter() - started
        observed = _observed(sender, sent, request, seconds)
        for observer in sender.producer.observers:
            observer(observed)
    if isinstance(sent, Err):
        # The caller may commit its own changes without the task.
        level = logging.WARNING if sender.options.transaction is None else logging.ERROR
        name, code = sender.definition.name, sent.err_value.code.value
        logger.log(level, "a send of task %r failed with %s", name, code)
    return sent


def _observed(
    sender: Sender, sent: TaskSendResult[Any], request: Request | None, seconds: float
) -> Sent:
    definition = sender.definition
    if isinstance(sent, Err):  # for example, the task's queue does not exist
        return Sent(definition.name, definition.queue_name, "failed", 1, seconds)
    queue_name = sender.options.queue_name or definition.queue_name
    count = len(sent.ok_value) if isinstance(sent.ok_value, Sequence) else 1
    # With an idempotency key, the handle may belong to an earlier task.
    is_found = request is not None and sent.ok_value.task_id != request.row.id
    result: Literal["stored", "duplicate"] = "duplicate" if is_found else "stored"
    return Sent(definition.name, queue_name, result, count, seconds)


def not_stored(
    error: BrokerOperationError, request: Request | None, transaction: object
) -> TaskSendError:
    mismatch = error.code is BrokerErrorCode.PAYLOAD_MISMATCH
    return TaskSendError(
        TaskSendErrorCode.PAYLOAD_MISMATCH if mismatch else TaskSendErrorCode.ENQUEUE_FAILED,
        error.message,
        error.retryable,
        request.row.id if request else None,
        # A retry needs the payload, and it would store the task outside the caller's transaction.
        request.payload if request and transaction is None else None,
        error.exception,
    )


@dataclass(slots=True)
class Sender:
    """One task with its send options: checks calls and prepares them for the broker."""

    producer: Producer
    definition: TaskDefinition
    options: SendOptions
    _shared: SharedValues | None = field(default=None, init=False, repr=False)

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        delay_seconds: float | Unset = UNSET,
        stamp: Stamp | None = None,
    ) -> TaskSendResult[PreparedSend]:
        """Check one ``send`` or ``schedule`` call. With a stamp, its task is stored at most once."""
        if self.producer.are_sends_suppressed():
            return Err(suppressed())
        config = self.producer.config
        prepared = prepare(
            config,
            self.definition,
            self.options,
            args,
            kwargs,
            delay_seconds=delay_seconds,
            stamp=stamp,
            hooks=self.producer.hooks,
            shared=self._known_values() if delay_seconds is UNSET else None,
        )
        if config.tracing is not None and isinstance(prepared, Ok):
            request, row = prepared.value, prepared.value.row
            size, attributes = len(row.args) + len(row.kwargs), {"messaging.message.id": row.id}
            row, sending = self.traced(config.tracing, row, size, attributes)
            return self._single(Ok(request._replace(row=row)), sending)
        return self._single(prepared)

    def _known_values(self) -> SharedValues | None:
        """Return the values that all sends share, which are computed once; None if there are headers, which
        may change, or invalid options.
        """
        if self.options.headers is not None or inherited_headers():
            return None
        if self._shared is None:
            config = self.producer.config
            if option_problem(config, self.options) is None:
                self._shared = shared_values(config, self.definition, self.options, None)
        return self._shared

    def prepare_retry(
        self, error: TaskSendError, *, scheduled: bool | None
    ) -> TaskSendResult[PreparedSend]:
        """Repeat a failed send with the same id and fingerprint, so that the task is stored at most once."""
        if self.producer.are_sends_suppressed():
            return Err(suppressed())
        config = self.producer.config
        return self._single(replay(config, self.definition, error, scheduled=scheduled))

    def traced(
        self, tracing: TracingConfig, row: Row, size: int, attributes: Mapping[str, str | int]
    ) -> tuple[Row, Sending]:
        """Start a send's span and add its carrier to the row, after the fingerprint was computed."""
        name = self.definition.name
        is_later = row.enqueue_at is not None or row.delay_seconds > 0
        described: dict[str, str | int] = {
            "messaging.destination.name": row.queue_name,
            "messaging.message.body.size": size,
            "horsies.task.name": name,
            **attributes,
        }
        sending = Sending(tracing, f"send {name}", described, is_later=is_later)
        return row._replace(task_options=with_carrier(row.task_options, sending.carrier)), sending

    def _single(
        self, prepared: TaskSendResult[Request], sending: Sending | None = None
    ) -> TaskSendResult[PreparedSend]:
        if isinstance(prepared, Err):
            return prepared
        config, request = self.producer.config, prepared.value
        transaction = self.options.transaction
        match self.producer.broker():
            case Err(error):
                if sending is not None:
                    sending.end(error.code.value)
                return Err(not_stored(error, request, transaction))
            case Ok(broker):
                resend, results = config.resend_on_transient_err, self.definition.results
                return Ok(PreparedSend(broker, request, results, resend, transaction, sending))


def insert_script(row: InsertTask, known_shas: tuple[str, ...] = ()) -> Script[str]:
    """Insert the row; on a conflict, compare its fingerprint with the fingerprint of the stored task."""
    while True:
        inserted = yield insert_task, row
        if inserted:
            return row.id
        # A key that is unique only for a limited time may now belong to a later task, so this task's id is
        # looked up first.
        if row.unique_key is not None and (found := (yield find_sent_tasks([row.id]))):
            return _same_request(row.id, found[0].enqueue_sha, row.enqueue_sha)
        if row.idempotency_sha is not None:
            holders = yield _find_holder(row)
            if holders:
                return _same_request(holders[0].id, holders[0].idempotency_sha, *known_shas)
        found = yield find_sent_tasks([row.id])
        if found:
            return _same_request(row.id, found[0].enqueue_sha, row.enqueue_sha)
        if row.idempotency_sha is None:
            logger.warning("task %s was stored earlier and has been deleted since", row.id)
            return row.id
        # The task with the same key has since ended or been deleted; this send has not stored a task yet.


def _debounce_script(row: InsertTask, debounce: Debounce) -> Script[str]:
    """Insert the row, or replace the arguments of the waiting task that has the same idempotency key."""
    values = DebounceTask.of(row, debounce.at_most.total_seconds())
    (stored,) = yield debounce_task, values
    if stored.id is None:
        raise PayloadMismatchError(
            f"A task {row.task_name!r} with this idempotency key waits on another queue or with another key, "
            "or was sent without debounce; use a new idempotency key."
        )
    return str(stored.id)


def _find_holder(row: InsertTask) -> Step:
    if row.unique_key is not None:
        return find_unique_task(row.task_name, row.unique_key)
    assert row.idempotency_key is not None
    return find_idempotent_task(row.task_name, row.idempotency_key)


def _same_request(task_id: str, stored_sha: str | None, *known_shas: str) -> str:
    if stored_sha in known_shas:
        return task_id
    if is_keyed(stored_sha):
        raise PayloadMismatchError(
            f"Task {task_id} already exists with a different request, or was sent with a key of the codec "
            "that this process does not have; use a new idempotency key, or add that key."
        )
    raise PayloadMismatchError(
        f"Task {task_id} already exists with a different request; use a new idempotency key for it."
    )
