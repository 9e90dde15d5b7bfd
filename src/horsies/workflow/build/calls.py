"""Calls: whether the nodes of a workflow give their tasks and definitions what they take.

Names, missing parameters, types of results handed on, and the arguments themselves, which are
written as JSON here and never change afterwards. Stands before the line producer -> SQL -> turn ->
child -> report -> result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from horsies.codec.calls import CallSignature
from horsies.codec.shape import type_text
from horsies.errors import ErrorCode, HorsiesError, WorkflowValidationError
from horsies.result import Err
from horsies.workflow.build.draft import Draft
from horsies.workflow.nodes.nodes import (
    AnyNode,
    CallingNode,
    FromNode,
    MapNode,
    SubWorkflowNode,
    value_type,
)
from horsies.workflow.nodes.type_compat import UNKNOWN_TYPE, element_type, fits, result_targets

_NESTED_MEMBERS_MAX = 1_000


@dataclass(slots=True)
class CheckedCall:
    """The call of one node: its arguments as JSON text, and the parameter a MapNode fills."""

    kwargs_json: str = "{}"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    each: str | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """One node beside what it calls."""

    plan: Draft
    says: str
    node: CallingNode
    callee: str
    signature: CallSignature

    def error(
        self, code: ErrorCode, problem: str, help_text: str | None = None
    ) -> WorkflowValidationError:
        return WorkflowValidationError(f"{self.says} {problem}.", code=code, help_text=help_text)


def check_call(
    plan: Draft, index: int, node: CallingNode, problems: list[HorsiesError]
) -> CheckedCall:
    """Check the call of a node, add what is wrong to the problems, and return what was read."""
    checked = CheckedCall()
    call = _call_of(plan, index, node, problems)
    if call is None:
        return checked
    checked.each = _each(call, problems)
    supplied = {*node.kwargs, *node.args_from, *((checked.each,) if checked.each else ())}
    problems.extend(_name_problems(call))
    if checked.each is not None or not isinstance(node, MapNode):
        problems.extend(_missing_problems(call, supplied))
    problems.extend(_context_problems(call))
    problems.extend(_result_problems(call))
    problems.extend(_element_problems(call, checked.each))
    _encode(call, checked, problems)
    return checked


def _call_of(
    plan: Draft, index: int, node: CallingNode, problems: list[HorsiesError]
) -> _Call | None:
    says = plan.says(index)
    if vars(node).get("args"):
        problems.append(
            WorkflowValidationError(
                f"{says} has positional arguments.",
                code=ErrorCode.WORKFLOW_POSITIONAL_ARGS_NOT_SUPPORTED,
                help_text="give the parameters by name, in kwargs",
            )
        )
    if not isinstance(node, SubWorkflowNode):
        definition = node.fn.definition
        return _Call(plan, says, node, f"task {definition.name!r}", definition.signature)
    return _child_call(plan, says, node, problems)


def _child_call(
    plan: Draft, says: str, node: SubWorkflowNode[Any], problems: list[HorsiesError]
) -> _Call | None:
    definition = node.workflow_def
    if definition.own_key() is None:
        problems.append(
            WorkflowValidationError(
                f"{says} runs {definition.__name__}, which has no definition_key of its own.",
                code=ErrorCode.WORKFLOW_NO_DEFINITION_KEY,
                help_text=f'definition_key = "{definition.__name__.lower()}.v1" in that class',
            )
        )
    try:
        signature = definition.build_signature()
    except ValueError as error:
        problems.append(_unusable_build(says, definition.__name__, str(error)))
        return None
    if signature is not None:
        return _Call(plan, says, node, f"{definition.__name__}.build_with", signature)
    if node.kwargs or node.args_from or node.workflow_ctx_from:
        problems.append(
            WorkflowValidationError(
                f"{says} gives parameters to {definition.__name__}, which has no build_with of "
                "its own to take them.",
                code=ErrorCode.WORKFLOW_SUBWORKFLOW_PARAMS_REQUIRE_BUILD_WITH,
                help_text="define build_with(cls, app, *, ...) in that class, or drop the parameters",
            )
        )
    return None


def _unusable_build(says: str, name: str, problem: str) -> WorkflowValidationError:
    return WorkflowValidationError(
        f"{says} runs {name}, whose build_with cannot be called: {problem}.",
        code=ErrorCode.WORKFLOW_SUBWORKFLOW_BUILD_WITH_BINDING,
        help_text="annotate its parameters with types that pydantic can write to JSON and read back",
    )


def _each(call: _Call, problems: list[HorsiesError]) -> str | None:
    """Return the parameter that takes the element of a MapNode."""
    node = call.node
    if not isinstance(node, MapNode):
        return None
    if node.each is not None:
        return node.each
    given = {*node.kwargs, *node.args_from}
    free = [name for name in call.signature.names.required if name not in given]
    if len(free) == 1:
        return free[0]
    shown = ", ".join(map(repr, free)) or "none"
    problems.append(
        call.error(
            ErrorCode.WORKFLOW_MISSING_REQUIRED_PARAMS,
            f"does not say which parameter of {call.callee} takes the element "
            f"(required and not given otherwise: {shown})",
            'name it: each="item"',
        )
    )
    return None


def _name_problems(call: _Call) -> Iterator[WorkflowValidationError]:
    node, names = call.node, call.signature.names
    each = (node.each,) if isinstance(node, MapNode) and node.each is not None else ()
    for name in {**node.kwargs, **node.args_from, **dict.fromkeys(each)}:
        if name in call.signature.injected:
            yield _unknown(call, name, "which the workflow passes itself")
        elif not isinstance(name, str) or (name not in names.spots and names.rest_keyword is None):
            yield _unknown(call, name, f"which {call.callee} does not take")
    given = [*node.kwargs, *node.args_from, *each]
    for name in dict.fromkeys(name for name in given if given.count(name) > 1):
        yield call.error(
            ErrorCode.WORKFLOW_KWARGS_ARGS_FROM_OVERLAP,
            f"gives the parameter {name!r} of {call.callee} in two ways",
            "keep one of kwargs, args_from and each",
        )


def _unknown(call: _Call, name: object, clause: str) -> WorkflowValidationError:
    return call.error(
        ErrorCode.WORKFLOW_INVALID_KWARG_KEY,
        f"gives a parameter {name!r}, {clause}",
        f"the parameters are {call.signature.names.shown}",
    )


def _missing_problems(call: _Call, supplied: set[Any]) -> Iterator[WorkflowValidationError]:
    node, names = call.node, call.signature.names
    missing = [name for name in names.required if name not in supplied or name not in names.spots]
    if "workflow_ctx" in call.signature.required_injected and not node.workflow_ctx_from:
        missing.append("workflow_ctx")
    if not missing:
        return
    hidden = [name for name in missing if name in names.positional and name not in names.spots]
    yield call.error(
        ErrorCode.WORKFLOW_MISSING_REQUIRED_PARAMS,
        f"does not give {call.callee} its {', '.join(map(repr, missing))}",
        f"{hidden[0]!r} is taken by position only; let it be given by name"
        if hidden
        else "give them in the call, through from_node(...), or give the parameters defaults",
    )


def _context_problems(call: _Call) -> Iterator[WorkflowValidationError]:
    if call.node.workflow_ctx_from and "workflow_ctx" not in call.signature.injected:
        yield call.error(
            ErrorCode.WORKFLOW_CTX_PARAM_MISSING,
            f"sets workflow_ctx_from, but {call.callee} has no parameter workflow_ctx",
            "declare workflow_ctx: WorkflowContext | None = None",
        )


def _result_problems(call: _Call) -> Iterator[WorkflowValidationError]:
    node = call.node
    for name, source in node.args_from.items():
        if call.plan.position(source) is None:
            continue  # said already
        if node.join != "all" and name in call.signature.names.required:
            yield call.error(
                ErrorCode.WORKFLOW_INVALID_JOIN,
                f"may start before {_id(source)} has a result (join={node.join!r}), but the "
                f"parameter {name!r} that takes it has no default",
                f"declare {name}: TaskResult[...] | None = None",
            )
        problem = _result_problem(call, name, source)
        if problem is not None:
            yield call.error(
                ErrorCode.WORKFLOW_ARGS_FROM_TYPE_MISMATCH,
                f"hands the result of {_id(source)} to {call.callee} as {name!r}, {problem}",
                "a result is taken as TaskResult[T, TaskError], T being the value of that node",
            )


def _result_problem(call: _Call, name: str, source: AnyNode) -> str | None:
    names = call.signature.names
    spot = name if name in names.spots else names.rest_keyword
    if spot is None:
        return None  # an unknown name, said already
    annotation = call.signature.annotations.get(spot)
    targets = result_targets(annotation)
    if not targets:
        shown = "not annotated" if annotation is None else f"annotated {type_text(annotation)}"
        return f"which is {shown}"
    given = value_type(source)
    if given is UNKNOWN_TYPE:
        return "but the type of that result is not known; declare WorkflowDefinition[T]"
    if any(fits(given, target) for target in targets):
        return None
    return f"which is annotated {type_text(annotation)}, but its value is {type_text(given)}"


def _element_problems(call: _Call, each: str | None) -> Iterator[WorkflowValidationError]:
    node = call.node
    if not isinstance(node, MapNode) or call.plan.position(node.over) is None:
        return
    problem = _element_problem(call, node, each)
    if problem is not None:
        yield call.error(ErrorCode.WORKFLOW_ARGS_FROM_TYPE_MISMATCH, problem)


def _element_problem(call: _Call, node: MapNode[Any], each: str | None) -> str | None:
    given = value_type(node.over)
    if given is UNKNOWN_TYPE:
        return f"runs over {_id(node.over)}, whose type is not known"
    element = element_type(given)
    if element is UNKNOWN_TYPE:
        return f"runs over {_id(node.over)}, whose value is {type_text(given)} and no list"
    annotation = call.signature.annotations.get(each or "", Any)
    if fits(element, annotation):
        return None
    return (
        f"hands every element of {_id(node.over)} to {call.callee} as {each!r}, which is annotated "
        f"{type_text(annotation)}, but the elements are {type_text(element)}"
    )


def _encode(call: _Call, checked: CheckedCall, problems: list[HorsiesError]) -> None:
    given = call.node.kwargs
    if not given:
        return
    markers = [name for name, value in given.items() if _holds_marker(value)]
    problems.extend(_misplaced_marker(call, name) for name in markers)
    known = {
        name: value
        for name, value in given.items()
        if isinstance(name, str) and name not in markers and name not in call.signature.injected
    }
    text = call.signature.encode_keywords(known)
    if isinstance(text, Err):
        problem = f"has an argument that cannot be stored: {text.value.message.rstrip('.')}"
        problems.append(call.error(ErrorCode.WORKFLOW_KWARGS_NOT_SERIALIZABLE, problem))
        return
    checked.kwargs_json = text.value
    checked.kwargs = call.signature.decode_keywords(text.value).unwrap_or({})


def _misplaced_marker(call: _Call, name: str) -> WorkflowValidationError:
    return call.error(
        ErrorCode.WORKFLOW_INVALID_ARGS_FROM,
        f"holds from_node(...) inside the value of {name!r}",
        "from_node stands for a whole parameter of task.node()(...); elsewhere use args_from",
    )


def _holds_marker(value: object) -> bool:
    if type(value) is FromNode:
        return True
    if not isinstance(value, dict | list | tuple) or len(value) > _NESTED_MEMBERS_MAX:
        return False
    members = value.values() if isinstance(value, dict) else value
    return any(type(member) is FromNode for member in members)


def _id(node: AnyNode) -> str:
    return repr(node.node_id or node.name)
