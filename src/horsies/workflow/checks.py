"""Checks: what ``app.check()`` asks about workflows, in phases.

Definitions have keys and can be built, builders make what they promise, and nothing that makes
specifications is left unregistered. Stands before the line producer -> SQL -> turn -> child ->
report -> result.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, Protocol, get_origin, get_type_hints

from horsies.errors import ErrorCode, HorsiesError, SourceLocation, WorkflowValidationError
from horsies.workflow.blueprint import key_problem, no_key
from horsies.workflow.builders import RegisteredBuilder, builder_errors, reported, spec_errors
from horsies.workflow.definition import BuildsSpecs, WorkflowDefinition
from horsies.workflow.nodes import MapNode, RunnableTask, TaskNode
from horsies.workflow.spec import WorkflowSpec

NO_CHECK = "__horsies_no_check__"

AnyDefinition = type[WorkflowDefinition[Any]]


class KnowsTasks(BuildsSpecs, Protocol):
    """What checking needs of an application."""

    def get_task(self, task_name: str) -> RunnableTask[Any] | None:
        """Return a registered task, or None."""


def workflow_errors(
    app: KnowsTasks, modules: Iterable[ModuleType], builders: Sequence[RegisteredBuilder]
) -> list[HorsiesError]:
    """Return the errors of the first phase that finds any."""
    found = list(_with_submodules(modules))
    definitions = list(_definitions(found))
    phases: tuple[Callable[[], Iterable[HorsiesError]], ...] = (
        lambda: map(_keyless, filter(_lacks_key, definitions)),
        lambda: _build_errors(app, definitions),
        lambda: builder_errors(app, builders),
        lambda: _undecorated(found, builders),
    )
    return next((errors for phase in phases if (errors := list(phase()))), [])


def _with_submodules(modules: Iterable[ModuleType]) -> Iterator[ModuleType]:
    """Yield the modules and what is loaded of the packages among them, each once."""
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


def _lacks_key(definition: AnyDefinition) -> bool:
    """Tell a definition that forgot its key from one that others are made of."""
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


def _build_errors(app: KnowsTasks, definitions: Iterable[AnyDefinition]) -> Iterator[HorsiesError]:
    """Build the definitions that take no parameters and whose tasks are this application's."""
    for definition in definitions:
        if definition.own_key() is None or not _is_ours(app, definition):
            continue
        for error in _one_build(app, definition):
            error.location = _class_location(definition) or error.location
            yield error


def _is_ours(app: KnowsTasks, definition: AnyDefinition) -> bool:
    if _has_own_build_with(definition):
        return False
    nodes = [node for _, node in definition.get_workflow_nodes()]
    tasks = [node.fn for node in nodes if isinstance(node, TaskNode | MapNode)]
    # What is no task belongs to nobody; building says so.
    return all(
        app.get_task(one.definition.name) is one for one in tasks if hasattr(one, "definition")
    )


def _has_own_build_with(definition: AnyDefinition) -> bool:
    try:
        return definition.build_signature() is not None
    except ValueError:
        return True


def _one_build(app: KnowsTasks, definition: AnyDefinition) -> Iterator[HorsiesError]:
    location = _class_location(definition)
    try:
        spec = definition.build(app)
    except Exception as error:
        yield from reported(error, f"{definition.__qualname__}.build", location)
        return
    yield from spec_errors(app, spec, location)


def _undecorated(
    modules: Iterable[ModuleType], builders: Sequence[RegisteredBuilder]
) -> Iterator[HorsiesError]:
    registered = {id(builder.function) for builder in builders}
    for module in modules:
        for function in list(vars(module).values()):
            if (
                isinstance(function, FunctionType)
                and function.__module__ == module.__name__
                and id(function) not in registered
                and not getattr(function, NO_CHECK, False)
                and _returns_spec(function)
            ):
                yield _unregistered(function)


def _returns_spec(function: FunctionType) -> bool:
    stated = function.__annotations__.get("return")
    try:
        returned = get_type_hints(function).get("return")
    except Exception:
        # An annotation beside the point may be unresolvable; the text still says it.
        return isinstance(stated, str) and "WorkflowSpec" in stated
    return returned is WorkflowSpec or get_origin(returned) is WorkflowSpec


def _unregistered(function: FunctionType) -> WorkflowValidationError:
    error = WorkflowValidationError(
        f"The function {function.__name__!r} returns a WorkflowSpec but is not checked.",
        code=ErrorCode.WORKFLOW_CHECK_UNDECORATED_BUILDER,
        help_text="decorate it with @app.workflow_builder(), or set "
        f"{function.__name__}.{NO_CHECK} = True",
    )
    error.location = SourceLocation.from_function(function)
    return error


def _class_location(definition: type) -> SourceLocation | None:
    try:
        file = inspect.getsourcefile(definition)
        line = inspect.getsourcelines(definition)[1]
    except (OSError, TypeError):
        return None
    return None if file is None else SourceLocation(file, line, definition.__name__)
