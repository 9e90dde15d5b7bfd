"""Outcomes: decides how a finished attempt changes its task, and returns the statements that record the
outcome. An attempt ends when its child reports or dies, or when its worker is lost. The decisions need no
I/O; the retry rules are in ``retry.py``. The statement that records a retry checks ``good_until`` against the
database's clock.
"""

from __future__ import annotations

import random as random_module
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from horsies.captured_log import CapturedLog
from horsies.codec.results import encode_task_error
from horsies.db.statement import Step
from horsies.db.statements.durable import CleanUpRuns, ParkTasks, clean_up_runs, park_tasks
from horsies.db.statements.turn import (
    ClaimedTask,
    CompleteTasks,
    FailTasks,
    RetryTasks,
    StoreLogs,
    complete_tasks,
    fail_tasks,
    retry_tasks,
    store_logs,
)
from horsies.db.statements.workers import AbandonedTask
from horsies.db.statements.workflows import lock_runs
from horsies.error_codes import OperationalErrorCode, OutcomeCode, column_code
from horsies.failure_fingerprint import NO_ORIGIN, Origin, fingerprint_of
from horsies.parking import ParkRequest
from horsies.retry import RetryDecision, decide_retry, limit_after_return
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.task_result import TaskError, storable_text

STOPPED_BY_TIMEOUT = "timeout"
STOPPED_BY_CANCEL = "cancel"
STOPPED_BY_SHUTDOWN = "shutdown"
STOPPED_FOR_REQUEUE = "requeue"
STOPPED_BY_LOSS = "loss"
STOPPED_BY_MEMORY = "memory"

# The database makes this decision, because its clock is authoritative.
TOO_LATE = "not retried: the next attempt would start after good_until, or a cancel was asked for"
RETURNED_TO_QUEUE = "returned to its queue: the worker stopped"
_FINAL = RetryDecision(None)

# The possible next states of a task whose attempt is recorded.
ENDINGS = ("completed", "cleaning", "parked", "retried", "cancelled", "failed")

# Returns the run that a task or an outcome belongs to; attrgetter avoids a Python call for each of them.
RUN_OF = attrgetter("workflow_id")
# Constants, because accessing an enum member takes 0.1 µs, and every task needs several accesses.
_SUCCEEDED, _ATTEMPT_SUCCEEDED = TaskStatus.COMPLETED, TaskAttemptOutcome.COMPLETED


class Outcome(NamedTuple):
    """A finished attempt to record. With ``delay_seconds`` the task is retried unless its ``good_until`` is
    earlier, up to ``max_retries`` times if that exceeds its own limit. ``retry_reason`` names the rule that
    decided. ``if_cancelled`` is recorded instead if the task has an accepted cancellation. ``run_us`` is how
    many microseconds the attempt ran, if known. With ``is_recorded``, the child has recorded the outcome in
    the task's transaction. With ``is_in_doubt``, the child may have recorded an outcome, which then replaces
    this one. With ``park``, the attempt has not ended: its run waits, and will continue in any child.
    ``fingerprint``, ``exception_type`` and ``raised_in`` identify the reason for a failure. If logs are kept,
    ``log`` is the log of the attempt and ``attempt`` its number.
    """

    task_id: str
    generation: int
    workflow_id: str | None
    status: TaskStatus
    result: str
    attempt_outcome: TaskAttemptOutcome
    run_us: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    failed_reason: str | None = None
    delay_seconds: float | None = None
    retry_reason: str | None = None
    max_retries: int = 0
    if_cancelled: Outcome | None = None
    is_recorded: bool = False
    is_in_doubt: bool = False
    park: ParkRequest | None = None
    fingerprint: str | None = None
    exception_type: str | None = None
    raised_in: str | None = None
    log: CapturedLog | None = None
    attempt: int = 0

    @classmethod
    def completed(cls, task: ClaimedTask, result: str, run_us: int | None = None) -> Outcome:
        """Return the outcome of a function that returned a success."""
        ids = task.id, task.generation, task.workflow_id
        # The tuple has all fields, because a call of the class would take three times as long for every task.
        fields = (*ids, _SUCCEEDED, result, _ATTEMPT_SUCCEEDED, run_us, *_OF_SUCCESS)
        return tuple.__new__(cls, fields)

    @classmethod
    def failed(
        cls,
        task: ClaimedTask | AbandonedTask,
        code: OperationalErrorCode | OutcomeCode,
        reason: str,
        *,
        status: TaskStatus = TaskStatus.FAILED,
        attempt_outcome: TaskAttemptOutcome = TaskAttemptOutcome.FAILED,
        decision: RetryDecision = _FINAL,
    ) -> Outcome:
        """Return the outcome of a task that ended without a result, including the error result for it."""
        return cls(
            task_id=task.id,
            generation=task.generation,
            workflow_id=task.workflow_id,
            status=status,
            result=encode_task_error(TaskError(error_code=code, message=reason)),
            attempt_outcome=attempt_outcome,
            error_code=code.value,
            error_message=reason,
            failed_reason=reason,
            delay_seconds=decision.delay_seconds,
            retry_reason=decision.reason,
            max_retries=decision.max_retries,
            fingerprint=None
            if code is OutcomeCode.TASK_CANCELLED
            else fingerprint_of(task.task_name, code.value),
        )


# The fields after the run time in the outcome of a success.
_OF_SUCCESS = Outcome("", 0, None, _SUCCEEDED, "", _ATTEMPT_SUCCEEDED)[7:]


class Failed(Protocol):
    """A failure as its outcome and the decision about a retry need it: a child's report, or ``Failure``."""

    @property
    def result_json(self) -> str: ...
    @property
    def error_code(self) -> str | None: ...
    @property
    def error_message(self) -> str | None: ...
    @property
    def exception_names(self) -> Sequence[str]: ...
    @property
    def retry_after(self) -> float | None: ...
    @property
    def origin(self) -> Origin: ...


class Failure(NamedTuple):
    """A failure that no child has reported."""

    error_code: str | None
    error_message: str | None = None
    result_json: str = ""
    exception_names: Sequence[str] = ()
    retry_after: float | None = None
    origin: Origin = NO_ORIGIN


class Report(Failed, Protocol):
    """The end of a function, as reported by the process that called it."""

    @property
    def ok(self) -> bool: ...
    @property
    def park(self) -> ParkRequest | None: ...


def outcome_of_report(
    task: ClaimedTask,
    report: Report,
    run_us: int | None = None,
    random: Callable[[], float] = random_module.random,
) -> Outcome:
    """Return the outcome for a function that returned, raised, or was left because its run waits; an error
    may be retried.
    """
    if report.park is not None:
        if (text := report.park.cancelled) is not None:
            return _cancelled(task, text)._replace(run_us=run_us)
        return _parked(task, report.park, run_us)
    if report.ok:
        return Outcome.completed(task, report.result_json, run_us)
    return outcome_of_error(task, report, run_us, random)


def _parked(task: ClaimedTask, request: ParkRequest, run_us: int | None) -> Outcome:
    return Outcome(
        task.id,
        task.generation,
        task.workflow_id,
        TaskStatus.PENDING,
        "",
        _ATTEMPT_SUCCEEDED,
        run_us,
        if_cancelled=outcome_of_stop(task, STOPPED_BY_CANCEL),
        park=request,
    )


def outcome_of_error(
    task: ClaimedTask,
    failure: Failed,
    run_us: int | None = None,
    random: Callable[[], float] = random_module.random,
) -> Outcome:
    """Return the outcome for an error, which may be retried."""
    decision = _decide(task, failure, random)
    reason, origin = decision.reason, failure.origin
    error_code, error_message = failure.error_code, failure.error_message
    return Outcome(
        task_id=task.id,
        generation=task.generation,
        workflow_id=task.workflow_id,
        status=TaskStatus.FAILED,
        result=failure.result_json,
        attempt_outcome=TaskAttemptOutcome.FAILED,
        run_us=run_us,
        error_code=None if error_code is None else column_code(storable_text(error_code)),
        error_message=None if error_message is None else storable_text(error_message),
        delay_seconds=decision.delay_seconds,
        retry_reason=None if reason is None else storable_text(reason),
        max_retries=decision.max_retries,
        fingerprint=fingerprint_of(task.task_name, error_code, origin),
        exception_type=origin.exception_type and storable_text(origin.exception_type),
        raised_in=origin.raised_in and storable_text(origin.raised_in),
    )


def outcome_of_crash(
    task: ClaimedTask, description: str, random: Callable[[], float] = random_module.random
) -> Outcome:
    """Return the outcome for a child that died without a report; the effects of user code are unknown."""
    return _crashed(task, f"The process running the task died: {description}.", random)


def outcome_of_loss(
    task: AbandonedTask, random: Callable[[], float] = random_module.random
) -> Outcome:
    """Return the outcome for a task whose worker was lost; the effects of user code are unknown."""
    worker = f"worker {task.worker_id}, process {task.worker_pid}"
    reason = f"The worker running the task is gone ({worker if task.worker_id else 'unknown'})."
    return _crashed(task, reason, random)


def outcome_of_stop(
    task: ClaimedTask,
    reason: str,
    random: Callable[[], float] = random_module.random,
    *,
    description: str = "",
    limit_ms: int | None = None,
) -> Outcome:
    """Return the outcome for a task that the worker stopped: it exceeded its time or memory limit, was
    cancelled, or was still running at shutdown.

    `description` explains why its child ended. `limit_ms` is the time limit of its call, which in a batch may
    be the limit of another task.
    """
    if reason == STOPPED_BY_CANCEL:
        return _cancelled(task, "The task was cancelled while it was running.")
    if reason == STOPPED_BY_TIMEOUT:
        text = _overrun(task.timeout_ms, limit_ms)
        decision = _decide(task, Failure(OutcomeCode.TASK_TIMEOUT.value), random)
        return Outcome.failed(task, OutcomeCode.TASK_TIMEOUT, text, decision=decision)
    if reason == STOPPED_BY_MEMORY:
        text = f"The process running the task {description}."
        decision = _decide(task, Failure(OutcomeCode.MEMORY_LIMIT.value), random)
        return Outcome.failed(task, OutcomeCode.MEMORY_LIMIT, text, decision=decision)
    if reason == STOPPED_BY_LOSS:
        return _crashed(task, "The worker lost the task while it was running.", random)
    stopped = _interrupted(
        task,
        OperationalErrorCode.WORKER_STOPPED,
        "The worker was stopped before the task ended.",
        random,
    )
    if reason == STOPPED_FOR_REQUEUE:
        # One more retry is allowed, so that this attempt does not use one up.
        return stopped._replace(
            delay_seconds=0.0,
            max_retries=limit_after_return(task.task_options, task.max_retries),
            retry_reason=RETURNED_TO_QUEUE,
            if_cancelled=outcome_of_stop(task, STOPPED_BY_CANCEL),
        )
    return stopped


def _overrun(own_ms: int | None, limit_ms: int | None) -> str:
    if limit_ms is None or limit_ms == own_ms:
        return f"The task ran longer than its timeout_ms={own_ms}."
    return (
        f"The call of the batch ran longer than timeout_ms={limit_ms}, "
        "the shortest limit of its tasks."
    )


def _cancelled(task: ClaimedTask, text: str) -> Outcome:
    return Outcome.failed(task, OutcomeCode.TASK_CANCELLED, text, status=TaskStatus.CANCELLED)


def outcome_of_unread_inputs(task: ClaimedTask) -> Outcome:
    """Return the outcome for a task that never reaches a child because results of other nodes cannot be
    read.
    """
    text = "The results of other nodes that the task takes could not be read."
    return Outcome.failed(task, OperationalErrorCode.WORKER_SERIALIZATION_ERROR, text)


def outcome_of_large_inputs(task: ClaimedTask, size: int, size_max: int) -> Outcome:
    """Return the outcome for a task that never reaches a child because results of other nodes are too
    large.
    """
    text = (
        f"Node {task.workflow_node_index} ({task.task_name}) takes results of {size:,} bytes from other "
        f"nodes, more than payload.max_input_bytes ({size_max:,}); return references to the data instead."
    )
    return Outcome.failed(task, OperationalErrorCode.PAYLOAD_TOO_LARGE, text)


def as_completed(outcome: Outcome) -> Outcome:
    """Return the success that the child recorded instead of this outcome, without its result."""
    return Outcome(
        outcome.task_id,
        outcome.generation,
        outcome.workflow_id,
        _SUCCEEDED,
        "",
        _ATTEMPT_SUCCEEDED,
        outcome.run_us,
        is_recorded=True,
    )


def without_result(outcome: Outcome) -> Outcome:
    """Return the same attempt as a failure without its texts, which the database refuses to store."""
    text = "The outcome of the task could not be stored."
    code = OperationalErrorCode.WORKER_SERIALIZATION_ERROR
    return outcome._replace(
        status=TaskStatus.FAILED,
        result=encode_task_error(TaskError(error_code=code, message=text)),
        attempt_outcome=TaskAttemptOutcome.FAILED,
        error_code=code.value,
        error_message=text,
        failed_reason=None,
        delay_seconds=None,
        retry_reason=None,
        if_cancelled=None,
        fingerprint=None,
        exception_type=None,
        raised_in=None,
    )


def _crashed(
    task: ClaimedTask | AbandonedTask, reason: str, random: Callable[[], float]
) -> Outcome:
    return _interrupted(task, OperationalErrorCode.WORKER_CRASHED, reason, random)


def _interrupted(
    task: ClaimedTask | AbandonedTask,
    code: OperationalErrorCode,
    reason: str,
    random: Callable[[], float],
) -> Outcome:
    return Outcome.failed(
        task,
        code,
        reason,
        attempt_outcome=TaskAttemptOutcome.WORKER_FAILURE,
        decision=_decide(task, Failure(code.value), random),
    )


def _decide(
    task: ClaimedTask | AbandonedTask, failure: Failed, random: Callable[[], float]
) -> RetryDecision:
    return decide_retry(
        task_options=task.task_options,
        error_code=failure.error_code,
        retry_count=task.retry_count,
        max_retries=task.max_retries,
        exception_names=failure.exception_names,
        retry_after=failure.retry_after,
        random=random,
    )


def logging_steps(outcomes: Sequence[Outcome]) -> list[Step]:
    """Return the statement that stores the logs of these attempts, if there are any."""
    rows = [
        (one.task_id, one.generation, one.attempt, *one.log)
        for one in outcomes
        if one.log is not None
    ]
    if not rows:
        return []
    return [(store_logs, StoreLogs(*map(list, zip(*rows, strict=True))))]


def locking_steps(workflow_ids: Iterable[str | None]) -> list[Step]:
    """Return the statement that locks these runs' trees, if there are any.

    This statement must precede all statements on the tasks of these runs: run rows are locked before task
    rows, to prevent deadlocks.
    """
    runs = {workflow_id for workflow_id in workflow_ids if workflow_id is not None}
    return [lock_runs(sorted(runs))] if runs else []


_TASK_ID = attrgetter("task_id")
_COMPLETED = attrgetter("task_id", "generation", "result", "run_us")
_FAILURE = ("attempt_outcome", "error_code", "error_message", "failed_reason", "retry_reason")
_ORIGIN = ("fingerprint", "exception_type", "raised_in")
_RETRIED = attrgetter(
    "task_id", "generation", "delay_seconds", *_FAILURE, "max_retries", "run_us", *_ORIGIN
)
_FAILED = attrgetter("task_id", "generation", "status", "result", *_FAILURE, "run_us", *_ORIGIN)


def recording_steps(worker_id: str | None, outcomes: Sequence[Outcome]) -> dict[str, Step]:
    """Return the statements that record these outcomes, in order, by their entry in ``ENDINGS``.

    No statement names a task twice. If a cancellation of a durable function's run was accepted and the
    run has a clean-up, the run starts the clean-up, and no other statement matches it. The statements
    after the retries handle the tasks that the retries skipped: tasks with an accepted cancellation, and
    tasks for which another attempt would be too late.
    """
    outcomes = _newest(outcomes)
    completed = [one for one in outcomes if one.status is _SUCCEEDED]
    steps: dict[str, Step] = {}
    if completed:
        columns = CompleteTasks(worker_id, *_columns(completed, _COMPLETED))
        steps["completed"] = complete_tasks, columns
    if len(completed) == len(outcomes):
        return steps
    failed = [one for one in outcomes if one.status is not _SUCCEEDED]
    if stopped := [one for one in failed if _may_be_cancelled(one)]:
        ids, generations = [one.task_id for one in stopped], [one.generation for one in stopped]
        steps["cleaning"] = clean_up_runs, CleanUpRuns(worker_id, ids, generations)
    if parked := [one for one in failed if one.park is not None]:
        steps.update(_parking_steps(worker_id, parked))
        failed = [one for one in failed if one.park is None]
        if not failed:
            return steps
    retried = [one for one in failed if one.delay_seconds is not None]
    if retried:
        steps["retried"] = retry_tasks, RetryTasks(worker_id, *_columns(retried, _RETRIED))
        if cancelled := [one.if_cancelled for one in retried if one.if_cancelled is not None]:
            cancels = FailTasks(worker_id, *_columns(cancelled, _FAILED))
            steps["cancelled"] = fail_tasks, cancels._replace(only_cancelled=True)
        failed = [
            one if one.delay_seconds is None else one._replace(retry_reason=TOO_LATE)
            for one in failed
        ]
    steps["failed"] = fail_tasks, FailTasks(worker_id, *_columns(failed, _FAILED))
    return steps


def _may_be_cancelled(outcome: Outcome) -> bool:
    """Return whether an accepted cancellation may have ended the attempt, or the process of the attempt died
    after an accepted cancellation.
    """
    if outcome.park is not None:
        return False  # the statement that parks the run detects the cancellation
    is_interrupted = outcome.attempt_outcome is TaskAttemptOutcome.WORKER_FAILURE
    return is_interrupted or outcome.status is TaskStatus.CANCELLED


def _parking_steps(worker_id: str | None, parked: Sequence[Outcome]) -> dict[str, Step]:
    """Return the statements for runs that wait; runs with an accepted cancellation are cancelled instead."""
    ids, generations = [one.task_id for one in parked], [one.generation for one in parked]
    requests = [one.park.to_json() for one in parked if one.park is not None]
    cancelled = [one.if_cancelled for one in parked if one.if_cancelled is not None]
    cancels = FailTasks(worker_id, *_columns(cancelled, _FAILED))._replace(only_cancelled=True)
    return {
        "parked": (park_tasks, ParkTasks(worker_id, ids, generations, requests)),
        "cancelled": (fail_tasks, cancels),
    }


def _newest(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """Drop an attempt that is followed by a later attempt of the same task.

    The earlier claim is no longer valid, and the statements find a task's values by the position of its
    id, so each id may occur only once.
    """
    if len(set(map(_TASK_ID, outcomes))) == len(outcomes):
        return outcomes
    by_generation = sorted(outcomes, key=attrgetter("generation"))
    return list({one.task_id: one for one in by_generation}.values())


def _columns(
    outcomes: Iterable[Outcome], fields: Callable[[Outcome], tuple[Any, ...]]
) -> Iterator[Any]:
    # The columns are lists, because the encoder would cache tuples.
    return map(list, zip(*map(fields, outcomes), strict=True))
