"""run_pending, which runs all due tasks of the database in this process, and the test clock. Tasks are
claimed and recorded one at a time, with a worker's own statements. The database's clock decides which
tasks are due. When the test clock advances, the stored times of waiting tasks are moved back; schedules
are evaluated at the advanced time, because their slots depend on the calendar.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import cast
from weakref import WeakKeyDictionary

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.db.pipeline import Pipeline
from horsies.db.statements.clock import (
    advance_deadlines,
    advance_nodes,
    advance_schedules,
    advance_steps,
    advance_tasks,
)
from horsies.db.statements.durable import list_steps
from horsies.db.statements.schedules import DueSchedule, fire_slots
from horsies.db.statements.turn import ClaimedTask, LookAtKeys, look_at_keys
from horsies.scheduler.registry import Registry, store_configured
from horsies.scheduler.tick import columns, decide_all
from horsies.tasks.blocked import Blocked
from horsies.tasks.outcome import Outcome
from horsies.tasks.recovery import end_late, expire_pending
from horsies.testing.execution import Attempt, Attempts, Ended, Execution
from horsies.worker.child.builtin_tasks import BUILTIN_TASKS
from horsies.worker.keyed import PROMOTED_MAX, KeyRings
from horsies.worker.node_inputs import NodeInputs, tasks_with_injection
from horsies.worker.protocol import NodePart
from horsies.worker.turn import Claimer, TurnRequest, release_unheld, take_turn

_LONGEST = timedelta(days=36_525)  # The maximum delay of a task.


@dataclass
class PendingRun(Attempts):
    """The result of one ``run_pending``: its attempts, the expired tasks, and the slots of schedules."""

    expired: int = 0
    """The number of tasks that had passed their `good_until` without a start."""
    slots: int = 0
    """The number of schedule slots that were sent."""


class Clock:
    """The time of a test database, ahead of real time by ``offset``."""

    def __init__(self, app: Horsies) -> None:
        self._app = app
        self.offset = timedelta()

    def __repr__(self) -> str:
        return f"Clock(offset={self.offset})"

    def now(self) -> datetime:
        """Return the current test time."""
        return datetime.now(UTC) + self.offset

    def advance(self, by: timedelta) -> None:
        """Advance the time of all delays, retries, deadlines, sleeps and schedules. Due tasks run in the
        next ``run_pending``, or when a worker polls.

        Example:
            clock.advance(timedelta(hours=1))
            run_pending(app)
        """
        if not isinstance(by, timedelta) or not timedelta() <= by <= _LONGEST - self.offset:
            raise ValueError(
                f"advance() takes the timedelta that passes, not {by!r}; time goes forward, by 100 "
                "years at most."
            )
        seconds = by.total_seconds()
        steps = [
            advance_tasks(seconds),
            advance_steps(seconds),
            advance_deadlines(seconds),
            advance_nodes(seconds),
            advance_schedules(0.0, seconds),
        ]
        with _connected(self._app) as pipeline:
            pipeline.run(steps)
        self.offset += by


_clocks: WeakKeyDictionary[Horsies, Clock] = WeakKeyDictionary()


def clock_of(app: Horsies) -> Clock:
    """Return the clock of the application's test database, which ``run_pending`` also uses."""
    return _clocks.setdefault(app, Clock(app))


def forget_clock(app: Horsies) -> None:
    """Make the application's next clock start at the real time."""
    _clocks.pop(app, None)


def run_pending(app: Horsies, *, reraise: bool = False, limit: int = 1_000) -> PendingRun:
    """Run all due tasks of the application's database in this process, until no due task is left.

    Workflows advance, schedules fire, and retries and delayed tasks run once ``clock_of(app).advance``
    has made them due. With ``reraise``, if a task fails and is not retried, its exception is raised here,
    with its traceback. More than ``limit`` attempts raise RuntimeError, because tasks that keep sending
    one another would never finish. A task that waits for another task's result waits forever, because
    only one task runs at a time.

    Example:
        confirm.enqueue(7)
        assert run_pending(app).completed == 1
    """
    with _connected(app) as pipeline, Execution(app, _claimer(app.config).worker_id) as execution:
        pending = _Pending(app, pipeline, reraise, limit)
        running = pending.run()
        step = next(running, None)
        while step is not None:
            step = _next(running, execution.run(*step))
        return pending.done


async def run_pending_async(
    app: Horsies, *, reraise: bool = False, limit: int = 1_000
) -> PendingRun:
    """Like ``run_pending``, but ``async def`` tasks run on the test's event loop."""
    with _connected(app) as pipeline, Execution(app, _claimer(app.config).worker_id) as execution:
        pending = _Pending(app, pipeline, reraise, limit)
        running = pending.run()
        step = next(running, None)
        while step is not None:
            step = _next(running, await execution.run_async(*step))
        return pending.done


# The attempts to run: a generator that yields each attempt and receives its outcome.
Running = Generator[tuple[ClaimedTask, NodePart | None], Ended, None]


def _next(running: Running, ended: Ended) -> tuple[ClaimedTask, NodePart | None] | None:
    try:
        return running.send(ended)
    except StopIteration:
        return None


class _Pending:
    """A worker with one slot and a scheduler, reduced to the needs of tests."""

    def __init__(self, app: Horsies, pipeline: Pipeline, reraise: bool, limit: int) -> None:
        self._app = app
        self._pipeline = pipeline
        self._reraise = reraise
        self._limit = limit
        self._claimer = _claimer(app.config)
        self._rings = KeyRings(self._claimer.queues)
        self._inputs = NodeInputs(tasks_with_injection(app), app.config.payload.max_input_bytes)
        self._schedules = _Schedules.of(app, pipeline)
        self._unknown: list[str] = []
        self._refused: list[str] = []
        self.done = PendingRun()

    def run(self) -> Running:
        outcomes: list[Outcome] = []
        while True:
            fired = self._fire()
            self.done.expired += expire_pending(self._pipeline)
            end_late(self._pipeline, Blocked())
            request = TurnRequest(
                pids=[os.getpid()],
                unknown_names=self._unknown,
                refused_ids=self._refused,
                cursors=self._look_at_keys(),
            )
            turned = take_turn(self._pipeline, self._claimer, outcomes, request)
            served = {task.queue_name for task in turned.claimed}
            seen = self._rings.note_claim(turned.lanes, served, time.monotonic())
            had_outcomes, outcomes = bool(outcomes), []
            if not (turned.claimed or had_outcomes or fired or seen.has_more):
                return
            for task in turned.claimed:
                if self._leaves(task):
                    continue
                node, refused = self._node(task)
                ended = Ended(refused) if refused else (yield task, node)
                if ended.was_called or not self._waits_for_its_code(task):
                    outcomes.append(ended.outcome)
                    self._note(task, ended.outcome, ended.raised)

    def _look_at_keys(self) -> Sequence[int | None]:
        """Make tasks with keys due; return where the claim by keys continues in each queue."""
        queues = [*self._claimer.queues]
        ((found,),) = self._pipeline.run([(look_at_keys, LookAtKeys(queues, PROMOTED_MAX))])
        self._rings.note_search(queues, found.queues)
        return self._rings.cursors()

    def _fire(self) -> int:
        fired = 0 if self._schedules is None else self._schedules.fire()
        self.done.slots += fired
        return fired

    def _leaves(self, task: ClaimedTask) -> bool:
        """Return a task to its queue if the application does not define it, as a worker would."""
        if self._app.get_task(task.task_name) or task.task_name in BUILTIN_TASKS:
            return False
        self._unknown.append(task.task_name)
        release_unheld(self._pipeline, self._claimer.worker_id, [])
        return True

    def _waits_for_its_code(self, task: ClaimedTask) -> bool:
        """Return a run to its queue if its arguments do not fit and it has recorded steps, as a worker
        would.
        """
        if not self._pipeline.run([list_steps(task.id)])[0]:
            return False
        self._refused.append(task.id)
        release_unheld(self._pipeline, self._claimer.worker_id, [])
        return True

    def _node(self, task: ClaimedTask) -> tuple[NodePart | None, Outcome | None]:
        """Return a task's place in its workflow, or its failure if its inputs cannot be read."""
        if task.workflow_id is None or not self._inputs.has_part(task):
            return None, None
        parts, refused = self._inputs.read(self._pipeline, [task])
        return parts.get(task.id), refused[0][1] if refused else None

    def _note(self, task: ClaimedTask, outcome: Outcome, raised: BaseException | None) -> None:
        if outcome.park is not None:
            return
        self.done.attempts.append(Attempt.of(task, outcome))
        is_final = outcome.delay_seconds is None
        if raised is not None and is_final and self._reraise:
            self._record(outcome)
            raise raised
        if len(self.done.attempts) > self._limit:
            self._record(outcome)
            raise RuntimeError(
                f"run_pending has run more than {self._limit:,} attempts, the last one of "
                f"{task.task_name!r}; do tasks send each other? Raise `limit` if not."
            )

    def _record(self, outcome: Outcome) -> None:
        take_turn(self._pipeline, self._claimer, [outcome], TurnRequest())


class _Schedules:
    """Fires the slots of configured schedules that are due at the test time."""

    def __init__(self, pipeline: Pipeline, registry: Registry, offset: timedelta) -> None:
        self._pipeline = pipeline
        self._registry = registry
        self._offset = offset
        pipeline.run_script(store_configured(registry, at_start=True))

    @classmethod
    def of(cls, app: Horsies, pipeline: Pipeline) -> _Schedules | None:
        configured = app.config.schedule
        if configured is None or not configured.enabled:
            return None
        registry = Registry.of(app.config, app.definitions(), "horsies.testing", app)
        return cls(pipeline, registry, clock_of(app).offset)

    def fire(self) -> int:
        """Send the tasks and start the runs of due slots; return how many slots fired."""
        decided = decide_all(self._registry, self._due())
        if not decided:
            return 0
        (taken,) = self._pipeline.run([(fire_slots, columns(decided))])
        names = {one.name for one in taken}
        work = [work for one in decided if one.due.name in names for work in one.work]
        passed = self._offset.total_seconds(), [one.id for one in work]
        self._pipeline.run([advance_tasks(*passed), advance_nodes(*passed)])
        return len(work)

    def _due(self) -> list[DueSchedule]:
        seconds = self._offset.total_seconds()
        _, due, _ = self._pipeline.run(
            [
                advance_schedules(seconds),
                self._registry.find_due(),
                advance_schedules(-seconds),
            ]
        )
        return [self._at_test_time(one) for one in cast("list[DueSchedule]", due)]

    def _at_test_time(self, due: DueSchedule) -> DueSchedule:
        return due._replace(
            due_at=due.due_at + self._offset,
            looked_at=due.looked_at + self._offset,
            resumed_at=due.resumed_at and due.resumed_at + self._offset,
        )


def _claimer(config: AppConfig) -> Claimer:
    queues = config.queues()
    return Claimer(
        f"horsies.testing-{os.getpid()}",
        socket.gethostname(),
        tuple(queue.name for queue in queues),
        tuple(queue.max_concurrency for queue in queues),
        config.cluster_wide_cap,
    )


@contextmanager
def _connected(app: Horsies) -> Iterator[Pipeline]:
    broker = app.get_broker()
    broker.ensure_schema_initialized().unwrap()
    pipeline = Pipeline.open(broker.database, "testing")
    try:
        yield pipeline
    finally:
        pipeline.connection.close()
