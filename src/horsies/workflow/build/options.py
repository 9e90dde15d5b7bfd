"""The options of nodes: all of the right kind; deadlines, limits, sleeps and signals in their ranges.

Nodes may be changed until a workflow takes them, so what they hold is looked at then: first whether
it can be read at all, its values once the nodes have their ids. Stands before the line producer ->
SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, assert_never

from horsies.codec.shape import type_text
from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.retry import RetryPolicy
from horsies.tasks.definition import NAME_LENGTH_MAX, TIMEOUT_MS_MIN, is_storable_name
from horsies.tasks.request import DELAY_SECONDS_MAX
from horsies.workflow.build.draft import Draft, slugify
from horsies.workflow.nodes.nodes import (
    CALLING_KINDS,
    NODE_KINDS,
    AnyNode,
    CallingNode,
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


class _Misfit(NamedTuple):
    """What of a node is of another kind than it should be, and how to write it."""

    code: ErrorCode
    problem: str
    help_text: str


def node_misfits(name: str, nodes: Sequence[object]) -> Iterator[WorkflowValidationError]:
    """Find what keeps nodes from being read as a graph; what is no node at all is left aside."""
    for index, node in enumerate(nodes):
        if isinstance(node, NODE_KINDS):
            for code, problem, help_text in _misfits(node):
                says = f"Node {_id(name, index, node)!r} of workflow {name!r}"
                yield WorkflowValidationError(f"{says} {problem}.", code=code, help_text=help_text)
    yield from _signals_at_odds(name, nodes)


def _id(name: str, index: int, node: AnyNode) -> str:
    """Return the id that a draft will give the node."""
    given = None if node.id_derived else node.node_id
    return f"{slugify(str(name))}:{index}" if given is None else given


def _misfits(node: AnyNode) -> Iterator[_Misfit]:
    if not is_list(node.waits_for):
        yield _Misfit(
            ErrorCode.WORKFLOW_INVALID_DEPENDENCY,
            f"has a waits_for of type {type(node.waits_for).__name__}, not a list of nodes",
            "write waits_for=[...]",
        )
    elif node.join in ("any", "quorum") and not node.waits_for and not isinstance(node, MapNode):
        yield _Misfit(
            ErrorCode.WORKFLOW_INVALID_JOIN,
            f"has join={node.join!r} but waits for no node, so it has nothing to count",
            "list its dependencies in waits_for, or leave join out",
        )
    if isinstance(node, CALLING_KINDS):
        yield from _call_misfits(node)
    if isinstance(node, SubWorkflowNode) and not is_definition(node.workflow_def):
        yield _no_definition(node.workflow_def)


def _call_misfits(node: CallingNode) -> Iterator[_Misfit]:
    if not isinstance(node.kwargs, Mapping):
        yield _Misfit(
            ErrorCode.WORKFLOW_INVALID_KWARG_KEY,
            f"has kwargs of type {type(node.kwargs).__name__}, not a dict of arguments by name",
            'write kwargs={"parameter": value}, or leave it out',
        )
    if not isinstance(node.args_from, Mapping):
        yield _Misfit(
            ErrorCode.WORKFLOW_INVALID_ARGS_FROM,
            f"has an args_from of type {type(node.args_from).__name__}, not a dict of nodes by name",
            'write args_from={"parameter": node}, or leave it out',
        )
    if node.workflow_ctx_from is not None and not is_list(node.workflow_ctx_from):
        kind = type(node.workflow_ctx_from).__name__
        yield _Misfit(
            ErrorCode.WORKFLOW_INVALID_CTX_FROM,
            f"has a workflow_ctx_from of type {kind}, not a list of nodes",
            "write workflow_ctx_from=[...]",
        )
    if isinstance(node, MapNode) and node.each is not None and not isinstance(node.each, str):
        yield _Misfit(
            ErrorCode.WORKFLOW_INVALID_KWARG_KEY,
            f"has an each of type {type(node.each).__name__}, not the name of a parameter",
            'write each="item"',
        )


def _no_definition(given: object) -> _Misfit:
    shown = own_name(given) if isinstance(given, type) else f"a {type(given).__name__}"
    return _Misfit(
        ErrorCode.WORKFLOW_NO_DEFINITION_KEY,
        f"runs {shown}, which is no WorkflowDefinition",
        "give the class itself: SubWorkflowNode(Report)",
    )


def _signals_at_odds(name: str, nodes: Sequence[object]) -> Iterator[WorkflowValidationError]:
    """Find signals whose nodes take values of different types: a value goes to any of them."""
    first_use: dict[str, tuple[str, Any]] = {}
    for index, node in enumerate(nodes):
        if not isinstance(node, SignalNode) or not isinstance(node.name, str):
            continue
        node_id = _id(name, index, node)
        first_id, declared = first_use.setdefault(node.name, (node_id, node.value_type))
        if declared != node.value_type:
            yield WorkflowValidationError(
                f"Nodes {first_id!r} and {node_id!r} of workflow {name!r} wait for the same signal "
                f"{node.name!r} with values of different types, {type_text(declared)} and "
                f"{type_text(node.value_type)}.",
                code=ErrorCode.TASK_INVALID_OPTIONS,
                help_text="give both the same value_type, or one of them another signal name",
            )


def option_problems(plan: Draft, index: int) -> Iterator[WorkflowValidationError]:
    """Find options of a node that are out of range or contradict each other."""
    node = plan.nodes[index]
    for problem in _problems(node):
        yield WorkflowValidationError(
            f"{plan.says(index)} {problem}.", code=ErrorCode.TASK_INVALID_OPTIONS
        )
    if isinstance(node, SubWorkflowNode) and not _is_name(node.name):
        yield WorkflowValidationError(
            f"{plan.says(index)} runs {own_name(node.workflow_def)}, whose name is no plain text of "
            f"1 to {NAME_LENGTH_MAX} characters.",
            code=ErrorCode.WORKFLOW_NO_NAME,
            help_text='name = "nightly_report" in that class',
        )


def _is_name(name: object) -> bool:
    return isinstance(name, str) and is_storable_name(name)


def _problems(node: AnyNode) -> Iterator[str]:
    if type(node.allow_failed_deps) is not bool:
        yield "has an allow_failed_deps that is neither True nor False"
    match node:
        case TaskNode():
            yield from _task_problems(node)
        case MapNode():
            yield from _task_problems(node)
            if node.max_parallel is not None and not _is_whole(node.max_parallel, 1, 1_000_000):
                yield "has a max_parallel that is not a whole number of at least 1"
            if type(node.allow_failed_items) is not bool:
                yield "has an allow_failed_items that is neither True nor False"
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
