"""Checks: the part of ``app.check()`` that deals with workflows, in phases.

Definitions must have keys and build, including the sub-workflows of module-level specifications.
Builders must return valid specifications. Every function that returns a specification must be a
registered builder.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from types import FunctionType, ModuleType
from typing import Any, Protocol, TypeAlias, TypeVar, get_origin, get_type_hints
from weakref import WeakSet

from horsies.errors import (
    ErrorCode,
    HorsiesError,
    MultipleValidationErrors,
    SourceLocation,
    WorkflowValidationError,
)
from horsies.task_result import exception_text
from horsies.tasks.definition import is_decorated, is_method
from horsies.workflow.build.graph import key_problem, no_key
from horsies.workflow.build.shape import NESTING_DEPTH_MAX
from horsies.workflow.definition import AnyDefinition, BuildsSpecs, WorkflowDefinition
from horsies.workflow.nodes.nodes import RunnableTask, SubWorkflowNode, TaskCallingNode, own_name
from horsies.workflow.spec import WorkflowSpec

Builder = TypeVar("Builder", bound=Callable[..., WorkflowSpec[Any]])
Case: TypeAlias = Mapping[str, Any]

NO_CHECK = "__horsies_no_check__"

_NAMED_KINDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


# The builders of all applications; each application checks only its own builders.
_registered: WeakSet[FunctionType] = WeakSet()


@dataclass(frozen=True, slots=True)
class RegisteredBuilder:
    """A function decorated with ``@app.workflow_builder`` and its test cases."""

    function: Callable[..., Any]
    cases: Sequence[Case] | None

    def __post_init__(self) -> None:
        if isinstance(self.function, FunctionType):
            _registered.add(self.function)

    def __str__(self) -> str:
        return f"workflow builder {own_name(self.function)!r}"


def register_builder(builders: list[RegisteredBuilder], given: Any) -> Any:
    """Register the function decorated with ``@app.workflow_builder``, or return the decorator for its
    cases.
    """
    if is_decorated(given):
        return register_builder(builders, None)(given)
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if given is not None and not is_list:
        raise WorkflowValidationError(
            f"The cases of a workflow builder must be a list, not {type(given).__name__}.",
            code=ErrorCode.WORKFLOW_CHECK_CASE_INVALID,
            help_text='@app.workflow_builder(cases=[{"order_id": 7}])',
        )

    def register(function: Any) -> Any:
        _refuse_bad_builder(function)
        builders.append(RegisteredBuilder(function, given))
        return function

    return register


def _refuse_bad_builder(function: object) -> None:
    """Reject a function that cannot return a specification when ``check`` calls it with its cases."""
    kind = "coroutine" if inspect.iscoroutinefunction(function) else None
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        kind = "generator"
    if isinstance(function, FunctionType) and is_method(function):
        kind = "method"
    if isinstance(function, type):
        kind = "class"
    if kind or not callable(function):
        raise _located(
            "A workflow builder must be a plain function that returns a WorkflowSpec, "
            f"not a {kind or type(function).__name__}.",
            ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION,
            SourceLocation.from_function(function) if callable(function) else None,
            "decorate a function of the module, made with `def` and without `yield`",
        )


class HasTasks(BuildsSpecs, Protocol):
    """The parts of an application that the checks need."""

    def get_task(self, task_name: str) -> RunnableTask[Any] | None: ...


def workflow_errors(
    app: HasTasks, modules: Iterable[ModuleType], builders: Sequence[RegisteredBuilder]
) -> list[HorsiesError]:
    """Return the errors of the first phase that has any."""
    found = list(_with_submodules(modules))
    definitions = list(_definitions(found))
    phases: tuple[Callable[[], Iterable[HorsiesError]], ...] = (
        lambda: map(_keyless, filter(_lacks_key, definitions)),
        lambda: _definition_errors(app, definitions),
        lambda: (error for spec in _specs(app, found) for error in spec_errors(app, spec, None)),
        lambda: (error for builder in builders for error in _builder_errors(app, builder)),
        lambda: _undecorated(found),
    )
    return next((errors for phase in phases if (errors := list(phase()))), [])


def spec_errors(
    app: BuildsSpecs, spec: WorkflowSpec[Any], location: SourceLocation | None
) -> Iterator[HorsiesError]:
    """Find mistakes outside the specification itself: its key, its queues and its sub-workflows."""
    if problem := key_problem(spec.definition_key):
        error = no_key(f"Workflow {spec.name!r}", problem)
        error.location = location
        yield error
    try:
        _build_children(app, app.workflow.adopt(spec), 1, set())
    except Exception as error:
        yield from as_errors(error, f"A sub-workflow of {spec.name!r}", location)


def _build_children(
    app: BuildsSpecs, spec: WorkflowSpec[Any], depth: int, seen: set[tuple[type, str]]
) -> None:
    """Build the sub-workflows whose parameters are all known, and their sub-workflows recursively."""
    for index, node in enumerate(spec.tasks):
        if not isinstance(node, SubWorkflowNode) or node.args_from:
            continue
        call = (node.workflow_def, spec.graph.kwargs_json[index])
        if call in seen:
            continue
        seen.add(call)
        if depth > NESTING_DEPTH_MAX:
            raise WorkflowValidationError(
                f"The sub-workflow {node.name!r} is nested more than {NESTING_DEPTH_MAX} levels "
                "deep.",
                code=ErrorCode.WORKFLOW_CYCLE_DETECTED,
                help_text="does a definition contain itself with different parameters each time?",
            )
        definition: Any = node.workflow_def
        _build_children(app, definition.build_with(app, **node.kwargs), depth + 1, seen)


def as_errors(
    error: Exception, source: str, location: SourceLocation | None
) -> Iterator[HorsiesError]:
    """Convert an exception to errors: keep the library's own errors, and report any other exception as
    HRS-029.
    """
    match error:
        case MultipleValidationErrors():
            yield from error.report.errors
        case HorsiesError():
            yield error
        case _:
            problem = _located(
                f"{source} raised {type(error).__name__}: {exception_text(error)}",
                ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION,
                location,
            )
            problem.__cause__ = error
            yield problem


def _builder_errors(app: BuildsSpecs, builder: RegisteredBuilder) -> Iterator[HorsiesError]:
    """Call a builder with each of its cases and check the returned specifications."""
    location = SourceLocation.from_function(builder.function)
    try:
        parameters = list(inspect.signature(builder.function).parameters.values())
    except (TypeError, ValueError) as error:
        yield from as_errors(error, f"The {builder}", location)
        return
    required = [p.name for p in parameters if p.default is p.empty and p.kind in _NAMED_KINDS]
    if required and not builder.cases:
        yield _located(
            f"The {builder} needs {', '.join(map(repr, required))}, so it needs test cases.",
            ErrorCode.WORKFLOW_CHECK_CASES_REQUIRED,
            location,
            f'@app.workflow_builder(cases=[{{"{required[0]}": ...}}])',
        )
        return
    for case in builder.cases or [{}]:
        if problem := _case_problem(case, parameters, required):
            yield _located(
                f"A case of the {builder} {problem}.",
                ErrorCode.WORKFLOW_CHECK_CASE_INVALID,
                location,
                "a case is a dict of the builder's parameters",
            )
        else:
            yield from _case_errors(app, builder, location, case)


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


def _case_errors(
    app: BuildsSpecs, builder: RegisteredBuilder, location: SourceLocation | None, case: Case
) -> Iterator[HorsiesError]:
    try:
        spec = builder.function(**case)
    except Exception as error:
        yield from as_errors(error, f"The {builder}", location)
        return
    if isinstance(spec, WorkflowSpec):
        yield from spec_errors(app, spec, location)
        return
    yield _located(
        f"The {builder} returned {type(spec).__name__}, not a WorkflowSpec.",
        ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION,
        location,
        "return app.workflow(...)",
    )


def _located(
    message: str, code: ErrorCode, location: SourceLocation | None, help_text: str | None = None
) -> WorkflowValidationError:
    error = WorkflowValidationError(message, code=code, help_text=help_text)
    error.location = location
    return error


def _with_submodules(modules: Iterable[ModuleType]) -> Iterator[ModuleType]:
    """Yield each module, and each loaded submodule of a package, once."""
    found: dict[str, ModuleType] = {}
    for module in modules:
        found[module.__name__] = module
        prefix = f"{module.__name__}."
        loaded = {name: one for name, one in list(sys.modules.items()) if name.startswith(prefix)}
        found.update((name, one) for name, one in loaded.items() if isinstance(one, ModuleType))
    yield from found.values()


def _definitions(modules: Iterable[ModuleType]) -> Iterator[AnyDefinition]:
    found = {
        value: None
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, type)
        and issubclass(value, WorkflowDefinition)
        and value is not WorkflowDefinition
    }
    return (one for one in found if not vars(one).get(NO_CHECK))


def _specs(app: HasTasks, modules: Iterable[ModuleType]) -> Iterable[WorkflowSpec[Any]]:
    found = {
        id(value): value
        for module in modules
        for value in list(vars(module).values())
        if isinstance(value, WorkflowSpec) and app.workflow.accepts(value)
    }
    return found.values()


def _lacks_key(definition: AnyDefinition) -> bool:
    """Return whether a definition lacks a key; a base class of other definitions needs no key."""
    if "definition_key" in vars(definition):
        return definition.own_key() is None
    buildable = definition.get_workflow_nodes() or _has_own_build_with(definition)
    return bool(definition.name and buildable) and not definition.__subclasses__()


def _keyless(definition: AnyDefinition) -> WorkflowValidationError:
    problem = key_problem(vars(definition).get("definition_key")) or "has no definition_key"
    error = no_key(f"The workflow definition {definition.__qualname__}", f"{problem} of its own")
    error.location = _class_location(definition)
    error.notes = (f"a base for other definitions sets {NO_CHECK} = True",)
    return error


def _definition_errors(
    app: HasTasks, definitions: Iterable[AnyDefinition]
) -> Iterator[HorsiesError]:
    """Build the definitions without parameters whose tasks belong to this application."""
    for definition in definitions:
        if definition.own_key() is None or not _is_ours(app, definition):
            continue
        location = _class_location(definition)
        errors: Iterable[HorsiesError]
        try:
            errors = spec_errors(app, definition.build(app), location)
        except Exception as error:
            errors = as_errors(error, f"{definition.__qualname__}.build", location)
        for one in errors:
            one.location = location or one.location
            yield one


def _is_ours(app: HasTasks, definition: AnyDefinition) -> bool:
    if _has_own_build_with(definition):
        return False
    nodes = [node for _, node in definition.get_workflow_nodes()]
    tasks = [node.fn for node in nodes if isinstance(node, TaskCallingNode)]
    # Building the definition reports functions that are not tasks.
    return all(
        app.get_task(one.definition.name) is one for one in tasks if hasattr(one, "definition")
    )


def _has_own_build_with(definition: AnyDefinition) -> bool:
    try:
        return definition.build_signature() is not None
    except ValueError:
        return True


def _undecorated(modules: Iterable[ModuleType]) -> Iterator[HorsiesError]:
    for module in modules:
        for function in list(vars(module).values()):
            if (
                isinstance(function, FunctionType)
                and function.__module__ == module.__name__
                and function not in _registered
                and not getattr(function, NO_CHECK, False)
                and _returns_spec(function)
            ):
                name = function.__name__
                yield _located(
                    f"The function {name!r} returns a WorkflowSpec but is not checked.",
                    ErrorCode.WORKFLOW_CHECK_UNDECORATED_BUILDER,
                    SourceLocation.from_function(function),
                    f"decorate it with @app.workflow_builder(), or set {name}.{NO_CHECK} = True",
                )


def _returns_spec(function: FunctionType) -> bool:
    stated = function.__annotations__.get("return")
    try:
        returned = get_type_hints(function).get("return")
    except Exception:
        # Check the annotation's text, because other annotations may not be resolvable.
        return isinstance(stated, str) and "WorkflowSpec" in stated
    return returned is WorkflowSpec or get_origin(returned) is WorkflowSpec


def _class_location(definition: type) -> SourceLocation | None:
    try:
        file = inspect.getsourcefile(definition)
        line = inspect.getsourcelines(definition)[1]
    except (OSError, TypeError):
        return None
    return None if file is None else SourceLocation(file, line, definition.__name__)
