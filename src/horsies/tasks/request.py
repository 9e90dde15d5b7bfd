"""Requests: turn a call into the row to insert, or reject it with one sentence.

This module is the part of a send without I/O: it checks the options and arguments, encodes the call and
computes the fingerprint. ``send`` and ``send_async`` share this code.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias, TypeVar

from horsies.codec.calls import EncodedCall, payload_bytes
from horsies.codec.canonical import canonical
from horsies.config.app import AppConfig, PayloadConfig
from horsies.database_url import mask_url
from horsies.db.statements.tasks import InsertTask
from horsies.encryption import CodecFailed, Digests
from horsies.ids import new_id
from horsies.result import Err, Ok, Result
from horsies.task_result import exception_text
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.keys import CallKey, lane_of
from horsies.tasks.options import (
    NO_OPTIONS,
    UNSET,
    Debounce,
    OutgoingTask,
    SendHook,
    SendOptions,
    Uniqueness,
    Unset,
    encode_options,
    headers_problem,
    option_problem,
    retention_seconds,
    shown_name,
    with_inherited,
    with_overrides,
)

logger = logging.getLogger("horsies.send")

T = TypeVar("T")


class TaskSendErrorCode(StrEnum):
    """The reasons for which a send stores no task."""

    SEND_SUPPRESSED = "SEND_SUPPRESSED"
    """Sends are suppressed, during the import of task modules or by ``app.suppress_sends()``."""
    VALIDATION_FAILED = "VALIDATION_FAILED"
    """The call, a value or an option cannot be stored as it was passed."""
    ENQUEUE_FAILED = "ENQUEUE_FAILED"
    """The database did not store the row, or its confirmation was lost."""
    PAYLOAD_MISMATCH = "PAYLOAD_MISMATCH"
    """The idempotency key belongs to a different request."""
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    """The arguments are larger than ``payload.reject_bytes``."""


@dataclass(frozen=True, slots=True)
class TaskSendPayload:
    """Everything needed to send the same request again; its repr omits the arguments."""

    task_name: str
    """The name of the task."""
    queue_name: str
    """The queue in which the task is stored."""
    priority: int
    """The task's priority within the queue."""
    args_json: str = field(repr=False)
    """The positional arguments, encoded."""
    kwargs_json: str = field(repr=False)
    """The keyword arguments, encoded."""
    sent_at: datetime
    """When the task was first sent."""
    good_until: datetime | None
    """The time by which the task must start."""
    enqueue_delay_seconds: float | None
    """The delay passed to ``schedule``."""
    task_options: str
    """The options stored with the task, encoded."""
    enqueue_sha: str
    """The fingerprint that recognises a repeated request."""
    idempotency_key: str | None = None
    """The idempotency key, if one was given."""
    unique: Uniqueness = "forever"
    """How long the idempotency key stays in use."""
    enqueue_at: datetime | None = None
    """The option ``at``."""
    delay: timedelta | None = None
    """The option ``delay``."""
    max_retries: int = 0
    """How many retries the policy allows."""
    timeout_ms: int | None = None
    """The time limit of each attempt."""
    retention_seconds: float | None = None
    """How long the task's row is kept after the task has ended."""
    debounce: Debounce | None = None
    """The option ``debounce``."""
    key: str | None = None
    """The task's key, by which limits and the turns of keys count the task."""


@dataclass(frozen=True, slots=True)
class TaskSendError:
    """A send that stored nothing, or whose COMMIT is in doubt (``retryable``: use ``retry_send``)."""

    code: TaskSendErrorCode
    """The reason why the task was not stored, or why it is in doubt whether the task was stored."""
    message: str
    """A sentence with the position of the fault and the fix."""
    retryable: bool = False
    """Whether ``retry_send`` may repeat the request."""
    task_id: str | None = None
    """The id of the task, if it may have been stored."""
    payload: TaskSendPayload | None = field(default=None, repr=False)
    """The request to pass to ``retry_send``; None for a send inside your own transaction."""
    exception: BaseException | None = field(default=None, repr=False)
    """The exception behind the error, if there is one."""


TaskSendResult: TypeAlias = Result[T, TaskSendError]
"""The result of a send: ``Ok`` with a handle, or ``Err`` with a ``TaskSendError``."""


class Stamp(NamedTuple):
    """A request's id and time. Requests with equal stamps have equal rows and fingerprints."""

    task_id: str
    sent_at: datetime


class Request(NamedTuple):
    """A valid request to store one task: the row to insert, and the delay that the caller passed."""

    row: InsertTask
    delay: timedelta | None
    enqueue_delay_seconds: float | None
    debounce: Debounce | None = None
    # Return all digests that an equal request with this idempotency key may have in the database.
    known_shas: tuple[str, ...] = ()

    @property
    def payload(self) -> TaskSendPayload:
        """Return the request in the form that the error of a failed send contains."""
        row = self.row
        return TaskSendPayload(
            **{name: getattr(row, name) for name in _SHARED_COLUMNS},
            args_json=row.args,
            kwargs_json=row.kwargs,
            enqueue_delay_seconds=self.enqueue_delay_seconds,
            idempotency_key=row.idempotency_key or row.unique_key,
            unique=_UNIQUENESS[row.unique_while],
            delay=self.delay,
            debounce=self.debounce,
            key=row.lane_key,
        )


# The columns that the payload of a failed send contains unchanged.
_SHARED_COLUMNS = (
    *("task_name", "queue_name", "priority", "sent_at", "enqueue_at", "good_until", "max_retries"),
    *("task_options", "timeout_ms", "retention_seconds", "enqueue_sha"),
)
# By the value of the column unique_while.
_UNIQUENESS: Mapping[str | None, Uniqueness] = {
    None: "forever",
    "waiting": "while_waiting",
    "open": "while_open",
}


def prepare(
    config: AppConfig,
    definition: TaskDefinition,
    options: SendOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    delay_seconds: float | Unset = UNSET,
    stamp: Stamp | None = None,
    hooks: Sequence[SendHook] = (),
    shared: SharedValues | None = None,
) -> TaskSendResult[Request]:
    """Check and encode one call. Without a stamp, it gets a new id and the current time.

    ``shared`` contains the values of checked options, if the sender has already computed them.
    """
    if shared is None and (problem := option_problem(config, options, delay_seconds)):
        return Err(refused(definition, problem))
    encoded = encode(config.payload, definition, args, kwargs)
    if isinstance(encoded, Err):
        return encoded
    key, problem = call_key(config, definition, options, args, kwargs)
    if key is not None and delay_seconds is not UNSET:
        problem = fifo_problem(config, options.queue_name or definition.queue_name, "schedule")
    if problem is not None:
        return Err(refused(definition, problem))
    if hooks:
        hooked = run_hooks(hooks, config, definition, options, 1)
        if isinstance(hooked, Err):
            return hooked
        options, shared = hooked.value, None
    delay = None if isinstance(delay_seconds, Unset) else delay_seconds
    task_id, sent_at = stamp or Stamp(new_id(), datetime.now(UTC))
    shared = shared or shared_values(config, definition, options, delay)
    try:
        shas = _idempotency_shas(
            options.idempotency_key, definition.name, shared, encoded.value, shared.digests
        )
        row = _row(task_id, definition.name, options, shared, sent_at, encoded.value, delay, shas)
    except CodecFailed as failed:
        return Err(not_encrypted(failed))
    if key is not None:
        lane = lane_of(row.queue_name, key)
        row = row._replace(lane_key=lane.key, lane=lane.number)
    return Ok(Request(row, options.delay, delay, options.debounce, shas))


_NO_KEY = CallKey()


def call_key(
    config: AppConfig,
    definition: TaskDefinition,
    options: SendOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> CallKey:
    """Return the key of a call: the key passed to the send or, without it, the key of the task."""
    if isinstance(options.key, Unset):
        found = _NO_KEY if definition.key is None else definition.key.of_call(args, kwargs)
    else:
        found = CallKey(options.key)
    if found.key is not None and options is not NO_OPTIONS:
        name = next((name for name in _UNORDERED if getattr(options, name) is not None), None)
        if name is not None:
            queue_name = options.queue_name or definition.queue_name
            found = found._replace(problem=fifo_problem(config, queue_name, name))
    return found


# The options that change the order in which tasks run.
_UNORDERED = ("priority", "at", "delay", "debounce")


def fifo_problem(config: AppConfig, queue_name: str, option: str) -> str | None:
    """Return the reason why a send with a key cannot set its position in this queue, or None."""
    for queue in config.queues():
        if queue.name == queue_name and queue.per_key and queue.per_key.order == "fifo":
            return (
                f"queue {queue_name!r} runs the tasks of a key in the order of their sends; "
                f"leave {option} out"
            )
    return None


def _row(
    task_id: str,
    task_name: str,
    options: SendOptions,
    shared: SharedValues,
    sent_at: datetime,
    call: EncodedCall,
    delay_seconds: float | None,
    shas: tuple[str, ...],
) -> InsertTask:
    key, debounce = options.idempotency_key, options.debounce
    unique: Uniqueness = options.unique if debounce is None else "while_waiting"
    is_forever, delay = unique == "forever", debounce.quiet if debounce else options.delay
    return InsertTask(
        task_id,
        task_name,
        shared.queue_name,
        shared.priority,
        call.args_json,
        call.kwargs_json,
        sent_at,
        options.at,
        delay.total_seconds() if delay else delay_seconds or 0.0,
        shared.good_until,
        shared.max_retries,
        shared.task_options,
        shared.timeout_ms,
        shared.retention_seconds,
        shared.fingerprint(sent_at, call),
        key if is_forever else None,
        shas[0] if shas else None,
        None if is_forever else key,
        None if is_forever else unique.removeprefix("while_"),
    )


def run_hooks(
    hooks: Sequence[SendHook],
    config: AppConfig,
    definition: TaskDefinition,
    options: SendOptions,
    count: int,
) -> TaskSendResult[SendOptions]:
    """Call the ``on_send`` hooks and return the options with the headers that the hooks have set."""
    queue_name = with_overrides(config, definition, options).queue_name
    headers = dict(with_inherited(options.headers))
    outgoing = OutgoingTask(definition.name, queue_name, options, headers, count)
    for hook in hooks:
        try:
            _refuse_coroutine(hook(outgoing))
        except Exception as error:  # the application's code may raise any exception
            name = getattr(hook, "__name__", type(hook).__name__)
            first_line = next(iter(mask_url(exception_text(error)).strip().splitlines()), "")
            reason = f"{type(error).__name__}: {first_line}".rstrip(": ")
            problem = refused(definition, f"the on_send hook {name!r} raised {reason}")
            return Err(replace(problem, exception=error))
    if problem_text := headers_problem(outgoing.headers):
        return Err(refused(definition, problem_text))
    return Ok(replace(options, headers=outgoing.headers))


def _refuse_coroutine(returned: object) -> None:
    if inspect.iscoroutine(returned):
        returned.close()
        raise TypeError("it returned a coroutine, which synchronous sends cannot await")


def encode(
    limits: PayloadConfig,
    definition: TaskDefinition,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> TaskSendResult[EncodedCall]:
    """Encode one call's arguments and check their size."""
    encoded = definition.signature.encode_call(args, kwargs)
    if isinstance(encoded, Err):
        return Err(refused(definition, encoded.value.message))
    if problem := size_problem(limits, definition.name, encoded.value):
        return Err(TaskSendError(TaskSendErrorCode.PAYLOAD_TOO_LARGE, problem))
    return encoded


def _replayed(task_id: str, payload: TaskSendPayload, digests: Digests) -> Request:
    key, debounce = payload.idempotency_key, payload.debounce
    delay = payload.delay if debounce is None else debounce.quiet
    is_forever = payload.unique == "forever"
    call = EncodedCall(payload.args_json, payload.kwargs_json)
    shas = _idempotency_shas(key, payload.task_name, payload, call, digests)
    row = InsertTask(
        **{name: getattr(payload, name) for name in _SHARED_COLUMNS},
        id=task_id,
        args=payload.args_json,
        kwargs=payload.kwargs_json,
        delay_seconds=delay.total_seconds() if delay else payload.enqueue_delay_seconds or 0.0,
        idempotency_key=key if is_forever else None,
        idempotency_sha=shas[0] if shas else None,
        unique_key=None if is_forever else key,
        unique_while=None if is_forever else payload.unique.removeprefix("while_"),
        lane_key=payload.key,
        lane=None if payload.key is None else lane_of(payload.queue_name, payload.key).number,
    )
    return Request(row, payload.delay, payload.enqueue_delay_seconds, debounce, shas)


class SharedValues(NamedTuple):
    """The values that all rows of one send or ``send_many`` share."""

    queue_name: str
    priority: int
    good_until: datetime | None
    max_retries: int
    task_options: str
    timeout_ms: int | None
    retention_seconds: float | None
    digest: str
    digests: Digests

    def fingerprint(self, sent_at: datetime, call: EncodedCall) -> str:
        """Return the digest of one row: of the shared values, the row's time and its arguments."""
        text = f"{self.digest}{sent_at.isoformat()}\0{call.args_json}\0{call.kwargs_json}"
        return self.digests.of(text.encode())

    def fingerprints(self, sent_at: datetime, calls: Iterable[EncodedCall]) -> list[str]:
        """Return the digests of rows that are sent at the same time."""
        head = f"{self.digest}{sent_at.isoformat()}\0"
        return self.digests.of_each(f"{head}{args}\0{kwargs}".encode() for args, kwargs, _ in calls)


def shared_values(
    config: AppConfig,
    definition: TaskDefinition,
    options: SendOptions,
    delay_seconds: float | None,
) -> SharedValues:
    """Compute the values that the rows and their fingerprints share."""
    definition = with_overrides(config, definition, options)
    good_until = None if isinstance(options.good_until, Unset) else options.good_until
    priority = definition.priority if options.priority is None else options.priority
    task_options = encode_options(definition, good_until, with_inherited(options.headers))
    retention = retention_seconds(config, definition.queue_name, options)
    parts = (
        definition.name,
        definition.queue_name,
        str(priority),
        _utc_text(good_until),
        "" if delay_seconds is None else repr(float(delay_seconds)),
        task_options,
        f"{_utc_text(options.at)} {options.delay} {definition.timeout_ms} {retention} {options.unique}",
        *([options.key] if isinstance(options.key, str) else []),
    )
    return SharedValues(
        definition.queue_name,
        priority,
        good_until,
        max_retries(definition),
        task_options,
        definition.timeout_ms,
        retention,
        hashlib.sha256("\0".join(parts).encode()).hexdigest(),
        Digests(config.broker.codec),
    )


def _utc_text(timestamp: datetime | None) -> str:
    return "" if timestamp is None else timestamp.astimezone(UTC).isoformat()


def max_retries(definition: TaskDefinition) -> int:
    return definition.retry_policy.max_retries if definition.retry_policy else 0


def _idempotency_shas(
    key: str | None,
    task_name: str,
    line: SharedValues | TaskSendPayload,
    call: EncodedCall,
    digests: Digests,
) -> tuple[str, ...]:
    """Return the digests of the request without its times and headers.

    Times, headers and the order of dictionaries do not count, because a repeated request may be sent later
    and by another caller. The first digest is stored; without an idempotency key no digests are returned.
    """
    if key is None:
        return ()
    parts = (
        task_name,
        line.queue_name,
        str(line.priority),
        canonical(call.args_json),
        canonical(call.kwargs_json),
    )
    return digests.known("\0".join(parts).encode())


def size_problem(limits: PayloadConfig, task_name: str, call: EncodedCall) -> str | None:
    """Describe arguments that are too large, or return None; log a warning for large arguments."""
    if 4 * (len(call.args_json) + len(call.kwargs_json)) <= limits.warn_bytes:
        return None  # UTF-8 uses at most four bytes per character
    size = payload_bytes(call.args_json) + payload_bytes(call.kwargs_json)
    if limits.reject_bytes is not None and size > limits.reject_bytes:
        return (
            f"The arguments of task {task_name!r} are {size:,} bytes, more than payload.reject_bytes "
            f"({limits.reject_bytes:,}); store the data and send a reference to it."
        )
    if size > limits.warn_bytes:
        logger.warning("arguments of task %r are large: %s bytes", task_name, f"{size:,}")
    return None


def suppressed() -> TaskSendError:
    return TaskSendError(
        TaskSendErrorCode.SEND_SUPPRESSED,
        "Sends are suppressed while task modules are imported; send from a function, not at import time.",
    )


def refused(definition: TaskDefinition, problem: str) -> TaskSendError:
    message = f"Task {shown_name(definition.name)} was not sent: {problem.rstrip('.')}."
    return TaskSendError(TaskSendErrorCode.VALIDATION_FAILED, message)


def not_encrypted(failed: CodecFailed) -> TaskSendError:
    return TaskSendError(TaskSendErrorCode.ENQUEUE_FAILED, str(failed), exception=failed.__cause__)


def replay(
    config: AppConfig, definition: TaskDefinition, error: TaskSendError, *, scheduled: bool | None
) -> TaskSendResult[Request]:
    """Rebuild the request of a failed send with the same id and fingerprint.

    If ``scheduled`` is True, the failed call must have been a ``schedule``; if False, a ``send``; None
    accepts both.
    """
    if not isinstance(error, TaskSendError):
        problem = "only the TaskSendError of a failed send can be retried"
    elif error.code is not TaskSendErrorCode.ENQUEUE_FAILED:
        problem = f"only ENQUEUE_FAILED can be retried, not {error.code.value}"
    elif (payload := error.payload) is None or error.task_id is None:
        problem = (
            "the error carries no payload to send again; a failed send inside a transaction is "
            "repeated with that transaction"
        )
    elif payload.task_name != definition.name:
        problem = f"the error belongs to task {payload.task_name!r}"
    elif scheduled and payload.enqueue_delay_seconds is None:
        problem = "the failed send had no delay; use retry_send"
    elif scheduled is False and payload.enqueue_delay_seconds is not None:
        problem = "the failed send was delayed; use retry_schedule"
    else:
        try:
            return Ok(_replayed(error.task_id, payload, Digests(config.broker.codec)))
        except CodecFailed as failed:
            return Err(not_encrypted(failed))
    return Err(refused(definition, problem))
