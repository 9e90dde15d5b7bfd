"""The desk: every task this worker owns, from its claim until its outcome is recorded or lost.

Between the turn and the children. Claimed tasks go out to named children or wait here (prefetched); what
children say comes back as settlements for the next turn. No database: the loop carries the papers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from horsies.db.statements.turn import ClaimedTask
from horsies.events import as_event
from horsies.tasks.outcome import (
    STOPPED_BY_CANCEL,
    STOPPED_BY_LOSS,
    Completed,
    Outcome,
    outcome_of_crash,
    outcome_of_report,
    outcome_of_stop,
    outcome_of_unread_inputs,
)
from horsies.worker.batching import Pace
from horsies.worker.node_inputs import Inputs
from horsies.worker.pool.events import Died, HookFailed, PoolEvent, Reported, Stopped
from horsies.worker.pool.pool import ChildPool, NoIdleChildError
from horsies.worker.protocol import Assignment, NodePart

logger = logging.getLogger("horsies.worker")

NO_PARTS: Mapping[str, NodePart] = {}


class InFlight:
    """What is out with children, what waits, and what has ended."""

    def __init__(self, pool: ChildPool, inputs: Inputs | None = None) -> None:
        self._pool = pool
        self._running: dict[str, ClaimedTask] = {}
        # Claimed ahead, oldest first; no child has seen these.
        self._waiting: dict[str, ClaimedTask] = {}
        self.outcomes: list[Outcome] = []
        self.inputs = inputs or Inputs()
        self.pace = Pace()
        # The database may say that something is ours which is not on this desk.
        self.needs_release = False
        self.failed_hook: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is owned any more."""
        return not (self._running or self._waiting or self.outcomes)

    @property
    def is_cleared(self) -> bool:
        """Whether the database, too, calls nothing ours any more."""
        return self.is_empty and not self.needs_release

    @property
    def running_count(self) -> int:
        """How many tasks are out with children."""
        return len(self._running) - len(self.outcomes)

    @property
    def waiting_count(self) -> int:
        """How many tasks were claimed ahead."""
        return len(self._waiting)

    @property
    def held_count(self) -> int:
        """How many tasks are out with children or wait for one."""
        return self.running_count + len(self._waiting)

    def held(self) -> list[ClaimedTask]:
        """Every attempt that the database may believe to be ours."""
        return [*self._running.values(), *self._waiting.values()]

    def holds_any(self, task_ids: Iterable[str]) -> bool:
        """Tell whether one of these tasks is here."""
        return any(task_id in self._running or task_id in self._waiting for task_id in task_ids)

    def waiting(self, count: int) -> Sequence[ClaimedTask]:
        """The next tasks to start, oldest first."""
        return list(self._waiting.values())[:count]

    def freed_by_queue(self) -> Mapping[str, int]:
        """How many places of each queue the settlements give back."""
        ended = (self._running.get(one.task_id) for one in self.outcomes)
        return Counter(task.queue_name for task in ended if task is not None)

    @property
    def ends_nodes(self) -> bool:
        """Whether the settlements may move workflows on, and so make work."""
        return any(one.workflow_id is not None for one in self.outcomes)

    def absorb(self, events: Iterable[PoolEvent]) -> None:
        """Take in what children did."""
        for event in events:
            match event:
                case Reported(report=report, run_seconds=run_seconds):
                    self.pace.note_end(report.task_id, run_seconds, time.monotonic())
                    if task := self._owned(report.task_id, report.generation):
                        self.outcomes.append(outcome_of_report(task, report))
                case Died():
                    self._absorb_death(event)
                case Stopped(assignment=assignment, reason=reason):
                    if task := self._owned(assignment.task_id, assignment.generation):
                        self.outcomes.append(outcome_of_stop(task, reason))
                case HookFailed(name=name, description=description):
                    self.failed_hook = f"Child process start hook {name} {description}."
                case _:
                    assert_never(event)

    def _owned(self, task_id: str, generation: int) -> ClaimedTask | None:
        """The task, unless it was lost and claimed again since that attempt began."""
        task = self._running.get(task_id)
        return task if task is not None and task.generation == generation else None

    def _absorb_death(self, event: Died) -> None:
        if event.assignment is None:
            logger.error(
                "child %s ended while idle (%s); it is replaced",
                event.pid,
                event.description,
                extra=as_event("child_died", child_pid=event.pid, task_id=None),
            )
            return
        task = self._owned(event.assignment.task_id, event.assignment.generation)
        if task is None:
            return
        if not event.started:
            del self._running[task.id]
            self.needs_release = True
            return
        logger.error(
            "child %s died (%s) while running %s %s",
            event.pid,
            event.description,
            task.task_name,
            task.id,
            extra=as_event("child_died", child_pid=event.pid, task_id=task.id),
        )
        self.outcomes.append(outcome_of_crash(task, event.description))

    def keep_results(self, outcomes: Iterable[Outcome], recorded: set[str]) -> None:
        """Keep at hand what nodes returned, for those that come after them."""
        for one in outcomes:
            if (
                one.workflow_id is not None
                and isinstance(one, Completed)
                and one.task_id in recorded
            ):
                self.inputs.note_completed(self._running[one.task_id], one.result)

    def close_recorded(self, outcomes: Iterable[Outcome], recorded: set[str]) -> None:
        """These outcomes are recorded, or belong to somebody else now.

        A task that is tried again at once may be out with a child by now, as another generation.
        """
        self.outcomes = []
        for outcome in outcomes:
            task_id = outcome.task_id
            if self._running[task_id].generation == outcome.generation:
                del self._running[task_id]
            if task_id not in recorded:
                logger.warning(
                    "task %s belongs to somebody else now; its outcome is dropped",
                    task_id,
                    extra=as_event("outcome_dropped", task_id=task_id),
                )

    def take_started(
        self, asked: Iterable[ClaimedTask], pids: Mapping[str, int]
    ) -> list[ClaimedTask]:
        """Return the prefetched tasks that run now; one without a pid was lost meanwhile.

        Or it only cannot start: on hold, past its deadline, or its start was in doubt. Then it is still
        ours to give back.
        """
        started = []
        for task in asked:
            del self._waiting[task.id]
            if task.id in pids:
                started.append(task._replace(worker_pid=pids[task.id]))
            else:
                self.needs_release = True
                logger.info(
                    "task %s, claimed ahead, was lost before it started",
                    task.id,
                    extra=as_event("claim_lost", task_id=task.id),
                )
        return started

    def refuse(self, tasks: Iterable[ClaimedTask]) -> None:
        """Settle nodes whose inputs nobody can read, without a child."""
        for task in tasks:
            self._running[task.id] = task
            self.outcomes.append(outcome_of_unread_inputs(task))

    def hand_out(
        self, tasks: Iterable[ClaimedTask], parts: Mapping[str, NodePart] = NO_PARTS
    ) -> None:
        """Give tasks to the children they were started for, nodes with their part in a workflow; keep
        what was claimed ahead for later.
        """
        handed = []
        for task in tasks:
            if task.worker_pid is None:
                self._waiting[task.id] = task
            else:
                self._give(task, task.worker_pid, parts.get(task.id))
                handed.append(task.id)
        if handed:
            self.pace.note_hand_out(handed, time.monotonic())

    def _give(self, task: ClaimedTask, pid: int, node: NodePart | None) -> None:
        if task.id in self._running:
            # Somebody took it from us and gave it back to the queue; the old attempt is void.
            self._pool.stop_task(task.id, STOPPED_BY_LOSS)
        assignment = Assignment(
            task.id,
            task.generation,
            task.task_name,
            task.retry_count + 1,
            task.args or "[]",
            task.kwargs or "{}",
            task.timeout_ms,
            node,
        )
        try:
            self._pool.dispatch(assignment, pid)
        except NoIdleChildError:
            self.needs_release = True
        else:
            self._running[task.id] = task

    def put_back(self) -> None:
        """Forget what was claimed ahead; the next release gives it back to the queue."""
        if self._waiting:
            self._waiting = {}
            self.needs_release = True

    def cancel(self, task_ids: Iterable[str]) -> None:
        """Stop these tasks, if they are here; one that only waits is simply forgotten."""
        for task_id in task_ids:
            self._waiting.pop(task_id, None)
            self._pool.stop_task(task_id, STOPPED_BY_CANCEL)
