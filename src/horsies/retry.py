"""Retries: which failures run again, how long to wait, and which code an exception stands for.

Everything here is pure. The producer stores the policy with the task, and `retry_delay` decides from
that snapshot alone, so a new deployment never changes tasks already queued. `Backoff` spaces the
retries of workers and schedulers while the database is unavailable.
"""

from __future__ import annotations

import json
import math
import random as random_module
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import TypeIs

from horsies.error_codes import (
    BUILTIN_CODE_REGISTRY,
    BuiltInTaskCode,
    OperationalErrorCode,
    error_code_text,
    resolve_code,
)

ExceptionMapper: TypeAlias = dict[type[BaseException], str]

MAX_RETRIES_LIMIT = 20
MIN_INTERVAL_SECONDS = 0.001
MAX_INTERVAL_SECONDS = 86_400
LONGEST_DELAY_SECONDS = 365 * 86_400
DEFAULT_INTERVALS = (60, 300, 900)

_JITTER = 0.25
_CODE_NAME = re.compile(r"[A-Z][A-Z0-9_]*")

# Any sequence is accepted and kept as a list, so that equal policies compare equal.
Codes: TypeAlias = Annotated[Sequence[BuiltInTaskCode | str], AfterValidator(list)]
Intervals: TypeAlias = Annotated[
    Sequence[Annotated[int, Field(ge=1, le=MAX_INTERVAL_SECONDS)]], AfterValidator(list)
]


class RetryPolicy(BaseModel):
    """When a failed task runs again.

    Example:
        RetryPolicy.exponential(5, max_retries=4, auto_retry_for=["GATEWAY_DOWN"])

    waits 5, 10, 20 and 40 seconds, each lengthened by up to a quarter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    auto_retry_for: Codes = Field(min_length=1)
    """The error codes that lead to a retry, at least one; any other failure is final. Codes are upper
    case names such as GATEWAY_DOWN; an exception mapper turns exception classes into codes.
    Required."""

    max_retries: int = Field(default=3, ge=1, le=MAX_RETRIES_LIMIT)
    """How many times the task runs again after its first attempt, from 1 to 20. Defaults to 3."""

    intervals: Intervals = Field(
        default_factory=lambda: list(DEFAULT_INTERVALS),
        min_length=1,
        max_length=MAX_RETRIES_LIMIT,
    )
    """Seconds to wait, each from 1 to 86,400 (a day). The fixed strategy needs one entry per retry,
    the exponential strategy exactly one, the base. Defaults to 60, 300, 900."""

    max_delay_seconds: Annotated[
        float | None, Field(ge=MIN_INTERVAL_SECONDS, le=LONGEST_DELAY_SECONDS)
    ] = None
    """The longest wait in seconds, jitter included: from 0.001 to 31,536,000 (a year), which is also the
    longest wait without it. With jitter, waits that reach it vary between four fifths of it and all of
    it. Defaults to None."""

    backoff_strategy: Literal["fixed", "exponential"] = "fixed"
    """`fixed` waits the intervals in turn; `exponential` doubles the base with every further retry.
    Defaults to `fixed`."""

    jitter: bool = True
    """Lengthen every wait by a random 0 to 25 %, so that tasks that failed at the same time do not
    run again at the same time. Waits are never shortened. Defaults to True."""

    @classmethod
    def fixed(
        cls,
        intervals: Sequence[int],
        *,
        auto_retry_for: Sequence[BuiltInTaskCode | str],
        jitter: bool = True,
    ) -> Self:
        """Retry once per interval, waiting that many seconds before each."""
        return cls(
            auto_retry_for=auto_retry_for,
            max_retries=len(intervals),
            intervals=intervals,
            backoff_strategy="fixed",
            jitter=jitter,
        )

    @classmethod
    def exponential(
        cls,
        base_seconds: int,
        *,
        max_retries: int,
        auto_retry_for: Sequence[BuiltInTaskCode | str],
        max_delay_seconds: float | None = None,
        jitter: bool = True,
    ) -> Self:
        """Retry up to `max_retries` times, waiting base, 2 x base, 4 x base seconds and so on, at most
        `max_delay_seconds`.
        """
        return cls(
            auto_retry_for=auto_retry_for,
            max_retries=max_retries,
            intervals=[base_seconds],
            max_delay_seconds=max_delay_seconds,
            backoff_strategy="exponential",
            jitter=jitter,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot stored with a task, made of plain JSON values."""
        stored = {
            "auto_retry_for": [error_code_text(code) for code in self.auto_retry_for],
            "max_retries": self.max_retries,
            "intervals": list(self.intervals),
            "backoff_strategy": self.backoff_strategy,
            "jitter": self.jitter,
        }
        # Left out when unset: a worker of an earlier release reads a policy without unknown keys in full.
        if self.max_delay_seconds is not None:
            stored["max_delay_seconds"] = self.max_delay_seconds
        return stored

    @classmethod
    def from_json(cls, data: object) -> Self | None:
        """Read a stored snapshot; never raises.

        A damaged part falls back to its default. Without a readable list of codes nothing can be
        retried, and the result is None.
        """
        try:
            return cls.model_validate(data)
        except ValidationError:
            return cls._salvaged(data) if isinstance(data, Mapping) else None

    @classmethod
    def _salvaged(cls, data: Mapping[Any, Any]) -> Self | None:
        codes = [code for code in _entries(data.get("auto_retry_for")) if isinstance(code, str)]
        if not codes:
            return None
        intervals = [
            entry
            for entry in _entries(data.get("intervals"))
            if _is_whole(entry, MAX_INTERVAL_SECONDS)
        ]
        longest = data.get("max_delay_seconds")
        max_retries = data.get("max_retries")
        is_exponential = data.get("backoff_strategy") == "exponential"
        return cls.model_construct(
            auto_retry_for=codes,
            max_retries=max_retries if _is_whole(max_retries, MAX_RETRIES_LIMIT) else 3,
            intervals=intervals or list(DEFAULT_INTERVALS),
            max_delay_seconds=longest if _is_seconds(longest, LONGEST_DELAY_SECONDS) else None,
            backoff_strategy="exponential" if is_exponential else "fixed",
            jitter=data.get("jitter") is not False,
        )

    @field_validator("auto_retry_for")
    @classmethod
    def _check_codes(
        cls, codes: Sequence[BuiltInTaskCode | str]
    ) -> Sequence[BuiltInTaskCode | str]:
        problems = [p for code in codes for p in validate_error_code_name(code, where="the entry")]
        if problems:
            raise ValueError("; ".join(problems))
        return codes

    @model_validator(mode="after")
    def _check_intervals_fit_strategy(self) -> Self:
        count = len(self.intervals)
        if self.backoff_strategy == "exponential" and count != 1:
            raise ValueError(
                f"exponential backoff takes exactly one interval, the base, not {count}; "
                "use RetryPolicy.exponential(base_seconds, ...)"
            )
        if self.backoff_strategy == "fixed" and count != self.max_retries:
            raise ValueError(
                f"fixed backoff needs one interval per retry, but max_retries is "
                f"{self.max_retries} and {count} intervals are given; "
                "use RetryPolicy.fixed(intervals, ...)"
            )
        return self


def _entries(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _is_whole(value: object, largest: int) -> TypeIs[int]:
    # bool is an int in Python, but `true` is not a number.
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest


def _is_seconds(value: object, largest: int) -> TypeIs[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return MIN_INTERVAL_SECONDS <= value <= largest


def policy_from_options(text: str | None) -> RetryPolicy | None:
    """Return the policy in a stored `task_options` text; None when there is no readable one."""
    try:
        options = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return RetryPolicy.from_json(options.get("retry_policy")) if isinstance(options, dict) else None


def delay_seconds(
    policy: RetryPolicy,
    retry_number: int,
    random: Callable[[], float] = random_module.random,
) -> float:
    """Return the seconds to wait before the given retry, 1 being the first.

    Jitter only lengthens, and by less than doubling adds, so exponential waits grow until they reach
    the longest wait. A wait cut off there would have no jitter, so the wait before jitter is shorter.
    """
    number = max(retry_number, 1)
    if policy.backoff_strategy == "exponential":
        # 2^64 milliseconds are longer than the longest wait, and the number must not overflow.
        delay = math.ldexp(policy.intervals[0], min(number - 1, 64))
    else:
        delay = policy.intervals[min(number, len(policy.intervals)) - 1]
    longest = policy.max_delay_seconds or LONGEST_DELAY_SECONDS
    if policy.jitter:
        delay = min(delay, longest / (1 + _JITTER)) * (1 + _JITTER * random())
    return float(min(delay, longest))


def retry_delay(
    *,
    task_options: str | None,
    error_code: str | None,
    retry_count: int,
    max_retries: int,
    random: Callable[[], float] = random_module.random,
) -> float | None:
    """Return the seconds until a failed attempt is retried, or None when the failure is final.

    `retry_count` is the number of retries already made, `max_retries` the limit of the row.
    """
    if retry_count >= max_retries or error_code is None:
        return None  # the common case needs no parsing
    policy = policy_from_options(task_options)
    if policy is None or error_code not in map(error_code_text, policy.auto_retry_for):
        return None
    return delay_seconds(policy, retry_count + 1, random)


@dataclass(slots=True)
class Backoff:
    """The waits between attempts to reach the database: initial x 2^k with +-25 % jitter, at most `max_ms`.

    `max_attempts` is the number of retries after the first failure; 0 means no limit.
    """

    initial_ms: int
    max_ms: int
    max_attempts: int = 0
    random: Callable[[], float] = random_module.random
    attempts: int = field(default=0, init=False)

    def next_delay_seconds(self) -> float | None:
        """Count one failure; return the seconds to wait, or None when the retries are used up."""
        if self.max_attempts and self.attempts >= self.max_attempts:
            return None
        # From 2^32 on every initial value has reached its cap, and the number must not grow for days.
        delay_ms = min(self.initial_ms << min(self.attempts, 32), self.max_ms)
        self.attempts += 1
        # A wait cut off at the maximum would have no jitter, so the jitter itself ends there.
        shortest_ms = delay_ms * (1 - _JITTER)
        longest_ms = min(delay_ms * (1 + _JITTER), self.max_ms)
        return max((shortest_ms + (longest_ms - shortest_ms) * self.random()) / 1000, 0.1)

    def reset(self) -> None:
        """Start over after a success."""
        self.attempts = 0


def resolve_exception_code(
    exception: BaseException,
    task_mapper: Mapping[type[BaseException], str] | None,
    app_mapper: Mapping[type[BaseException], str] | None,
    task_default: str | None,
    app_default: str | None,
) -> BuiltInTaskCode | str:
    """Return the code that an exception stands for; the task's settings win over the app's.

    A mapped class stands for its subclasses too; of several, the nearest in the exception's MRO wins.
    """
    for mapper in (task_mapper, app_mapper):
        for kind in type(exception).__mro__ if mapper else ():
            if mapper and issubclass(kind, BaseException) and kind in mapper:
                return resolve_code(mapper[kind])
    return resolve_code(task_default or app_default or OperationalErrorCode.UNHANDLED_EXCEPTION)


def validate_error_code_name(code: object, *, where: str = "the error code") -> list[str]:
    """Return the problems of an error code as sentences; an empty list when it is well formed."""
    if not isinstance(code, str):
        return [f"{where} must be a string such as GATEWAY_DOWN, not {type(code).__name__}"]
    text = error_code_text(code) or ""
    if _CODE_NAME.fullmatch(text):
        return []
    if text.endswith(("Error", "Exception")):
        return [
            f"{where} {text!r} looks like an exception class; "
            "map the class to a code with exception_mapper and name that code"
        ]
    return [
        f"{where} {text!r} must be an upper case name such as GATEWAY_DOWN "
        "(letters A-Z, digits and _, starting with a letter)"
    ]


def validate_exception_mapper(mapper: object, *, where: str = "exception_mapper") -> list[str]:
    """Return the problems of an exception mapper as sentences; an empty list when it is valid."""
    if not isinstance(mapper, Mapping):
        return [
            f"{where} must be a dictionary from exception classes to codes, "
            f"not {type(mapper).__name__}"
        ]
    problems: list[str] = []
    for key, code in mapper.items():
        if isinstance(key, type) and issubclass(key, BaseException):
            problems += validate_error_code_name(code, where=f"{where}[{key.__name__}]")
        else:
            problems.append(f"{where} maps {key!r}, which is not an exception class")
    return problems


def reserved_code_collisions(
    mapper: Mapping[type[BaseException], str], default_code: str | None
) -> list[str]:
    """Return, as sentences, the places where user configuration uses the name of a built-in code."""
    problems = [
        f"exception_mapper[{kind.__name__}] uses the built-in code {error_code_text(code)}"
        for kind, code in mapper.items()
        if error_code_text(code) in BUILTIN_CODE_REGISTRY
    ]
    default = error_code_text(default_code)
    if default in BUILTIN_CODE_REGISTRY and default != "UNHANDLED_EXCEPTION":
        problems.append(f"default_unhandled_error_code uses the built-in code {default}")
    return problems
