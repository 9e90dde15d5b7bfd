"""Starting: the plan of a run, or of thousands, becomes rows in one statement and one transaction.

The first station of a workflow that talks to the database, on the line producer -> SQL -> turn ->
child -> report -> result. The run, its nodes and the tasks of its roots appear together or not at
all. The same id means the same run, however often it is started. Nothing here raises for operational
reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol, TypeVar

from horsies.db.statement import Script
from horsies.db.statements.workflows import StartedRun, StartRuns, start_runs
from horsies.errors import HorsiesError
from horsies.ids import new_id
from horsies.result import Err, Ok
from horsies.tasks.broker import BrokerOperationError, BrokerResult, PostgresBroker
from horsies.tasks.request import KEY_LENGTH_MAX, is_key
from horsies.workflow.build.graph import Graph
from horsies.workflow.build.plan import HasGraph, fingerprint, plan
from horsies.workflow.nodes.nodes import NodeKey
from horsies.workflow.run.control import operation_failed
from horsies.workflow.run.handle import WorkflowHandle
from horsies.workflow.run.info import (
    HandleErrorCode,
    WorkflowStartError,
    WorkflowStartErrorCode,
    WorkflowStartResult,
)
from horsies.workflow.run.results import DeclaredTypes

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Startable(HasGraph, Protocol[T_co]):
    """A specification, as far as starting it is concerned; ``T_co`` is the type of its result."""

    def output_key(self) -> NodeKey[T_co] | None:
        """The key of the output node."""


@dataclass(frozen=True, slots=True)
class StartOptions:
    """How to start a run; see ``WorkflowSpec.start``."""

    workflow_id: str | None = None
    workflow_key: str | None = None
    sent_at: datetime | None = None
    transaction: object = field(default=None, repr=False)


def start_workflow(
    spec: Startable[T],
    broker: PostgresBroker,
    workflow_id: str | None = None,
    sent_at: datetime | None = None,
    *,
    workflow_key: str | None = None,
    transaction: object = None,
    resend_on_transient_err: bool = False,
) -> WorkflowStartResult[WorkflowHandle[T]]:
    """Start a run on a broker of your choice; otherwise like ``WorkflowSpec.start``."""
    options = StartOptions(workflow_id, workflow_key, sent_at, transaction)
    means = Ok(_Means(broker, resend_on_transient_err))
    return _launch(_planned([spec], options, means)).map(_only)


async def start_workflow_async(
    spec: Startable[T],
    broker: PostgresBroker,
    workflow_id: str | None = None,
    sent_at: datetime | None = None,
    *,
    workflow_key: str | None = None,
    transaction: object = None,
    resend_on_transient_err: bool = False,
) -> WorkflowStartResult[WorkflowHandle[T]]:
    """``start_workflow`` without blocking the event loop."""
    options = StartOptions(workflow_id, workflow_key, sent_at, transaction)
    means = Ok(_Means(broker, resend_on_transient_err))
    return (await _launch_async(_planned([spec], options, means))).map(_only)


def start(spec: Startable[T], options: StartOptions) -> WorkflowStartResult[WorkflowHandle[T]]:
    """Start a run on the broker of the application that built the specification."""
    return _launch(_planned([spec], options, _means_of(spec, options))).map(_only)


async def start_async(
    spec: Startable[T], options: StartOptions
) -> WorkflowStartResult[WorkflowHandle[T]]:
    """The same without blocking the event loop."""
    planned = _planned([spec], options, _means_of(spec, options))
    return (await _launch_async(planned)).map(_only)


def start_again(
    spec: Startable[T], error: WorkflowStartError
) -> WorkflowStartResult[WorkflowHandle[T]]:
    """Repeat a start that failed with ENQUEUE_FAILED: the run is stored at most once."""
    match _replayed(spec.graph, error):
        case Err() as refused:
            return refused
        case Ok(options):
            return start(spec, options)


async def start_again_async(
    spec: Startable[T], error: WorkflowStartError
) -> WorkflowStartResult[WorkflowHandle[T]]:
    """The same without blocking the event loop."""
    match _replayed(spec.graph, error):
        case Err() as refused:
            return refused
        case Ok(options):
            return await start_async(spec, options)


def start_many(
    specs: Iterable[Startable[T]], *, transaction: object = None
) -> WorkflowStartResult[list[WorkflowHandle[T]]]:
    """Start many runs in one statement: all of them, or none.

    The specifications must come from one application; the same one may be given many times.

    Example:
        handles = start_many(build_report(day) for day in days).unwrap()
    """
    batch, options = list(specs), StartOptions(transaction=transaction)
    if not batch:
        return Ok([])
    return _launch(_planned(batch, options, _means_of(batch[0], options)))


async def start_many_async(
    specs: Iterable[Startable[T]], *, transaction: object = None
) -> WorkflowStartResult[list[WorkflowHandle[T]]]:
    """``start_many`` without blocking the event loop."""
    batch, options = list(specs), StartOptions(transaction=transaction)
    if not batch:
        return Ok([])
    return await _launch_async(_planned(batch, options, _means_of(batch[0], options)))


@dataclass(frozen=True, slots=True)
class _Means:
    """What a start is done with: the broker, and whether to try again after passing failures."""

    broker: PostgresBroker
    resend: bool


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A run ready to be stored."""

    spec: HasGraph
    options: StartOptions
    workflow_id: str
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Planned:
    """Runs ready to be stored, and what to store them with."""

    means: _Means
    runs: Sequence[_Prepared]
    transaction: object


def _launch(
    planned: WorkflowStartResult[_Planned],
) -> WorkflowStartResult[list[WorkflowHandle[Any]]]:
    if isinstance(planned, Err):
        return planned
    order = planned.value
    broker, resend = order.means.broker, order.means.resend
    return _handles(order, broker.store(lambda: _script(order), order.transaction, resend=resend))


async def _launch_async(
    planned: WorkflowStartResult[_Planned],
) -> WorkflowStartResult[list[WorkflowHandle[Any]]]:
    if isinstance(planned, Err):
        return planned
    order = planned.value
    broker, resend = order.means.broker, order.means.resend
    done = await broker.store_async(lambda: _script(order), order.transaction, resend=resend)
    return _handles(order, done)


def _means_of(spec: HasGraph, options: StartOptions) -> WorkflowStartResult[_Means]:
    graph = spec.graph
    producer = graph.producer
    if producer is None:
        message = (
            f"Workflow {graph.name!r} was built without an application; build it with "
            "app.workflow(...)."
        )
        code = WorkflowStartErrorCode.BROKER_NOT_CONFIGURED
        return Err(_error(graph, options, code, message))
    match producer.broker():
        case Err(error):
            return Err(_not_stored(graph, options, error))
        case Ok(broker):
            return Ok(_Means(broker, producer.config.resend_on_transient_err))


def _planned(
    specs: Sequence[HasGraph], options: StartOptions, means: WorkflowStartResult[_Means]
) -> WorkflowStartResult[_Planned]:
    if isinstance(means, Err):
        return means
    first, runs = specs[0].graph, []
    for position, spec in enumerate(specs):
        if spec.graph.producer is not first.producer:
            message = "start_many takes workflows of one application at a time."
            code = WorkflowStartErrorCode.VALIDATION_FAILED
            return Err(_error(spec.graph, options, code, message))
        match _prepared(spec, options):
            case Err(error) if len(specs) > 1:
                message = f"Workflow {position} of start_many: {error.message}"
                return Err(replace(error, message=message))
            case Err() as refused:
                return refused
            case Ok(prepared):
                runs.append(prepared)
    return Ok(_Planned(means.value, runs, options.transaction))


def _prepared(spec: HasGraph, options: StartOptions) -> WorkflowStartResult[_Prepared]:
    """Write the plan of a run, or say in one sentence why there can be none."""
    graph = spec.graph
    workflow_id = new_id() if options.workflow_id is None else options.workflow_id
    options = replace(options, workflow_id=workflow_id)
    producer = graph.producer
    if producer is not None and producer.are_sends_suppressed():
        return Err(_suppressed(graph, options))
    if options.workflow_key is not None and not is_key(options.workflow_key):
        code = WorkflowStartErrorCode.VALIDATION_FAILED
        message = f"workflow_key must be a text of 1 to {KEY_LENGTH_MAX} characters."
        return Err(_error(graph, options, code, message))
    try:
        text = plan(spec, workflow_id, workflow_key=options.workflow_key, sent_at=options.sent_at)
    except HorsiesError as error:
        code = WorkflowStartErrorCode.VALIDATION_FAILED
        return Err(replace(_error(graph, options, code, error.message), exception=error))
    except Exception as error:
        code = WorkflowStartErrorCode.INTERNAL_FAILED
        message = f"The plan of workflow {graph.name!r} could not be written: {error}"
        return Err(replace(_error(graph, options, code, message), exception=error))
    return Ok(_Prepared(spec, options, workflow_id, text))


def _script(order: _Planned) -> Script[list[StartedRun]]:
    runs = StartRuns(f"[{','.join(prepared.text for prepared in order.runs)}]")
    while True:
        rows: list[StartedRun] = yield start_runs, runs
        if all(row.created or row.name is not None for row in rows):
            return rows
        # Who held a key ended in between. Nothing of that run is stored yet, and those that are will
        # be met as what they are.


def _handles(
    order: _Planned, done: BrokerResult[list[StartedRun]]
) -> WorkflowStartResult[list[WorkflowHandle[Any]]]:
    if isinstance(done, Err):
        first = order.runs[0]
        return Err(_not_stored(first.spec.graph, first.options, done.value))
    handles = []
    for prepared, row in zip(order.runs, done.value, strict=True):
        if problem := _conflict(prepared, row):
            return Err(problem)
        types = DeclaredTypes(prepared.spec.graph.nodes)
        handles.append(WorkflowHandle[Any](row.id, order.means.broker, types=types))
    return Ok(handles)


def _conflict(prepared: _Prepared, row: StartedRun) -> WorkflowStartError | None:
    """Say why a run that was there before is not the one asked for, or None."""
    graph, options = prepared.spec.graph, prepared.options
    if row.created:
        return None
    if row.name != graph.name:
        code = WorkflowStartErrorCode.VALIDATION_FAILED
        message = f"Workflow {row.id} is a run of {row.name!r}, not of {graph.name!r}."
        return _error(graph, options, code, message)
    if row.fingerprint != fingerprint(prepared.spec):
        code = WorkflowStartErrorCode.PAYLOAD_MISMATCH
        message = (
            f"Workflow {row.id} was started with other nodes or arguments; start it under a new "
            "id or key."
        )
        return _error(graph, options, code, message)
    return None


def _replayed(graph: Graph, error: WorkflowStartError) -> WorkflowStartResult[StartOptions]:
    """Return the options of the start that failed, or why it cannot be repeated."""
    options = StartOptions()
    if not isinstance(error, WorkflowStartError):
        problem = "only the WorkflowStartError of a failed start can be retried"
    elif error.code is not WorkflowStartErrorCode.ENQUEUE_FAILED:
        problem = f"only ENQUEUE_FAILED can be retried, not {error.code.value}"
    elif error.workflow_name != graph.name:
        problem = f"the error belongs to workflow {error.workflow_name!r}"
    elif error.in_transaction:
        problem = "a failed start inside a transaction is repeated with that transaction"
    else:
        return Ok(StartOptions(error.workflow_id, error.workflow_key))
    code = WorkflowStartErrorCode.VALIDATION_FAILED
    message = f"Workflow {graph.name!r} was not started: {problem}."
    return Err(_error(graph, options, code, message))


def _not_stored(
    graph: Graph, options: StartOptions, error: BrokerOperationError
) -> WorkflowStartError:
    ours = operation_failed("", error).code is HandleErrorCode.INTERNAL_FAILED
    codes = WorkflowStartErrorCode
    code = codes.INTERNAL_FAILED if ours else codes.ENQUEUE_FAILED
    failed = _error(graph, options, code, error.message)
    return replace(failed, retryable=error.retryable, exception=error.exception)


def _suppressed(graph: Graph, options: StartOptions) -> WorkflowStartError:
    message = (
        "Sends are suppressed while task modules are imported; start workflows from a function, "
        "not at import time."
    )
    return _error(graph, options, WorkflowStartErrorCode.SEND_SUPPRESSED, message)


def _error(
    graph: Graph, options: StartOptions, code: WorkflowStartErrorCode, message: str
) -> WorkflowStartError:
    return WorkflowStartError(
        code,
        message,
        retryable=False,
        workflow_name=graph.name,
        workflow_id=str(new_id() if options.workflow_id is None else options.workflow_id),
        workflow_key=options.workflow_key,
        in_transaction=options.transaction is not None,
    )


def _only(handles: list[WorkflowHandle[Any]]) -> WorkflowHandle[Any]:
    return handles[0]
