"""Checks of one node's attributes: types, ranges and contradictions. Users may change a node until a
workflow uses it, so these checks run when the workflow is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, assert_never

from horsies.errors import ErrorCode
from horsies.retry import RetryPolicy
from horsies.tasks.definition import NAME_LENGTH_MAX, TIMEOUTS_MS, is_storable_name, is_timeout
from horsies.tasks.options import DELAY_SECONDS_MAX, is_delay, timestamp_problem
from horsies.workflow.nodes.nodes import (
    AnyNode,
    MapNode,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    TaskNode,
    codec_for,
    is_definition,
    is_list,
    own_name,
)

SIGNAL_NAME_LENGTH_MAX = 128
SPAN_MAX = timedelta(seconds=DELAY_SECONDS_MAX)


class Problem(NamedTuple):
    """A mistake in a node, worded as the rest of a sentence that begins with the node."""

    code: ErrorCode
    text: str
    help_text: str | None = None


class _AttributeType(NamedTuple):
    accepts: Callable[[object], bool]
    expected: str
    code: ErrorCode
    help_text: str


_ATTRIBUTE_TYPES = {
    "waits_for": _AttributeType(
        is_list, "a list of nodes", ErrorCode.WORKFLOW_INVALID_DEPENDENCY, "write waits_for=[...]"
    ),
    "kwargs": _AttributeType(
        lambda value: isinstance(value, Mapping),
        "a dict of arguments by name",
        ErrorCode.WORKFLOW_INVALID_KWARG_KEY,
        'write kwargs={"parameter": value}, or leave it out',
    ),
    "args_from": _AttributeType(
        lambda value: isinstance(value, Mapping),
        "a dict of nodes by name",
        ErrorCode.WORKFLOW_INVALID_ARGS_FROM,
        'write args_from={"parameter": node}, or leave it out',
    ),
    "workflow_ctx_from": _AttributeType(
        lambda value: value is None or is_list(value),
        "a list of nodes",
        ErrorCode.WORKFLOW_INVALID_CTX_FROM,
        "write workflow_ctx_from=[...]",
    ),
    "each": _AttributeType(
        lambda value: value is None or isinstance(value, str),
        "the name of a parameter",
        ErrorCode.WORKFLOW_INVALID_KWARG_KEY,
        'write each="item"',
    ),
}


def type_problems(node: AnyNode) -> Iterator[Problem]:
    """Find attributes of the wrong type; other checks then skip the node."""
    values = vars(node)
    for name, wanted in _ATTRIBUTE_TYPES.items():
        if name in values and not wanted.accepts(values[name]):
            kind = type(values[name]).__name__
            text = f"has {name} of type {kind}, not {wanted.expected}"
            yield Problem(wanted.code, text, wanted.help_text)
    if isinstance(node, SubWorkflowNode) and not is_definition(node.workflow_def):
        given = node.workflow_def
        shown = own_name(given) if isinstance(given, type) else f"a {type(given).__name__}"
        yield Problem(
            ErrorCode.WORKFLOW_NO_DEFINITION_KEY,
            f"runs {shown}, which is not a WorkflowDefinition",
            "give the class itself: SubWorkflowNode(Report)",
        )


def option_problems(node: AnyNode) -> Iterator[Problem]:
    """Find options that are out of range or contradict each other."""
    for text in _invalid_options(node):
        yield Problem(ErrorCode.TASK_INVALID_OPTIONS, text)
    if isinstance(node, SubWorkflowNode) and is_definition(node.workflow_def):
        name: object = node.name
        if not isinstance(name, str) or not is_storable_name(name):
            yield Problem(
                ErrorCode.WORKFLOW_NO_NAME,
                f"runs {own_name(node.workflow_def)}, whose name is not plain text of 1 to "
                f"{NAME_LENGTH_MAX} characters",
                'name = "nightly_report" in that class',
            )


def _invalid_options(node: AnyNode) -> Iterator[str]:
    if type(node.allow_failed_deps) is not bool:
        yield "has an allow_failed_deps that is neither True nor False"
    match node:
        case TaskNode():
            yield from _invalid_task_options(node)
        case MapNode():
            yield from _invalid_task_options(node)
            if node.max_parallel is not None and not _is_whole(node.max_parallel, 1, 1_000_000):
                yield "has a max_parallel that is not a whole number of at least 1"
            if type(node.allow_failed_items) is not bool:
                yield "has an allow_failed_items that is neither True nor False"
        case SleepNode():
            yield from _invalid_sleep(node)
        case SignalNode():
            yield from _invalid_signal(node)
        case SubWorkflowNode():
            return
        case _:
            assert_never(node)


def _invalid_task_options(node: TaskNode[Any] | MapNode[Any]) -> Iterator[str]:
    if node.priority is not None and not _is_whole(node.priority, 1, 100):
        yield "has a priority that is not a whole number from 1 (first) to 100 (last)"
    if node.timeout_ms is not None and not is_timeout(node.timeout_ms):
        yield f"has a timeout_ms that is not a whole number from {TIMEOUTS_MS[0]} to {TIMEOUTS_MS[-1]:,}"
    if node.retry_policy is not None and not isinstance(node.retry_policy, RetryPolicy):
        yield "has a retry_policy that is not a RetryPolicy"
    if node.good_until is not None and (problem := timestamp_problem(node.good_until)):
        yield f"has a good_until that {problem}"
    if node.expires_in is not None and (problem := _span_problem(node.expires_in)):
        yield f"has an expires_in that {problem}"


def _invalid_sleep(node: SleepNode) -> Iterator[str]:
    if (node.seconds is None) == (node.until is None):
        yield "takes exactly one of seconds and until"
    if node.seconds is not None and not is_delay(node.seconds):
        yield "has seconds that are not a number from 0 to 100 years"
    if node.until is not None and (problem := timestamp_problem(node.until)):
        yield f"has an until that {problem}"


def _invalid_signal(node: SignalNode[Any]) -> Iterator[str]:
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


def _span_problem(span: object) -> str | None:
    if not isinstance(span, timedelta):
        return "is not a timedelta"
    if not timedelta(milliseconds=1) <= span <= SPAN_MAX:
        return "is not between a millisecond and 100 years"
    return None
