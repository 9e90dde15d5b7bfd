"""Blocked tasks and runs: those whose next change the database refuses with an error of the data, or whose
rows another session has locked.

Such an error concerns single rows, see ``db/errors.py``. After such an error of a batch every task
or run gets a transaction of its own. The one that causes the error is logged once, recorded for operators,
left alone, and tried again after a delay that doubles from a second to five minutes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import psycopg

from horsies.db.errors import describe_refusal, is_lock_timeout, is_of_data, is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.blocked import LockWait, NoteBlocked, limit_lock_wait, note_blocked
from horsies.logs import as_event

logger = logging.getLogger("horsies.blocked")

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 300.0
# The lock of another session ends by itself, and the task should not wait much longer than that.
LONGEST_LOCK_SECONDS = 5.0
# An attempt that is overdue for this long will not come: the task was changed elsewhere.
FORGET_SECONDS = 60.0

Task = TypeVar("Task")
Action: TypeAlias = Literal["record", "recover", "expire", "release", "start", "renew", "claim"]


# How long a change that is tried again anyway waits for a lock, and how many seconds this uses up. One second
# comes back per second; without patience a change hardly waits, so that a thousand of them silence no worker.
_PATIENT, _IMPATIENT = LockWait(200), LockWait(1)
_WAIT_COST_SECONDS = 1.0
_PATIENCE_SECONDS = 3.0


def is_isolated(error: psycopg.Error) -> bool:
    """Whether the error concerns single tasks or runs, so that each gets a transaction of its own."""
    return is_of_data(error) or is_lock_timeout(error)


class Change(NamedTuple):
    """The next change of one task or run."""

    action: Action
    id: str
    workflow_id: str | None = None
    is_run: bool = False

    def __str__(self) -> str:
        if self.is_run:
            return f"workflow run {self.id}"
        run = "" if self.workflow_id is None else f" of workflow run {self.workflow_id}"
        return f"task {self.id}{run}"


@dataclass(slots=True)
class _Delay:
    action: Action
    seconds: float
    ends_at: float


class Blocked:
    """The tasks and runs of which this process knows that they are blocked."""

    def __init__(
        self, worker_id: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker_id = worker_id
        self._clock = clock
        # Empty most of the time; callers on the way of every task look here first.
        self.delays: dict[str, _Delay] = {}
        # When all patience that waits for locks have used up is back.
        self._patient_at = 0.0

    def excluded(self) -> list[str]:
        """The tasks and runs whose next attempt has not come."""
        now = self._clock()
        return [one for one, delay in self.delays.items() if now < delay.ends_at]

    def is_waiting(self, task_id: str) -> bool:
        """Whether the next attempt of this task has not come."""
        delay = self.delays.get(task_id)
        return delay is not None and self._clock() < delay.ends_at

    def includes(self, action: Action) -> bool:
        """Whether a change of this kind was refused recently."""
        kept_from = self._clock() - FORGET_SECONDS
        self.delays = {
            one: delay for one, delay in self.delays.items() if delay.ends_at > kept_from
        }
        return any(delay.action == action for delay in self.delays.values())

    def lock_wait(self) -> Step:
        """The first step of a transaction that is tried again anyway: it waits briefly for locks."""
        is_patient = self._patient_at - self._clock() < _PATIENCE_SECONDS
        return limit_lock_wait, _PATIENT if is_patient else _IMPATIENT

    def attempt(
        self, pipeline: Pipeline, change: Change, steps: Sequence[Step]
    ) -> list[list[Any]] | None:
        """Run the steps of one change in a transaction; None if the database refuses it."""
        try:
            _, *answers = pipeline.run([self.lock_wait(), *steps])
        except psycopg.Error as error:
            if not is_isolated(error):
                raise
            self.note(pipeline, change, error)
            return None
        self.forget(change.id)
        return answers

    def forget(self, changed_id: str) -> None:
        """The task or run was changed."""
        self.delays.pop(changed_id, None)

    def run_each(
        self,
        pipeline: Pipeline,
        tasks: Sequence[Task],
        change_of: Callable[[Task], Change],
        steps_of: Callable[[Sequence[Task]], list[Step]],
    ) -> list[list[list[Any]]]:
        """Change all tasks in one transaction, or after an error of the data each in its own.

        Tasks whose next attempt has not come are left out. Returns the answers by transaction.
        """
        wanted = [task for task in tasks if not self.is_waiting(change_of(task).id)]
        if not wanted:
            return []
        try:
            return [pipeline.run(steps_of(wanted))]
        except psycopg.Error as error:
            if not is_isolated(error):
                raise
        attempts = [self.attempt(pipeline, change_of(task), steps_of([task])) for task in wanted]
        return [answers for answers in attempts if answers is not None]

    def note(self, pipeline: Pipeline, change: Change, error: psycopg.Error) -> None:
        """Leave a task or run alone for longer than last time; log and record it the first time."""
        known = self.delays.get(change.id)
        longest = LONGEST_LOCK_SECONDS if is_lock_timeout(error) else LONGEST_DELAY_SECONDS
        seconds = min(2 * known.seconds, longest) if known else FIRST_DELAY_SECONDS
        now = self._clock()
        self.delays[change.id] = _Delay(change.action, seconds, now + seconds)
        if is_lock_timeout(error):
            spent_at = max(self._patient_at, now) + _WAIT_COST_SECONDS
            self._patient_at = min(spent_at, now + _PATIENCE_SECONDS)
        reason = describe_refusal(error)
        if known is None and self._is_new(pipeline, change, reason):
            logger.error(
                "%s is blocked, others go on: the database refuses to %s it: %s",
                change,
                change.action,
                reason,
                extra=as_event(
                    "blocked",
                    id=change.id,
                    workflow_id=change.workflow_id,
                    action=change.action,
                    error=reason,
                ),
            )

    def _is_new(self, pipeline: Pipeline, change: Change, reason: str) -> bool:
        """Record the change for operators; False if it was recorded before, by any worker."""
        row = NoteBlocked(change.id, change.is_run, change.action, reason, self._worker_id)
        try:
            return bool(pipeline.run([(note_blocked, row)])[0])
        except psycopg.Error as error:
            if is_transient(error):
                raise
            logger.warning("a blocked task cannot be recorded: %s", describe_refusal(error))
            return True
