"""Pure functions that decide which failures are retried, and how long to wait. The producer stores the
policy with the task; exception classes are stored by name. `decide_retry` decides from that snapshot and
from the exception's class names, which the child reports, so a new deployment never changes tasks that
are already queued. `Backoff` computes the waits of workers and schedulers while the database is
unavailable.
"""

from __future__ import annotations

import json
import math
import random as random_module
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from typing_extensions import TypeIs

from horsies.error_codes import (
    BuiltInTaskCode,
    column_code,
    error_code_text,
    validate_error_code_name,
)
from horsies.errors import LONGEST_DELAY_SECONDS, UNLIMITED_RETRIES, StepFailed, TaskFailed
from horsies.validation import FrozenModel

ExceptionMapper: TypeAlias = dict[type[BaseException], str]
"""Exception classes with the error codes that replace them; a class covers its subclasses."""
RetryRule: TypeAlias = BuiltInTaskCode | str | type[BaseException]

# How many times a task without a policy may raise RetryLater, equal to the default of max_retries.
RETRIES_WITHOUT_POLICY = 3
MIN_INTERVAL_SECONDS = 0.001
MAX_INTERVAL_SECONDS = 86_400
DEFAULT_INTERVALS = (60, 300, 900)
# The possible endings of a stored reason against a retry; operators use them like codes.
NOT_LISTED = "listed in auto_retry_for"
LIMIT_REACHED = "is reached"
IN_A_STEP = "in the policy of the step, ctx.with_options(retry=...)"

_JITTER = 0.25
_CLASS_NAME = re.compile(r"\w+(\.(\w+|<locals>))+")
_MAIN = "__main__"


def _checked_rules(rules: object) -> list[RetryRule]:
    if isinstance(rules, str | bytes) or not isinstance(rules, Sequence) or not rules:
        raise ValueError(
            "auto_retry_for must be a list of at least one error code or exception class, such as "
            '["GATEWAY_DOWN", ConnectionError]'
        )
    if problems := [problem for rule in rules for problem in _rule_problems(rule)]:
        raise ValueError("; ".join(problems))
    return list(rules)


def _rule_problems(rule: object) -> list[str]:
    if isinstance(rule, type) and issubclass(rule, TaskFailed):
        return [f"the entry {rule.__name__} is a failure with a code; list its code instead"]
    if isinstance(rule, type) and issubclass(rule, BaseException):
        return []
    if not isinstance(rule, str):
        kind = rule.__name__ if isinstance(rule, type) else type(rule).__name__
        return [
            f"the entry must be an error code such as GATEWAY_DOWN or an exception class, not {kind}"
        ]
    text = error_code_text(rule) or ""
    if text.endswith(("Error", "Exception")) and text.isidentifier():
        return [
            f"the entry {text!r} looks like an exception class; list the class itself, without quotes"
        ]
    return [] if _CLASS_NAME.fullmatch(text) else validate_error_code_name(rule, where="the entry")


# Any sequence is accepted and stored as a list, so that equal policies compare equal.
Rules: TypeAlias = Annotated[Sequence[RetryRule], PlainValidator(_checked_rules)]
# Whole numbers stay integers, because earlier releases read them.
Seconds: TypeAlias = Annotated[
    int | float, Field(ge=MIN_INTERVAL_SECONDS, le=MAX_INTERVAL_SECONDS, allow_inf_nan=False)
]
Intervals: TypeAlias = Annotated[Sequence[Seconds], AfterValidator(list)]


class RetryPolicy(FrozenModel):
    """Decides when a failed task runs again.

    Example:
        RetryPolicy.exponential(5, max_retries=4, auto_retry_for=[ConnectionError, "GATEWAY_DOWN"])

    waits 5, 10, 20 and 40 seconds, each lengthened by up to a quarter.
    """

    auto_retry_for: Rules
    """The failures that lead to a retry, at least one; any other failure is final. An entry is an error
    code, an upper-case name such as GATEWAY_DOWN, or an exception class, which covers its subclasses
    too. Classes are stored by name, `module.Class`, and may be listed by that name. Required.
    """

    max_retries: int = Field(default=3, ge=1, le=UNLIMITED_RETRIES)
    """How many times the task runs again after its first attempt, from 1 to 2,000,000,000. Defaults to
    3."""

    intervals: Intervals = Field(default_factory=lambda: list(DEFAULT_INTERVALS), min_length=1)
    """Seconds to wait, each from 0.001 to 86,400 (a day). The fixed strategy needs one entry per retry;
    the exponential strategy needs one entry, the base. Defaults to 60, 300, 900.
    """

    max_delay_seconds: Annotated[
        float | None, Field(ge=MIN_INTERVAL_SECONDS, le=LONGEST_DELAY_SECONDS)
    ] = None
    """The maximum wait in seconds, including jitter: from 0.001 to 31,536,000 (a year). With None, the
    limit is a year. With jitter, a wait at the limit varies between four fifths of the limit and the
    limit. Defaults to None.
    """

    backoff_strategy: Literal["fixed", "exponential"] = "fixed"
    """`fixed` uses the intervals in turn; `exponential` doubles the base with each further retry.
    Defaults to `fixed`.
    """

    jitter: bool = True
    """Lengthen every wait by a random 0 to 25 %, so that tasks that failed at the same time do not
    run again at the same time. Waits are never shortened. Defaults to True."""

    @classmethod
    def fixed(
        cls,
        intervals: Sequence[float],
        *,
        auto_retry_for: Sequence[RetryRule],
        jitter: bool = True,
    ) -> Self:
        """Retry once per interval, after a wait of this many seconds."""
        if isinstance(intervals, str) or not isinstance(intervals, Sequence):
            raise TypeError(
                "RetryPolicy.fixed() takes a list of seconds, one per retry, such as [1, 5, 30], "
                f"not {type(intervals).__name__}"
            )
        for seconds in intervals:
            _refuse_other_than_number("fixed", "intervals", seconds)
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
        base_seconds: float,
        *,
        max_retries: int,
        auto_retry_for: Sequence[RetryRule],
        max_delay_seconds: float | None = None,
        jitter: bool = True,
    ) -> Self:
        """Retry up to `max_retries` times, waiting base, 2 x base, 4 x base seconds and so on, at most
        `max_delay_seconds`.
        """
        _refuse_other_than_number("exponential", "base_seconds", base_seconds)
        return cls(
            auto_retry_for=auto_retry_for,
            max_retries=max_retries,
            intervals=[base_seconds],
            max_delay_seconds=max_delay_seconds,
            backoff_strategy="exponential",
            jitter=jitter,
        )

    @classmethod
    def forever(
        cls,
        base_seconds: float = 1,
        *,
        auto_retry_for: Sequence[RetryRule],
        max_delay_seconds: float = 3_600,
        jitter: bool = True,
    ) -> Self:
        """Retry without a limit, waiting base, 2 x base, 4 x base seconds and so on, at most
        `max_delay_seconds`. A `good_until` or a cancellation ends the retries.
        """
        _refuse_other_than_number("forever", "base_seconds", base_seconds)
        return cls.exponential(
            base_seconds,
            max_retries=UNLIMITED_RETRIES,
            auto_retry_for=auto_retry_for,
            max_delay_seconds=max_delay_seconds,
            jitter=jitter,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot stored with a task, as plain JSON values."""
        stored = {
            "auto_retry_for": [rule_text(rule) for rule in self.auto_retry_for],
            "max_retries": self.max_retries,
            "intervals": list(self.intervals),
            "backoff_strategy": self.backoff_strategy,
            "jitter": self.jitter,
        }
        # Omit an unset value, because workers of earlier releases do not know its key.
        if self.max_delay_seconds is not None:
            stored["max_delay_seconds"] = self.max_delay_seconds
        return stored

    @classmethod
    def from_json(cls, data: object) -> Self | None:
        """Parse a stored snapshot; never raises. A damaged field gets its default. If the list of codes
        is unreadable, no failure can be retried and the result is None.
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
            if _is_seconds(entry, MAX_INTERVAL_SECONDS)
        ]
        longest = data.get("max_delay_seconds")
        max_retries = data.get("max_retries")
        is_exponential = data.get("backoff_strategy") == "exponential"
        return cls.model_construct(
            auto_retry_for=codes,
            max_retries=max_retries if _is_whole(max_retries, UNLIMITED_RETRIES) else 3,
            intervals=intervals or list(DEFAULT_INTERVALS),
            max_delay_seconds=longest if _is_seconds(longest, LONGEST_DELAY_SECONDS) else None,
            backoff_strategy="exponential" if is_exponential else "fixed",
            jitter=data.get("jitter") is not False,
        )

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


def _refuse_other_than_number(method: str, name: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        hint = "; use timedelta.total_seconds()" if isinstance(seconds, timedelta) else ""
        raise TypeError(
            f"RetryPolicy.{method}() takes {name} as a number of seconds, "
            f"not {type(seconds).__name__}{hint}"
        )


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
    """Return the policy in a stored `task_options` text, or None if it is missing or unreadable."""
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
    """Return the seconds to wait before this retry, 1 being the first.

    Jitter lengthens a wait by less than the next doubling, so exponential waits grow until they reach
    the maximum. The wait before jitter is limited to less than the maximum, to leave a range for the
    jitter.
    """
    number = max(retry_number, 1)
    if policy.backoff_strategy == "exponential":
        # 2^64 milliseconds exceed the maximum wait; a larger exponent could overflow.
        delay = math.ldexp(policy.intervals[0], min(number - 1, 64))
    else:
        delay = policy.intervals[min(number, len(policy.intervals)) - 1]
    longest = policy.max_delay_seconds or LONGEST_DELAY_SECONDS
    if policy.jitter:
        delay = min(delay, longest / (1 + _JITTER)) * (1 + _JITTER * random())
    return float(min(delay, longest))


def class_name(kind: type) -> str:
    """Return the name by which policies store an exception class."""
    return f"{kind.__module__}.{kind.__qualname__}"


# A retry of the run is pointless after this exception, because the next attempt would find the same
# recorded failure.
_STEP_FAILED = class_name(StepFailed)


def exception_names(exception: BaseException) -> list[str]:
    """Return the names of the classes that an exception is an instance of, nearest first."""
    return [class_name(kind) for kind in type(exception).__mro__[:-1]]


def rule_text(rule: RetryRule) -> str:
    """Return an entry of `auto_retry_for` as it is stored."""
    return class_name(rule) if isinstance(rule, type) else str(error_code_text(rule))


class RetryDecision(NamedTuple):
    """The decision about a failed attempt: the delay of the retry in seconds (None if the failure is
    final), the rule that decided, and the number of retries that the rule allows.
    """

    delay_seconds: float | None
    reason: str | None = None
    max_retries: int = 0


def decide_retry(
    *,
    task_options: str | None,
    error_code: str | None,
    retry_count: int,
    max_retries: int,
    exception_names: Sequence[str] = (),
    retry_after: float | None = None,
    random: Callable[[], float] = random_module.random,
) -> RetryDecision:
    """Decide whether a failed attempt is retried, and return the reason.

    `retry_count` is the number of retries already made; `max_retries` is the row's limit, which is 0
    without a policy. `retry_after` is the delay of a RetryLater in seconds.
    """
    policy = policy_from_options(task_options) if max_retries > 0 else None
    if retry_after is not None:
        limit = _limit(policy, max_retries)
        return _limited("RetryLater", min(retry_after, LONGEST_DELAY_SECONDS), retry_count, limit)
    if max_retries < 1:
        return RetryDecision(None)
    if policy is None:
        return RetryDecision(None, "not retried: the task has no retry policy")
    rule = _matching_rule(policy, error_code, exception_names)
    if rule is None:
        return RetryDecision(None, _unlisted(error_code, exception_names))
    # A return to the queue counts as a retry and raises the limit of retries, but does not lengthen the
    # waits.
    returns = max(max_retries - policy.max_retries, 0)
    delay = delay_seconds(policy, retry_count + 1 - returns, random)
    return _limited(rule, delay, retry_count, max_retries)


def limit_after_return(task_options: str | None, max_retries: int) -> int:
    """Return the row's limit after a stopping worker has returned the task to its queue: one more, so
    that the return uses up no retry.
    """
    policy = policy_from_options(task_options) if max_retries > 0 else None
    return _limit(policy, max_retries) + 1


def _limit(policy: RetryPolicy | None, max_retries: int) -> int:
    return max_retries if policy else max(max_retries, RETRIES_WITHOUT_POLICY)


def _limited(rule: str, delay: float, retry_count: int, limit: int) -> RetryDecision:
    if retry_count >= limit:
        return RetryDecision(None, f"not retried: max_retries={limit} {LIMIT_REACHED}")
    return RetryDecision(delay, f"retried by {rule}", limit)


def _matching_rule(policy: RetryPolicy, error_code: str | None, names: Sequence[str]) -> str | None:
    """Return the policy's entry for this failure: its code, or the nearest class of its exception."""
    rules = [rule_text(rule) for rule in policy.auto_retry_for]
    if error_code is not None and error_code in rules:
        return f"code {column_code(error_code_text(error_code))}"
    # Classes defined in a program that is run as a script are stored under this module name.
    scripts = tuple(rule.removeprefix(_MAIN) for rule in rules if rule.startswith(f"{_MAIN}."))
    return next((name for name in names if name in rules or name.endswith(scripts)), None)


def _unlisted(error_code: str | None, names: Sequence[str]) -> str:
    code = (
        f"code {column_code(error_code)}" if error_code is not None else "an error without a code"
    )
    if names and names[0] == _STEP_FAILED:
        return f"not retried: {code} is the recorded failure of a step; list it {IN_A_STEP}"
    if not names:
        return f"not retried: {code} is not {NOT_LISTED}"
    return f"not retried: neither {code} nor {names[0]} is {NOT_LISTED}"


@dataclass(slots=True)
class Backoff:
    """Computes the waits between attempts to reach the database: initial x 2^k with ±25 % jitter, at
    most `max_ms`.

    `max_attempts` is the number of retries after the first failure; 0 means no limit.
    """

    initial_ms: int
    max_ms: int
    max_attempts: int = 0
    random: Callable[[], float] = random_module.random
    attempts: int = field(default=0, init=False)

    def next_delay_seconds(self) -> float | None:
        """Count one failure; return the seconds to wait, or None if no retries are left."""
        if self.max_attempts and self.attempts >= self.max_attempts:
            return None
        # At 2^32, every initial value has reached its maximum; the number must not keep growing for
        # days.
        delay_ms = min(self.initial_ms << min(self.attempts, 32), self.max_ms)
        self.attempts += 1
        # Apply the maximum after the jitter; otherwise all long waits would be equal.
        shortest_ms = delay_ms * (1 - _JITTER)
        longest_ms = min(delay_ms * (1 + _JITTER), self.max_ms)
        return max((shortest_ms + (longest_ms - shortest_ms) * self.random()) / 1000, 0.1)

    def reset(self) -> None:
        """Reset the count of failures after a success."""
        self.attempts = 0
