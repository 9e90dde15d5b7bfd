"""Builders: functions that make specifications, tried out by ``app.check()`` before anything runs.

What a builder makes is checked with its sub-workflows, as far as their parameters are known. Stands
before the line producer -> SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, TypeAlias, TypeVar

from horsies.errors import (
    ErrorCode,
    HorsiesError,
    MultipleValidationErrors,
    SourceLocation,
    WorkflowValidationError,
)
from horsies.raised import exception_text
from horsies.workflow.blueprint import key_problem, no_key
from horsies.workflow.definition import BuildsSpecs
from horsies.workflow.graph import NESTING_DEPTH_MAX
from horsies.workflow.nodes import SubWorkflowNode
from horsies.workflow.spec import WorkflowSpec

Builder = TypeVar("Builder", bound=Callable[..., WorkflowSpec[Any]])
Case: TypeAlias = Mapping[str, Any]

_NAMED_KINDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class RegisteredBuilder:
    """A function decorated with ``@app.workflow_builder`` and the cases it is tried with."""

    function: Callable[..., Any]
    cases: Sequence[Case] | None


def builder_errors(app: BuildsSpecs, builders: Iterable[RegisteredBuilder]) -> list[HorsiesError]:
    """Run every builder, with each of its cases, and return what is wrong with what it makes."""
    return [error for builder in builders for error in _errors_of(app, builder)]


def _errors_of(app: BuildsSpecs, builder: RegisteredBuilder) -> Iterator[HorsiesError]:
    location = SourceLocation.from_function(builder.function)
    try:
        parameters = list(inspect.signature(builder.function).parameters.values())
    except (TypeError, ValueError) as error:
        yield from reported(error, f"The workflow builder {_name(builder)}", location)
        return
    required = [p.name for p in parameters if p.default is p.empty and p.kind in _NAMED_KINDS]
    if required and not builder.cases:
        yield _located(
            f"The workflow builder {_name(builder)} needs {', '.join(map(repr, required))}, "
            "so it needs cases to be tried with.",
            ErrorCode.WORKFLOW_CHECK_CASES_REQUIRED,
            location,
            f'@app.workflow_builder(cases=[{{"{required[0]}": ...}}])',
        )
        return
    for case in builder.cases or [{}]:
        problem = _case_problem(case, parameters, required)
        if problem is not None:
            yield _bad_case(builder, location, problem)
        else:
            yield from _try(app, builder, location, case)


def _case_problem(
    case: object, parameters: Sequence[Parameter], required: Sequence[str]
) -> str | None:
    if not isinstance(case, dict):
        return f"is of type {type(case).__name__}, not a dict"
    names = {p.name for p in parameters if p.kind in _NAMED_KINDS}
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    unknown = [name for name in case if name not in names and not takes_all]
    if unknown:
        return f"has the key {unknown[0]!r}, which the builder does not take"
    missing = [name for name in required if name not in case]
    return f"lacks {', '.join(map(repr, missing))}" if missing else None


def _bad_case(
    builder: RegisteredBuilder, location: SourceLocation | None, problem: str
) -> WorkflowValidationError:
    return _located(
        f"A case of the workflow builder {_name(builder)} {problem}.",
        ErrorCode.WORKFLOW_CHECK_CASE_INVALID,
        location,
        "a case is a dict of the builder's parameters",
    )


def _try(
    app: BuildsSpecs, builder: RegisteredBuilder, location: SourceLocation | None, case: Case
) -> Iterator[HorsiesError]:
    try:
        spec = builder.function(**case)
    except Exception as error:
        yield from reported(error, f"The workflow builder {_name(builder)}", location)
        return
    if not isinstance(spec, WorkflowSpec):
        yield _located(
            f"The workflow builder {_name(builder)} returned {type(spec).__name__}, "
            "not a WorkflowSpec.",
            ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION,
            location,
            "return app.workflow(...)",
        )
        return
    yield from spec_errors(app, spec, location)


def spec_errors(
    app: BuildsSpecs, spec: WorkflowSpec[Any], location: SourceLocation | None
) -> Iterator[HorsiesError]:
    """Find what is wrong with a specification beyond itself: its key, its queues, its children."""
    if problem := key_problem(spec.definition_key):
        error = no_key(f"Workflow {spec.name!r}", problem)
        error.location = location
        yield error
    try:
        _build_children(app, app.workflow.adopt(spec), 1, set())
    except Exception as error:
        yield from reported(error, f"A sub-workflow of {spec.name!r}", location)


def _build_children(
    app: BuildsSpecs, spec: WorkflowSpec[Any], depth: int, seen: set[tuple[type, str]]
) -> None:
    """Build the sub-workflows whose parameters are all known, and theirs in turn."""
    for index, node in enumerate(spec.tasks):
        if not isinstance(node, SubWorkflowNode) or node.args_from:
            continue
        call = (node.workflow_def, spec.blueprint.kwargs_json[index])
        if call in seen:
            continue
        seen.add(call)
        if depth > NESTING_DEPTH_MAX:
            raise _too_deep(node)
        definition: Any = node.workflow_def
        child = definition.build_with(app, **node.kwargs)
        _build_children(app, child, depth + 1, seen)


def _too_deep(node: SubWorkflowNode[Any]) -> WorkflowValidationError:
    return WorkflowValidationError(
        f"The sub-workflow {node.name!r} is nested more than {NESTING_DEPTH_MAX} levels deep.",
        code=ErrorCode.WORKFLOW_CYCLE_DETECTED,
        help_text="does a definition contain itself with ever new parameters?",
    )


def reported(error: Exception, who: str, location: SourceLocation | None) -> Iterator[HorsiesError]:
    """Return an exception as errors: our own as they are, anything else as HRS-029."""
    match error:
        case MultipleValidationErrors():
            yield from error.report.errors
        case HorsiesError():
            yield error
        case _:
            kind = type(error).__name__
            problem = _located(
                f"{who} raised {kind}: {exception_text(error)}",
                ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION,
                location,
                None,
            )
            problem.__cause__ = error
            yield problem


def _name(builder: RegisteredBuilder) -> str:
    return repr(getattr(builder.function, "__name__", type(builder.function).__name__))


def _located(
    message: str, code: ErrorCode, location: SourceLocation | None, help_text: str | None
) -> WorkflowValidationError:
    error = WorkflowValidationError(message, code=code, help_text=help_text)
    error.location = location
    return error
