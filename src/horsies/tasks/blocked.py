"""Finds and retries blocked tasks and runs, whose next change the database refuses.

A data error concerns single rows (see ``db/errors.py``), and so does a row that another session has
locked. After such an error in a batch, every task or run gets its own transaction. The same happens if
one kind of batch has failed several times in a row with a transient error, such as a time limit. The task
or run that causes the error is logged once, recorded for operators, skipped, and tried again after a
delay that doubles from a second to five minutes.

If the database refuses every task with the same error, the tasks are not the cause: a single log line
blames the database.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import psycopg

from horsies.db.errors import (
    describe_refusal,
    is_lock_timeout,
    is_of_data,
    is_time_limit,
    is_transient,
    may_last,
)
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.blocked import (
    delete_unblocked,
    limit_lock_wait,
    note_blocked,
)
from horsies.logs import EventName, as_event, headers_to_log

logger = logging.getLogger("horsies.blocked")

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 300.0
# The longest delay after a lock timeout. It is shorter, because the task should not wait much longer than the
# other session holds its lock.
LONGEST_LOCK_SECONDS = 5.0
# How long refusals stay in memory after their table was found locked, so that no turn waits for the table.
LOCKED_SECONDS = 30.0
# A blocked task is forgotten if its next attempt is overdue by this time, because another process must have
# changed it.
FORGET_SECONDS = 60.0

# How many times in a row batches of one kind may fail with a transient error.
PATIENCE = 3
# How many tasks a log line names when the database refuses all of them.
SHOWN = 3
# If this many tasks in a row are refused with the same error, the tasks are not the cause of the error.
ALIKE = 3
# The delay after a change that has taken too long, as a multiple of its duration.
REST_FACTOR = 10

Task = TypeVar("Task")
Answer = TypeVar("Answer")
Action: TypeAlias = Literal[
    "record", "recover", "expire", "release", "start", "renew", "claim", "reassign"
]


# How long a change that will be repeated anyway waits for a lock, and the limit on the sum of such waits. The
# sum falls by one second per second. At the limit, changes hardly wait, so that a thousand changes do not
# delay a worker's heartbeat.
_PATIENT_MS, _IMPATIENT_MS = 200, 1
# How long a change that will be repeated anyway may take in total, including its COMMIT.
_PATIENT_SECONDS, _IMPATIENT_SECONDS = 10.0, 1.0
_WAIT_COST_SECONDS = 1.0
_PATIENCE_SECONDS = 3.0


class Failures:
    """Counts how many times in a row jobs have failed with transient errors; ``patience`` is the limit."""

    def __init__(self) -> None:
        self.patience = PATIENCE
        self._counts: dict[str, int] = {}
        # For each regular job, the reason why the database last refused it.
        self.refused_jobs: dict[str, str] = {}

    def isolated(
        self,
        job: str,
        batch: Callable[[], Answer],
        one_by_one: Callable[[], Answer],
        *,
        waits: bool = True,
    ) -> Answer:
        """Run ``batch``, which uses a single transaction. If single rows make it fail, run ``one_by_one``
        instead.

        Consecutive failures are counted per `job`, the name of a kind of batch. If `waits` is False, the
        batch does not wait for locks on single rows. A lock timeout then concerns the whole batch and is
        raised.
        """
        if not self.is_suspect(job):
            try:
                answer = batch()
            except psycopg.Error as error:
                is_of_all = is_lock_timeout(error) and not waits
                if is_of_all or not self.is_isolated(job, error):
                    raise
                reason = describe_refusal(error)
                logger.warning("%s: a batch failed; continuing one by one: %s", job, reason)
            else:
                self.forget(job)
                return answer
        answer = one_by_one()
        self.note_search(job)
        return answer

    @contextmanager
    def job(
        self,
        name: str,
        event: EventName | None = None,
        remedy: str = "",
        *,
        may_fail: Callable[[psycopg.Error], bool] | None = None,
    ) -> Iterator[None]:
        """Postpone a regular job to its next scheduled time if the database refuses it, or if it fails
        with an error for which ``may_fail`` returns True; log each reason once.
        """
        try:
            yield
        except psycopg.Error as error:
            is_postponed = self.is_isolated(name, error)
            if not is_postponed and (may_fail is None or not may_fail(error)):
                raise
            reason = describe_refusal(error)
            if self.refused_jobs.get(name) != reason:
                extra = None if event is None else as_event(event, error=reason)
                logger.error(
                    "%s failed, other jobs continue: %s%s", name, reason, remedy, extra=extra
                )
            self.refused_jobs[name] = reason
        else:
            self.forget(name)
            self.refused_jobs.pop(name, None)

    def is_isolated(self, job: str, error: psycopg.Error) -> bool:
        """Count a failed batch, and return whether single tasks or runs are the probable cause."""
        if is_of_data(error) or is_lock_timeout(error):
            return True
        if may_last(error):
            self._counts[job] = self._counts.get(job, 0) + 1
        return may_last(error) and self.is_suspect(job)

    def is_suspect(self, job: str) -> bool:
        """Return whether this job has failed so many times that each task now gets its own transaction."""
        return self._counts.get(job, 0) >= self.patience

    def note_search(self, job: str) -> None:
        """Note that every task has had its own transaction; batches are used again until the next failure."""
        if job in self._counts:
            self._counts[job] = self.patience - 1

    def forget(self, job: str) -> None:
        """A batch succeeded."""
        self._counts.pop(job, None)


class Change(NamedTuple):
    """A change to one task or run."""

    action: Action
    id: str
    workflow_id: str | None = None
    is_run: bool = False

    def __str__(self) -> str:
        if self.is_run:
            return f"workflow run {self.id}"
        run = "" if self.workflow_id is None else f" of workflow run {self.workflow_id}"
        return f"task {self.id}{run}"


class Refusal(NamedTuple):
    """The first refusal of a change, with the error on one line, and with the task's stored options once
    they are known.
    """

    change: Change
    reason: str
    task_options: str | None = None


@dataclass(slots=True)
class _Delay:
    action: Action
    reason: str
    seconds: float
    ends_at: float
    is_locked: bool
    # The duration of the slowest attempt that exceeded a time limit.
    taken_seconds: float


@dataclass(slots=True)
class _Alike:
    """The tasks that were refused one after another with the same error; `first` is the first
    refused task.
    """

    reason: str
    first: str
    count: int = 0
    is_logged: bool = False


@dataclass(slots=True)
class _Search:
    """The state of a search that runs one transaction per task, to find the task that causes an error."""

    refused: list[Refusal] = field(default_factory=list)
    succeeded: set[Action] = field(default_factory=set)


class Blocked:
    """Keeps track of the blocked tasks and runs that are known to this process."""

    def __init__(
        self, worker_id: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._worker_id = worker_id
        self._clock = clock
        self.failures = Failures()
        # This mapping is usually empty; callers that handle every task check it first.
        self.delays: dict[str, _Delay] = {}
        # When the sum of waits for locks will have fallen to zero.
        self._patient_at = 0.0
        self._alike: dict[Action, _Alike] = {}
        self._search: _Search | None = None
        # Refusals that could not be recorded because the connection was lost.
        self._unreported: list[Refusal] = []
        # The refusals that were logged but could not be recorded because another session had locked the
        # table; and until when the table counts as locked.
        self._unrecorded: list[Refusal] = []
        self._locked_until = 0.0
        # Whether the table may still contain rows of tasks that are no longer blocked.
        self.has_recorded = False

    def excluded(self) -> list[str]:
        """Return the tasks and runs whose next attempt is not due yet."""
        now = self._clock()
        return [one for one, delay in self.delays.items() if now < delay.ends_at]

    def is_waiting(self, task_id: str, action: Action | None = None) -> bool:
        """Return whether the action was refused for this task and its next attempt is not due yet."""
        delay = self.delays.get(task_id)
        if delay is None or action not in (None, delay.action):
            return False
        return self._clock() < delay.ends_at

    def includes(self, action: Action) -> bool:
        """Return whether a change of this kind was refused recently."""
        kept_from = self._clock() - FORGET_SECONDS
        self.delays = {
            one: delay for one, delay in self.delays.items() if delay.ends_at > kept_from
        }
        return any(delay.action == action for delay in self.delays.values())

    def has_next(self, action: Action) -> bool:
        """Return whether the next attempt at a refused change of this kind is due."""
        if not self.includes(action):
            return False
        now, delays = self._clock(), self.delays.values()
        return any(delay.action == action and delay.ends_at <= now for delay in delays)

    def lock_wait(self) -> Step:
        """Return the first step of a transaction that will be repeated anyway: it makes the transaction
        wait only briefly for locks.
        """
        return limit_lock_wait(_PATIENT_MS if self._is_patient() else _IMPATIENT_MS)

    def seconds_alone(self, one: str = "") -> float:
        """Return the time limit for the next attempt to change this task or run.

        The limit doubles after an attempt that took too long, so that a slow change eventually succeeds.
        ``statement_timeout_ms``, the limit of every transaction, also applies.
        """
        if not self._is_patient():
            return _IMPATIENT_SECONDS
        return max(_PATIENT_SECONDS, 2 * self.seconds_taken(one))

    def seconds_taken(self, one: str) -> float:
        """Return the duration of the slowest attempt at a refused change that exceeded a time limit."""
        delay = self.delays.get(one)
        return 0.0 if delay is None else delay.taken_seconds

    def _is_patient(self) -> bool:
        return self._patient_at - self._clock() < _PATIENCE_SECONDS

    def isolated(
        self,
        pipeline: Pipeline,
        action: Action,
        batch: Callable[[], Answer],
        one_by_one: Callable[[], Answer],
        job: str = "",
        *,
        waits: bool = True,
    ) -> Answer:
        """Like ``Failures.isolated``, but for a batch that changes tasks.

        The tasks that the database refuses are reported when ``one_by_one`` has tried all tasks. `job`
        defaults to the action.
        """

        if self._alike:
            batch = partial(self._run_batch, action, batch)
        apart = partial(self._run_apart, pipeline, one_by_one)
        return self.failures.isolated(job or action, batch, apart, waits=waits)

    def _run_batch(self, action: Action, batch: Callable[[], Answer]) -> Answer:
        answer = batch()
        self._alike.pop(action, None)
        return answer

    def _run_apart(self, pipeline: Pipeline, one_by_one: Callable[[], Answer]) -> Answer:
        with self.search(pipeline):
            return one_by_one()

    @contextmanager
    def search(self, pipeline: Pipeline) -> Iterator[None]:
        """Give each task its own transaction; the refused tasks are reported together at the end."""
        search, outer = _Search(), self._search
        self._search = search
        try:
            yield
        except BaseException:
            self._unreported += search.refused
            raise
        finally:
            self._search = outer
        self._report(pipeline, search.refused, search.succeeded)

    def attempt(
        self, pipeline: Pipeline, change: Change, steps: Sequence[Step]
    ) -> list[list[Any]] | None:
        """Run the steps of one change in a transaction; return None if the database refuses the change."""
        started = self._clock()
        try:
            _, *answers = pipeline.run([self.lock_wait(), *steps], self.seconds_alone(change.id))
        except psycopg.Error as error:
            if not is_of_one(error):
                raise
            self.note(pipeline, change, error, self._clock() - started)
            return None
        self.forget(change)
        return answers

    def forget(self, change: Change) -> None:
        """Note that the task or run was changed. Other tasks and runs that were refused for the same
        reason are now tried again.
        """
        self._alike.pop(change.action, None)
        if self._search is not None:
            self._search.succeeded.add(change.action)
        ended = self.delays.pop(change.id, None)
        if ended is not None and not ended.is_locked:
            now = self._clock()
            for delay in self.delays.values():
                if (delay.action, delay.reason) == (ended.action, ended.reason):
                    delay.ends_at = min(delay.ends_at, now)

    def run_each(
        self,
        pipeline: Pipeline,
        tasks: Sequence[Task],
        change_of: Callable[[Task], Change],
        steps_of: Callable[[Sequence[Task]], list[Step]],
    ) -> list[list[list[Any]]]:
        """Change all tasks in one transaction, or each in its own transaction if single tasks cause an error.
        Tasks whose next attempt is not due yet are skipped. Return the results of each transaction.
        """
        wanted = [task for task in tasks if not self.is_waiting(change_of(task).id)]
        if not wanted:
            return []

        def apart() -> list[list[list[Any]]]:
            each = [self.attempt(pipeline, change_of(task), steps_of([task])) for task in wanted]
            return [answers for answers in each if answers is not None]

        return self.isolated(
            pipeline, change_of(wanted[0]).action, lambda: [pipeline.run(steps_of(wanted))], apart
        )

    def note(
        self, pipeline: Pipeline, change: Change, error: psycopg.Error, taken_seconds: float = 0.0
    ) -> None:
        """Skip a task or run for longer than the last time; the first time, also log and record
        the refusal.
        """
        known, now = self.delays.get(change.id), self._clock()
        reason = describe_refusal(error)
        alike = self._note_alike(change, reason, is_new=known is None)
        is_brief = is_lock_timeout(error) or (alike.is_logged and alike.first == change.id)
        longest = LONGEST_LOCK_SECONDS if is_brief else LONGEST_DELAY_SECONDS
        seconds = min(2 * known.seconds, longest) if known else FIRST_DELAY_SECONDS
        slowest = self.seconds_taken(change.id)
        if is_time_limit(error):
            slowest = max(slowest, taken_seconds)
            rest_seconds = REST_FACTOR * taken_seconds
            seconds = max(seconds, rest_seconds)
            self._patient_at = now + _PATIENCE_SECONDS + rest_seconds
        elif is_lock_timeout(error):
            spent_at = max(self._patient_at, now) + _WAIT_COST_SECONDS
            self._patient_at = max(self._patient_at, min(spent_at, now + _PATIENCE_SECONDS))
        self.delays[change.id] = _Delay(
            change.action, reason, seconds, now + seconds, is_lock_timeout(error), slowest
        )
        refused = [] if known else [Refusal(change, reason)]
        if self._search is not None:
            self._search.refused += refused
        elif refused or self._unreported:
            self._report(pipeline, refused, set())

    def _note_alike(self, change: Change, reason: str, *, is_new: bool) -> _Alike:
        alike = self._alike.get(change.action)
        if alike is None or alike.reason != reason:
            alike = self._alike[change.action] = _Alike(reason, change.id)
        alike.count += is_new
        return alike

    def _report(
        self, pipeline: Pipeline, refused: Sequence[Refusal], succeeded: Set[Action]
    ) -> None:
        """Record refused changes for operators. Log each refusal, or a single line if the database refuses
        every task.
        """
        self._unreported += refused  # the refusals are kept until they are recorded
        noted = [self._note_new(pipeline, one) for one in self._unreported]
        new = [one for one in noted if one is not None]
        self._unreported = []
        for action in dict.fromkeys(one.change.action for one in new):
            found = [one for one in new if one.change.action == action]
            alike = self._alike.get(action)
            if alike is None or not is_of_database(found, alike.count, action in succeeded):
                for one in found:
                    _log_blocked(one)
            elif not alike.is_logged:
                alike.is_logged = True
                _log_database(action, found)

    def _note_new(self, pipeline: Pipeline, refusal: Refusal) -> Refusal | None:
        """Record a refusal; return None if a worker has already recorded it."""
        if self._clock() < self._locked_until:
            self._unrecorded.append(refusal)
            return refusal
        change = refusal.change
        row = note_blocked(change.id, change.is_run, change.action, refusal.reason, self._worker_id)
        try:
            _, found = pipeline.run([self.lock_wait(), row])
        except psycopg.Error as error:
            if is_lock_timeout(error):
                self._unrecorded.append(refusal)
                self._locked_until = self._clock() + LOCKED_SECONDS
            elif is_transient(error):
                raise
            logger.warning("a blocked task cannot be recorded: %s", describe_refusal(error))
            return refusal
        self.has_recorded = True
        return refusal._replace(task_options=found[0].task_options) if found else None

    def update_record(self, pipeline: Pipeline) -> None:
        """Record the refusals that could not be recorded while the table was locked. When no task or run is
        known to be blocked, delete the rows of tasks and runs that are no longer blocked.
        """
        if self._unrecorded and self._clock() >= self._locked_until:
            unrecorded, self._unrecorded = self._unrecorded, []
            for refusal in unrecorded:
                if refusal.change.id in self.delays:
                    self._note_new(pipeline, refusal)
        if self.has_recorded and not self.delays:
            pipeline.run([self.lock_wait(), delete_unblocked()])
            self.has_recorded = False


def is_of_one(error: psycopg.Error) -> bool:
    """Return whether a change that was alone in its transaction can have caused the transaction's error."""
    return is_of_data(error) or is_lock_timeout(error) or may_last(error)


def is_of_database(found: Sequence[Refusal], alike_count: int, has_success: bool) -> bool:
    """Return whether every task is refused with the same error: either all tasks of a batch, or several tasks
    in a row.
    """
    is_same = len({one.reason for one in found}) == 1
    return is_same and not has_success and (len(found) > 1 or alike_count >= ALIKE)


def _log_blocked(refusal: Refusal) -> None:
    change, reason, options = refusal
    event = as_event(
        "blocked",
        id=change.id,
        workflow_id=change.workflow_id,
        action=change.action,
        error=reason,
    )
    about = {} if change.is_run else {"task_id": change.id}
    logger.error(
        "%s is blocked, other work continues: the database refuses to %s it: %s",
        change,
        change.action,
        reason,
        extra=event | about | headers_to_log(options),
    )


def _log_database(action: Action, found: Sequence[Refusal]) -> None:
    shown = ", ".join(str(one.change) for one in found[:SHOWN])
    logger.error(
        "the database refuses to %s every task with the same error: %s; check the triggers on its "
        "tables, locks of other sessions, the settings of the database and the role, memory and disk, "
        "rather than the tasks (%s%s); each is tried again",
        action,
        found[0].reason,
        shown,
        ", ..." if len(found) > SHOWN else "",
        extra=as_event("database_refuses", action=action, error=found[0].reason),
    )
