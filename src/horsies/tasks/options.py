"""Send options: their types, their checks, and the row values derived from them."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final, Literal, TypeAlias, TypedDict, get_args

from horsies.config.app import AppConfig
from horsies.current_task import inherited_headers
from horsies.retry import RetryPolicy
from horsies.task_result import storable_text
from horsies.tasks.definition import TIMEOUT_PROBLEM, TaskDefinition, is_timeout
from horsies.tasks.keys import lane_key_problem
from horsies.validation import SECONDS_MAX

KEY_LENGTH_MAX = 255
HEADERS_BYTES_MAX = 8_192
DELAY_SECONDS_MAX = SECONDS_MAX
# A thousand years stand for no limit, because PostgreSQL before version 17 has no infinite interval.
KEPT_FOREVER_SECONDS = 1_000 * 366 * 86_400.0

# Limits the length of names in messages, because callers may pass names of any length.
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 100

_EMPTY = '{"retry_policy":null,"good_until":null}'
_EMPTY_ASYNC = '{"async":true,"retry_policy":null,"good_until":null}'


class Unset(Enum):
    """Marks an omitted option, because None is a valid value."""

    UNSET = "UNSET"


UNSET: Final = Unset.UNSET

Uniqueness: TypeAlias = Literal["while_waiting", "while_open", "forever"]


@dataclass(frozen=True, slots=True)
class Debounce:
    """Run once after the last of many sends, with the latest arguments.

    While a task with the same ``idempotency_key`` is waiting, each further send replaces its arguments.
    The task becomes due ``quiet`` after the latest send, but at most ``at_most`` after the first.

    Example:
        reindex.with_options(
            idempotency_key=f"document-{number}",
            debounce=Debounce(quiet=timedelta(seconds=2), at_most=timedelta(seconds=30)),
        ).send(number)
    """

    quiet: timedelta
    """How long to wait after the latest send before the task runs."""
    at_most: timedelta
    """The maximum time that the task waits in total."""


class SendKeywords(TypedDict, total=False):
    """The keyword arguments of ``task.with_options``."""

    good_until: datetime | Unset | None
    idempotency_key: str | None
    unique: Uniqueness
    priority: int | None
    queue_name: str | None
    timeout_ms: int | None
    retry_policy: RetryPolicy | None
    at: datetime | None
    delay: timedelta | None
    headers: Mapping[str, str] | None
    retention: timedelta | None
    debounce: Debounce | None
    key: str | Unset | None
    transaction: object


@dataclass(frozen=True, slots=True)
class SendOptions:
    """The options of one send; see ``TaskFunction.with_options``."""

    good_until: datetime | Unset | None = UNSET
    idempotency_key: str | None = None
    priority: int | None = None
    transaction: object = field(default=None, repr=False)
    unique: Uniqueness = "forever"
    queue_name: str | None = None
    timeout_ms: int | None = None
    retry_policy: RetryPolicy | None = None
    at: datetime | None = None
    delay: timedelta | None = None
    headers: Mapping[str, str] | None = None
    retention: timedelta | None = None
    debounce: Debounce | None = None
    key: str | Unset | None = UNSET


_OTHER_WORDS = {"eta": "at", "countdown": "delay", "queue": "queue_name"}


def send_options(keywords: Mapping[str, Any]) -> SendOptions:
    """Return the options of a send; an unknown option raises a TypeError that lists the valid ones."""
    try:
        return SendOptions(**keywords)
    except TypeError:
        known = SendKeywords.__annotations__
        name = next(one for one in keywords if one not in known)
        hint = f"; write {_OTHER_WORDS[name]}=" if name in _OTHER_WORDS else ""
        raise TypeError(
            f"A send has no option {name!r}{hint}; the options are {', '.join(known)}."
        ) from None


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The options of a stored task, in the column ``task_options``. Only these options decide about the
    task's retries, even after a deployment that has changed the policy of its function.

    Example:
        TaskOptions.from_json(row["task_options"]).headers
    """

    retry_policy: RetryPolicy | None = None
    """The task's retry policy."""
    good_until: datetime | None = None
    """Its deadline."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Its headers."""
    is_async: bool = False
    """Whether async children may run the task: its function is ``async def``, and it has no memory limit."""
    burst: bool = False
    """Whether a child may hold the task together with other tasks."""

    def to_json(self) -> str:
        """Return the text to store in the column."""
        # "async" comes first, because the database uses these characters to find tasks for async children.
        stored: dict[str, Any] = {
            **({"async": True} if self.is_async else {}),
            "retry_policy": self.retry_policy.to_json() if self.retry_policy else None,
            "good_until": self.good_until.isoformat() if self.good_until else None,
        }
        if self.headers:
            stored["headers"] = dict(self.headers)
        if self.burst:
            stored["burst"] = True
        return json.dumps(stored, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | None) -> TaskOptions:
        """Read the options from a task's column; raise ValueError if the text is not a JSON object."""
        stored = json.loads(text or "{}")
        if not isinstance(stored, dict):
            raise ValueError(f"task_options is a JSON object, not {type(stored).__name__}")
        deadline = stored.get("good_until")
        return cls(
            RetryPolicy.from_json(stored.get("retry_policy")),
            datetime.fromisoformat(deadline) if deadline else None,
            stored.get("headers") or {},
            bool(stored.get("async")),
            bool(stored.get("burst")),
        )


# The options of a plain ``task.send``, which are recognised by identity and need no checks.
NO_OPTIONS = SendOptions()


@dataclass(slots=True)
class OutgoingTask:
    """A send that has passed its checks, before its task is stored. It is the argument of
    ``@app.on_send`` hooks.

    Hooks may change ``headers``, which include those inherited from the running task. ``count`` is the
    number of tasks: 1, or the number of calls in a ``send_many``.
    """

    task_name: str
    """The name of the task to send."""
    queue_name: str
    """The queue that the task is sent to."""
    options: SendOptions
    """The options of this send."""
    headers: dict[str, str]
    """The headers to store with the task; the hook may change them."""
    count: int = 1
    """How many tasks the call sends: more than 1 for ``send_many``."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "headers" and hasattr(self, name):
            raise AttributeError(f"an on_send hook can change only the headers, not {name}")
        object.__setattr__(self, name, value)


SendHook: TypeAlias = Callable[[OutgoingTask], None]


def with_overrides(
    config: AppConfig, definition: TaskDefinition, options: SendOptions
) -> TaskDefinition:
    """Return the task with this send's queue, time limit and retry policy."""
    if options is NO_OPTIONS:
        return definition
    changes: dict[str, Any] = {}
    if options.queue_name is not None:
        priorities = {queue.name: queue.priority for queue in config.queues()}
        name = options.queue_name
        changes |= {"queue_name": name, "priority": priorities[name]}
    if options.timeout_ms is not None:
        changes["timeout_ms"] = options.timeout_ms
    if options.retry_policy is not None:
        changes["retry_policy"] = options.retry_policy
    return replace(definition, **changes) if changes else definition


def retention_seconds(config: AppConfig, queue_name: str, options: SendOptions) -> float | None:
    """Return how long this task is kept after its end: the retention of the send or, without it, of the
    queue.
    """
    if options.retention is not None:
        return options.retention.total_seconds()
    by_queue = config.recovery.queue_retention
    if not by_queue or queue_name not in by_queue:
        return None
    kept = by_queue[queue_name]
    return KEPT_FOREVER_SECONDS if kept is None else kept.total_seconds()


def encode_options(
    definition: TaskDefinition,
    good_until: datetime | None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Return the options to store with the row; only these options decide about its retries, even after a
    deployment.
    """
    policy = definition.retry_policy
    if policy is None and good_until is None and not headers and not definition.burst:
        return _EMPTY_ASYNC if definition.may_share_process else _EMPTY
    kept = headers or {}
    is_async = definition.may_share_process
    return TaskOptions(policy, good_until, kept, is_async, definition.burst).to_json()


def option_problem(
    config: AppConfig, options: SendOptions, delay_seconds: float | Unset = UNSET
) -> str | None:
    """Describe an invalid option in one sentence, or return None."""
    if options is NO_OPTIONS and delay_seconds is UNSET:
        return None
    return (
        _time_problem(options, delay_seconds)
        or _key_problem(options)
        or _debounce_problem(options, delay_seconds)
        or _override_problem(config, options)
        or _stored_problem(options)
        or (None if options.key in (None, UNSET) else lane_key_problem(options.key))
    )


def _delay_hint(given: object) -> str:
    if isinstance(given, datetime):
        return "; for a point in time write with_options(at=...).send(...)"
    if isinstance(given, timedelta):
        return "; write with_options(delay=...).send(...) or pass .total_seconds()"
    return ""


def _time_problem(options: SendOptions, delay_seconds: float | Unset) -> str | None:
    good_until, at, delay = options.good_until, options.at, options.delay
    if not isinstance(good_until, Unset | None) and (problem := timestamp_problem(good_until)):
        return f"good_until {problem}"
    if not isinstance(delay_seconds, Unset) and not is_delay(delay_seconds):
        return f"delay_seconds must be a number of seconds from 0 to 100 years{_delay_hint(delay_seconds)}"
    if at is None and delay is None:
        return None
    if at is not None and delay is not None:
        return "at and delay exclude each other; leave one of them out"
    if not isinstance(delay_seconds, Unset):
        return "schedule takes its own delay; use send with the options at or delay"
    if at is not None and (problem := timestamp_problem(at)):
        return f"at {problem}"
    if delay is not None and not is_duration(delay, timedelta(0)):
        return "delay must be a timedelta from 0 to 100 years"
    return None


def _key_problem(options: SendOptions) -> str | None:
    key, unique = options.idempotency_key, options.unique
    if key is not None and not is_key(key):
        return f"idempotency_key must be a text of 1 to {KEY_LENGTH_MAX} characters"
    if unique == "forever":
        return None
    if unique not in get_args(Uniqueness):
        return "unique must be 'while_waiting', 'while_open' or 'forever'"
    if key is None:
        return "unique needs an idempotency_key, which names the tasks that must not exist twice"
    return None


def _debounce_problem(options: SendOptions, delay_seconds: float | Unset) -> str | None:
    debounce = options.debounce
    if debounce is None:
        return None
    if not isinstance(debounce, Debounce):
        return f"debounce must be a Debounce, not {type(debounce).__name__}"
    if not is_duration(debounce.quiet, timedelta(milliseconds=1)):
        return "quiet of debounce must be a timedelta from one millisecond to 100 years"
    if not is_duration(debounce.at_most, debounce.quiet):
        return "at_most of debounce must be a timedelta from quiet to 100 years"
    if options.idempotency_key is None:
        return "debounce needs an idempotency_key, which names the tasks that replace each other"
    if options.unique == "while_open":
        return "debounce implies unique='while_waiting'; leave unique out"
    if options.at is not None or options.delay is not None or delay_seconds is not UNSET:
        return "debounce sets the time of the task; leave at, delay and schedule out"
    return None


def _override_problem(config: AppConfig, options: SendOptions) -> str | None:
    priority, timeout_ms = options.priority, options.timeout_ms
    if priority is not None and (type(priority) is not int or not 1 <= priority <= 100):
        return "priority must be a whole number from 1 (first) to 100 (last)"
    if timeout_ms is not None and not is_timeout(timeout_ms):
        return TIMEOUT_PROBLEM
    policy = options.retry_policy
    if not isinstance(policy, RetryPolicy | None):
        return f"retry_policy must be a RetryPolicy, not {type(policy).__name__}"
    return None if options.queue_name is None else _queue_problem(config, options.queue_name)


def _queue_problem(config: AppConfig, queue_name: object) -> str | None:
    names = [queue.name for queue in config.queues()]
    if isinstance(queue_name, str) and queue_name in names:
        return None
    return (
        f"this application has no queue {shown_name(queue_name)}; choose one of {', '.join(names)}, or use "
        "app.send_by_name for a queue of another application"
    )


def shown_name(name: object) -> str:
    """Return a name's repr for a message, at most about 100 characters long."""
    return _shortened.repr(name)


def _stored_problem(options: SendOptions) -> str | None:
    headers = options.headers
    if headers is not None and (problem := headers_problem(headers)):
        return problem
    if problem := headers_problem(with_inherited(headers)):
        return problem
    if options.retention is not None and not is_duration(options.retention, timedelta(seconds=1)):
        return "retention must be a timedelta from one second to 100 years"
    return None


def with_inherited(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the running task's headers merged with the headers of the send, which take precedence."""
    return inherited_headers() if headers is None else {**inherited_headers(), **headers}


def headers_problem(headers: object) -> str | None:
    """Return the reason why these headers cannot be stored, or None."""
    if not isinstance(headers, Mapping):
        return f"headers must be a dictionary of texts, not {type(headers).__name__}"
    try:
        found = dict(headers)
    except Exception as error:  # the application's Mapping may raise any exception
        return f"headers could not be read: {type(error).__name__}"
    size = 0
    for name, value in found.items():
        if not isinstance(name, str) or not name:
            return "the name of a header must be a text that is not empty"
        if not isinstance(value, str):
            return f"header {name[:40]!r} must be a text, not {type(value).__name__}"
        try:
            size += len(name.encode()) + len(value.encode())
        except UnicodeEncodeError:
            return f"header {name[:40]!a} contains a lone surrogate; replace that character"
        if "\0" in name or "\0" in value:
            return f"header {name[:40]!a} contains a NUL character; remove it"
    if size > HEADERS_BYTES_MAX:
        return (
            f"headers are {size:,} bytes, more than {HEADERS_BYTES_MAX:,}; send an argument instead"
        )
    return None


def timestamp_problem(timestamp: object) -> str | None:
    """Return the reason why a value cannot be stored as a point in time, or None."""
    if not isinstance(timestamp, datetime):
        return "is not a datetime"
    try:
        if timestamp.utcoffset() is None:
            return "has no time zone; write datetime(..., tzinfo=UTC) or call .astimezone()"
        timestamp.astimezone(UTC)
    except (OverflowError, ValueError):
        return "cannot be written in UTC; give a date between the years 1 and 9999"
    except Exception as error:  # the application's tzinfo may raise any exception
        return f"has a time zone that raised {type(error).__name__}"
    return None


def is_key(key: object) -> bool:
    """Return whether PostgreSQL can store the value as a key."""
    return isinstance(key, str) and 1 <= len(key) <= KEY_LENGTH_MAX and storable_text(key) == key


def is_delay(delay_seconds: object) -> bool:
    if isinstance(delay_seconds, bool) or not isinstance(delay_seconds, int | float):
        return False
    return 0 <= delay_seconds <= DELAY_SECONDS_MAX


def is_duration(value: object, shortest: timedelta) -> bool:
    return isinstance(value, timedelta) and shortest <= value <= timedelta(
        seconds=DELAY_SECONDS_MAX
    )
