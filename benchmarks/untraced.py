"""Functions of the package without their checks for tracing, to measure the cost of these checks."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from functools import reduce
from types import CodeType, FunctionType
from typing import Any

# The functions on the way of a task that ask whether the application traces.
CHECKED = (
    ("horsies.tasks.send", "Sender.prepare"),
    ("horsies.worker.work", "Work._turn"),
    ("horsies.worker.dispatcher", "Dispatcher._absorb_report"),
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
    """Remove the checks from this process, including modules that have imported the functions."""
    for function in checked_functions():
        function.__code__ = code_without_checks(function)
