"""Recording: the statements that write settlements down, one per kind, whatever their number.

Between what ``settle.py`` decided and the transaction that carries it: a worker's turn, or the rescue
of what a dead worker left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from horsies.db.query import Step
from horsies.db.turn import (
    CompleteTasks,
    FailTasks,
    RetryTasks,
    complete_tasks,
    fail_tasks,
    retry_tasks,
)
from horsies.db.workflows import WorkflowIds, lock_runs
from horsies.settle import Completed, Failed, Settlement


def locking_steps(workflow_ids: Iterable[str | None]) -> list[Step]:
    """Return the statement that locks the trees of these runs, if there are any.

    It comes before every statement on their tasks: nobody who holds a task's row ever waits for a run.
    """
    runs = {workflow_id for workflow_id in workflow_ids if workflow_id is not None}
    return [(lock_runs, WorkflowIds(sorted(runs)))] if runs else []


def recording_steps(worker_id: str, settlements: Sequence[Settlement]) -> list[Step]:
    """Return the statements that record these settlements; one per kind, whatever their number."""
    completed = [one for one in settlements if isinstance(one, Completed)]
    steps: list[Step] = []
    if completed:
        steps.append((complete_tasks, _completions(worker_id, completed)))
    if len(completed) == len(settlements):
        return steps
    failed = [one for one in settlements if isinstance(one, Failed)]
    retried = [one for one in failed if one.delay_seconds is not None]
    if retried:
        steps.append((retry_tasks, _retries(worker_id, retried)))
    if failed:
        steps.append((fail_tasks, _failures(worker_id, failed)))
    return steps


def _completions(worker_id: str, rows: Sequence[Completed]) -> CompleteTasks:
    return CompleteTasks(
        worker_id,
        [row.task_id for row in rows],
        [row.generation for row in rows],
        [row.result for row in rows],
    )


def _retries(worker_id: str, rows: Sequence[Failed]) -> RetryTasks:
    return RetryTasks(
        worker_id,
        [row.task_id for row in rows],
        [row.generation for row in rows],
        [row.delay_seconds or 0.0 for row in rows],
        [row.outcome.value for row in rows],
        [row.error_code for row in rows],
        [row.error_message for row in rows],
        [row.failed_reason for row in rows],
    )


def _failures(worker_id: str, rows: Sequence[Failed]) -> FailTasks:
    return FailTasks(
        worker_id,
        [row.task_id for row in rows],
        [row.generation for row in rows],
        [row.status.value for row in rows],
        [row.result for row in rows],
        [row.outcome.value for row in rows],
        [row.error_code for row in rows],
        [row.error_message for row in rows],
        [row.failed_reason for row in rows],
    )
