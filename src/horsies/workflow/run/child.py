"""Workflows as children of durable functions, started by ``ctx.start`` and read by ``ctx.result``."""

from __future__ import annotations

from functools import partial
from typing import Any

from horsies.codec.results import split_result
from horsies.db.statement import Script
from horsies.db.statements.workflows import RunOutcome, StartedRun, read_runs
from horsies.durable.calls import Launch, NewChild, Outcome
from horsies.durable.steps import RESULT_BYTES_MAX, Failure
from horsies.error_codes import OperationalErrorCode, RetrievalCode, error_code_text
from horsies.errors import DurableMisuse
from horsies.result import Err
from horsies.states import WorkflowStatus
from horsies.workflow.build.plan import HasGraph
from horsies.workflow.nodes.nodes import AnyNode, codec_for, result_codec
from horsies.workflow.run.results import NO_TYPES, run_result
from horsies.workflow.run.start import StartOptions, prepare, stored_run


def workflow_as_child(spec: HasGraph, output: AnyNode | None, run_id: str) -> NewChild[Any]:
    """Return a workflow as the child of a durable function; raise DurableMisuse if it has no output."""
    name = spec.graph.name
    if output is None:
        raise DurableMisuse(
            f"ctx.start takes a workflow with an output; give workflow {name!r} one with output=node."
        )
    results = result_codec(output) or codec_for(Any)
    return NewChild(name, results, partial(_launched, spec, run_id), _outcome)


def _launched(spec: HasGraph, run_id: str) -> Launch:
    prepared = prepare(spec, StartOptions(wakes_task_id=run_id))
    if isinstance(prepared, Err):
        raise DurableMisuse(prepared.value.message)
    run = prepared.value

    def stored() -> Script[str]:
        row: StartedRun = yield from stored_run(run)
        return row.id

    return Launch(stored, (lambda: None) if run.sending is None else run.sending.end)


def _outcome(workflow_id: str) -> Script[Outcome | None]:
    """Return the JSON text of an ended run's output, or its failure; return None while the run is open."""
    rows: list[RunOutcome] = yield read_runs([workflow_id], RESULT_BYTES_MAX)
    if not rows:
        text = f"Workflow {workflow_id} does not exist; it was deleted before its result was read."
        return None, Failure(RetrievalCode.WORKFLOW_NOT_FOUND.value, text)
    (run,) = rows
    if not WorkflowStatus(run.status).is_terminal:
        return None
    if run.status != WorkflowStatus.COMPLETED:
        error = run_result(run, NO_TYPES).err_value
        code = str(error_code_text(error.error_code) or run.status)
        return None, Failure(code, error.message or code, error.data)
    if run.result is None:
        text = (
            f"The result of workflow {workflow_id} has {run.result_bytes:,} bytes, more than "
            f"{RESULT_BYTES_MAX:,}; return a reference to the data instead."
        )
        return None, Failure(OperationalErrorCode.PAYLOAD_TOO_LARGE.value, text)
    split = split_result(run.result)
    return ("null" if split is None else split[1]), None
