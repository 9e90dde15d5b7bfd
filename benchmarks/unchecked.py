"""Removes a feature's checks from functions of the package, to measure the cost of these checks."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from functools import reduce
from types import CodeType, FunctionType
from typing import Any, NamedTuple


class Feature(NamedTuple):
    """A feature that is off by default: the names that its checks read, and the functions on a task's
    path with these checks.
    """

    names: frozenset[str]
    functions: tuple[tuple[str, str], ...]


TRACING = Feature(
    frozenset(("tracing", "_tracing", "traces", "traceparent")),
    (
        ("horsies.tasks.send", "Sender.prepare"),
        ("horsies.worker.work", "Work._turn"),
        ("horsies.worker.dispatcher", "Dispatcher._absorb_report"),
        ("horsies.worker.child.execute", "AppProgram.execute"),
    ),
)
LOGS = Feature(
    frozenset(("capture", "log")),
    (
        ("horsies.worker.child.main", "_serve"),
        ("horsies.worker.dispatcher", "Dispatcher._absorb_report"),
        ("horsies.worker.ledger", "Ledger.to_record"),
    ),
)


class _Remover(ast.NodeTransformer):
    """Removes the branches that only an application with the feature takes."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if self._is_check(node.test) else self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        """Keep the value for the disabled feature, as in ``None if capture is None else ...``."""
        match node.test:
            case ast.Compare(ops=[ast.Is()]) if self._is_check(node.test):
                return node.body
        return node.orelse if self._is_check(node.test) else self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        node.values = [value for value in node.values if not self._is_check(value)]
        return self.generic_visit(node)

    def _is_check(self, condition: ast.expr) -> bool:
        return any(
            (isinstance(node, ast.Attribute) and node.attr in self._names)
            or (isinstance(node, ast.Name) and node.id in self._names)
            for node in ast.walk(condition)
        )


def code_without_checks(function: FunctionType, feature: Feature) -> CodeType:
    """Compile a function again without its checks for a feature."""
    source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree = _Remover(feature.names).visit(source)
    code = compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec")
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    found: CodeType = made[function.__name__].__code__
    return found


def checked_functions(feature: Feature) -> list[FunctionType]:
    """Return the functions on a task's path that check whether the application uses the feature."""
    found: list[Any] = [
        reduce(getattr, path.split("."), importlib.import_module(module))
        for module, path in feature.functions
    ]
    return found


def remove_checks(feature: Feature) -> None:
    """Remove the checks from this process, including modules that have imported the functions."""
    for function in checked_functions(feature):
        function.__code__ = code_without_checks(function, feature)
