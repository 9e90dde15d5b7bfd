"""Helpers for tests of the supervisor: assignments, and waits for events of the pool."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horsies.db.statements.turn import ClaimedTask
from horsies.worker.os_process import own_rss_bytes
from horsies.worker.pool.events import PoolEvent, Reported
from horsies.worker.pool.pool import ChildPool, NoIdleChildError
from horsies.worker.protocol import Assignment, ChildBoot, NodePart, ProgressReport
from tests.support.workers import is_gone as is_gone

DEADLINE_SECONDS = 60.0
REPOSITORY = str(Path(__file__).parents[2])
BOOT = ChildBoot(
    "unused", sys_path_roots=(REPOSITORY,), program="tests.support.apps.pool_programs:load"
)

MakePool = Callable[..., ChildPool]
numbers = itertools.count(1)


def assignment(name: str, *args: Any, timeout_ms: int | None = None) -> Assignment:
    return Assignment(f"task-{next(numbers)}", 7, name, 1, json.dumps(args), "{}", timeout_ms)


def collect_until(pool: ChildPool, wanted: Callable[[], bool]) -> list[PoolEvent]:
    """Return the pool's events until the condition holds."""
    events: list[PoolEvent] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not wanted():
        assert time.monotonic() < deadline, f"it did not happen; events so far: {events}"
        events += pool.collect(0.02)
    return events


def collect_events(pool: ChildPool, count: int, kind: type[PoolEvent]) -> list[PoolEvent]:
    """Return the pool's events up to `count` events of `kind`."""
    events: list[PoolEvent] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while sum(isinstance(event, kind) for event in events) < count:
        assert time.monotonic() < deadline, f"it did not happen; events so far: {events}"
        events += pool.collect(0.1)
    return events


def next_event(pool: ChildPool) -> PoolEvent:
    """Return the pool's next event."""
    events: list[PoolEvent] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not events:
        assert time.monotonic() < deadline, "the pool told nothing"
        events += pool.collect(0.1)
    assert len(events) == 1, events
    return events[0]


def value_of(event: PoolEvent) -> Any:
    assert isinstance(event, Reported), event
    return json.loads(event.report.result_json)


def run(pool: ChildPool, name: str, *args: Any) -> Any:
    pool.dispatch(assignment(name, *args))
    return value_of(next_event(pool))


@dataclass(slots=True)
class RecordingPool:
    """Records the calls that a pool of children would receive."""

    idle: set[int]
    dispatched: list[tuple[str, int, int]] = field(default_factory=list)
    nodes: list[NodePart | None] = field(default_factory=list)
    stopped: list[tuple[str, str]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    unstored_progress: dict[str, ProgressReport] = field(default_factory=dict)

    def progress(self) -> dict[str, ProgressReport]:
        return self.unstored_progress

    def dispatch(self, assignment: Assignment, pid: int) -> None:
        if pid not in self.idle:
            raise NoIdleChildError
        self.idle.remove(pid)
        self.nodes.append(assignment.node)
        self.dispatched.append((assignment.task_id, assignment.generation, pid))

    @property
    def held_tasks(self) -> list[str]:
        return [task_id for task_id, *_ in self.dispatched]

    def return_unstarted(self) -> None:
        pass

    def stop_task(self, task_id: str, reason: str) -> None:
        self.stopped.append((task_id, reason))

    def drop_task(self, task_id: str, reason: str) -> None:
        self.kill_task(task_id)

    def kill_task(self, task_id: str) -> None:
        if task_id in (dispatched for dispatched, *_ in self.dispatched):
            self.killed.append(task_id)


def claimed(
    task_id: str, pid: int | None = None, queue: str = "default", **more: Any
) -> ClaimedTask:
    generation = more.get("generation", 1)
    return ClaimedTask(task_id, generation, "work", queue, "[]", "{}", 0, 0, None, None, pid)


def attempt(task_id: str, generation: int = 1) -> Assignment:
    return Assignment(task_id, generation, "work", 1, "[]", "{}", None)


def wide_memory_limit_mb() -> int:
    """Return a limit 400 MB above a new child, which may be forked from this process with all its
    memory.
    """
    return round(own_rss_bytes() / 1024 / 1024) + 400
