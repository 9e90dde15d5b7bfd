"""Settling: what the end of an attempt means for its task, decided without touching the database.

Between the child's report (or its death, or its worker's) and the statements that record it, which
``record.py`` chooses. The retry rules live in ``retry.py``; here they meet what happened. Whether a
retry would miss ``good_until`` is decided by the statement, on the database's clock.
"""

from __future__ import annotations

import random as random_module
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from horsies.codec.results import encode_task_error
from horsies.db.statement import Step
from horsies.db.statements.turn import (
    ClaimedTask,
    CompleteTasks,
    FailTasks,
    RetryTasks,
    complete_tasks,
    fail_tasks,
    retry_tasks,
)
from horsies.db.statements.workflows import WorkflowIds, lock_runs
from horsies.error_codes import OperationalErrorCode, OutcomeCode
from horsies.retry import retry_delay
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.task_result import TaskError, storable_text

STOPPED_BY_TIMEOUT = "timeout"
STOPPED_BY_CANCEL = "cancel"
STOPPED_BY_SHUTDOWN = "shutdown"
STOPPED_BY_LOSS = "loss"


class Completed(NamedTuple):
    """A success to record."""

    task_id: str
    generation: int
    result: str
    workflow_id: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure to record; with a delay it is tried again unless its deadline forbids it."""

    task_id: str
    generation: int
    status: TaskStatus
    result: str | None
    outcome: TaskAttemptOutcome
    error_code: str | None
    error_message: str | None
    failed_reason: str | None
    delay_seconds: float | None
    workflow_id: str | None = None


Outcome = Completed | Failed


class Report(Protocol):
    """What a child says of the attempt it has run."""

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""

    @property
    def result_json(self) -> str:
        """The result to store."""

    @property
    def error_code(self) -> str | None:
        """The code of its error."""

    @property
    def error_message(self) -> str | None:
        """The text of its error."""


def outcome_of_report(
    task: ClaimedTask, report: Report, random: Callable[[], float] = random_module.random
) -> Outcome:
    """A child reported: success, or an error that may be retried."""
    if report.ok:
        return Completed(task.id, task.generation, report.result_json, task.workflow_id)
    return Failed(
        task.id,
        task.generation,
        TaskStatus.FAILED,
        report.result_json,
        TaskAttemptOutcome.FAILED,
        report.error_code,
        None if report.error_message is None else storable_text(report.error_message),
        None,
        _retry_delay(task, report.error_code, random),
        task.workflow_id,
    )


def outcome_of_crash(
    task: ClaimedTask, description: str, random: Callable[[], float] = random_module.random
) -> Failed:
    """The child died without a report: what user code did is unknown."""
    reason = f"The process running the task died: {description}."
    return _vanished(task, OperationalErrorCode.WORKER_CRASHED, reason, random)


def outcome_of_loss(
    task: ClaimedTask, worker_id: str, random: Callable[[], float] = random_module.random
) -> Failed:
    """The worker that ran the task is gone: what user code did is unknown."""
    reason = f"The worker running the task is gone (worker {worker_id}, process {task.worker_pid})."
    return _vanished(task, OperationalErrorCode.WORKER_CRASHED, reason, random)


def outcome_of_stop(
    task: ClaimedTask, reason: str, random: Callable[[], float] = random_module.random
) -> Failed:
    """We stopped the task: over its time limit, cancelled, or because the worker had to leave."""
    if reason == STOPPED_BY_CANCEL:
        text = "The task was cancelled while it was running."
        return _ended(task, TaskStatus.CANCELLED, OutcomeCode.TASK_CANCELLED, text, None)
    if reason == STOPPED_BY_TIMEOUT:
        text = f"The task ran longer than its timeout_ms={task.timeout_ms}."
        delay = _retry_delay(task, OutcomeCode.TASK_TIMEOUT.value, random)
        return _ended(task, TaskStatus.FAILED, OutcomeCode.TASK_TIMEOUT, text, delay)
    text = "The worker was stopped before the task ended."
    return _vanished(task, OperationalErrorCode.WORKER_CRASHED, text, random)


def outcome_of_unread_inputs(task: ClaimedTask) -> Failed:
    """What the task takes from other nodes cannot be read: it never gets to a child."""
    text = "The results of other nodes that the task takes could not be read."
    code = OperationalErrorCode.WORKER_SERIALIZATION_ERROR
    return Failed(
        task.id,
        task.generation,
        TaskStatus.FAILED,
        encode_task_error(TaskError(error_code=code, message=text)),
        TaskAttemptOutcome.FAILED,
        code.value,
        text,
        text,
        None,
        task.workflow_id,
    )


def without_result(failed: Outcome) -> Failed:
    """The same attempt without its texts, for the rare case that the database refuses to store
    them.
    """
    text = "The outcome of the task could not be stored."
    code = OperationalErrorCode.WORKER_SERIALIZATION_ERROR
    return Failed(
        failed.task_id,
        failed.generation,
        TaskStatus.FAILED,
        encode_task_error(TaskError(error_code=code, message=text)),
        TaskAttemptOutcome.FAILED,
        code.value,
        text,
        None,
        None,
        failed.workflow_id,
    )


def _ended(
    task: ClaimedTask, status: TaskStatus, code: OutcomeCode, text: str, delay_seconds: float | None
) -> Failed:
    result = encode_task_error(TaskError(error_code=code, message=text))
    return Failed(
        task.id,
        task.generation,
        status,
        result,
        TaskAttemptOutcome.FAILED,
        code.value,
        text,
        text,
        delay_seconds,
        task.workflow_id,
    )


def _vanished(
    task: ClaimedTask, code: OperationalErrorCode, reason: str, random: Callable[[], float]
) -> Failed:
    return Failed(
        task.id,
        task.generation,
        TaskStatus.FAILED,
        encode_task_error(TaskError(error_code=code, message=reason)),
        TaskAttemptOutcome.WORKER_FAILURE,
        code.value,
        reason,
        reason,
        _retry_delay(task, code.value, random),
        task.workflow_id,
    )


def _retry_delay(
    task: ClaimedTask, error_code: str | None, random: Callable[[], float]
) -> float | None:
    return retry_delay(
        task_options=task.task_options,
        error_code=error_code,
        retry_count=task.retry_count,
        max_retries=task.max_retries,
        random=random,
    )


def locking_steps(workflow_ids: Iterable[str | None]) -> list[Step]:
    """Return the statement that locks the trees of these runs, if there are any.

    It comes before every statement on their tasks: nobody who holds a task's row ever waits for a run.
    """
    runs = {workflow_id for workflow_id in workflow_ids if workflow_id is not None}
    return [(lock_runs, WorkflowIds(sorted(runs)))] if runs else []


def recording_steps(worker_id: str, outcomes: Sequence[Outcome]) -> list[Step]:
    """Return the statements that record these settlements; one per kind, whatever their number."""
    completed = [one for one in outcomes if isinstance(one, Completed)]
    steps: list[Step] = []
    if completed:
        steps.append((complete_tasks, _completions(worker_id, completed)))
    if len(completed) == len(outcomes):
        return steps
    failed = [one for one in outcomes if isinstance(one, Failed)]
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
