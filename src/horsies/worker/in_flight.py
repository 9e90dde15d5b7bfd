"""In flight: every task this worker owns, from its claim until its outcome is recorded or lost.

Claimed tasks go to children or wait here (prefetched); reports come back as outcomes for the next
turn. This class does no database I/O; the loop records the outcomes it collects.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from operator import attrgetter
from typing import assert_never

from horsies.db.statements.turn import ClaimedTask
from horsies.logs import as_event
from horsies.states import TaskStatus
from horsies.tasks.outcome import (
    STOPPED_BY_CANCEL,
    STOPPED_BY_LOSS,
    TOO_LATE,
    Outcome,
    outcome_of_crash,
    outcome_of_error,
    outcome_of_stop,
)
from horsies.worker.agenda import Pace
from horsies.worker.known_tasks import UnknownTasks
from horsies.worker.node_inputs import NodeInputs, assignment_of
from horsies.worker.pool.assignments import (
    Died,
    HookFailed,
    PoolEvent,
    Reported,
    Stopped,
    TakenBack,
)
from horsies.worker.pool.mixed_pool import AnyPool
from horsies.worker.pool.pool import NoIdleChildError
from horsies.worker.pool.window import Windows, linger_seconds
from horsies.worker.protocol import Assignment, NodePart
from horsies.worker.tally import Tally, ends_logger, log_end
from horsies.worker.traces import Traces
from horsies.worker.turn import ClaimInDoubt

logger = logging.getLogger("horsies.worker")

# The outcomes of one turn. PostgreSQL accepts no statement of a gigabyte, and reads an array of texts at
# some 60 MB/s: a longer turn would keep the worker from showing signs of life.
TURN_CHARACTERS_MAX = 16 * 1024 * 1024
# Refused outcomes that a worker keeps before it claims no more.
BLOCKED_MAX = 1000
BLOCKED_CHARACTERS_MAX = 256 * 1024 * 1024
# Outcomes wait this long only for a database that does not answer.
LATE_SECONDS = 1.0
Parts = Mapping[str, NodePart]
NO_PARTS: Parts = {}


class InFlight:
    """The tasks that children run, the tasks that wait for a child, and the outcomes to record."""

    def __init__(
        self,
        pool: AnyPool,
        inputs: NodeInputs | None = None,
        traces: Traces | None = None,
        windows: Windows | None = None,
    ) -> None:
        self._pool = pool
        self.windows = windows or Windows()
        # None unless the application traces.
        self.traces = traces
        self._running: dict[str, ClaimedTask] = {}
        # Claimed ahead, oldest first; no child has seen these.
        self._waiting: dict[str, ClaimedTask] = {}
        self._doubt = ClaimInDoubt()
        self.outcomes: list[Outcome] = []
        # When the first of them was reported.
        self._unrecorded_since = 0.0
        self._waited_seconds = 0.0  # since the events came that are being absorbed
        # Outcomes that the database refused, by task; each is tried again alone.
        self.blocked: dict[str, Outcome] = {}
        # Attempts without a call: this worker's version of the task cannot take it, another one may.
        self.uncalled: list[tuple[ClaimedTask, Outcome]] = []
        # Tasks that their children have not begun, until they are released.
        self.taken_back: list[ClaimedTask] = []
        self.inputs = inputs or NodeInputs()
        self.pace = Pace()
        self.failed_hook: str | None = None
        self.tally = Tally()
        # The durations of ended attempts, for the log and the tally, and when they ended.
        self._ended: dict[tuple[str, int], tuple[ClaimedTask, float | None, float]] = {}

    def claim_in_doubt(self) -> ClaimInDoubt:
        """``with in_flight.claim_in_doubt():`` around code that claims tasks or hands them out."""
        return self._doubt

    @property
    def needs_release(self) -> bool:
        """Whether the database may list tasks as this worker's that it does not hold."""
        return self._doubt.may_own_more

    def note_released(self) -> None:
        self._doubt.may_own_more = False

    def release_again(self) -> None:
        """Release the tasks that the database lists and this worker does not hold, even refused ones."""
        self._doubt.may_own_more = True

    @property
    def is_empty(self) -> bool:
        return not (self._running or self._waiting or self.outcomes)

    @property
    def is_cleared(self) -> bool:
        """Whether this worker owns no task, in the database either."""
        return self.is_empty and not self.needs_release

    @property
    def has_only_blocked(self) -> bool:
        """Whether outcomes that the database refuses are all that is left to record."""
        is_rest = len(self.blocked) == len(self._running)
        return bool(self.blocked) and is_rest and not (self._waiting or self.outcomes)

    @property
    def is_full(self) -> bool:
        """Whether the refused outcomes in memory are too many to run more tasks."""
        size = sum(len(one.result) for one in self.blocked.values())
        return len(self.blocked) >= BLOCKED_MAX or size >= BLOCKED_CHARACTERS_MAX

    @property
    def running_count(self) -> int:
        return len(self._running) - len(self.outcomes) - len(self.blocked)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def held_count(self) -> int:
        return self.running_count + len(self._waiting)

    def held(self) -> list[ClaimedTask]:
        """Every attempt that this worker knows to be its own: of each task, the newest."""
        both = [*self._running.values(), *self._waiting.values()]
        both.sort(key=attrgetter("generation"))
        return list({task.id: task for task in both}.values())

    def holds_any(self, task_ids: Iterable[str]) -> bool:
        return any(task_id in self._running or task_id in self._waiting for task_id in task_ids)

    def waiting(self, count: int) -> Sequence[ClaimedTask]:
        """The next tasks to start, oldest first."""
        return list(self._waiting.values())[:count]

    def next_outcomes(self) -> Sequence[Outcome]:
        """The outcomes for the next turn: all, unless their texts are too long for one transaction, or a
        task that was lost and claimed again has two: the statements take one of each task.
        """
        size, task_ids, outcomes = 0, set[str](), self.outcomes
        for count, one in enumerate(outcomes):
            size += len(one.result)
            if one.task_id in task_ids or (count and size > TURN_CHARACTERS_MAX):
                outcomes = outcomes[:count]
                break
            task_ids.add(one.task_id)
        now = time.monotonic()
        if now < self._unrecorded_since + LATE_SECONDS:
            return outcomes
        return [self._backdated(one, now) for one in outcomes]

    def _backdated(self, outcome: Outcome, now: float) -> Outcome:
        """Add the wait of an outcome to its run time, from which the database computes the start."""
        ended = self._ended.get((outcome.task_id, outcome.generation))
        if ended is None or outcome.run_us is None:
            return outcome
        return outcome._replace(run_us=outcome.run_us + round((now - ended[2]) * 1e6))

    def freed_by_queue(self, outcomes: Iterable[Outcome]) -> Mapping[str, int]:
        """How many places of each queue the outcomes free."""
        ended = (self._running.get(one.task_id) for one in outcomes)
        return Counter(task.queue_name for task in ended if task is not None)

    @property
    def ends_nodes(self) -> bool:
        """Whether the outcomes may advance workflows, and so create tasks."""
        return any(one.workflow_id is not None for one in self.outcomes)

    def absorb(self, events: Iterable[PoolEvent], waited_seconds: float = 0.0) -> None:
        """Turn events of children into outcomes; the events came so many seconds ago."""
        self._waited_seconds = waited_seconds
        for event in events:
            match event:
                case Reported():
                    self._absorb_report(event)
                case Died():
                    self._absorb_death(event)
                case Stopped():
                    self._absorb_stop(event)
                case TakenBack(assignments=assignments):
                    self._forget_unstarted(assignments)
                case HookFailed(name=name, description=description):
                    self.failed_hook = f"Child process start hook {name} {description}."
                case _:
                    assert_never(event)

    def _absorb_report(self, event: Reported) -> None:
        report, _, run_seconds = event
        now = time.monotonic()
        self.pace.note_end(report.task_id, run_seconds, now)
        if (task := self._owned(report.task_id, report.generation)) is None:
            return
        run_us = round(run_seconds * 1e6)
        if report.ok:
            outcome = Outcome.completed(task, report.result_json, run_us)
        else:
            outcome = outcome_of_error(
                task,
                result_json=report.result_json,
                error_code=report.error_code,
                error_message=report.error_message,
                exception_names=report.exception_names,
                retry_after=report.retry_after,
                run_us=run_us,
            )
        if self.traces is not None and report.traceparent is not None:
            self.traces.note(task, report.traceparent)
        if task.burst:
            self.windows.note_end(task.task_name, run_seconds)
        if not report.was_called:
            self.uncalled.append((task, outcome))
            return
        if not self.outcomes:
            self._unrecorded_since = now - self._waited_seconds
        self._ended[task.id, task.generation] = task, run_seconds, now - self._waited_seconds
        self.outcomes.append(outcome)

    def _owned(self, task_id: str, generation: int) -> ClaimedTask | None:
        """The task, unless it was lost and claimed again since that attempt began."""
        task = self._running.get(task_id)
        return task if task is not None and task.generation == generation else None

    def _forget_unstarted(self, assignments: Iterable[Assignment]) -> None:
        """The next release returns these tasks to the queue."""
        for given in assignments:
            if (task := self._owned(given.task_id, given.generation)) is not None:
                del self._running[task.id]
                self.taken_back.append(task)
                self._doubt.may_own_more = True

    def linger_seconds(self, now: float) -> float:
        """How long to wait for more reports before the next turn records them together."""
        if (depth := self.windows.depth) < 2:
            return self.pace.linger_seconds(now)
        return linger_seconds(*self._pool.window_space(depth), self._unrecorded_since, now)

    def _absorb_stop(self, event: Stopped) -> None:
        given = event.assignment
        if (task := self._owned(given.task_id, given.generation)) is not None:
            self._note_interrupted(task, given, outcome_of_stop(task, event.reason), event)

    def _absorb_death(self, event: Died) -> None:
        if event.assignment is None:
            extra = as_event("child_died", child_pid=event.pid, task_id=None)
            idle = event.pid, event.description
            logger.error("idle child %s died (%s); replacing it", *idle, extra=extra)
            return
        task = self._owned(event.assignment.task_id, event.assignment.generation)
        if task is None:
            return
        if not event.started:
            self._forget_unstarted([event.assignment])
            return
        extra = as_event("child_died", child_pid=event.pid, task_id=task.id)
        death = event.pid, event.description, task.task_name, task.id
        logger.error("child %s died (%s) while running %s %s", *death, extra=extra)
        outcome = outcome_of_crash(task, event.description)
        self._note_interrupted(task, event.assignment, outcome, event)

    def _note_interrupted(
        self, task: ClaimedTask, given: Assignment, outcome: Outcome, event: Died | Stopped
    ) -> None:
        if (seconds := event.run_seconds) is not None:
            outcome = outcome._replace(run_us=round(seconds * 1e6))
        if self.traces is not None:
            self.traces.close(given, outcome, seconds)
        ended_at = time.monotonic() - self._waited_seconds
        self._ended[task.id, task.generation] = task, seconds, ended_at
        self.outcomes.append(outcome)

    def keep_results(self, outcomes: Iterable[Outcome], recorded: set[str]) -> None:
        """Keep the results of nodes for the nodes that depend on them."""
        for one in outcomes:
            if (
                one.workflow_id is not None
                and one.status is TaskStatus.COMPLETED
                and one.task_id in recorded
            ):
                self.inputs.note_completed(self._running[one.task_id], one.result)

    def close_recorded(
        self,
        outcomes: Sequence[Outcome],
        recorded: Set[str],
        refused: Set[str] = frozenset(),
        failed: Set[str] = frozenset(),
        cancelled: Set[str] = frozenset(),
    ) -> None:
        """Forget attempts whose outcome is recorded, or that another worker owns now; keep those whose
        outcome the database refused. ``failed`` ones are not retried, whatever their outcome says; of
        ``cancelled`` ones the outcome for a cancel is recorded. A task that is retried at once may already
        run in a child, as another generation.
        """
        self.outcomes = self.outcomes[len(outcomes) :]
        if outcomes:
            ends = self._take_ends(outcomes, recorded, failed, cancelled)
            self.tally.note_ends(ends)
            if ends_logger.isEnabledFor(logging.INFO):
                for end in ends:
                    log_end(*end)
        for outcome in outcomes:
            task_id = outcome.task_id
            if task_id in refused:
                self.blocked[task_id] = outcome
                if self.is_full:
                    logger.error("%d outcomes are refused; claiming no tasks", len(self.blocked))
                continue
            if self._owned(task_id, outcome.generation):
                del self._running[task_id]
            if task_id not in recorded:
                logger.warning(
                    "outcome of task %s dropped: its claim is not valid any more",
                    task_id,
                    extra=as_event("outcome_dropped", task_id=task_id),
                )

    def _take_ends(
        self,
        outcomes: Iterable[Outcome],
        recorded: Set[str],
        failed: Set[str],
        cancelled: Set[str],
    ) -> list[tuple[Outcome, ClaimedTask, float | None]]:
        """The outcomes as they are recorded, with their tasks and the seconds that each took."""
        ends: list[tuple[Outcome, ClaimedTask, float | None]] = []
        for outcome in outcomes:
            task_id = outcome.task_id
            ended = self._ended.pop((task_id, outcome.generation), None)
            if task_id not in recorded:
                continue
            if task_id in cancelled and outcome.if_cancelled is not None:
                outcome = outcome.if_cancelled
            elif task_id in failed and outcome.delay_seconds is not None:
                # A cancel or its good_until comes first.
                outcome = outcome._replace(delay_seconds=None, retry_reason=TOO_LATE)
            if ended is not None:
                ends.append((outcome, *ended[:2]))
            elif (task := self._owned(task_id, outcome.generation)) is not None:
                ends.append((outcome, task, None))  # it never reached a child
        return ends

    def close_blocked(
        self, outcome: Outcome, recorded: Set[str], failed: Set[str], cancelled: Set[str]
    ) -> None:
        """``close_recorded`` for an outcome that the database had refused."""
        del self.blocked[outcome.task_id]
        self.outcomes.insert(0, outcome)
        self.close_recorded([outcome], recorded, frozenset(), failed, cancelled)

    def take_started(
        self, requested: Iterable[ClaimedTask], pids: Mapping[str, int]
    ) -> list[ClaimedTask]:
        """The prefetched tasks that have started; one without a pid was lost meanwhile.

        Or it only cannot start: on hold, past its deadline, or its start was in doubt. Then this worker
        still owns it and must release it.
        """
        started = []
        for task in requested:
            del self._waiting[task.id]
            if task.id in pids:
                started.append(task._replace(worker_pid=pids[task.id]))
            else:
                self._doubt.may_own_more = True
                event = as_event("claim_lost", task_id=task.id)
                logger.info("prefetched task %s was lost before it started", task.id, extra=event)
        return started

    def sort_out(
        self, claimed: Sequence[ClaimedTask], unknown: UnknownTasks
    ) -> Sequence[ClaimedTask]:
        """The claimed tasks that this worker knows; the others are released, or wait in ``uncalled``."""
        if unknown.knows_all(claimed):
            return claimed
        known = []
        for task in claimed:
            if not unknown.is_unknown(task):
                known.append(task)
                continue
            outcome = unknown.note_unknown(task, time.monotonic())
            if outcome is None:
                self._doubt.may_own_more = True
            else:
                self._hold(task)
                self.uncalled.append((task, outcome))
        return known

    def close_uncalled(self, left: Collection[str] | None = None) -> None:
        """Release the uncalled attempts of these tasks, or all, to other workers; fail the rest."""
        for task, outcome in self.uncalled:
            if left is None or task.id in left:
                del self._running[task.id]
                self._doubt.may_own_more = True
            else:
                logger.error("%s", outcome.error_message)
                self.outcomes.append(outcome)
        self.uncalled = []

    def fail(self, task: ClaimedTask, outcome: Outcome) -> None:
        """Take over a task that no child has seen, to record this failure."""
        self._hold(task)
        self.outcomes.append(outcome)

    def _hold(self, task: ClaimedTask) -> None:
        """Own an attempt without a child; a refused outcome of an earlier one is void."""
        self.blocked.pop(task.id, None)
        self._running[task.id] = task

    def hand_out(self, tasks: Iterable[ClaimedTask], parts: Parts = NO_PARTS) -> None:
        """Give tasks to the children they were started for, nodes with their part in a workflow; keep
        prefetched tasks for later.
        """
        handed = []
        windows: dict[int, list[ClaimedTask]] = {}
        for task in tasks:
            if task.worker_pid is None:
                self._waiting[task.id] = task
                continue
            handed.append(task)
            if task.burst and self.windows.is_on:
                windows.setdefault(task.worker_pid, []).append(task)
            else:
                self._give(task, task.worker_pid, parts.get(task.id))
        behind = sum(self._give_window(window, pid, parts) for pid, window in windows.items())
        if handed:
            self.pace.note_hand_out([task.id for task in handed], time.monotonic())
            self.tally.note_starts(handed, behind)

    def _give(self, task: ClaimedTask, pid: int, node: NodePart | None) -> None:
        try:
            self._pool.dispatch(self._assignment(task, node), pid)
        except NoIdleChildError:
            self._doubt.may_own_more = True
        else:
            self._running[task.id] = task

    def _give_window(self, tasks: Sequence[ClaimedTask], pid: int, parts: Parts) -> int:
        """Return how many of the tasks wait in the child behind another one."""
        assignments = [self._assignment(task, parts.get(task.id)) for task in tasks]
        patience = [self.windows.patience_seconds(task.task_name) for task in tasks]
        try:
            behind = self._pool.dispatch_window(pid, list(zip(assignments, patience, strict=True)))
        except NoIdleChildError:
            self._doubt.may_own_more = True
            return 0
        self._running.update((task.id, task) for task in tasks)
        return behind

    def _assignment(self, task: ClaimedTask, node: NodePart | None) -> Assignment:
        if task.id in self._running:
            # Another worker recovered the task and it came back here; the old attempt is void.
            self._pool.stop_task(task.id, STOPPED_BY_LOSS)
            self.blocked.pop(task.id, None)
        return assignment_of(task, node)

    def put_back(self) -> None:
        """Forget the tasks that no child has begun; the next release returns them to the queue."""
        self._pool.return_unstarted()
        if self._waiting:
            self._waiting = {}
            self._doubt.may_own_more = True

    def cancel(self, task_ids: Iterable[str]) -> None:
        """Stop these tasks where they run; forget those that wait."""
        for task_id in task_ids:
            self._waiting.pop(task_id, None)
            self._pool.stop_task(task_id, STOPPED_BY_CANCEL)

    def keep_owned(self, task_ids: Iterable[str]) -> None:
        """Kill the children of tasks that are not among these, or cancel coroutines: others own them now."""
        shared = self._pool.asynchronous
        lost = {*self._pool.held_tasks, *self._waiting}.difference(task_ids)
        for task_id in lost:
            event = as_event("claim_lost", task_id=task_id)
            logger.warning("task %s belongs to another worker now", task_id, extra=event)
            self._waiting.pop(task_id, None)
            if shared is None or not shared.stop_task(task_id, STOPPED_BY_LOSS):
                self._pool.kill_task(task_id)
