"""WorkflowDefinition: a workflow written as a class and looked up by its key.

A class names its nodes and may take parameters in ``build_with``. A worker that expands a sub-workflow
finds the class by the key stored with the node.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, get_args, get_origin

from horsies.codec.calls import CallSignature
from horsies.codec.shape import type_text
from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.workflow.build.graph import key_problem, no_key
from horsies.workflow.nodes.nodes import NODE_KINDS, AnyNode, NodeKey, OnError, value_type
from horsies.workflow.nodes.type_compat import UNKNOWN_TYPE, fits
from horsies.workflow.spec import WorkflowMaker, WorkflowSpec, specs_made

T = TypeVar("T")


class BuildsSpecs(Protocol):
    """What a definition needs from an application."""

    @property
    def workflow(self) -> WorkflowMaker: ...


class WorkflowDefinition(Generic[T]):
    """A workflow as a class: a name, a key, nodes, and optionally parameters.

    ``T`` is the type of the output node's value, or None if there is no output. ``definition_key``
    identifies the workflow across deployments; a class without its own key is an abstract base for
    other definitions. ``Meta`` may name the ``output`` node (by its attribute name, as text),
    ``on_error`` and ``success_policy``.

    Example:
        class Report(WorkflowDefinition[str]):
            name = "report"
            definition_key = "report.v1"
            fetch = fetch_task.node()(url="https://example.org")
            render = render_task.node()(page=from_node(fetch))

            class Meta:
                output = "render"
    """

    name: ClassVar[str] = ""
    """The name for display."""
    definition_key: ClassVar[str] = ""
    """The identity of the workflow across runs and deployments."""

    # Not a nested class, because pyright rejects a `class Meta` that does not inherit from it.
    Meta: ClassVar[type] = object
    """An inner class that may set ``output``, ``on_error`` and ``success_policy``."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _stamp_ids(cls)
        if "build_with" in vars(cls):
            cls.build_with = _guarded(vars(cls)["build_with"])  # type: ignore[method-assign]
        if "definition_key" in vars(cls):
            _register(cls)

    @classmethod
    def get_workflow_nodes(cls) -> list[tuple[str, AnyNode]]:
        """Return the nodes with their attribute names, in order; nodes from base classes come first."""
        found: dict[str, Any] = {}
        for owner in reversed(cls.__mro__):
            found.update(vars(owner))
        return [(name, value) for name, value in found.items() if isinstance(value, NODE_KINDS)]

    @classmethod
    def own_key(cls) -> str | None:
        """Return the key that this class itself declares, or None if it is abstract."""
        key = vars(cls).get("definition_key")
        return None if key_problem(key) else key

    @classmethod
    def output_type(cls) -> Any:
        """Return the declared type of the result, or UNKNOWN_TYPE."""
        declared = _declared_type(cls)
        output = _output_of(cls) if declared is UNKNOWN_TYPE else None
        return declared if output is None else value_type(output)

    @classmethod
    def build_signature(cls) -> CallSignature | None:
        """Return the parameters of the user's own ``build_with``, if it is overridden."""
        function = inspect.unwrap(cls.build_with.__func__)  # type: ignore[attr-defined]
        if function is inspect.unwrap(WorkflowDefinition.build_with.__func__):  # type: ignore[attr-defined]
            return None
        return _signature_of(function)

    @classmethod
    def build(cls, app: BuildsSpecs) -> WorkflowSpec[T]:
        """Create the specification from the class's nodes.

        Raises HRS-001 without a name, HRS-002 without nodes, HRS-016 without a key, and HRS-025 if the
        output is not of type ``T``.
        """
        key = _key_of(cls)
        if not cls.name:
            raise WorkflowValidationError(
                f"{cls.__qualname__} has no name.",
                code=ErrorCode.WORKFLOW_NO_NAME,
                help_text=f'name = "{cls.__name__.lower()}" in the class',
            )
        _stamp_ids(cls)
        meta = cls.Meta
        spec: WorkflowSpec[Any] = app.workflow(
            cls.name,
            [node for _, node in cls.get_workflow_nodes()],
            getattr(meta, "on_error", OnError.FAIL),
            output=getattr(meta, "output", None),
            success_policy=getattr(meta, "success_policy", None),
            definition_key=key,
        )
        _refuse_other_output(cls, spec)
        return spec

    @classmethod
    def build_with(cls, app: Any, *args: Any, **params: Any) -> WorkflowSpec[T]:
        """Create the specification for these parameters; override this method to add parameters. Every
        call must create a new specification, which gets the class's key. Parameters are passed by name.

        Example:
            @classmethod
            def build_with(cls, app: Horsies, *, order_id: int) -> WorkflowSpec[str]:
                charge = charge_task.node(node_id="charge")(order_id=order_id)
                return app.workflow(cls.name, [charge], output=charge)
        """
        return cls.build(app)


AnyDefinition: TypeAlias = type[WorkflowDefinition[Any]]

_registry: dict[str, AnyDefinition] = {}


def definition_by_key(definition_key: str) -> AnyDefinition | None:
    """Return the class registered under a key in this process, or None."""
    return _registry.get(definition_key)


def definition_keys() -> list[str]:
    """Return the keys registered in this process."""
    return list(_registry)


def _stamp_ids(cls: AnyDefinition) -> None:
    for name, node in cls.get_workflow_nodes():
        if (node.node_id is None or node.id_derived) and not node.frozen:
            node.node_id = name


def _register(cls: AnyDefinition) -> None:
    key = cls.own_key()
    if key is None:
        return  # This mistake is reported when the class is built or checked.
    known = _registry.get(key, cls)
    # Importing a module again creates its classes again.
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise WorkflowValidationError(
            f"The definition_key {key!r} of {cls.__qualname__} belongs to another workflow.",
            code=ErrorCode.WORKFLOW_DUPLICATE_DEFINITION_KEY,
            notes=[f"first used by {known.__module__}.{known.__qualname__}"],
            help_text="give one of the workflows another definition_key",
        )
    _registry[key] = cls


def _guarded(method: Any) -> Any:
    """Check the result of every call to an overridden build_with."""
    if not isinstance(method, classmethod):
        raise TypeError(
            "build_with must be a classmethod: @classmethod def build_with(cls, app, ...)"
        )
    function: Callable[..., Any] = method.__func__

    @functools.wraps(function)
    def build_with(cls: Any, app: Any, *args: Any, **params: Any) -> WorkflowSpec[Any]:
        with specs_made(cls.own_key()) as made:
            spec = function(cls, app, *args, **params)
        return _accepted(cls, app, spec, made)

    return classmethod(build_with)


def _accepted(
    cls: AnyDefinition, app: BuildsSpecs, spec: object, made: list[Any]
) -> WorkflowSpec[Any]:
    key = _key_of(cls)
    if not isinstance(spec, WorkflowSpec):
        raise _bad_build(cls, f"returned {type(spec).__name__} instead of a WorkflowSpec")
    if not any(spec is one for one in made):
        raise _bad_build(cls, "returned a specification that was not made in this call")
    if spec.definition_key is None:
        spec = WorkflowSpec.of(replace(spec.graph, definition_key=key))
    if spec.definition_key != key:
        raise _bad_build(cls, f"returned a specification with the key {spec.definition_key!r}")
    _refuse_other_output(cls, spec)
    return spec if spec.graph.producer is not None else app.workflow.adopt(spec)


def _bad_build(cls: AnyDefinition, problem: str) -> WorkflowValidationError:
    return WorkflowValidationError(
        f"{cls.__qualname__}.build_with {problem}.",
        code=ErrorCode.WORKFLOW_SUBWORKFLOW_BUILD_WITH_BINDING,
        help_text="create a specification in every call: return app.workflow(cls.name, [...])",
    )


def _key_of(cls: AnyDefinition) -> str:
    key = cls.own_key()
    if key is None:
        problem = key_problem(vars(cls).get("definition_key")) or "has no definition_key"
        raise no_key(f"{cls.__qualname__}", f"{problem} of its own")
    return key


def _refuse_other_output(cls: AnyDefinition, spec: WorkflowSpec[Any]) -> None:
    declared = _declared_type(cls)
    if declared is UNKNOWN_TYPE or declared is Any:
        return
    output = spec.output
    given = None if output is None else value_type(output)
    if given is UNKNOWN_TYPE or fits(given, declared):
        return
    found = "it has no output" if output is None else f"its output is {type_text(given)}"
    raise WorkflowValidationError(
        f"{cls.__qualname__} is declared as WorkflowDefinition[{type_text(declared)}], but {found}.",
        code=ErrorCode.WORKFLOW_OUTPUT_TYPE_MISMATCH,
        help_text="name the output in Meta, or declare the type of the output node; without an "
        "output, declare WorkflowDefinition[None]",
    )


def _output_of(cls: AnyDefinition) -> AnyNode | None:
    output = getattr(cls.Meta, "output", None)
    if isinstance(output, NODE_KINDS):
        return output
    name = output.node_id if isinstance(output, NodeKey) else output
    return next((node for _, node in cls.get_workflow_nodes() if node.node_id == name), None)


def _declared_type(cls: type, known: Mapping[Any, Any] = MappingProxyType({})) -> Any:
    """Return the T of WorkflowDefinition[T] as declared by the class or one of its bases."""
    for base in vars(cls).get("__orig_bases__", cls.__bases__):
        origin = get_origin(base) or base
        if not (isinstance(origin, type) and issubclass(origin, WorkflowDefinition)):
            continue
        arguments = [known.get(one, one) for one in get_args(base)]
        if origin is WorkflowDefinition:
            is_declared = arguments and not isinstance(arguments[0], TypeVar)
            return arguments[0] if is_declared else UNKNOWN_TYPE
        parameters = getattr(origin, "__parameters__", ())
        return _declared_type(origin, dict(zip(parameters, arguments, strict=False)))
    return UNKNOWN_TYPE


@functools.lru_cache(maxsize=1_024)
def _signature_of(function: Callable[..., Any]) -> CallSignature:
    """Read the parameters after ``cls`` and ``app``."""

    @functools.wraps(function)
    def build(*args: Any, **params: Any) -> Any:
        raise NotImplementedError

    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[2:]
    build.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    # Skip the annotation of ``app``, which is often imported only for type checkers.
    kept = {one.name for one in parameters}
    annotations = function.__annotations__
    build.__annotations__ = {name: annotations[name] for name in annotations if name in kept}
    return CallSignature.of(build)
