"""The cost of the logs of attempts: drains without the checks for logs, with logs off, with logs on but
no lines, and with one line per task.
"""

from __future__ import annotations

import mmap

from benchmarks.paired import Side, alone_us, compare, is_within, report
from horsies import LogCapture
from horsies.captured_log import LogLimits
from horsies.current_task import CurrentTask
from horsies.worker.child.log_capture import Capture
from horsies.worker.log_area import LogArea, area_bytes
from horsies.worker.protocol import Assignment

# The environment variable that noop_app.py reads.
LOGS_VARIABLE = "HORSIES_BENCH_LOGS"
# The maximum cost of kept logs for tasks that log nothing, as a fraction of the drain.
TARGET = 0.03
# The cost of a setting that is off must be too small for this comparison to measure.
FREE = 0.01
# "off again" has the same code and settings as "off", so their difference is noise.
SIDES = {
    "no checks": Side({LOGS_VARIABLE: "removed"}),
    "off": Side({LOGS_VARIABLE: "off"}),
    "off again": Side({LOGS_VARIABLE: "off"}),
    "idle": Side({LOGS_VARIABLE: "on"}),
    "a line": Side({LOGS_VARIABLE: "on"}, task="say"),
}


def logs(url: str) -> bool:
    """Drain alternately without the checks, with the setting off (twice), on but unused, and on with a
    line per task.
    """
    found = compare(url, SIDES)
    was_idle = report("logs of attempts", found, "off")
    print(f"  one process: {_idle_us():.2f} µs for an attempt that logs nothing, all in the child")
    is_free = is_within(found, "off", "no checks", FREE, was_idle=was_idle)
    return is_within(found, "idle", "off", TARGET, was_idle=was_idle) and is_free


def _idle_us() -> float:
    """Time all work of a child for an attempt that logs nothing."""
    settings = LogCapture()
    limits = LogLimits(settings.max_bytes, settings.max_lines)
    assignment = Assignment("0" * 36, 1, "noop", 1, "[]", "{}", None)
    task = CurrentTask(assignment, 0.0)
    with mmap.mmap(-1, area_bytes(limits)) as memory:
        capture = Capture([LogArea(memory, 0, limits)], settings.level)

        def attempt() -> None:
            capture.begin(task, assignment)
            capture.end(task)

        return alone_us(attempt)


BENCHMARKS = {"logs": logs}
