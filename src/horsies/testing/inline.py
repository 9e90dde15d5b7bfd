"""run_inline: every send runs its task immediately in this process, without a database."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from horsies.app import Horsies
from horsies.db.statements.tasks import InsertTask, OutcomeRow
from horsies.db.statements.turn import ClaimedTask
from horsies.states import TaskStatus
from horsies.tasks.outcome import Outcome
from horsies.testing.broker import InMemoryBroker, NoDatabaseError, Stored, in_place_of_broker
from horsies.testing.execution import Attempt, Attempts, Ended, Execution

# The limit of retries, because a policy without a limit would retry forever.
ATTEMPTS_MAX = 100

# The attempts of one task: a generator that yields each attempt and receives its outcome.
Running = Generator[ClaimedTask, Ended, None]


@contextmanager
def run_inline(app: Horsies, *, reraise: bool = False) -> Iterator[Attempts]:
    """Run every sent task immediately in this process; its handle has the result when ``send``
    returns.

    Arguments and results pass through the codec. Failed attempts are retried as the retry policy
    specifies, without waits; delays are skipped. Tasks may send other tasks. With ``reraise``, ``send``
    raises the exception of a task whose last attempt failed, with its traceback. Time limits do not
    apply. Workflows are refused because they need a database; see ``run_pending``.

    Example:
        with run_inline(app):
            assert add.enqueue(1, 2).result() == 3
    """
    with Execution(app) as execution:
        inline = _Inline(execution, reraise)
        with in_place_of_broker(app, inline.broker):
            yield inline.ran


class _Inline:
    """Receives stored requests and runs them."""

    name = "run_inline"

    def __init__(self, execution: Execution, reraise: bool) -> None:
        self._execution = execution
        self._reraise = reraise
        self._ends: dict[str, OutcomeRow | None] = {}
        self.broker = InMemoryBroker(self, takes_runs=False)
        self.ran = Attempts()

    def take(self, stored: Stored) -> None:
        for row in stored.tasks:
            running = self._run(row)
            task = next(running, None)
            while task is not None:
                task = _next(running, self._execution.run(task))

    async def take_async(self, stored: Stored) -> None:
        for row in stored.tasks:
            running = self._run(row)
            task = next(running, None)
            while task is not None:
                task = _next(running, await self._execution.run_async(task))

    def end_of(self, task_id: str) -> OutcomeRow | None:
        end = self._ends.get(task_id)
        if end is None and task_id in self._ends:
            raise NoDatabaseError(
                f"task {task_id} is running; a task that run_inline runs cannot wait for itself."
            )
        return end

    def _run(self, row: InsertTask) -> Running:
        self._ends[row.id] = None
        if row.good_until is not None and row.good_until <= datetime.now(UTC):
            self._end(row, TaskStatus.EXPIRED)
            return
        task, due_at = _claimed(row), row.sent_at
        while True:
            outcome, raised, _ = yield task
            due_at += timedelta(seconds=outcome.delay_seconds or 0.0)
            if row.good_until is not None and due_at >= row.good_until:
                outcome = outcome._replace(delay_seconds=None)
            self.ran.attempts.append(Attempt.of(task, outcome))
            if outcome.delay_seconds is None:
                break
            task = _retried(task, outcome)
        self._end(row, outcome.status, outcome.result)
        if raised is not None and self._reraise:
            raise raised

    def _end(self, row: InsertTask, status: TaskStatus, result: str | None = None) -> None:
        self._ends[row.id] = OutcomeRow(row.id, row.task_name, status.value, result, None, None)
        self.broker.release_key(row)


def _next(running: Running, ended: Ended) -> ClaimedTask | None:
    try:
        return running.send(ended)
    except StopIteration:
        return None


def _claimed(row: InsertTask) -> ClaimedTask:
    """Return the task in the form in which a worker claims it right after the send."""
    times = (row.sent_at, datetime.now(UTC), row.good_until)
    details = "\n".join("" if time is None else time.isoformat() for time in times)
    return ClaimedTask(
        row.id,
        1,
        row.task_name,
        row.queue_name,
        row.args,
        row.kwargs,
        0,
        row.max_retries,
        row.task_options,
        row.timeout_ms,
        None,
        priority=row.priority,
        # The other details are empty, because the task has no slot, no workflow and no schedule.
        details=details + "\n" * 5,
    )


def _retried(task: ClaimedTask, outcome: Outcome) -> ClaimedTask:
    if task.retry_count + 1 >= ATTEMPTS_MAX:
        raise RuntimeError(
            f"Task {task.task_name!r} failed {ATTEMPTS_MAX} times in run_inline and its retry policy has "
            "no limit; let it succeed in the test, or use run_pending."
        )
    return task._replace(
        generation=task.generation + 1,
        retry_count=task.retry_count + 1,
        max_retries=max(task.max_retries, outcome.max_retries),
    )
