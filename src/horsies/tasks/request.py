"""Requests: turn a call into the row to insert, or refuse it with one sentence.

This is the pure half of a send: check the options and arguments, encode the call, compute the
fingerprint. Without I/O, ``send`` and ``send_async`` share all of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from horsies.codec.calls import EncodedCall, payload_bytes
from horsies.codec.canonical import canonical
from horsies.config.app import PayloadConfig
from horsies.db.statements.tasks import InsertTask
from horsies.ids import new_id
from horsies.result import Err, Ok, Result
from horsies.tasks.definition import TaskDefinition

logger = logging.getLogger("horsies.send")

T = TypeVar("T")

DELAY_SECONDS_MAX = 100 * 366 * 86_400
KEY_LENGTH_MAX = 255

_NO_OPTIONS = '{"retry_policy":null,"good_until":null}'


class Unset(Enum):
    """Marks an omitted option where None is a value."""

    UNSET = "UNSET"


UNSET: Final = Unset.UNSET


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


@dataclass(frozen=True, slots=True)
class SendOptions:
    """The options of one send; see ``TaskFunction.with_options``."""

    good_until: datetime | Unset | None = UNSET
    idempotency_key: str | None = None
    priority: int | None = None
    transaction: object = field(default=None, repr=False)


class Stamp(NamedTuple):
    """The id and the time of a request: an equal stamp makes an equal row and fingerprint."""

    task_id: str
    sent_at: datetime


class Request(NamedTuple):
    """A valid request to store one task: the row to insert, and the payload for a retry."""

    row: InsertTask
    payload: TaskSendPayload


def prepare(
    limits: PayloadConfig,
    definition: TaskDefinition,
    options: SendOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    delay_seconds: float | Unset,
    stamp: Stamp | None = None,
) -> TaskSendResult[Request]:
    """Check and encode one call; a missing stamp means a new id and the current time."""
    if problem := option_problem(options, delay_seconds):
        return Err(refused(definition, problem))
    encoded = encode(limits, definition, args, kwargs)
    if isinstance(encoded, Err):
        return encoded
    call = encoded.value
    delay = None if isinstance(delay_seconds, Unset) else delay_seconds
    stamp = stamp or Stamp(new_id(), datetime.now(UTC))
    shared = shared_values(definition, options, delay, stamp.sent_at)
    payload = TaskSendPayload(
        task_name=definition.name,
        queue_name=definition.queue_name,
        priority=shared.priority,
        args_json=call.args_json,
        kwargs_json=call.kwargs_json,
        sent_at=shared.sent_at,
        good_until=shared.good_until,
        enqueue_delay_seconds=delay,
        task_options=shared.task_options,
        enqueue_sha=shared.fingerprint(call),
        idempotency_key=options.idempotency_key,
    )
    return Ok(_request(definition, stamp.task_id, payload))


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


def _request(definition: TaskDefinition, task_id: str, payload: TaskSendPayload) -> Request:
    key = payload.idempotency_key
    row = InsertTask(
        id=task_id,
        task_name=payload.task_name,
        queue_name=payload.queue_name,
        priority=payload.priority,
        args=payload.args_json,
        kwargs=payload.kwargs_json,
        sent_at=payload.sent_at,
        delay_seconds=payload.enqueue_delay_seconds or 0.0,
        good_until=payload.good_until,
        max_retries=max_retries(definition),
        task_options=payload.task_options,
        timeout_ms=definition.timeout_ms,
        enqueue_sha=payload.enqueue_sha,
        idempotency_key=key,
        idempotency_sha=_idempotency_sha(payload) if key is not None else None,
    )
    return Request(row, payload)


class SharedValues(NamedTuple):
    """The values shared by all rows of one send or send_many."""

    priority: int
    sent_at: datetime
    good_until: datetime | None
    task_options: str
    hasher: Any

    def fingerprint(self, call: EncodedCall) -> str:
        """Return the digest of one row: the shared values, then its arguments."""
        hasher = self.hasher.copy()
        hasher.update(f"{call.args_json}\0{call.kwargs_json}".encode())
        digest: str = hasher.hexdigest()
        return digest


def shared_values(
    definition: TaskDefinition,
    options: SendOptions,
    delay_seconds: float | None,
    sent_at: datetime,
) -> SharedValues:
    """Compute the shared part of the rows and the shared prefix of their fingerprints."""
    good_until = None if isinstance(options.good_until, Unset) else options.good_until
    priority = definition.priority if options.priority is None else options.priority
    task_options = encode_options(definition, good_until)
    parts = (
        definition.name,
        definition.queue_name,
        str(priority),
        sent_at.isoformat(),
        good_until.astimezone(UTC).isoformat() if good_until else "",
        "" if delay_seconds is None else repr(float(delay_seconds)),
        task_options,
        "",
    )
    hasher = hashlib.sha256("\0".join(parts).encode())
    return SharedValues(priority, sent_at, good_until, task_options, hasher)


def encode_options(definition: TaskDefinition, good_until: datetime | None) -> str:
    """Return the options stored with the row: they alone drive its retries, even after a deploy."""
    policy = definition.retry_policy
    if policy is None and good_until is None:
        return _NO_OPTIONS
    return json.dumps(
        {
            "retry_policy": policy.to_json() if policy else None,
            "good_until": good_until.isoformat() if good_until else None,
        },
        separators=(",", ":"),
    )


def max_retries(definition: TaskDefinition) -> int:
    return definition.retry_policy.max_retries if definition.retry_policy else 0


def _idempotency_sha(payload: TaskSendPayload) -> str:
    """Fingerprint the request without its time: a repeat may come later, and with dicts in
    another order.
    """
    parts = (
        payload.task_name,
        payload.queue_name,
        str(payload.priority),
        canonical(payload.args_json),
        canonical(payload.kwargs_json),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def option_problem(options: SendOptions, delay_seconds: float | Unset = UNSET) -> str | None:
    """Describe an invalid option in one sentence, or return None."""
    good_until, key, priority = options.good_until, options.idempotency_key, options.priority
    if not isinstance(good_until, Unset | None) and (problem := timestamp_problem(good_until)):
        return f"good_until {problem}"
    if priority is not None and (type(priority) is not int or not 1 <= priority <= 100):
        return "priority must be a whole number from 1 (first) to 100 (last)"
    if key is not None and not is_key(key):
        return f"idempotency_key must be a text of 1 to {KEY_LENGTH_MAX} characters"
    if not isinstance(delay_seconds, Unset) and not is_delay(delay_seconds):
        return "delay_seconds must be a number of seconds from 0 to 100 years"
    return None


def timestamp_problem(timestamp: object) -> str | None:
    """Return why a value cannot be stored as a point in time, or None."""
    if not isinstance(timestamp, datetime):
        return "is not a datetime"
    try:
        if timestamp.utcoffset() is None:
            return "has no time zone; write datetime(..., tzinfo=UTC) or call .astimezone()"
        timestamp.astimezone(UTC)
    except (OverflowError, ValueError):
        return "cannot be written in UTC; give a date between the years 1 and 9999"
    return None


def is_key(key: object) -> bool:
    """Check that PostgreSQL can store the value as a caller's key."""
    if not isinstance(key, str) or not 1 <= len(key) <= KEY_LENGTH_MAX or "\0" in key:
        return False
    return key.isprintable() or not any(0xD800 <= ord(character) <= 0xDFFF for character in key)


def is_delay(delay_seconds: object) -> bool:
    if isinstance(delay_seconds, bool) or not isinstance(delay_seconds, int | float):
        return False
    return 0 <= delay_seconds <= DELAY_SECONDS_MAX


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
    message = f"Task {definition.name!r} was not sent: {problem.rstrip('.')}."
    return TaskSendError(TaskSendErrorCode.VALIDATION_FAILED, message)


def replay(
    definition: TaskDefinition, error: TaskSendError, *, scheduled: bool
) -> TaskSendResult[Request]:
    """Rebuild the request of a failed send with the same id and fingerprint."""
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
    elif not scheduled and payload.enqueue_delay_seconds is not None:
        problem = "the failed send was delayed; use retry_schedule"
    else:
        return Ok(_request(definition, error.task_id, payload))
    return Err(refused(definition, problem))
