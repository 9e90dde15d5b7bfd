"""The dispatcher: gives the ledger's tasks to children and enters their outcomes in the ledger."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import assert_never

from horsies.db.statements.turn import ClaimedTask
from horsies.logs import as_event
from horsies.tasks.outcome import (
    STOPPED_BY_CANCEL,
    STOPPED_BY_LOSS,
    Outcome,
    outcome_of_crash,
    outcome_of_report,
    outcome_of_stop,
)
from horsies.worker.agenda import Pace
from horsies.worker.batches import Batches
from horsies.worker.ledger import ENDED, RUNNING, UNCALLED, WAITING, Ledger
from horsies.worker.node_inputs import NodeInputs
from horsies.worker.pool.events import (
    Died,
    HookFailed,
    PoolEvent,
    Reported,
    Stopped,
    TakenBack,
)
from horsies.worker.pool.pool import ChildPool, NoIdleChildError
from horsies.worker.pool.window import Windows, linger_seconds
from horsies.worker.protocol import (
    Assignment,
    NodePart,
    TransactionEnd,
    assignment_of,
    with_transaction,
)
from horsies.worker.tally import Tally
from horsies.worker.traces import Traces

logger = logging.getLogger("horsies.worker")

# Constants, because accessing an enum member takes 0.1 µs and is needed for every task.
_LOST = TransactionEnd.LOST
_ID = attrgetter("id")

Parts = Mapping[str, NodePart]
NO_PARTS: Parts = {}


class Dispatcher:
    """Gives the tasks of one worker to its children."""

    def __init__(
        self,
        pool: ChildPool,
        ledger: Ledger,
        inputs: NodeInputs | None = None,
        traces: Traces | None = None,
        windows: Windows | None = None,
        batches: Batches | None = None,
    ) -> None:
        self.pool = pool
        self.ledger = ledger
        self.inputs = inputs or NodeInputs()
        # The spans of attempts; None if the application does not use tracing.
        self.traces = traces
        self.windows = windows or Windows()
        # The application's batched tasks; None if there are none.
        self.batches = batches
        self.tally = Tally()
        self.failed_hook: str | None = None
        self._pace = Pace()

    # To children

    def hand_out(self, tasks: Iterable[ClaimedTask], parts: Parts = NO_PARTS) -> None:
        """Give tasks to the children for which they were started; the tasks of nodes also get their workflow
        data. Prefetched tasks are kept for later.
        """
        ledger = self.ledger
        handed: list[ClaimedTask] = []
        windows: dict[int, list[ClaimedTask]] = {}
        batches: dict[int, list[ClaimedTask]] = {}
        for task in tasks:
            if task.id in ledger.owned:
                # Another worker has recovered the task and this worker has claimed it again, so the old
                # attempt is void.
                self.pool.stop_task(task.id, STOPPED_BY_LOSS)
            pid = task.worker_pid
            if pid is None:
                ledger.put(task, WAITING)
                continue
            handed.append(task)
            if task.burst and self.windows.takes(task):
                windows.setdefault(pid, []).append(task)
            elif self.batches is not None and self.batches.takes(task):
                batches.setdefault(pid, []).append(task)
            else:
                self._give(task, pid, parts)
        for pid, batch in batches.items():
            self._give_batch(batch, pid, parts)
        behind = 0
        for pid, window in windows.items():
            behind += self._give_window(window, pid, parts)
        if handed:
            self._pace.note_hand_out(map(_ID, handed), time.monotonic())
            self.tally.note_starts(handed, behind)

    def _give(self, task: ClaimedTask, pid: int, parts: Parts) -> None:
        try:
            self.pool.dispatch(assignment_of(task, parts.get(task.id)), pid)
        except NoIdleChildError:
            self.ledger.give_back([task])
        else:
            self.ledger.put(task, RUNNING)

    def _give_batch(self, tasks: Sequence[ClaimedTask], pid: int, parts: Parts) -> None:
        first, *companions = [assignment_of(task, parts.get(task.id)) for task in tasks]
        try:
            self.pool.dispatch(first, pid, companions)
        except NoIdleChildError:
            self.ledger.give_back(tasks)
            return
        for task in tasks:
            self.ledger.put(task, RUNNING)

    def _give_window(self, tasks: Sequence[ClaimedTask], pid: int, parts: Parts) -> int:
        """Give tasks to a child with a window, and return how many of them wait behind another task."""
        patience = self.windows.patience_seconds
        window = [
            (assignment_of(task, parts.get(task.id)), patience(task.task_name)) for task in tasks
        ]
        try:
            behind = self.pool.dispatch_window(pid, window)
        except NoIdleChildError:
            self.ledger.give_back(tasks)
            return 0
        for task in tasks:
            self.ledger.put(task, RUNNING)
        return behind

    def take_started(
        self, requested: Iterable[ClaimedTask], pids: Mapping[str, int]
    ) -> list[ClaimedTask]:
        """Return the prefetched tasks that have started.

        A task without a pid either belongs to another worker now, or could not be started, because it is held
        or past its deadline or its start was in doubt. In the second case the task still belongs to this
        worker, which must release it.
        """
        started = []
        for task in requested:
            if task.id in pids:
                self.ledger.forget(task.id)
                started.append(task._replace(worker_pid=pids[task.id]))
            else:
                # Logged first, because the line's headers come from the ledger.
                event = as_event("claim_lost", task_id=task.id)
                logger.info("prefetched task %s was lost before it started", task.id, extra=event)
                self.ledger.give_back([task])
        return started

    # From children

    def absorb(self, events: Iterable[PoolEvent], waited_seconds: float = 0.0) -> None:
        """Turn children's events into outcomes; ``waited_seconds`` is the age of the events."""
        came_at = time.monotonic() - waited_seconds
        for event in events:
            match event:
                case Reported():
                    self._absorb_report(event, came_at)
                case Died():
                    self._absorb_death(event, came_at)
                case Stopped():
                    self._absorb_stop(event, came_at)
                case TakenBack(assignments=assignments):
                    self._take_back(assignments)
                case HookFailed(name=name, description=description):
                    self.failed_hook = f"Child process start hook {name} {description}."
                case _:
                    assert_never(event)

    def _absorb_report(self, event: Reported, came_at: float) -> None:
        report, _, run_seconds = event
        self._pace.note_end(report.task_id, run_seconds, came_at)
        if (task := self.ledger.running(report)) is None:
            return
        if report.transaction is _LOST:
            self._drop(task)
            return
        outcome = outcome_of_report(task, report, round(run_seconds * 1e6))
        if report.transaction:
            outcome = with_transaction(outcome, report)
        if report.log is not None:
            outcome = outcome._replace(log=report.log, attempt=task.retry_count + 1)
        if self.traces is not None and report.traceparent is not None:
            self.traces.note(task, report.traceparent)
        if task.burst and self.windows.takes(task):
            self.windows.note_end(task.task_name, run_seconds)
        state = ENDED if report.was_called else UNCALLED
        self.ledger.end(task, outcome, run_seconds, came_at, state)

    def _drop(self, task: ClaimedTask) -> None:
        """Drop a task that another worker owns, as the task's own transaction found before it was rolled
        back. If the database still lists the task as this worker's, the next release returns it to its queue.
        """
        event = as_event("claim_lost", task_id=task.id)
        text = "task %s belongs to another worker now; its transaction was rolled back"
        logger.warning(text, task.id, extra=event)
        self.ledger.give_back([task])

    def _absorb_stop(self, event: Stopped, came_at: float) -> None:
        if (task := self.ledger.running(event.assignment)) is not None:
            # A task that records its own outcome may have been stopped after it had committed.
            outcome = outcome_of_stop(
                task,
                event.reason,
                description=event.description,
                limit_ms=event.assignment.timeout_ms,
            )
            self._end_interrupted(task, outcome._replace(is_in_doubt=True), event, came_at)

    def _absorb_death(self, event: Died, came_at: float) -> None:
        if event.assignment is None:
            logger.error(
                "idle child %s died (%s); replacing it",
                event.pid,
                event.description,
                extra=as_event("child_died", child_pid=event.pid, task_id=None),
            )
            return
        if (task := self.ledger.running(event.assignment)) is None:
            return
        logger.error(
            "child %s died (%s) while running %s %s",
            event.pid,
            event.description,
            task.task_name,
            task.id,
            extra=as_event("child_died", child_pid=event.pid, task_id=task.id),
        )
        # A child that records outcomes itself may have died after it had committed.
        outcome = outcome_of_crash(task, event.description)._replace(is_in_doubt=True)
        self._end_interrupted(task, outcome, event, came_at)

    def _end_interrupted(
        self, task: ClaimedTask, outcome: Outcome, event: Died | Stopped, came_at: float
    ) -> None:
        if (seconds := event.run_seconds) is not None:
            outcome = outcome._replace(run_us=round(seconds * 1e6))
        if event.log is not None:
            outcome = outcome._replace(log=event.log, attempt=task.retry_count + 1)
        if self.traces is not None and event.assignment is not None:
            self.traces.close(event.assignment, outcome, seconds)
        self.ledger.end(task, outcome, seconds, came_at)

    def _take_back(self, assignments: Iterable[Assignment]) -> None:
        found = map(self.ledger.running, assignments)
        self.ledger.give_back([task for task in found if task is not None])

    def linger_seconds(self, now: float) -> float:
        """Return how long to wait for more reports, so that one turn records them together."""
        if (depth := self.windows.depth) < 2:
            return self._pace.linger_seconds(now)
        if (ended_since := self.ledger.ended_since) is None:
            return 0.0
        return linger_seconds(*self.pool.places.window_space(depth), ended_since, now)

    # Against children

    def put_back(self) -> None:
        """Make the next release return tasks to their queues if no child has started them."""
        self.pool.return_unstarted()
        self.ledger.give_back(self.ledger.tasks(WAITING))

    def cancel(self, task_ids: Iterable[str]) -> None:
        """Stop these tasks if they are running. Return tasks that are waiting to the queue; their start may
        be in doubt.
        """
        waiting = {task.id: task for task in self.ledger.tasks(WAITING)}
        for task_id in task_ids:
            if task_id in waiting:
                self.ledger.give_back([waiting[task_id]])
            self.pool.stop_task(task_id, STOPPED_BY_CANCEL)

    def keep_owned(self, task_ids: Iterable[str]) -> None:
        """Kill the children, or cancel the coroutines, of all other tasks, because other workers now own
        them.
        """
        waiting = [task.id for task in self.ledger.tasks(WAITING)]
        for task_id in {*self.pool.held_tasks, *waiting}.difference(task_ids):
            event = as_event("claim_lost", task_id=task_id)
            logger.warning("task %s now belongs to another worker", task_id, extra=event)
            if self.ledger.has(task_id, WAITING):
                self.ledger.forget(task_id)
            self.pool.drop_task(task_id, STOPPED_BY_LOSS)
