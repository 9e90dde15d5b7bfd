"""The cost of disabled tracing: drains with and without the checks for tracing, and the calls alone.

A drain shows whether anything is measurable; the calls of one process, in short rounds, resolve nanoseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from benchmarks.rounds import alternate, heading, ratios, spread
from benchmarks.unchecked import TRACING, checked_functions, code_without_checks
from benchmarks.worker import drain

# The environment variable that noop_app.py reads.
TRACING_VARIABLE = "HORSIES_BENCH_TRACING"
CHILDREN = 2
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "10000"))
ROUNDS = 5
CALLS, CALL_ROUNDS = 50, 1_000
# The time that a worker takes for a no-op task is 250 µs.
TARGET_US = 0.5


def tracing(url: str) -> bool:
    """Drain alternately without and with the checks for tracing (the default); then time the calls
    alternately.
    """
    kinds = {"no checks": partial(_drain, "off"), "as it is": partial(_drain, "on")}
    found = alternate({name: partial(kind, url) for name, kind in kinds.items()}, ROUNDS)
    heading(
        f"tracing off: processor µs for a task, of {TASKS:,} no-op tasks with {CHILDREN} children, "
        f"median (min-max) of {ROUNDS}; ratio to no checks round by round"
    )
    for metric in ("parent_us", "children_us"):
        parts = ratios(found["as it is"], found["no checks"], metric)
        texts = [f"{name} {spread([run[metric] for run in found[name]], 1)}" for name in found]
        print(f"  {metric.removesuffix('_us'):<10}{'   '.join(texts)}   {spread(parts, 3)}")
    os.environ["HORSIES_DATABASE_URL"] = url
    differences = [_compare(name, call) for name, call in _calls().items()]
    print(f"  target: at most {TARGET_US} µs more")
    return max(differences) <= TARGET_US


def _drain(checks: str, url: str) -> dict[str, float]:
    os.environ[TRACING_VARIABLE] = checks
    try:
        return drain(url, CHILDREN, TASKS, "--max-tasks-per-child", "0", "--quiet-tasks")
    finally:
        del os.environ[TRACING_VARIABLE]


def _calls() -> dict[str, Callable[[], object]]:
    """Return the parts of a send, and of a child's work on a no-op task, that need no other process."""
    from benchmarks.noop_app import app, noop
    from horsies.worker.child.execute import AppProgram
    from horsies.worker.protocol import Assignment, encode_report

    program, assignment = AppProgram(app), Assignment("id", 1, "noop", 1, "[]", "{}", None)
    return {
        "send": lambda: noop._sender.prepare((), {}),
        "child": lambda: encode_report(program.execute(assignment)),
    }


def _compare(name: str, call: Callable[[], object]) -> float:
    """Time the call alternately with and without checks; return the microseconds that the checks add to
    the fastest round.
    """
    codes = {
        one: (one.__code__, code_without_checks(one, TRACING)) for one in checked_functions(TRACING)
    }
    taken: tuple[list[float], list[float]] = [], []
    for done in range(2 * CALL_ROUNDS):
        for function, versions in codes.items():
            function.__code__ = versions[done % 2]
        call()
        started = time.process_time()
        for _ in range(CALLS):
            call()
        taken[done % 2].append((time.process_time() - started) / CALLS * 1e6)
    for function, versions in codes.items():
        function.__code__ = versions[0]
    checked, unchecked = map(min, taken)
    print(f"  {name}, one process: {unchecked:.2f} µs without checks, {checked:.2f} as it is")
    return checked - unchecked


BENCHMARKS = {"tracing": tracing}
