"""The options of nodes: deadlines, time limits, priorities, sleeps and signals in their ranges.

Nodes may be changed until a workflow takes them, so what they hold is looked at then. Stands before
the line producer -> SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, assert_never

from horsies.definition import TIMEOUT_MS_MIN
from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.request import DELAY_SECONDS_MAX
from horsies.retry import RetryPolicy
from horsies.workflow.draft import Draft
from horsies.workflow.nodes import (
    AnyNode,
    MapNode,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    TaskNode,
    codec_for,
)

SIGNAL_NAME_LENGTH_MAX = 128
SPAN_MAX = timedelta(seconds=DELAY_SECONDS_MAX)


def option_problems(plan: Draft, index: int) -> Iterator[WorkflowValidationError]:
    """Find options of a node that are out of range or contradict each other."""
    for problem in _problems(plan.nodes[index]):
        yield WorkflowValidationError(
            f"{plan.says(index)} {problem}.", code=ErrorCode.TASK_INVALID_OPTIONS
        )


def _problems(node: AnyNode) -> Iterator[str]:
    match node:
        case TaskNode():
            yield from _task_problems(node)
        case MapNode():
            yield from _task_problems(node)
            if node.max_parallel is not None and not _is_whole(node.max_parallel, 1, 1_000_000):
                yield "has a max_parallel that is not a whole number of at least 1"
        case SleepNode():
            yield from _sleep_problems(node)
        case SignalNode():
            yield from _signal_problems(node)
        case SubWorkflowNode():
            return
        case _:
            assert_never(node)


def _task_problems(node: TaskNode[Any] | MapNode[Any]) -> Iterator[str]:
    if node.priority is not None and not _is_whole(node.priority, 1, 100):
        yield "has a priority that is not a whole number from 1 (first) to 100 (last)"
    if node.timeout_ms is not None and not _is_whole(node.timeout_ms, TIMEOUT_MS_MIN, 2**31 - 1):
        yield f"has a timeout_ms that is not a whole number of at least {TIMEOUT_MS_MIN}"
    if node.retry_policy is not None and not isinstance(node.retry_policy, RetryPolicy):
        yield "has a retry_policy that is not a RetryPolicy"
    if node.good_until is not None and (problem := _moment_problem(node.good_until)):
        yield f"has a good_until that {problem}"
    if node.expires_in is not None and (problem := _span_problem(node.expires_in)):
        yield f"has an expires_in that {problem}"


def _sleep_problems(node: SleepNode) -> Iterator[str]:
    if (node.seconds is None) == (node.until is None):
        yield "takes exactly one of seconds and until"
    if node.seconds is not None and not _is_delay(node.seconds):
        yield "has seconds that are not a number from 0 to 100 years"
    if node.until is not None and (problem := _moment_problem(node.until)):
        yield f"has an until that {problem}"


def _signal_problems(node: SignalNode[Any]) -> Iterator[str]:
    if not isinstance(node.name, str) or not 1 <= len(node.name) <= SIGNAL_NAME_LENGTH_MAX:
        yield f"needs a signal name of 1 to {SIGNAL_NAME_LENGTH_MAX} characters"
    elif not node.name.isprintable():
        yield "has a signal name with characters that cannot be printed"
    if node.timeout is not None and (problem := _span_problem(node.timeout)):
        yield f"has a timeout that {problem}"
    try:
        codec_for(node.value_type)
    except ValueError as error:
        yield f"has a value_type that cannot be stored ({error})"


def _is_whole(number: object, least: int, most: int) -> bool:
    return type(number) is int and least <= number <= most


def _is_delay(seconds: object) -> bool:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return False
    return 0 <= seconds <= DELAY_SECONDS_MAX


def _moment_problem(moment: object) -> str | None:
    if not isinstance(moment, datetime):
        return "is not a datetime"
    try:
        if moment.utcoffset() is None:
            return "has no time zone; write datetime(..., tzinfo=UTC) or call .astimezone()"
        moment.astimezone(UTC)
    except (OverflowError, ValueError):
        return "cannot be written in UTC; give a date between the years 1 and 9999"
    return None


def _span_problem(span: object) -> str | None:
    if not isinstance(span, timedelta):
        return "is not a timedelta"
    if not timedelta(milliseconds=1) <= span <= SPAN_MAX:
        return "is not between a millisecond and 100 years"
    return None
