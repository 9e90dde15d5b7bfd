"""Node calls: parameter names, missing parameters, the types of forwarded results, and arguments.

A call's arguments are encoded as JSON here and never change afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from horsies.codec.calls import CallSignature
from horsies.codec.shape import type_text
from horsies.errors import ErrorCode, HorsiesError
from horsies.result import Err
from horsies.workflow.build.shape import NodeIndex
from horsies.workflow.nodes.factory import FromNode
from horsies.workflow.nodes.nodes import (
    NODE_KINDS,
    AnyNode,
    CallingNode,
    MapNode,
    SubWorkflowNode,
    TaskCallingNode,
    value_type,
)
from horsies.workflow.nodes.type_compat import (
    UNKNOWN_TYPE,
    admits_none,
    element_type,
    fits,
    result_targets,
    takes_item_results,
    takes_value,
)

_NESTED_MEMBERS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class EncodedArguments:
    """A node's arguments as JSON text and as decoded values; ``each`` is the parameter of a MapNode."""

    kwargs_json: str = "{}"
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    each: str | None = None


@dataclass(frozen=True, slots=True)
class _Mistakes:
    """One node's mistakes, collected with the mistakes of the whole workflow."""

    nodes: NodeIndex
    index: int
    found: list[HorsiesError]

    def add(self, code: ErrorCode, problem: str, help_text: str | None = None) -> None:
        self.found.append(self.nodes.error(self.index, code, problem, help_text))


@dataclass(frozen=True, slots=True)
class _Call:
    """One node and the signature that it calls."""

    mistakes: _Mistakes
    node: CallingNode[Any]
    callee: str
    signature: CallSignature

    def is_readable(self, source: AnyNode) -> bool:
        """Return whether a source's type can be read despite any mistakes in the source."""
        nodes = self.mistakes.nodes
        return nodes.position(source) in nodes.readable

    def id_of(self, source: AnyNode) -> str:
        """Return a source's id in this workflow; it may have a different id in other workflows."""
        return repr(self.mistakes.nodes.id_of(source))


def check_call(nodes: NodeIndex, index: int, problems: list[HorsiesError]) -> EncodedArguments:
    """Check a node's call, add its mistakes to the problems, and return its arguments."""
    node = nodes.members[index]
    if not isinstance(node, CallingNode):
        return EncodedArguments()
    mistakes = _Mistakes(nodes, index, problems)
    call = _call_of(node, mistakes)
    if call is None:
        return EncodedArguments()
    each = _element_parameter(call)
    _check_names(call, each)
    if node.workflow_ctx_from and "workflow_ctx" not in call.signature.injected:
        mistakes.add(
            ErrorCode.WORKFLOW_CTX_PARAM_MISSING,
            f"sets workflow_ctx_from, but {call.callee} has no parameter workflow_ctx",
            "declare workflow_ctx: WorkflowContext | None = None",
        )
    _check_results(call)
    if isinstance(node, MapNode) and (problem := _element_problem(call, node, each)):
        mistakes.add(ErrorCode.WORKFLOW_ARGS_FROM_TYPE_MISMATCH, problem)
    return _encode(call, each)


def _call_of(node: CallingNode[Any], mistakes: _Mistakes) -> _Call | None:
    if vars(node).get("args"):
        mistakes.add(
            ErrorCode.WORKFLOW_POSITIONAL_ARGS_NOT_SUPPORTED,
            "has positional arguments",
            "give the parameters by name, in kwargs",
        )
    if isinstance(node, TaskCallingNode):
        definition = node.fn.definition
        return _Call(mistakes, node, f"task {definition.name!r}", definition.signature)
    assert isinstance(node, SubWorkflowNode)
    return _child_call(node, mistakes)


def _child_call(node: SubWorkflowNode[Any], mistakes: _Mistakes) -> _Call | None:
    definition = node.workflow_def
    name = definition.__name__
    if definition.own_key() is None:
        mistakes.add(
            ErrorCode.WORKFLOW_NO_DEFINITION_KEY,
            f"runs {name}, which has no definition_key of its own",
            f'definition_key = "{name.lower()}.v1" in that class',
        )
    try:
        signature = definition.build_signature()
    except ValueError as error:
        mistakes.add(
            ErrorCode.WORKFLOW_SUBWORKFLOW_BUILD_WITH_BINDING,
            f"runs {name}, whose build_with cannot be called: {error}",
            "annotate its parameters with types that pydantic can write to JSON and read back",
        )
        return None
    if signature is not None:
        return _Call(mistakes, node, f"{name}.build_with", signature)
    if node.kwargs or node.args_from or node.workflow_ctx_from:
        mistakes.add(
            ErrorCode.WORKFLOW_SUBWORKFLOW_PARAMS_REQUIRE_BUILD_WITH,
            f"gives parameters to {name}, which has no build_with of its own to take them",
            "define build_with(cls, app, *, ...) in that class, or drop the parameters",
        )
    return None


def _element_parameter(call: _Call) -> str | None:
    """Return the parameter that takes a MapNode's element, or None if it is not clear."""
    if not isinstance(call.node, MapNode):
        return None
    if call.node.each is not None:
        return call.node.each
    free = _free(call)
    return free[0] if len(free) == 1 else None


def _free(call: _Call) -> list[str]:
    given = {*call.node.kwargs, *call.node.args_from}
    return [name for name in call.signature.names.required if name not in given]


def _check_names(call: _Call, each: str | None) -> None:
    """Find unknown, duplicate and missing parameters; a misspelt one is reported only as unknown."""
    node = call.node
    given = [*node.kwargs, *node.args_from]
    if isinstance(node, MapNode) and node.each is not None:
        given.append(node.each)
    missing = _missing(call, each)
    unknown = {name: clause for name in given if (clause := _unknown(call, name))}
    for name, clause in unknown.items():
        also = f", and does not give its {missing}" if missing else ""
        call.mistakes.add(
            ErrorCode.WORKFLOW_INVALID_KWARG_KEY,
            f"gives a parameter {name!r}, {clause}{also}",
            f"the parameters are {call.signature.names.shown}",
        )
        missing = None
    for name in (name for name, count in Counter(given).items() if count > 1):
        call.mistakes.add(
            ErrorCode.WORKFLOW_KWARGS_ARGS_FROM_OVERLAP,
            f"gives the parameter {name!r} of {call.callee} in two ways",
            "keep one of kwargs, args_from and each",
        )
    if unknown:
        return
    if isinstance(node, MapNode) and each is None:
        _report_unclear_element(call)
    elif missing:
        _report_missing(call, missing)


def _unknown(call: _Call, name: object) -> str | None:
    names = call.signature.names
    if name in call.signature.injected:
        return "which the workflow or the worker passes itself"
    if not isinstance(name, str) or (name not in names.spots and names.rest_keyword is None):
        return f"which {call.callee} does not take"
    return None


def _missing(call: _Call, each: str | None) -> str | None:
    node, names = call.node, call.signature.names
    given = {*node.kwargs, *node.args_from, each}
    missing = [name for name in names.required if name not in given or name not in names.spots]
    if "workflow_ctx" in call.signature.required_injected and not node.workflow_ctx_from:
        missing.append("workflow_ctx")
    return ", ".join(map(repr, missing)) or None


def _report_unclear_element(call: _Call) -> None:
    shown = ", ".join(map(repr, _free(call))) or "none"
    call.mistakes.add(
        ErrorCode.WORKFLOW_MISSING_REQUIRED_PARAMS,
        f"does not say which parameter of {call.callee} takes the element "
        f"(required and not given otherwise: {shown})",
        'name it: each="item"',
    )


def _report_missing(call: _Call, missing: str) -> None:
    names = call.signature.names
    hidden = [name for name in names.required if name not in names.spots]
    call.mistakes.add(
        ErrorCode.WORKFLOW_MISSING_REQUIRED_PARAMS,
        f"does not give {call.callee} its {missing}",
        f"{hidden[0]!r} is taken by position only; let it be given by name"
        if hidden
        else "give them in the call, through from_node(...), or give the parameters defaults",
    )


def _check_results(call: _Call) -> None:
    node = call.node
    for name, source in node.args_from.items():
        if not call.is_readable(source):
            continue  # Other checks, of the shape or of the source, report this mistake.
        if _may_be_open(node) and name in call.signature.names.required:
            call.mistakes.add(
                ErrorCode.WORKFLOW_INVALID_JOIN,
                f"may start before {call.id_of(source)} has a result (join={node.join!r}), but the "
                f"parameter {name!r} that takes it has no default",
                f"give it one: {name}: ... | None = None",
            )
        elif misfit := _result_misfit(call, name, source):
            clause, help_text = misfit
            call.mistakes.add(
                ErrorCode.WORKFLOW_ARGS_FROM_TYPE_MISMATCH,
                f"passes the result of {call.id_of(source)} to {call.callee} as {name!r}, {clause}",
                help_text,
            )
        elif problem := _failure_problem(call, name, source):
            call.mistakes.add(
                ErrorCode.WORKFLOW_ARGS_FROM_TYPE_MISMATCH,
                problem,
                "annotate the parameter T | None, which is None then, or TaskResult[T, TaskError]",
            )


def _may_be_open(node: CallingNode[Any]) -> bool:
    """Return whether a node may start before all its dependencies have ended."""
    return node.join in ("any", "quorum") and not isinstance(node, MapNode)


def _result_misfit(call: _Call, name: str, source: AnyNode) -> tuple[str, str] | None:
    """Explain why a parameter cannot take a result, with the help text; return None if it can."""
    names = call.signature.names
    if name not in names.spots and names.rest_keyword is None:
        return None  # The unknown name has already been reported.
    annotation = call.signature.annotation_of(name)
    if annotation in (None, Any):
        if name not in names.spots:
            return None  # **kwargs accepts any result.
        return (
            f"which is {'not annotated' if annotation is None else 'annotated Any'}",
            "annotate it T to take the value of that node, or TaskResult[T, TaskError] to take "
            "its whole result",
        )
    given, targets = value_type(source), result_targets(annotation)
    form = "TaskResult[{}, TaskError]"
    if takes_value(annotation):
        given, targets, form = _taken_type(source, annotation), (annotation,), "{}"
    if given is UNKNOWN_TYPE:
        return "but the type of that result is not known", "declare WorkflowDefinition[T]"
    if any(fits(given, target) for target in targets):
        return None
    value = type_text(given)
    clause = f"which is annotated {type_text(annotation)}, but its value is {value}"
    return clause, f"annotate it {form.format(value)}, or pass another node"


def _taken_type(source: AnyNode, annotation: Any) -> Any:
    """Return the type of the value that a parameter takes; for a map, usually its items' values."""
    if not isinstance(source, MapNode) or takes_item_results(annotation):
        return value_type(source)
    item = source.fn.definition.results.ok_type
    if source.allow_failed_items and item is not None:
        item = item | None
    return list[item]  # type: ignore[valid-type]


def _failure_problem(call: _Call, name: str, source: AnyNode) -> str | None:
    """Return the problem of a parameter that needs a value if the node that provides it may fail."""
    node, annotation = call.node, call.signature.annotation_of(name)
    if not node.allow_failed_deps or _may_be_open(node):
        return None
    if not takes_value(annotation) or admits_none(annotation):
        return None
    return (
        f"runs even if {call.id_of(source)} fails (allow_failed_deps), but the parameter {name!r} of "
        f"{call.callee} takes the value of that node ({type_text(annotation)})"
    )


def _element_problem(call: _Call, node: MapNode[Any], each: str | None) -> str | None:
    if not call.is_readable(node.over):
        return None
    given = value_type(node.over)
    if given is UNKNOWN_TYPE:
        return f"runs over {call.id_of(node.over)}, whose type is not known"
    element = element_type(given)
    if element is UNKNOWN_TYPE:
        return f"runs over {call.id_of(node.over)}, whose value is {type_text(given)}, not a list"
    annotation = call.signature.annotations.get(each or "", Any)
    if isinstance(node.over, MapNode) and takes_value(annotation):
        element = element_type(_taken_type(node.over, annotation))
    if fits(element, annotation):
        return None
    return (
        f"passes every element of {call.id_of(node.over)} to {call.callee} as {each!r}, which is annotated "
        f"{type_text(annotation)}, but the elements are {type_text(element)}"
    )


def _encode(call: _Call, each: str | None) -> EncodedArguments:
    given = call.node.kwargs
    if not given:
        return EncodedArguments(each=each)
    markers = [name for name, value in given.items() if _holds(value, FromNode)]
    for name in markers:
        call.mistakes.add(
            ErrorCode.WORKFLOW_INVALID_ARGS_FROM,
            f"holds from_node(...) inside the value of {name!r}",
            "from_node stands for a whole parameter of task.node()(...); elsewhere use args_from",
        )
    bare = [name for name, value in given.items() if _holds(value, NODE_KINDS)]
    for name in bare:
        call.mistakes.add(
            ErrorCode.WORKFLOW_KWARGS_NOT_SERIALIZABLE,
            f"passes a node itself as {name!r}, not its result",
            f"write {name}=from_node(...) in the call of task.node()",
        )
    known = {
        name: value
        for name, value in given.items()
        if isinstance(name, str) and name not in {*markers, *bare, *call.signature.injected}
    }
    text = call.signature.encode_keywords(known)
    if isinstance(text, Err):
        problem = f"has an argument that cannot be stored: {text.value.message.rstrip('.')}"
        call.mistakes.add(ErrorCode.WORKFLOW_KWARGS_NOT_SERIALIZABLE, problem)
        return EncodedArguments(each=each)
    kwargs = call.signature.decode_keywords(text.value).unwrap_or({})
    return EncodedArguments(text.value, kwargs, each)


def _holds(value: object, kinds: type | tuple[type, ...]) -> bool:
    if isinstance(value, kinds):
        return True
    if not isinstance(value, dict | list | tuple) or len(value) > _NESTED_MEMBERS_MAX:
        return False
    members = value.values() if isinstance(value, dict) else value
    return any(isinstance(member, kinds) for member in members)
