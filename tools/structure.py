"""Measure the structure of the package and fail when a figure is over its limit.

`python -m tools.structure` prints the size of the code, the floors of its import graph, and the files
that one task enters on its way from `send` to its result. The last figure is traced: see `tools.way`.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.way import files_on_the_way, main_line

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "horsies"

# The limit of each figure, and its goal. A limit above its goal is raised only for a new feature.
LIMITS = {
    "files in the root": (20, 20),
    "floors": (13, 13),
    "imports in a circle": (0, 0),
    "lines of Python": (58_600, 26_000),
    "lines of Python in the core": (27_250, 13_500),
    "lines of SQL": (5_460, 3_300),
    "longest function": (60, 60),
    "median function": (8, 8),
    "95th percentile of functions": (30, 30),
    "files on a task's main line": (14, 14),
    "files on a task's way": (52, 30),
}
# The core is everything a plain task needs. These parts serve workflows, schedules and operators.
NOT_CORE = (
    *("workflow", "scheduler", "timetable", "monitor", "cli", "web", "demo", "django", "testing"),
    *("config/schedules.py", "db/statements/clock.py"),
    *(f"db/statements/{name}.py" for name in ("workflows", "schedules", "monitor")),
    *("worker/node_inputs.py", "worker/child/node_arguments.py", "worker/child/builtin_tasks.py"),
)


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def lines(paths: list[Path]) -> int:
    return sum(path.read_text("utf-8").count("\n") for path in paths)


def is_core(path: Path) -> bool:
    return not str(path.relative_to(SOURCE)).startswith(NOT_CORE)


def function_lengths() -> Iterator[int]:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield node.end_lineno - node.lineno + 1


def room(module: str) -> str:
    """The root file or folder that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def imports() -> dict[str, set[str]]:
    """Which rooms each room imports from."""
    graph: dict[str, set[str]] = {}
    for path in modules():
        parts = ("horsies", *path.relative_to(SOURCE).with_suffix("").parts)
        here = room(".".join(parts))
        graph.setdefault(here, set())
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horsies."):
                graph[here].add(room(node.module or ""))
    for here, below in graph.items():
        below.discard(here)
    return graph


def floors(graph: dict[str, set[str]]) -> tuple[int, int]:
    """The longest chain of imports between rooms, and how many rooms are left in circles."""
    remaining = {here: set(below) for here, below in graph.items() if here != "__init__"}
    count = 0
    while remaining:
        ground = {here for here, below in remaining.items() if not below & remaining.keys()}
        if not ground:
            return count, len(remaining)
        remaining = {here: below for here, below in remaining.items() if here not in ground}
        count += 1
    return count, 0


def measure() -> dict[str, float]:
    lengths = sorted(function_lengths())
    floor_count, in_circles = floors(imports())
    return {
        "files in the root": len(list(SOURCE.glob("*.py"))),
        "floors": floor_count,
        "imports in a circle": in_circles,
        "lines of Python": lines(modules()),
        "lines of Python in the core": lines([path for path in modules() if is_core(path)]),
        "lines of SQL": lines(sorted(SOURCE.rglob("*.sql"))),
        "longest function": lengths[-1],
        "median function": statistics.median(lengths),
        "95th percentile of functions": lengths[int(len(lengths) * 0.95)],
        "files on a task's main line": len(main_line()),
        "files on a task's way": len(files_on_the_way()),
    }


def main() -> int:
    """Print every figure beside its limit; return 1 when one is over."""
    failed = False
    for name, value in measure().items():
        limit, goal = LIMITS[name]
        failed = failed or value > limit
        verdict = "over" if value > limit else "ok" if value <= goal else "high"
        wanted = f"at most {limit:,}" + (f", goal {goal:,}" if goal < limit else "")
        print(f"{verdict:>5}  {name}: {value:,g} ({wanted})")
    if "-v" in sys.argv:
        print("\n".join(sorted(files_on_the_way())))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
