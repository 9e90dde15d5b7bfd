"""Measure the structure of the package and fail when a figure is over its limit.

`python -m tools.structure` prints the size of the code, the floors of its import graph, and the classes and
functions that are over a limit. It reads files only. Lines are counted but not limited: a change says what
it added and why. `tests/project/test_structure.py` traces the files that one task enters.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "horsies"

LIMITS = {
    "files in the root": 21,
    "floors": 13,
    "modules that import each other in a circle": 0,
    "longest function": 60,
    "median function": 8,
    "95th percentile of functions": 30,
    "classes over a limit": 0,
}
METHODS_MAX, ATTRIBUTES_MAX = 25, 15
# Methods and attributes of the classes that are over a limit today. These numbers only go down.
KNOWN = {
    "app.Horsies": (33, 15),
    "current_task.CurrentTask": (26, 3),
    "worker.connection.WorkerConnection": (27, 25),
    "worker.in_flight.InFlight": (43, 17),
    "worker.loop.Worker": (24, 19),
    "worker.maintenance.Maintenance": (28, 29),
    "worker.pool.async_pool.AsyncPool": (31, 12),
    "worker.pool.children.Children": (29, 14),
    "worker.pool.mixed_pool.MixedPool": (29, 4),
    "worker.pool.pool.ChildPool": (36, 8),
    "worker.work.Work": (23, 16),
    "workflow.run.handle.WorkflowHandle": (27, 6),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache
def modules() -> Mapping[str, ast.Module]:
    """Every module of the package, parsed, by its name without the package's."""
    paths = {path.relative_to(SOURCE).with_suffix(""): path for path in SOURCE.rglob("*.py")}
    return {
        ".".join(name.parts).removesuffix(".__init__"): ast.parse(path.read_text("utf-8"))
        for name, path in sorted(paths.items())
    }


def lines(pattern: str) -> int:
    return sum(path.read_text("utf-8").count("\n") for path in SOURCE.rglob(pattern))


def function_lengths() -> Iterator[int]:
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                assert node.end_lineno is not None
                yield node.end_lineno - node.lineno + 1


def imports() -> dict[str, set[str]]:
    """Which modules each module imports from."""
    return {name: set(_imported(tree)) - {name} for name, tree in modules().items()}


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horsies."):
            source = (node.module or "").removeprefix("horsies.")
            names = [f"{source}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else source for name in names)


def rooms(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same imports between the files and folders of the root."""
    found: dict[str, set[str]] = {}
    for name, below in graph.items():
        room = name.partition(".")[0]
        found.setdefault(room, set()).update({one.partition(".")[0] for one in below} - {room})
    return found


def floors(graph: Mapping[str, set[str]]) -> tuple[int, int]:
    """The longest chain of imports, and how many of these are left in circles."""
    remaining = {here: set(below) for here, below in graph.items() if here != "__init__"}
    count = 0
    while remaining:
        ground = {here for here, below in remaining.items() if not below & remaining.keys()}
        if not ground:
            return count, len(remaining)
        remaining = {here: below for here, below in remaining.items() if here not in ground}
        count += 1
    return count, 0


def class_sizes() -> dict[str, tuple[int, int]]:
    """The methods and attributes of each class; a method and its async form count once."""
    return {
        f"{name}.{node.name}": (_methods(node), _attributes(node))
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def _methods(node: ast.ClassDef) -> int:
    names = [part.name for part in node.body if isinstance(part, Function)]
    return len({name.removesuffix("_async") for name in names})


def _attributes(node: ast.ClassDef) -> int:
    """Count the names that methods assign to `self`."""
    stored = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
    return len(
        {
            part.attr
            for part in stored
            if isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        }
    )


def oversized(sizes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The classes with more methods or attributes than allowed to them."""
    usual = METHODS_MAX, ATTRIBUTES_MAX
    return {
        name: (methods, attributes)
        for name, (methods, attributes) in sizes.items()
        if methods > max(METHODS_MAX, KNOWN.get(name, usual)[0])
        or attributes > max(ATTRIBUTES_MAX, KNOWN.get(name, usual)[1])
    }


def measure() -> dict[str, float]:
    lengths, graph = sorted(function_lengths()), imports()
    return {
        "files in the root": len(list(SOURCE.glob("*.py"))),
        "floors": floors(rooms(graph))[0],
        "modules that import each other in a circle": floors(graph)[1],
        "longest function": lengths[-1],
        "median function": statistics.median(lengths),
        "95th percentile of functions": lengths[int(len(lengths) * 0.95)],
        "classes over a limit": len(oversized(class_sizes())),
    }


def main() -> int:
    """Print every figure beside its limit; return 1 when one is over."""
    print(f"{lines('*.py'):,} lines of Python, {lines('*.sql'):,} of SQL")
    figures = measure()
    for name, value in figures.items():
        verdict = "over" if value > LIMITS[name] else "ok"
        print(f"{verdict:>5}  {name}: {value:,g} (at most {LIMITS[name]:,})")
    for name, (methods, attributes) in oversized(class_sizes()).items():
        print(f"       {name}: {methods} methods, {attributes} attributes")
    return int(any(value > LIMITS[name] for name, value in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
