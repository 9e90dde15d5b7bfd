"""Expansion: creates a sub-workflow's plan when its node becomes runnable. A worker's child process
finds the definition by the key stored with the node and calls its ``build_with``, without any lock. The
expansion task returns the plan, and the database starts it as a child run.
"""

from __future__ import annotations

from typing import Any

from horsies.codec.form import CodecError
from horsies.error_codes import OperationalErrorCode
from horsies.errors import TaskStopped
from horsies.ids import new_id
from horsies.result import Err, Ok, Result
from horsies.task_result import TaskError, exception_text
from horsies.tracing import current_carrier
from horsies.workflow.build.plan import Parent, plan, with_trace
from horsies.workflow.definition import AnyDefinition, BuildsSpecs, definition_by_key


def find_child(definition_key: str) -> Result[AnyDefinition, TaskError]:
    """Return a sub-workflow's definition, or the error for its node."""
    definition = definition_by_key(definition_key)
    if definition is None:
        return Err(
            TaskError(
                error_code=OperationalErrorCode.SUBWORKFLOW_LOAD_FAILED,
                message=missing_definition(definition_key),
            )
        )
    return Ok(definition)


def missing_definition(definition_key: str) -> str:
    return (
        f"This worker has no workflow with the definition key {definition_key!r}; "
        "import the module that defines it in the modules of discover_tasks."
    )


def expand(
    app: BuildsSpecs, definition: AnyDefinition, kwargs: dict[str, Any], parent: Parent
) -> Result[str, TaskError]:
    """Return the plan of the child run below ``parent``, or the error for its node."""
    try:
        spec = definition.build_with(app, **kwargs)
        text = plan(spec, new_id(), parent=parent)
        tracing = spec.graph.producer.config.tracing if spec.graph.producer else None
        return Ok(text if tracing is None else with_trace(text, current_carrier(tracing)))
    except TaskStopped:
        raise
    except BaseException as error:  # The user's build_with may raise any exception.
        return Err(
            TaskError(
                error_code=OperationalErrorCode.WORKFLOW_ENQUEUE_FAILED,
                message=f"Sub-workflow {definition.__name__} could not be built: "
                f"{type(error).__name__}: {exception_text(error)}",
                exception=error,
            )
        )


def unreadable_parameters(definition: AnyDefinition, problem: CodecError) -> TaskError:
    """Return the error for stored parameters that ``build_with`` cannot take."""
    return TaskError(
        error_code=OperationalErrorCode.WORKER_SERIALIZATION_ERROR,
        message=f"The stored parameters do not fit {definition.__name__}.build_with: "
        f"{problem.message}",
    )
