"""What the tests of the supervisor share: assignments, and waiting for what the pool tells."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from horsies.worker.pool.events import PoolEvent, Reported
from horsies.worker.pool.pool import ChildPool
from horsies.worker.protocol import Assignment, ChildBoot

DEADLINE_SECONDS = 20.0
REPOSITORY = str(Path(__file__).parents[2])
BOOT = ChildBoot("unused", sys_path_roots=(REPOSITORY,), program="tests.worker.pool_programs:load")

MakePool = Callable[..., ChildPool]
numbers = itertools.count(1)


def assignment(name: str, *args: Any, timeout_ms: int | None = None) -> Assignment:
    return Assignment(f"task-{next(numbers)}", 7, name, 1, json.dumps(args), "{}", timeout_ms)


def collect_until(pool: ChildPool, wanted: Callable[[], bool]) -> list[PoolEvent]:
    """Everything the pool tells until the condition holds."""
    events: list[PoolEvent] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not wanted():
        assert time.monotonic() < deadline, f"it did not happen; events so far: {events}"
        events += pool.collect(0.02)
    return events


def collect_events(pool: ChildPool, count: int, kind: type[PoolEvent]) -> list[PoolEvent]:
    """Everything the pool tells until it has told `count` events of `kind`."""
    events: list[PoolEvent] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while sum(isinstance(event, kind) for event in events) < count:
        assert time.monotonic() < deadline, f"it did not happen; events so far: {events}"
        events += pool.collect(0.1)
    return events


def next_event(pool: ChildPool) -> PoolEvent:
    """The next thing the pool tells."""
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


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
