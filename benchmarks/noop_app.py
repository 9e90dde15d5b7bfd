"""The application of the worker benchmarks: tasks that do nothing, or hardly anything. Older checkouts
run this application too; tasks that need newer features are in ``newer_app.py``.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from horsies import AppConfig, Horsies, PostgresConfig, RetryPolicy, TaskError, TaskNode, TaskResult

# "off" disables a worker's counts, to measure the cost of counting.
if os.environ.get("HORSIES_BENCH_TALLY") == "off":
    from horsies.worker.tally import Tally

    for _name in ("note_starts", "note_ends", "note_turn"):
        setattr(Tally, _name, lambda *_: None)

# "off" removes the checks for tracing, to measure their cost in an application without tracing.
if os.environ.get("HORSIES_BENCH_TRACING") == "off":
    from benchmarks.unchecked import TRACING, remove_checks

    remove_checks(TRACING)

# "on" keeps the logs of attempts, and "removed" removes the checks for this setting.
_settings: dict[str, Any] = {}
if os.environ.get("HORSIES_BENCH_LOGS") == "removed":
    from benchmarks.unchecked import LOGS, remove_checks

    remove_checks(LOGS)
elif os.environ.get("HORSIES_BENCH_LOGS") == "on":
    _settings["log_capture"] = {}
    # Attach a handler, because without one children would write the lines to standard error.
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger().setLevel(logging.INFO)

# A setting that the tasks below do not use.
_setting = os.environ.get("HORSIES_BENCH_SETTING")
_broker: dict[str, Any] = {}
if _setting == "logs":
    _settings["log_capture"] = {}
elif _setting == "codec":
    from horsies import FernetCodec

    # The key is the same in every process.
    _broker["codec"] = FernetCodec("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")
elif _setting == "store":
    from horsies import TableStore

    _broker["store"] = TableStore()
elif _setting == "webhook":
    _settings["webhooks"] = [
        {
            "name": "bench",
            "url": "https://example.com/",
            "secret": "x" * 24,
            "on": ["task.failed", "task.cancelled", "task.expired", "run.ended"],
        }
    ]

app = Horsies(AppConfig(broker=PostgresConfig.from_env(pool_size=1, **_broker), **_settings))
if _setting == "memory limit":

    @app.task("limited", memory_limit_mb=500)
    def limited() -> None:
        """Is never sent."""


# The nodes of a chain.
STEPS = 5
# A child may hold several of these tasks, because they are retried after a crash.
AGAIN = RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"])


@app.task("noop")
def noop() -> TaskResult[None, TaskError]:
    """Do nothing, successfully."""
    return TaskResult(ok=None)


@app.task("say")
def say() -> TaskResult[None, TaskError]:
    """Log one line."""
    logging.getLogger("bench").warning("task of the %s", "benchmark")
    return TaskResult(ok=None)


@app.task("burst", retry_policy=AGAIN)
def burst() -> TaskResult[None, TaskError]:
    """Do nothing; the task is retried after a crash."""
    return TaskResult(ok=None)


@app.task("burst_nap", retry_policy=AGAIN)
def burst_nap() -> TaskResult[None, TaskError]:
    """Wait for 5 ms; the task is retried after a crash."""
    time.sleep(0.005)
    return TaskResult(ok=None)


@app.task("burst_nap_50", retry_policy=AGAIN)
def burst_nap_50() -> TaskResult[float, TaskError]:
    """Wait for 50 ms and return the start time."""
    started = time.time()
    time.sleep(0.05)
    return TaskResult(ok=started)


@app.task("nap")
def nap() -> TaskResult[None, TaskError]:
    """Wait for an external event, as most tasks do."""
    time.sleep(0.005)
    return TaskResult(ok=None)


@app.task("nap_1")
def nap_1() -> TaskResult[None, TaskError]:
    """Wait for 1 ms."""
    time.sleep(0.001)
    return TaskResult(ok=None)


@app.task("after")
def after(before: TaskResult[None, TaskError]) -> TaskResult[None, TaskError]:
    """Do nothing; take the result of another node."""
    return before


@app.task("numbers")
def numbers(count: int) -> TaskResult[list[int], TaskError]:
    """Return the list that a map iterates over."""
    return TaskResult(ok=list(range(count)))


@app.task("number")
def number(number: int) -> TaskResult[None, TaskError]:
    """Do nothing with an item of a map."""
    return TaskResult(ok=None)


def chain() -> Any:
    """Build a run of no-op nodes, each after the previous one."""
    nodes = [TaskNode(noop)]
    while len(nodes) < STEPS:
        nodes.append(TaskNode(noop, waits_for=[nodes[-1]]))
    return app.workflow("chain", nodes, definition_key="benchmarks.chain")
