"""Requests: turn a call into the row to insert, or refuse it with one sentence.

This is the pure half of a send: check the options and arguments, encode the call, compute the
fingerprint. Without I/O, ``send`` and ``send_async`` share all of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias, TypeVar

from horsies.codec.calls import EncodedCall, payload_bytes
from horsies.codec.canonical import canonical
from horsies.config.app import AppConfig, PayloadConfig
from horsies.database_url import mask_url
from horsies.db.statements.tasks import InsertTask
from horsies.ids import new_id
from horsies.result import Err, Ok, Result
from horsies.task_result import exception_text
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.headers import headers_problem, merged
from horsies.tasks.options import (
    UNSET,
    OutgoingTask,
    SendHook,
    SendOptions,
    Uniqueness,
    Unset,
    encode_options,
    option_problem,
    retention_seconds,
    shown_name,
    with_overrides,
)

logger = logging.getLogger("horsies.send")

T = TypeVar("T")


class TaskSendErrorCode(StrEnum):
    """Why a send did not store a task."""

    SEND_SUPPRESSED = "SEND_SUPPRESSED"
    VALIDATION_FAILED = "VALIDATION_FAILED"
    ENQUEUE_FAILED = "ENQUEUE_FAILED"
    PAYLOAD_MISMATCH = "PAYLOAD_MISMATCH"
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"


@dataclass(frozen=True, slots=True)
class TaskSendPayload:
    """Everything needed to send the same request again; arguments stay out of its repr."""

    task_name: str
    queue_name: str
    priority: int
    args_json: str = field(repr=False)
    kwargs_json: str = field(repr=False)
    sent_at: datetime
    good_until: datetime | None
    enqueue_delay_seconds: float | None
    task_options: str
    enqueue_sha: str
    idempotency_key: str | None = None
    unique: Uniqueness = "forever"
    enqueue_at: datetime | None = None
    delay: timedelta | None = None
    max_retries: int = 0
    timeout_ms: int | None = None
    retention_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TaskSendError:
    """A send that stored nothing, or whose COMMIT is in doubt (``retryable``: use ``retry_send``)."""

    code: TaskSendErrorCode
    message: str
    retryable: bool = False
    task_id: str | None = None
    payload: TaskSendPayload | None = field(default=None, repr=False)
    exception: BaseException | None = field(default=None, repr=False)


TaskSendResult: TypeAlias = Result[T, TaskSendError]


class Stamp(NamedTuple):
    """The id and the time of a request: an equal stamp makes an equal row and fingerprint."""

    task_id: str
    sent_at: datetime


class Request(NamedTuple):
    """A valid request to store one task: the row to insert, and the payload for a retry."""

    row: InsertTask
    payload: TaskSendPayload


def prepare(
    config: AppConfig,
    definition: TaskDefinition,
    options: SendOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    delay_seconds: float | Unset = UNSET,
    stamp: Stamp | None = None,
    hooks: Sequence[SendHook] = (),
) -> TaskSendResult[Request]:
    """Check and encode one call; a missing stamp means a new id and the current time."""
    if problem := option_problem(config, options, delay_seconds):
        return Err(refused(definition, problem))
    encoded = encode(config.payload, definition, args, kwargs)
    if isinstance(encoded, Err):
        return encoded
    call = encoded.value
    if hooks:
        hooked = run_hooks(hooks, config, definition, options, 1)
        if isinstance(hooked, Err):
            return hooked
        options = hooked.value
    delay = None if isinstance(delay_seconds, Unset) else delay_seconds
    stamp = stamp or Stamp(new_id(), datetime.now(UTC))
    shared = shared_values(config, definition, options, delay, stamp.sent_at)
    payload = TaskSendPayload(
        task_name=definition.name,
        queue_name=shared.queue_name,
        priority=shared.priority,
        args_json=call.args_json,
        kwargs_json=call.kwargs_json,
        sent_at=shared.sent_at,
        good_until=shared.good_until,
        enqueue_delay_seconds=delay,
        task_options=shared.task_options,
        enqueue_sha=shared.fingerprint(call),
        idempotency_key=options.idempotency_key,
        unique=options.unique,
        enqueue_at=options.at,
        delay=options.delay,
        max_retries=shared.max_retries,
        timeout_ms=shared.timeout_ms,
        retention_seconds=shared.retention_seconds,
    )
    return Ok(_request(stamp.task_id, payload))


def run_hooks(
    hooks: Sequence[SendHook],
    config: AppConfig,
    definition: TaskDefinition,
    options: SendOptions,
    count: int,
) -> TaskSendResult[SendOptions]:
    """Call the ``on_send`` hooks and return the options with their headers."""
    queue_name = with_overrides(config, definition, options).queue_name
    headers = dict(merged(options.headers))
    outgoing = OutgoingTask(definition.name, queue_name, options, headers, count)
    for hook in hooks:
        try:
            hook(outgoing)
        except Exception as error:  # the application's code may raise anything
            name = getattr(hook, "__name__", type(hook).__name__)
            first_line = next(iter(mask_url(exception_text(error)).strip().splitlines()), "")
            reason = f"{type(error).__name__}: {first_line}".rstrip(": ")
            problem = refused(definition, f"the on_send hook {name!r} raised {reason}")
            return Err(replace(problem, exception=error))
    if problem_text := headers_problem(outgoing.headers):
        return Err(refused(definition, problem_text))
    return Ok(replace(options, headers=outgoing.headers))


def encode(
    limits: PayloadConfig,
    definition: TaskDefinition,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> TaskSendResult[EncodedCall]:
    """Encode the arguments of one call and check their size."""
    encoded = definition.signature.encode_call(args, kwargs)
    if isinstance(encoded, Err):
        return Err(refused(definition, encoded.value.message))
    if problem := size_problem(limits, definition.name, encoded.value):
        return Err(TaskSendError(TaskSendErrorCode.PAYLOAD_TOO_LARGE, problem))
    return encoded


def _request(task_id: str, payload: TaskSendPayload) -> Request:
    key, delay = payload.idempotency_key, payload.delay
    is_forever = payload.unique == "forever"
    row = InsertTask(
        id=task_id,
        task_name=payload.task_name,
        queue_name=payload.queue_name,
        priority=payload.priority,
        args=payload.args_json,
        kwargs=payload.kwargs_json,
        sent_at=payload.sent_at,
        enqueue_at=payload.enqueue_at,
        delay_seconds=delay.total_seconds() if delay else payload.enqueue_delay_seconds or 0.0,
        good_until=payload.good_until,
        max_retries=payload.max_retries,
        task_options=payload.task_options,
        timeout_ms=payload.timeout_ms,
        retention_seconds=payload.retention_seconds,
        enqueue_sha=payload.enqueue_sha,
        idempotency_key=key if is_forever else None,
        idempotency_sha=_idempotency_sha(payload) if key is not None else None,
        unique_key=None if is_forever else key,
        unique_while=None if is_forever else payload.unique.removeprefix("while_"),
    )
    return Request(row, payload)


class SharedValues(NamedTuple):
    """The values shared by all rows of one send or send_many."""

    queue_name: str
    priority: int
    sent_at: datetime
    good_until: datetime | None
    max_retries: int
    task_options: str
    timeout_ms: int | None
    retention_seconds: float | None
    hasher: Any

    def fingerprint(self, call: EncodedCall) -> str:
        """Return the digest of one row: the shared values, then its arguments."""
        hasher = self.hasher.copy()
        hasher.update(f"{call.args_json}\0{call.kwargs_json}".encode())
        digest: str = hasher.hexdigest()
        return digest


def shared_values(
    config: AppConfig,
    definition: TaskDefinition,
    options: SendOptions,
    delay_seconds: float | None,
    sent_at: datetime,
) -> SharedValues:
    """Compute the shared part of the rows and the shared prefix of their fingerprints."""
    definition = with_overrides(config, definition, options)
    good_until = None if isinstance(options.good_until, Unset) else options.good_until
    priority = definition.priority if options.priority is None else options.priority
    task_options = encode_options(definition, good_until, merged(options.headers))
    retention = retention_seconds(config, definition.queue_name, options)
    parts = (
        definition.name,
        definition.queue_name,
        str(priority),
        sent_at.isoformat(),
        _utc_text(good_until),
        "" if delay_seconds is None else repr(float(delay_seconds)),
        task_options,
        f"{_utc_text(options.at)} {options.delay} {definition.timeout_ms} {retention} {options.unique}",
        "",
    )
    return SharedValues(
        definition.queue_name,
        priority,
        sent_at,
        good_until,
        max_retries(definition),
        task_options,
        definition.timeout_ms,
        retention,
        hashlib.sha256("\0".join(parts).encode()),
    )


def _utc_text(timestamp: datetime | None) -> str:
    return "" if timestamp is None else timestamp.astimezone(UTC).isoformat()


def max_retries(definition: TaskDefinition) -> int:
    return definition.retry_policy.max_retries if definition.retry_policy else 0


def _idempotency_sha(payload: TaskSendPayload) -> str:
    """Fingerprint the request without its times and headers: a repeat may come later, from another
    caller, and with dicts in another order.
    """
    parts = (
        payload.task_name,
        payload.queue_name,
        str(payload.priority),
        canonical(payload.args_json),
        canonical(payload.kwargs_json),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def size_problem(limits: PayloadConfig, task_name: str, call: EncodedCall) -> str | None:
    """Describe arguments that are too large, or return None; log a warning for large ones."""
    if 4 * (len(call.args_json) + len(call.kwargs_json)) <= limits.warn_bytes:
        return None  # UTF-8 has at most four bytes for a character
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


def replay(
    definition: TaskDefinition, error: TaskSendError, *, scheduled: bool | None
) -> TaskSendResult[Request]:
    """Rebuild the request of a failed send with the same id and fingerprint.

    ``scheduled`` tells whether it must have been a schedule; None takes both.
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
        return Ok(_request(error.task_id, payload))
    return Err(refused(definition, problem))
