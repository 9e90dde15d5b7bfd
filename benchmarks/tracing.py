"""The cost of tracing that is off: drains and sends with the checks for tracing, and without them."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import statistics
import textwrap
from functools import partial, reduce
from types import CodeType, FunctionType
from typing import Any

from benchmarks.rounds import Checkout, alternate, heading, ratios, spread
from benchmarks.worker import drain

# Read by noop_app.py.
TRACING_VARIABLE = "HORSIES_BENCH_TRACING"
CHILDREN = 2
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "10000"))
SENDS = TASKS // 4
ROUNDS = 5
TARGET = 1.02

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
    """Drain and send in turns without the checks for tracing, and as by default."""
    kinds = {"no checks": partial(_measure, "off"), "as it is": partial(_measure, "on")}
    found = alternate({name: partial(kind, url) for name, kind in kinds.items()}, ROUNDS)
    heading(
        f"tracing off: processor µs for a task, of {TASKS:,} no-op tasks with {CHILDREN} children, and for "
        f"a send, of {SENDS:,}; median (min-max) of {ROUNDS}; ratio to no checks round by round"
    )
    medians = []
    for metric in ("parent_us", "children_us", "send_us"):
        parts = ratios(found["as it is"], found["no checks"], metric)
        medians.append(statistics.median(parts))
        texts = [f"{name} {spread([run[metric] for run in found[name]], 1)}" for name in found]
        print(f"  {metric.removesuffix('_us'):<10}{'   '.join(texts)}   {spread(parts, 3)}")
    print(f"  target {TARGET}")
    return max(medians) <= TARGET


def _measure(checks: str, url: str) -> dict[str, float]:
    os.environ[TRACING_VARIABLE] = checks
    try:
        drained = drain(url, CHILDREN, TASKS, "--max-tasks-per-child", "0", "--quiet-tasks")
        return {**drained, "send_us": Checkout(url).measure("send", count=SENDS)["processor_us"]}
    finally:
        del os.environ[TRACING_VARIABLE]


BENCHMARKS = {"tracing": tracing}
