"""The cost of settings that the drained tasks do not use: logs without lines, a codec for tasks without
payload, a store for tasks without large payload, a webhook for outcomes that do not occur, and the
memory limit of another task.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.paired import Side, alone_us, compare, is_within, report
from horsies.worker.pool.memory import MemoryWatch
from horsies.worker.protocol import Assignment

# The environment variable that noop_app.py reads.
SETTING_VARIABLE = "HORSIES_BENCH_SETTING"
SETTINGS = ("none", "none again", "logs", "codec", "store", "webhook", "memory limit")
# The maximum cost of an unused setting, as a fraction of the drain; "none again" shows the
# machine's noise.
TARGET = 0.03
# The cost of another task's memory limit must be too small for this comparison to measure.
FREE = {"memory limit": 0.01}


def unused(url: str) -> bool:
    """Drain alternately without a setting (twice) and with each setting."""
    found = compare(url, {one: Side({SETTING_VARIABLE: one}) for one in SETTINGS})
    was_idle = report("unused settings, no-op tasks", found, "none")
    print(f"  one process: {_watch_us():.2f} µs for a task without a limit, all in the parent")
    judged = [
        is_within(found, name, "none", FREE.get(name, TARGET), was_idle=was_idle)
        for name in SETTINGS
        if not name.startswith("none")
    ]
    return all(judged)


def _watch_us() -> float:
    """Time all work of a parent for a task without a memory limit that exists because another task has
    one.
    """
    nothing: Any = SimpleNamespace(is_async=False, tasks_done=1)
    held: Any = SimpleNamespace(assignment=Assignment("0" * 36, 1, "noop", 1, "[]", "{}", None))
    watch = MemoryWatch(nothing, nothing, {"limited": 500})

    def task() -> object:
        watch.note_start(held)
        watch.attend(0.0)
        return watch.admits(nothing, "noop") and watch.next_look

    return alone_us(task)


BENCHMARKS = {"unused": unused}
