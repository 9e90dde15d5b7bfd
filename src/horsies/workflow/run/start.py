"""Starts a run: stores its plan as rows with one statement in one transaction. The run, its nodes and
its roots' tasks are stored together or not at all. Starting the same id twice results in one run.
Operational errors are returned, not raised.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol, TypeVar

from horsies.db.statement import Script
from horsies.db.statements.workflows import StartedRun, start_runs
from horsies.encryption import CodecFailed
from horsies.errors import HorsiesError
from horsies.ids import new_id
from horsies.result import Err, Ok
from horsies.tasks.broker import (
    BrokerErrorCode,
    BrokerOperationError,
    BrokerResult,
    PostgresBroker,
    failure,
)
from horsies.tasks.keys import lane_key_problem
from horsies.tasks.options import KEY_LENGTH_MAX, is_key
from horsies.tracing import Sending
from horsies.workflow.build.graph import Graph
from horsies.workflow.build.plan import HasGraph, fingerprints, plan, with_trace
from horsies.workflow.nodes.nodes import YieldsValue
from horsies.workflow.run.control import operation_failed
from horsies.workflow.run.handle import WorkflowHandle
from horsies.workflow.run.info import (
    HandleErrorCode,
    WorkflowStartError,
    WorkflowStartErrorCode,
    WorkflowStartResult,
)
from horsies.workflow.run.results import DeclaredTypes

logger = logging.getLogger("horsies.send")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Startable(HasGraph, YieldsValue[T_co], Protocol[T_co]):
    """The parts of a specification that a start needs; ``T_co`` is the type of its result."""


@dataclass(frozen=True, slots=True)
class StartOptions:
    """The options of a start; see ``WorkflowSpec.start``."""

    workflow_id: str | None = None
    workflow_key: str | None = None
    sent_at: datetime | None = None
    transaction: object = field(default=None, repr=False)
    # The durable function's run to wake when this run ends.
    wakes_task_id: str | None = None
    key: str | None = None


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
    """Start a run on the given broker, otherwise like ``WorkflowSpec.start``."""
    options = StartOptions(workflow_id, workflow_key, sent_at, transaction)
    return _launch(prepare(spec, options), broker, resend_on_transient_err)


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
    """Run ``start_workflow`` without blocking the event loop."""
    options = StartOptions(workflow_id, workflow_key, sent_at, transaction)
    return await _launch_async(prepare(spec, options), broker, resend_on_transient_err)


def start(spec: Startable[T], options: StartOptions) -> WorkflowStartResult[WorkflowHandle[T]]:
    """Start a run on the broker of the application that built the specification."""
    own = reported(own_broker(spec.graph, options))
    return own.and_then(lambda found: _launch(prepare(spec, options), *found))


async def start_async(
    spec: Startable[T], options: StartOptions
) -> WorkflowStartResult[WorkflowHandle[T]]:
    own = reported(own_broker(spec.graph, options))
    return await own.and_then_async(lambda found: _launch_async(prepare(spec, options), *found))


def replay_options(spec: HasGraph, error: object) -> WorkflowStartResult[StartOptions]:
    """Return the options that repeat a start after ENQUEUE_FAILED; the run is stored at most once."""
    if not isinstance(error, WorkflowStartError):
        problem = "only the WorkflowStartError of a failed start can be retried"
    elif error.code is not WorkflowStartErrorCode.ENQUEUE_FAILED:
        problem = f"only ENQUEUE_FAILED can be retried, not {error.code.value}"
    elif error.workflow_name != spec.graph.name:
        problem = f"the error belongs to workflow {error.workflow_name!r}"
    elif error.in_transaction:
        problem = "a failed start inside a transaction is repeated with that transaction"
    else:
        return Ok(StartOptions(error.workflow_id, error.workflow_key, key=error.key))
    message = f"Workflow {spec.graph.name!r} was not started: {problem}."
    return reported(invalid(spec.graph, StartOptions(), message))


def reported(started: WorkflowStartResult[T]) -> WorkflowStartResult[T]:
    """Log a failed start, because callers may ignore the value. Omit the message, because it may quote
    arguments.
    """
    if isinstance(started, Err):
        error = started.err_value
        # Warn, because the caller's own changes may be committed without the run.
        level = logging.ERROR if error.in_transaction else logging.WARNING
        name, code = error.workflow_name, error.code.value
        logger.log(level, "a start of workflow %r failed with %s", name, code)
    return started


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is ready to be stored, with its plan as JSON text."""

    spec: HasGraph
    options: StartOptions
    workflow_id: str
    plan: str = field(repr=False)
    sending: Sending | None = None


def _launch(
    prepared: WorkflowStartResult[Run], broker: PostgresBroker, resend: bool
) -> WorkflowStartResult[WorkflowHandle[Any]]:
    if isinstance(prepared, Err):
        return reported(prepared)
    run = prepared.value
    done = broker.store(lambda: stored_run(run), run.options.transaction, resend=resend)
    return reported(_handle(run, broker, done))


async def _launch_async(
    prepared: WorkflowStartResult[Run], broker: PostgresBroker, resend: bool
) -> WorkflowStartResult[WorkflowHandle[Any]]:
    if isinstance(prepared, Err):
        return reported(prepared)
    run = prepared.value
    done = await broker.store_async(lambda: stored_run(run), run.options.transaction, resend=resend)
    return reported(_handle(run, broker, done))


def own_broker(
    graph: Graph, options: StartOptions
) -> WorkflowStartResult[tuple[PostgresBroker, bool]]:
    """Return the broker of the application that built the graph, and whether failed starts are retried."""
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
            return Err(not_stored(graph, options, error))
        case Ok(broker):
            return Ok((broker, producer.config.resend_on_transient_err))


def prepare(spec: HasGraph, options: StartOptions) -> WorkflowStartResult[Run]:
    """Write the plan of a run."""
    graph = spec.graph
    workflow_id = new_id() if options.workflow_id is None else options.workflow_id
    options = replace(options, workflow_id=workflow_id)
    if graph.producer is not None and graph.producer.are_sends_suppressed():
        code = WorkflowStartErrorCode.SEND_SUPPRESSED
        message = (
            "Sends are suppressed while task modules are imported; start workflows from a function, "
            "not at import time."
        )
        return Err(_error(graph, options, code, message))
    if options.workflow_key is not None and not is_key(options.workflow_key):
        message = f"workflow_key must be a text of 1 to {KEY_LENGTH_MAX} characters."
        return invalid(graph, options, message)
    if options.key is not None and (problem := lane_key_problem(options.key)):
        return invalid(graph, options, f"Workflow {graph.name!r} was not started: {problem}.")
    try:
        text = plan(
            spec,
            workflow_id,
            workflow_key=options.workflow_key,
            sent_at=options.sent_at,
            key=options.key,
        )
    except HorsiesError as error:
        return invalid(graph, options, error.message, error)
    except CodecFailed as error:
        return Err(not_stored(graph, options, failure(BrokerErrorCode.ENQUEUE_FAILED, error)))
    except Exception as error:
        code = WorkflowStartErrorCode.INTERNAL_FAILED
        message = f"The plan of workflow {graph.name!r} could not be written: {error}"
        return Err(replace(_error(graph, options, code, message), exception=error))
    if options.wakes_task_id is not None:
        text = f'{{"wakes_task_id":"{options.wakes_task_id}",{text[1:]}'
    tracing = graph.producer.config.tracing if graph.producer else None
    if tracing is None:
        return Ok(Run(spec, options, workflow_id, text))
    attributes = {"messaging.message.conversation_id": str(workflow_id)}
    ours = {"horsies.workflow.id": str(workflow_id), "horsies.workflow.name": graph.name}
    sending = Sending(tracing, f"start {graph.name}", {**attributes, **ours})
    return Ok(Run(spec, options, workflow_id, with_trace(text, sending.carrier), sending))


def stored_run(run: Run) -> Script[StartedRun]:
    while True:
        rows: list[StartedRun] = yield start_runs(f"[{run.plan}]")
        (row,) = rows
        if row.created or row.name is not None:
            return row
        # The previous run with the key ended during the start, so the new run is not stored yet.


def _handle(
    run: Run, broker: PostgresBroker, done: BrokerResult[StartedRun]
) -> WorkflowStartResult[WorkflowHandle[Any]]:
    if run.sending is not None:
        run.sending.end(done.err_value.code.value if isinstance(done, Err) else None)
    if isinstance(done, Err):
        return Err(not_stored(run.spec.graph, run.options, done.value))
    row = done.value
    if not row.created and (conflict := _conflict(run, row)):
        return Err(conflict)
    return Ok(WorkflowHandle(row.id, broker, types=DeclaredTypes(run.spec.graph.nodes)))


def _conflict(run: Run, row: StartedRun) -> WorkflowStartError | None:
    """Explain why an existing run differs from the requested run, or return None."""
    graph = run.spec.graph
    if row.name != graph.name:
        code = WorkflowStartErrorCode.VALIDATION_FAILED
        message = f"Workflow {row.id} is a run of {row.name!r}, not of {graph.name!r}."
    elif row.fingerprint not in fingerprints(run.spec):
        code = WorkflowStartErrorCode.PAYLOAD_MISMATCH
        message = (
            f"Workflow {row.id} was started with other nodes or arguments; start it under a new "
            "id or key."
        )
    else:
        return None
    return _error(graph, run.options, code, message)


def not_stored(
    graph: Graph, options: StartOptions, error: BrokerOperationError
) -> WorkflowStartError:
    internal = operation_failed("", error).code is HandleErrorCode.INTERNAL_FAILED
    codes = WorkflowStartErrorCode
    code = codes.INTERNAL_FAILED if internal else codes.ENQUEUE_FAILED
    failed = _error(graph, options, code, error.message)
    return replace(failed, retryable=error.retryable, exception=error.exception)


def invalid(
    graph: Graph, options: StartOptions, message: str, error: Exception | None = None
) -> Err[WorkflowStartError]:
    invalid = _error(graph, options, WorkflowStartErrorCode.VALIDATION_FAILED, message)
    return Err(replace(invalid, exception=error))


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
        key=options.key,
    )
