"""One step of a workload in its own process: ``agent PEER STEP [ARGUMENT ...]``.

The result is written as JSON to the file in ``PEERS_ANSWER``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.adapter import ANSWER, Adapter, load

WATCH_SECONDS = 0.05
START_SECONDS = 30.0


def facts(adapter: Adapter) -> dict[str, Any]:
    """Return the facts with the installed version."""
    return asdict(adapter.FACTS) | {"version": version(adapter.FACTS.package)}


def watch(
    adapter: Adapter, sent: str, count: str, seconds: str, stop: str
) -> list[tuple[float, int]]:
    """Sample the number of finished tasks until it reaches the count, until a time limit after the first
    finished task, or until a file appears.
    """
    samples = [(0.0, adapter.count_done(int(sent)))]
    begun_at, ends_at = time.monotonic(), time.monotonic() + START_SECONDS
    has_begun = False
    while samples[-1][1] < int(count) and time.monotonic() < ends_at and not Path(stop).exists():
        time.sleep(WATCH_SECONDS)
        samples.append((time.monotonic() - begun_at, adapter.count_done(int(sent))))
        if samples[-1][1] and not has_begun:
            has_begun, ends_at = True, time.monotonic() + float(seconds)
    return samples


def worker_command(adapter: Adapter, slots: str, recycle: str) -> list[str]:
    """Return the command of a worker."""
    return list(adapter.worker_command(int(slots), int(recycle) or None))


STEPS: dict[str, Callable[..., Any]] = {
    "facts": facts,
    "set_up": lambda adapter: adapter.set_up(),
    "enqueue": lambda adapter, task, count: adapter.enqueue(task, int(count)),
    "enqueue_many": lambda adapter, task, count: adapter.enqueue_many(task, int(count)),
    "latencies": lambda adapter, count: adapter.latencies(int(count)),
    "watch": watch,
    "crash_state": lambda adapter: adapter.crash_state(),
    "worker_command": worker_command,
}


def main(peer: str, step: str, *arguments: str) -> None:
    """Execute the step and write its result."""
    answer = STEPS[step](load(peer), *arguments)
    Path(os.environ[ANSWER]).write_text(json.dumps(answer), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
