"""Measure the structure of the package and fail when a figure is over its limit.

`python -m tools.structure` prints the size of the code, the floors of its import graph, and the classes
and functions that are over a limit. It also fails for circular imports in the package, the benchmarks
and the tools; for meaningless names and retired metaphors; for SQL outside `.sql` files; and for
comprehensions with quadratic time. It imports nothing. Lines are counted but not limited.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "horsies"

LIMITS = {
    "modules that import each other in a circle": 0,
    "names, statements and comprehensions to change": 0,
    "longest function": 60,
    "median function": 8,
    "95th percentile of functions": 30,
    "classes over a limit": 0,
}
METHODS_MAX, ATTRIBUTES_MAX = 25, 15
# The limits of methods and attributes for classes that exceed the usual limits. These numbers must
# only decrease.
OWN_LIMITS = {
    "app.Horsies": (33, 15),
    # The ledger owns the state of every task in a worker; functions outside the class query this
    # state.
    "worker.ledger.Ledger": (20, 15),
}
# Packages without circular imports between their modules.
PACKAGES = {
    "horsies": SOURCE,
    "benchmarks": REPOSITORY / "benchmarks",
    "tools": REPOSITORY / "tools",
}
EMPTY_NAMES = {"utils", "helpers", "common", "base", "manager", "misc", "types"}
# Metaphors that readers would have to look up; docs/internals/glossary.md has the replacements.
RETIRED_WORDS = {
    *("together", "settle", "settled", "settlement", "rescue", "stray", "strays", "desk"),
    *("ear", "hear", "hears", "heard", "hearing", "deaf", "farewell", "goodbye", "duty"),
    *("duties", "roster", "bury", "buried", "surroundings", "steer", "steered"),
    *("steering", "survey", "portrait", "recall", "told", "brothers", "moment"),
    *("moments", "borrow"),
}
SQL_WORDS = ("INSERT INTO horsies", "UPDATE horsies", "DELETE FROM horsies", "FROM horsies_")
# Modules that may contain SQL: they create the schema, listen, or check a foreign database.
SQL_ALLOWED = {"migrate.py", "listen.py", "caller_transaction.py", "check.py"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def modules(package: str = "horsies") -> Mapping[str, ast.Module]:
    """Parse every module of a package; return them by name, without the package's name."""
    return _parsed(package)


@lru_cache
def _parsed(package: str) -> Mapping[str, ast.Module]:
    root = PACKAGES[package]
    paths = {path.relative_to(root).with_suffix(""): path for path in root.rglob("*.py")}
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


def imports(package: str = "horsies") -> dict[str, set[str]]:
    """Return which modules of the package each module imports."""
    return {name: set(_imported(tree, package)) - {name} for name, tree in modules(package).items()}


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module == package or node.module.startswith(f"{package}."):
            source = node.module.removeprefix(package).removeprefix(".")
            names = [f"{source}.{alias.name}".removeprefix(".") for alias in node.names]
            known = modules(package)
            yield from (name if name in known else source for name in names)


def rooms(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports grouped by the files and folders of the package's root."""
    found: dict[str, set[str]] = {}
    for name, below in graph.items():
        room = name.partition(".")[0]
        found.setdefault(room, set()).update({one.partition(".")[0] for one in below} - {room})
    return found


def floors(graph: Mapping[str, set[str]]) -> tuple[int, int]:
    """Return the number of layers in the import graph, and the number of modules in import cycles."""
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
    """Return the numbers of methods and attributes per class; a method and its async form count once."""
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
    """Yield the classes that exceed their limit of methods or attributes."""
    usual = METHODS_MAX, ATTRIBUTES_MAX
    return {
        name: size
        for name, size in sizes.items()
        if any(found > most for found, most in zip(size, OWN_LIMITS.get(name, usual), strict=True))
    }


@lru_cache
def findings() -> tuple[str, ...]:
    """Yield the names, statements and comprehensions that break a rule, with their places."""
    return tuple(_findings())


def _findings() -> Iterator[str]:
    for name, tree in modules().items():
        yield from (f"{name}: the name {found} says nothing" for found in _empty_names(name))
        yield from (f"{name}: {found} uses a retired word" for found in _retired_names(name, tree))
        yield from (f"{name}, {found} takes quadratic time" for found in quadratic(tree))
    for path in SOURCE.rglob("*.py"):
        if path.name not in SQL_ALLOWED and any(
            word in path.read_text("utf-8") for word in SQL_WORDS
        ):
            yield f"{path.relative_to(SOURCE)}: SQL is written in .sql files"
    for folder in SOURCE.glob("*/__init__.py"):
        if folder.parent.name not in _layers():
            yield f"{folder.parent.name}: a new folder needs a layer in pyproject.toml"


def _layers() -> set[str]:
    """Return the folders and files of the root that the import contract assigns to a layer."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    return {name for layer in contract["layers"] for name in layer.split(" | ")}


def _empty_names(module: str) -> set[str]:
    return EMPTY_NAMES & {module.rpartition(".")[2]}


def _retired_names(module: str, tree: ast.Module) -> list[str]:
    """Yield the file, class and function names that contain a retired word."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef))
    names = [module.rpartition(".")[2], *(node.name for node in nodes)]
    return [name for name in names if RETIRED_WORDS & set(_words(name))]


def _words(name: str) -> list[str]:
    """Return the words of a snake_case or CamelCase name in lower case."""
    return re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


def quadratic(tree: ast.AST) -> list[str]:
    """Yield the comprehensions that search their own sequence for each of its elements.

    With ten thousand schedules, such a count per name takes seconds at every start.
    """
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for node in ast.walk(tree)
        if isinstance(node, Comprehension)
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and _searches(call, {ast.unparse(part.iter) for part in node.generators})
    ]


def _searches(call: ast.Call, sequences: set[str]) -> bool:
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ("count", "index")
        and ast.unparse(call.func.value) in sequences
    )


def measure() -> dict[str, float]:
    lengths = sorted(function_lengths())
    return {
        "modules that import each other in a circle": sum(
            floors(imports(package))[1] for package in PACKAGES
        ),
        "names, statements and comprehensions to change": len(findings()),
        "longest function": lengths[-1],
        "median function": statistics.median(lengths),
        "95th percentile of functions": lengths[int(len(lengths) * 0.95)],
        "classes over a limit": len(oversized(class_sizes())),
    }


def main() -> int:
    """Print every figure with its limit; return 1 if a figure is over its limit."""
    print(
        f"{lines('*.py'):,} lines of Python, {lines('*.sql'):,} of SQL; "
        f"{len(list(SOURCE.glob('*.py')))} files in the root, {floors(rooms(imports()))[0]} floors"
    )
    figures = measure()
    for name, value in figures.items():
        verdict = "over" if value > LIMITS[name] else "ok"
        print(f"{verdict:>5}  {name}: {value:,g} (at most {LIMITS[name]:,})")
    for finding in findings():
        print(f"       {finding}")
    for name, (methods, attributes) in oversized(class_sizes()).items():
        print(f"       {name}: {methods} methods, {attributes} attributes")
    return int(any(value > LIMITS[name] for name, value in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
