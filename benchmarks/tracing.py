"""The cost of tracing that is off: drains with the checks for tracing and without them, and the calls alone.

A drain shows whether anything is measurable; the calls of one process, in short rounds, resolve nanoseconds.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import textwrap
import time
from collections.abc import Callable
from functools import partial, reduce
from types import CodeType, FunctionType
from typing import Any

from benchmarks.rounds import alternate, heading, ratios, spread
from benchmarks.worker import drain

# Read by noop_app.py.
TRACING_VARIABLE = "HORSIES_BENCH_TRACING"
CHILDREN = 2
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "10000"))
ROUNDS = 5
CALLS, CALL_ROUNDS = 50, 1_000
# Of 250 µs that a worker takes for a no-op task.
TARGET_US = 0.5

# The functions on the way of a task that ask whether the application traces.
CHECKED = (
    ("horsies.tasks.send", "Sender.prepare"),
    ("horsies.worker.work", "Work._turn"),
    ("horsies.worker.in_flight", "InFlight._absorb_report"),
    ("horsies.worker.child.execute", "AppProgram.execute"),
    ("horsies.worker.protocol", "encode_report"),
)
_NAMES = frozenset(("tracing", "_tracing", "traces", "traceparent"))


class _Remover(ast.NodeTransformer):
    """Removes the branches that are taken only by an application that traces."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if _mentions_tracing(node.test) else self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        node.values = [value for value in node.values if not _mentions_tracing(value)]
        return self.generic_visit(node)


def _mentions_tracing(condition: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in _NAMES for node in ast.walk(condition)
    )


def code_without_checks(function: FunctionType) -> CodeType:
    """Compile a function again, without its checks for tracing."""
    tree = _Remover().visit(ast.parse(textwrap.dedent(inspect.getsource(function))))
    code = compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec")
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    found: CodeType = made[function.__name__].__code__
    return found


def checked_functions() -> list[FunctionType]:
    """Return the functions on the way of a task that ask whether the application traces."""
    found: list[Any] = [
        reduce(getattr, path.split("."), importlib.import_module(module))
        for module, path in CHECKED
    ]
    return found


def remove_checks() -> None:
    """Remove the checks from this process, also for modules that have imported the functions."""
    for function in checked_functions():
        function.__code__ = code_without_checks(function)


def tracing(url: str) -> bool:
    """Drain in turns without the checks for tracing and as by default; then make the calls in turns."""
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
    """Return the part of a send, and of a child's work on a no-op task, that needs no other process."""
    from benchmarks.noop_app import app, noop
    from horsies.worker.child.execute import AppProgram
    from horsies.worker.protocol import Assignment, encode_report

    program, assignment = AppProgram(app), Assignment("id", 1, "noop", 1, "[]", "{}", None)
    return {
        "send": lambda: noop._sender.prepare((), {}),
        "child": lambda: encode_report(program.execute(assignment)),
    }


def _compare(name: str, call: Callable[[], object]) -> float:
    """Time the call in turns; return how many µs the checks add to the fastest round."""
    codes = {one: (one.__code__, code_without_checks(one)) for one in checked_functions()}
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
