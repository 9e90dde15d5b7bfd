"""Starts many runs: cuts a stream of specifications into chunks of plans and stores all of them, or
none, in one transaction. Each chunk is stored before the next chunk is built, so only the handles of
started runs stay in memory. Runs of the same tasks share their result types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Generic, TypeVar

from horsies.db.statement import Script
from horsies.db.statements.workflows import start_runs
from horsies.result import Err, Ok
from horsies.tasks.broker import BrokerResult, PostgresBroker
from horsies.tasks.bulk import KeptRows
from horsies.tracing import Sending
from horsies.workflow.build.plan import HasGraph
from horsies.workflow.nodes.nodes import AnyNode, TaskNode
from horsies.workflow.run.handle import WorkflowHandle
from horsies.workflow.run.info import WorkflowStartError, WorkflowStartResult
from horsies.workflow.run.results import DeclaredTypes
from horsies.workflow.run.start import (
    Run,
    Startable,
    StartOptions,
    invalid,
    not_stored,
    own_broker,
    prepare,
    reported,
)

T = TypeVar("T")

# The chunk size limits the program's memory use and the duration of one statement.
CHUNK_RUNS = 500
CHUNK_CHARACTERS = 1_000_000
# A chunk of one row would send another kind of notification, which names the row; so the last chunk
# takes two runs from the previous chunk.
_CARRIED = 2


def start_many(
    specs: Iterable[Startable[T]], *, transaction: object = None
) -> WorkflowStartResult[list[WorkflowHandle[T]]]:
    """Start many runs in one transaction: all of them, or none. The specifications must belong to one
    application; a specification may occur several times. A generator is read in chunks while the
    previous runs are stored.

    Example:
        handles = start_many(build_report(day) for day in days).unwrap()
    """
    match _stream(specs, StartOptions(transaction=transaction)):
        case Ok(stream):
            with closing(stream):
                return reported(stream.end(stream.store()))
        case Err() as refused:
            return reported(refused)
        case None:
            return Ok([])


async def start_many_async(
    specs: Iterable[Startable[T]], *, transaction: object = None
) -> WorkflowStartResult[list[WorkflowHandle[T]]]:
    """Run ``start_many`` without blocking the event loop, except while a chunk is built."""
    match _stream(specs, StartOptions(transaction=transaction)):
        case Ok(stream):
            with closing(stream):
                return reported(stream.end(await stream.store_async()))
        case Err() as refused:
            return reported(refused)
        case None:
            return Ok([])


class _RefusedRun(Exception):
    """A run in the stream that was rejected."""

    def __init__(self, position: int, error: WorkflowStartError) -> None:
        message = f"Workflow {position} of start_many: {error.message}"
        super().__init__(message)
        self.error = replace(error, message=message)


def _workflows(specs: Iterable[Startable[T]]) -> Iterator[Startable[T]]:
    if not hasattr(specs, "__iter__"):
        raise TypeError(f"start_many takes a list of workflows, not {type(specs).__name__}.")
    for position, spec in enumerate(specs):
        if getattr(spec, "graph", None) is None:
            kind = spec.__name__ if isinstance(spec, type) else type(spec).__name__
            raise TypeError(
                f"Workflow {position} of start_many is not a workflow but {kind}; pass the "
                "specifications that app.workflow(...) or build_with(...) returns."
            )
        yield spec


def _prepared(specs: Iterable[HasGraph], options: StartOptions, producer: object) -> Iterator[Run]:
    for position, spec in enumerate(specs):
        if spec.graph.producer is producer:
            made = prepare(spec, options)
        else:
            message = "start_many takes workflows of one application at a time."
            made = invalid(spec.graph, options, message)
        if isinstance(made, Err):
            raise _RefusedRun(position, made.value)
        yield made.value


def _chunks(runs: Iterable[Run]) -> Iterator[tuple[list[Run], bool]]:
    """Cut the runs into chunks, each with a flag that marks the last chunk."""
    chunk: list[Run] = []
    size = 0
    for run in runs:
        chunk.append(run)
        size += len(run.plan)
        is_large = size > CHUNK_CHARACTERS and len(chunk) > _CARRIED + 1
        if len(chunk) == CHUNK_RUNS + _CARRIED or is_large:
            yield chunk[:-_CARRIED], False
            chunk = chunk[-_CARRIED:]
            size = sum(len(one.plan) for one in chunk)
    if chunk:
        yield chunk, True


def _stream(
    specs: Iterable[Startable[T]], options: StartOptions
) -> WorkflowStartResult[_Stream[T]] | None:
    """Prepare the first chunk, which has all runs of a short stream; return None if there is no run."""
    specs = _workflows(specs)
    if (spec := next(specs, None)) is None:
        return None
    found = own_broker(spec.graph, options)
    if isinstance(found, Err):
        return found
    chunks = _chunks(_prepared(chain([spec], specs), options, spec.graph.producer))
    try:
        first, is_last = next(chunks)
    except _RefusedRun as refusal:
        return Err(refusal.error)
    chunks = chain([(first, is_last)], chunks)
    return Ok(_Stream(*found.value, first[0], chunks, is_last))


@dataclass(slots=True)
class _Stream(Generic[T]):
    """The state of one start_many: its plans, and the handles of the runs prepared so far."""

    _broker: PostgresBroker
    _resend: bool
    _first_run: Run
    _chunks: Iterator[tuple[list[Run], bool]]
    _is_single: bool
    # The exception that ended the stream: of a rejected run, or raised by the caller's iterable.
    _fault: Exception | None = None
    _handles: list[WorkflowHandle[T]] = field(default_factory=list)
    _types: dict[tuple[tuple[str | None, int], ...], DeclaredTypes] = field(default_factory=dict)
    _sendings: list[Sending] = field(default_factory=list)
    _kept: KeptRows | None = None

    def __post_init__(self) -> None:
        self._kept = KeptRows() if self._resend else None

    def store(self) -> BrokerResult[None]:
        """Start all runs; retry after a transient failure if the application is configured to retry."""
        transaction, atomic = self._first_run.options.transaction, not self._is_single
        return self._broker.store(self._script, transaction, resend=self._resend, atomic=atomic)

    async def store_async(self) -> BrokerResult[None]:
        transaction, resend = self._first_run.options.transaction, self._resend
        atomic = not self._is_single
        return await self._broker.store_async(
            self._script, transaction, resend=resend, atomic=atomic
        )

    def end(self, stored: BrokerResult[None]) -> WorkflowStartResult[list[WorkflowHandle[T]]]:
        """Return the handles or the error, and end the spans; raise an error of the iterable."""
        for sending in self._sendings:
            sending.end(stored.err_value.code.value if isinstance(stored, Err) else None)
        if isinstance(self._fault, _RefusedRun):
            return Err(self._fault.error)
        if self._fault is not None:
            raise self._fault
        if isinstance(stored, Err):
            first = self._first_run
            return Err(not_stored(first.spec.graph, first.options, stored.value))
        return Ok(self._handles)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def _script(self) -> Script[None]:
        # A repeated store uses the ids to find runs that an attempt stored without receiving the
        # confirmation.
        for plans in self._plans():
            yield start_runs(plans)

    def _plans(self) -> Iterator[str]:
        """Yield the plans of earlier attempts, then the plans of the rest of the stream."""
        if self._fault is not None:
            raise self._fault
        if self._kept is not None:
            for (plans,) in self._kept:
                yield plans
        while chunk := self._next_chunk():
            plans = f"[{','.join(run.plan for run in chunk)}]"
            if self._kept is not None:
                self._kept.add(plans)
            yield plans

    def _next_chunk(self) -> list[Run]:
        try:
            chunk, _ = next(self._chunks, ([], True))
        except Exception as fault:
            self._fault = fault
            raise
        for run in chunk:
            types = self._types_of(run.spec.graph.nodes)
            self._handles.append(WorkflowHandle(run.workflow_id, self._broker, types=types))
        self._sendings += [run.sending for run in chunk if run.sending is not None]
        return chunk

    def _types_of(self, nodes: Sequence[AnyNode]) -> DeclaredTypes:
        """Return the types shared by all runs of the same tasks, so that handles do not keep nodes in
        memory.
        """
        types, shape = DeclaredTypes(nodes), []
        for node in nodes:
            if not isinstance(node, TaskNode):
                return types
            # The stored nodes keep the definition alive, so its id() stays valid.
            shape.append((node.node_id, id(node.fn.definition)))
        return self._types.setdefault(tuple(shape), types)
