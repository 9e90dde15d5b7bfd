"""Requests: a call becomes the row to insert, or one sentence saying why it cannot.

The first, pure half of a send: options and arguments are checked, the call is encoded, the
fingerprint taken. No I/O, so both faces of ``send.py`` share all of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum
from typing import Any, Final, TypeAlias, TypeVar

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
    """Marks an option that was not given, where None means something."""

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


@dataclass(frozen=True, slots=True)
class Stamp:
    """The id and the moment of a request: the same stamp makes the same row and fingerprint."""

    task_id: str
    sent_at: datetime


@dataclass(frozen=True, slots=True)
class Request:
    """A valid request to store one task, ready for the INSERT."""

    task_id: str
    payload: TaskSendPayload
    row: InsertTask


def prepare(
    limits: PayloadConfig,
    definition: TaskDefinition,
    options: SendOptions,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    delay_seconds: float | Unset,
    stamp: Stamp | None = None,
) -> TaskSendResult[Request]:
    """Turn a call into the row to insert, or say in one sentence why it cannot be.

    The id is new and the moment now, unless a stamp says otherwise.
    """
    if problem := option_problem(options, delay_seconds):
        return Err(refused(definition, problem))
    match definition.signature.encode_call(args, kwargs):
        case Err(error):
            return Err(refused(definition, error.message))
        case Ok(call):
            if problem := size_problem(limits, definition.name, call):
                return Err(TaskSendError(TaskSendErrorCode.PAYLOAD_TOO_LARGE, problem))
            delay = None if isinstance(delay_seconds, Unset) else delay_seconds
            stamp = stamp or Stamp(new_id(), datetime.now(UTC))
            return Ok(_request(definition, options, call, delay, stamp))


def _request(
    definition: TaskDefinition,
    options: SendOptions,
    call: EncodedCall,
    delay_seconds: float | None,
    stamp: Stamp,
) -> Request:
    shared = shared_values(definition, options, delay_seconds, stamp.sent_at)
    key = options.idempotency_key
    payload = TaskSendPayload(
        definition.name,
        definition.queue_name,
        shared.priority,
        call.args_json,
        call.kwargs_json,
        shared.sent_at,
        shared.good_until,
        delay_seconds,
        shared.task_options,
        shared.fingerprint(call),
        key,
    )
    return request_for(definition, stamp.task_id, payload)


def request_for(definition: TaskDefinition, task_id: str, payload: TaskSendPayload) -> Request:
    """Build the row of a payload; a replay builds exactly the same one."""
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
    return Request(task_id, payload, row)


@dataclass(frozen=True, slots=True)
class SharedValues:
    """What all rows of one call to send or send_many have in common."""

    priority: int
    sent_at: datetime
    good_until: datetime | None
    task_options: str
    hasher: Any

    def fingerprint(self, call: EncodedCall) -> str:
        """Return the digest of one row: what all share, then its arguments."""
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
    """Return the snapshot that alone drives retries later, whatever is deployed meanwhile."""
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
    """Return how often the task's policy allows it to run again."""
    return definition.retry_policy.max_retries if definition.retry_policy else 0


def _idempotency_sha(payload: TaskSendPayload) -> str:
    """Fingerprint what was asked for, leaving out when: the same key and request may come at any
    time, with dicts that were filled in another order.
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
    """Return what is wrong with the options in one sentence, or None."""
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
    """Tell whether this can be stored as a key of the caller's choice."""
    if not isinstance(key, str) or not 1 <= len(key) <= KEY_LENGTH_MAX or "\0" in key:
        return False
    return key.isprintable() or not any(0xD800 <= ord(character) <= 0xDFFF for character in key)


def is_delay(delay_seconds: object) -> bool:
    if isinstance(delay_seconds, bool) or not isinstance(delay_seconds, int | float):
        return False
    return 0 <= delay_seconds <= DELAY_SECONDS_MAX


def size_problem(limits: PayloadConfig, task_name: str, call: EncodedCall) -> str | None:
    """Return why the arguments are too large, or None; warn when they are merely large."""
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
    """Return the error of a send made while sends are suppressed."""
    return TaskSendError(
        TaskSendErrorCode.SEND_SUPPRESSED,
        "Sends are suppressed while task modules are imported; send from a function, not at import time.",
    )


def refused(definition: TaskDefinition, problem: str) -> TaskSendError:
    """Return the error of a request that is not valid."""
    message = f"Task {definition.name!r} was not sent: {problem.rstrip('.')}."
    return TaskSendError(TaskSendErrorCode.VALIDATION_FAILED, message)


def replay_problem(
    definition: TaskDefinition, error: TaskSendError, *, scheduled: bool
) -> TaskSendError | None:
    """Say why this error cannot be replayed by this method, or None."""
    if not isinstance(error, TaskSendError):
        return refused(definition, "only the TaskSendError of a failed send can be retried")
    payload = error.payload
    if error.code is not TaskSendErrorCode.ENQUEUE_FAILED:
        return refused(definition, f"only ENQUEUE_FAILED can be retried, not {error.code.value}")
    if payload is None or error.task_id is None:
        return refused(
            definition,
            "the error carries no payload to send again; a failed send inside a transaction is "
            "repeated with that transaction",
        )
    if payload.task_name != definition.name:
        return refused(definition, f"the error belongs to task {payload.task_name!r}")
    if scheduled and payload.enqueue_delay_seconds is None:
        return refused(definition, "the failed send had no delay; use retry_send")
    if not scheduled and payload.enqueue_delay_seconds is not None:
        return refused(definition, "the failed send was delayed; use retry_schedule")
    return None


def replay(
    definition: TaskDefinition, error: TaskSendError, *, scheduled: bool
) -> TaskSendResult[Request]:
    """Rebuild the request of a failed send: same id, same fingerprint."""
    if problem := replay_problem(definition, error, scheduled=scheduled):
        return Err(problem)
    assert error.task_id is not None
    assert error.payload is not None
    return Ok(request_for(definition, error.task_id, error.payload))
