"""The library's own tasks, which are workflow nodes like users' tasks: the first ends a sleep, the second
takes a signal that arrived or timed out, and the third expands a sub-workflow into a plan. While a node
sleeps or waits for a signal, it occupies no child.
"""

from __future__ import annotations

from json import JSONDecodeError, JSONDecoder
from typing import Any

from horsies.app import Horsies
from horsies.error_codes import OperationalErrorCode, OutcomeCode
from horsies.result import Err, Ok, Result
from horsies.task_result import TaskError
from horsies.tasks.definition import RESERVED_PREFIX
from horsies.worker.child.node_arguments import build_call
from horsies.worker.protocol import Assignment
from horsies.workflow.build.plan import EXPAND_TASK, SIGNAL_TASK, SLEEP_TASK, Parent
from horsies.workflow.expand import expand, find_child, unreadable_parameters

_NOTHING = "{}"
_SIGNAL_HEAD = '{"value":'
_KEY_HEAD, _KWARGS_HEAD = '{"definition_key":', ',"kwargs":'


# The built-in tasks of this release. A worker leaves tasks that only a newer release has to the workers of
# that release.
BUILTIN_TASKS = frozenset({SLEEP_TASK, SIGNAL_TASK, EXPAND_TASK})


def is_builtin(assignment: Assignment) -> bool:
    return assignment.node is not None and assignment.task_name.startswith(RESERVED_PREFIX)


def run_builtin(app: Horsies, assignment: Assignment) -> Result[str, TaskError]:
    """Run one of the library's own tasks; return the JSON text of its value, or its error."""
    name = assignment.task_name
    if name == SLEEP_TASK:
        return Ok("null")
    if name == SIGNAL_TASK:
        return _signal_value(assignment.kwargs_json)
    if name == EXPAND_TASK:
        return _expansion(app, assignment)
    return Err(
        TaskError(
            error_code=OperationalErrorCode.WORKER_RESOLUTION_ERROR,
            message=f"This worker has no built-in task {name!r}; upgrade it to the release of the producer.",
        )
    )


def _signal_value(kwargs_json: str) -> Result[str, TaskError]:
    """Return the JSON text of the signal's value, or an error if the wait has timed out."""
    if kwargs_json == _NOTHING:
        return Err(
            TaskError(
                error_code=OutcomeCode.SIGNAL_TIMEOUT,
                message="The signal did not arrive within the timeout of its node.",
            )
        )
    if not kwargs_json.startswith(_SIGNAL_HEAD):
        return Err(_unreadable("The signal"))
    return Ok(kwargs_json[len(_SIGNAL_HEAD) : -1])


def _expansion(app: Horsies, assignment: Assignment) -> Result[str, TaskError]:
    node, request = assignment.node, expansion_request(assignment.kwargs_json)
    assert node is not None
    if request is None or node.root_workflow_id is None:
        return Err(_unreadable("The sub-workflow"))
    key, kwargs_json = request
    found = find_child(key)
    if isinstance(found, Err):
        return found
    definition = found.value
    signature = definition.build_signature()
    kwargs: dict[str, Any] = {}
    if signature is not None:
        call = build_call(app, assignment, signature, kwargs_json)
        if isinstance(call, Err):
            return Err(unreadable_parameters(definition, call.value))
        kwargs = call.value.kwargs
    parent = Parent(
        workflow_id=node.workflow_id,
        task_index=node.task_index,
        root_workflow_id=node.root_workflow_id,
        depth=node.depth,
    )
    return expand(app, definition, kwargs, parent)


def expansion_request(kwargs_json: str) -> tuple[str, str] | None:
    """The definition's key, and its parameters as JSON text, which is later decoded by annotation."""
    try:
        key, end = JSONDecoder().raw_decode(kwargs_json, len(_KEY_HEAD))
    except (JSONDecodeError, RecursionError):
        return None
    is_ours = kwargs_json.startswith(_KEY_HEAD) and kwargs_json.startswith(_KWARGS_HEAD, end)
    return (key, kwargs_json[end + len(_KWARGS_HEAD) : -1]) if is_ours else None


def _unreadable(subject: str) -> TaskError:
    return TaskError(
        error_code=OperationalErrorCode.WORKER_SERIALIZATION_ERROR,
        message=f"{subject} is stored in a format that this worker cannot read.",
    )
