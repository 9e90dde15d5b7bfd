"""Tasks that query themselves, report progress and stop early, in addition to the other tests' tasks."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from horsies import RetryPolicy, TaskError, TaskResult, current_task
from tests.support.apps.programs import app, write_down

__all__ = ["app"]

FIELDS = (
    *("id", "name", "attempt", "max_attempts", "is_last_attempt", "queue", "priority", "sent_at"),
    *("enqueued_at", "started_at", "deadline", "good_until", "workflow_id", "node_id"),
    *("item_index", "schedule_name", "slot", "headers"),
)

Described = TaskResult[dict[str, Any], TaskError]


@app.task("describe_self", timeout_ms=60_000)
def describe_self(item: int = 0) -> Described:
    task = current_task()
    values = {name: getattr(task, name) for name in FIELDS}
    return TaskResult(
        ok={name: str(value) if name.endswith("_at") else value for name, value in values.items()}
        | {"headers": dict(task.headers), "slot": str(task.slot), "deadline": str(task.deadline)}
        | {"good_until": str(task.good_until)}
    )


@app.task("numbers")
def numbers(count: int) -> TaskResult[list[int], TaskError]:
    return TaskResult(ok=list(range(count)))


@app.task("hammer")
def hammer(seconds: float) -> TaskResult[list[float], TaskError]:
    """Report progress ten thousand times a second.

    Return the number of calls, the seconds per call, and the seconds for encoding its arguments as JSON.
    """
    task, calls, fastest, as_json = current_task(), 0, 1e9, 1e9
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        began = time.perf_counter()
        for _ in range(100):
            calls += 1
            task.progress(calls, 1_000_000, "hammering")
        ended = time.perf_counter()
        for _ in range(100):
            json.dumps((calls, 1_000_000, "hammering"))
        fastest = min(fastest, (ended - began) / 100)
        as_json = min(as_json, (time.perf_counter() - ended) / 100)
        time.sleep(0.01)
    return TaskResult(ok=[calls, fastest, as_json])


@app.task("burst")
def burst() -> TaskResult[None, TaskError]:
    """Report progress in a burst, then do other work until asked to stop."""
    task = current_task()
    for done in range(1, 51):
        task.progress(done, 50, "read")
    while not task.should_stop():
        time.sleep(0.01)
    task.progress(50, 50, "ended in order")
    return TaskResult(ok=None)


@app.task("die_reporting", retry_policy=RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"]))
def die_reporting() -> TaskResult[int, TaskError]:
    task = current_task()
    if task.attempt == 1:
        task.progress(9, 10)
        os._exit(3)
    thread = threading.Thread(target=lambda: current_task().progress(1, note="by a thread"))
    thread.start()
    thread.join()
    return TaskResult(ok=task.attempt)


@app.task("fork_and_report")
def fork_and_report() -> TaskResult[None, TaskError]:
    if (pid := os.fork()) == 0:
        current_task().progress(7, note="by a forked process")
        os._exit(0)
    os.waitpid(pid, 0)
    return TaskResult(ok=None)


@app.task("end_in_order")
def end_in_order() -> TaskResult[str, TaskError]:
    write_down("start")
    while not current_task().should_stop():
        time.sleep(0.01)
    return TaskResult(ok="in order")
