"""WorkflowSpec: a checked, immutable workflow. ``app.workflow(...)`` creates a specification; starting
the specification creates a run. The data is in its graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar, overload

from horsies.durable.calls import NewChild
from horsies.result import Err
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.broker import PostgresBroker
from horsies.tasks.send import Producer
from horsies.workflow.build.graph import Graph, build_graph, key_problem, no_key
from horsies.workflow.nodes.nodes import AnyNode, NodeKey, OnError, SuccessPolicy, ValueNode
from horsies.workflow.run.child import workflow_as_child
from horsies.workflow.run.handle import WorkflowHandle
from horsies.workflow.run.info import WorkflowStartError, WorkflowStartResult
from horsies.workflow.run.start import StartOptions, replay_options, start, start_async

T = TypeVar("T")

WorkflowTerminalResults: TypeAlias = dict[str, TaskResult[Any, TaskError]]
"""The results of all end nodes by node id: the value of a run without an output."""


@dataclass(frozen=True, slots=True)
class _BuildWith:
    """A running call of a definition's ``build_with``: the definition's key, and the specifications
    created so far.
    """

    definition_key: str | None
    made: list[WorkflowSpec[Any]] = field(default_factory=list)


_build_with: ContextVar[_BuildWith | None] = ContextVar("build_with", default=None)


class WorkflowSpec(Generic[T]):
    """A checked workflow, created by ``app.workflow(...)`` or by a ``WorkflowDefinition``.

    ``T`` is the type of its result. It holds copies of the nodes passed to it and never changes. A
    specification created without an application has no queues and cannot be started.
    """

    __slots__ = ("graph",)

    graph: Graph
    """The checked nodes and edges."""

    def __init__(
        self,
        name: str,
        tasks: Iterable[AnyNode],
        on_error: OnError = OnError.FAIL,
        output: ValueNode[T] | None = None,
        success_policy: SuccessPolicy | None = None,
        *,
        definition_key: str | None = None,
        producer: Producer | None = None,
        key: str | None = None,
    ) -> None:
        options = (on_error, output, success_policy, definition_key, producer, key)
        self._hold(build_graph(name, tasks, *options))

    @classmethod
    def of(cls, graph: Graph) -> WorkflowSpec[T]:
        """Return the specification for a graph."""
        spec = object.__new__(cls)
        spec._hold(graph)
        return spec

    def _hold(self, graph: Graph) -> None:
        object.__setattr__(self, "graph", graph)
        if call := _build_with.get():
            call.made.append(self)

    @property
    def name(self) -> str:
        """The name of the workflow."""
        return self.graph.name

    @property
    def tasks(self) -> tuple[AnyNode, ...]:
        """The nodes, in index order."""
        return self.graph.nodes

    @property
    def on_error(self) -> OnError:
        """How a failed node affects a run."""
        return self.graph.on_error

    @property
    def output(self) -> AnyNode | None:
        """The node whose result is the workflow's result."""
        index = self.graph.output_index
        return None if index is None else self.graph.nodes[index]

    def output_key(self) -> NodeKey[T] | None:
        """Return the output node's key; return None if the result consists of the results of all end
        nodes.
        """
        output: Any = self.output
        key: NodeKey[T] | None = None if output is None else output.key()
        return key

    @property
    def success_policy(self) -> SuccessPolicy | None:
        """When a run counts as a success; None if every node must succeed."""
        return self.graph.success_policy

    @property
    def definition_key(self) -> str | None:
        """The stable identity of this workflow, the same in every run and deployment."""
        return self.graph.definition_key

    @property
    def broker(self) -> PostgresBroker | None:
        """The broker of the application that built the workflow, or None."""
        producer = self.graph.producer
        return None if producer is None else producer.get_broker()

    @property
    def resend_on_transient_err(self) -> bool:
        """Whether a start is retried after a transient database failure."""
        producer = self.graph.producer
        return producer is not None and producer.config.resend_on_transient_err

    def start(
        self,
        workflow_id: str | None = None,
        *,
        workflow_key: str | None = None,
        key: str | None = None,
        transaction: object = None,
    ) -> WorkflowStartResult[WorkflowHandle[T]]:
        """Start a run and return its handle.

        ``workflow_id``: your own UUID; a second start with the same id returns the existing run.
        ``workflow_key``: any text; until the run with this key has ended, a second start returns that
        run. ``key``: the key of all tasks of the run whose functions declare no key; it overrides the
        specification's key. ``transaction``: your open psycopg, SQLAlchemy or Django connection; the run
        commits or rolls back with it. Never raises for operational reasons.

        Example:
            handle = spec.start(workflow_key=f"order-{order_id}").unwrap()
        """
        options = StartOptions(workflow_id, workflow_key, transaction=transaction, key=key)
        return start(self, options)

    async def start_async(
        self,
        workflow_id: str | None = None,
        *,
        workflow_key: str | None = None,
        key: str | None = None,
        transaction: object = None,
    ) -> WorkflowStartResult[WorkflowHandle[T]]:
        """Run ``start`` without blocking the event loop."""
        options = StartOptions(workflow_id, workflow_key, transaction=transaction, key=key)
        return await start_async(self, options)

    def retry_start(self, error: WorkflowStartError) -> WorkflowStartResult[WorkflowHandle[T]]:
        """Repeat a start after ENQUEUE_FAILED; the run is stored at most once."""
        options = replay_options(self, error)
        return options if isinstance(options, Err) else start(self, options.value)

    async def retry_start_async(
        self, error: WorkflowStartError
    ) -> WorkflowStartResult[WorkflowHandle[T]]:
        """Run ``retry_start`` without blocking the event loop."""
        options = replay_options(self, error)
        return options if isinstance(options, Err) else await start_async(self, options.value)

    def as_child(self, run_id: str) -> NewChild[T]:
        """Return a run of this workflow as the child of a durable function, for ``ctx.start``."""
        return workflow_as_child(self, self.output, run_id)

    def __repr__(self) -> str:
        return f"WorkflowSpec({self.name!r}, nodes={len(self.tasks)})"

    def __setattr__(self, name: str, _value: object) -> NoReturn:
        raise AttributeError(f"a specification is immutable; {name!r} cannot be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a specification is immutable; {name!r} cannot be deleted")


class WorkflowMaker:
    """``app.workflow``: creates specifications with an application's queues and broker.

    ``tasks`` are the nodes. ``output`` is the node whose result is the workflow's result; without an
    output, the result consists of the results of all end nodes, by node id. ``definition_key``
    identifies the workflow across deployments; inside ``build_with`` it defaults to the class's key.
    ``key`` is the key of all tasks whose functions declare no key; a queue divides its child processes
    between keys.

    Example:
        spec = app.workflow("report", [fetch, render], output=render, definition_key="report.v1")
    """

    __slots__ = ("_producer",)

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    @overload
    def __call__(
        self,
        name: str,
        tasks: Iterable[AnyNode],
        on_error: OnError = OnError.FAIL,
        output: None = None,
        success_policy: SuccessPolicy | None = None,
        *,
        definition_key: str | None = None,
        key: str | None = None,
    ) -> WorkflowSpec[WorkflowTerminalResults]: ...
    @overload
    def __call__(
        self,
        name: str,
        tasks: Iterable[AnyNode],
        on_error: OnError = OnError.FAIL,
        *,
        output: ValueNode[T],
        success_policy: SuccessPolicy | None = None,
        definition_key: str | None = None,
        key: str | None = None,
    ) -> WorkflowSpec[T]: ...
    def __call__(
        self,
        name: str,
        tasks: Iterable[AnyNode],
        on_error: OnError = OnError.FAIL,
        output: ValueNode[Any] | None = None,
        success_policy: SuccessPolicy | None = None,
        *,
        definition_key: str | None = None,
        key: str | None = None,
    ) -> WorkflowSpec[Any]:
        """Check the whole workflow and return its specification; raise all mistakes together."""
        call = _build_with.get()
        if definition_key is None and call is not None:
            definition_key = call.definition_key
        if problem := key_problem(definition_key):
            raise no_key(f"Workflow {name!r}", problem)
        return WorkflowSpec(
            name,
            tasks,
            on_error,
            output,
            success_policy,
            definition_key=definition_key,
            producer=self._producer,
            key=key,
        )

    def accepts(self, spec: WorkflowSpec[Any]) -> bool:
        """Return whether a specification belongs to this application or to no application yet."""
        return spec.graph.producer in (None, self._producer)

    def adopt(self, spec: WorkflowSpec[T]) -> WorkflowSpec[T]:
        """Return the specification with this application's queues and broker."""
        found = spec.graph
        if found.producer is not None:
            return spec
        options = (found.on_error, spec.output, found.success_policy, found.definition_key)
        return WorkflowSpec.of(
            build_graph(found.name, found.nodes, *options, self._producer, found.key)
        )


@contextmanager
def specs_made(definition_key: str | None) -> Iterator[list[WorkflowSpec[Any]]]:
    """Collect the specifications created inside the block; give the key to specifications without a key."""
    outer = _build_with.get()
    call = _BuildWith(definition_key)
    token = _build_with.set(call)
    try:
        yield call.made
    finally:
        _build_with.reset(token)
        if outer is not None:
            outer.made.extend(call.made)
