"""The rules of `tools` find their cases, and the page about a task's way names files on it."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest
from tools.prose import habits_of
from tools.structure import (
    OWN_LIMITS,
    class_sizes,
    findings,
    floors,
    imports,
    oversized,
    quadratic,
)
from tools.way import MAIN_LINE_MAX, files_on_the_way, main_line


def test_a_comprehension_that_searches_its_own_sequence_is_found() -> None:
    assert quadratic(ast.parse("{name for name in names if names.count(name) > 1}"))
    assert not quadratic(ast.parse("[name for name in names if others.count(name) > 1]"))


def test_a_circle_of_imports_is_found() -> None:
    chain = {"a": {"b"}, "b": {"c"}, "c": set[str]()}
    assert floors(chain) == (3, 0)
    assert floors({**chain, "c": {"a"}}) == (0, 3)
    assert floors(imports("benchmarks"))[1] == 0


def test_a_class_over_the_usual_limits_or_its_own_is_found() -> None:
    ledger = "worker.ledger.Ledger"
    assert oversized({"words.Large": (25, 15), ledger: (20, 15)}) == {}
    too_large = {"words.Large": (26, 0), "words.Wide": (0, 16), ledger: (21, 0)}
    assert oversized(too_large) == too_large
    assert OWN_LIMITS.keys() <= class_sizes().keys()


def test_the_package_breaks_no_rule_of_names_statements_and_comprehensions() -> None:
    assert findings() == ()


@pytest.mark.parametrize(
    ("sentence", "is_habit"),
    [
        ("The guard runs in a process of its own.", True),
        ("A child opens no connection of its own.", False),
        ("It closes the descriptors of its own process.", False),
        ("Your trigger waits for ever.", True),
        ("The worker holds at least as many tasks as children.", False),
        ("It stops all servers, also after Ctrl-C.", True),
        ("It is also an error after a restart.", False),
        ("Return the name of the step of the run of the schedule.", True),
        ("The end of the list of tasks.", False),
        ("The second look finds the lock free.", False),
        ("Each look finds the lock free.", True),
        ("It tells whether a migration is missing.", True),
        ("The client cannot tell whether the row was stored.", False),
    ],
)
def test_wordings_that_sound_translated_are_found(sentence: str, is_habit: bool) -> None:
    assert any(habits_of(sentence)) == is_habit


@pytest.mark.slow
def test_the_page_about_the_way_of_a_task_names_a_few_files_that_a_task_enters() -> None:
    way, line = files_on_the_way(), main_line()
    print(f"{len(way)} files on the way of a task, {len(line)} of them on the main line")
    assert line <= way
    assert len(line) <= MAIN_LINE_MAX


@lru_cache
def nodes_of_tests() -> tuple[tuple[Path, ast.AST], ...]:
    """Every node of the tests' syntax trees with its file; reading all of them takes seconds."""
    return tuple(
        (path, node)
        for path in Path("tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom | ast.Constant)
    )


def test_helpers_are_imported_from_the_support_folder() -> None:
    # A test module can then change or go, and the others stay.
    borrowed = [
        f"{path}:{node.lineno}"
        for path, node in nodes_of_tests()
        if isinstance(node, ast.ImportFrom)
        and re.match(r"tests\.(\w+\.)*(test_\w+|conftest)$", node.module or "")
    ]
    assert borrowed == []


def test_the_tests_look_only_at_the_sessions_of_their_database() -> None:
    # Several test processes share a server: the session of a neighbour must not satisfy a test's wait.
    unscoped = [
        f"{path}:{node.lineno}"
        for path, node in nodes_of_tests()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.search(r"FROM (pg_stat_activity|pg_locks)\b", node.value)
        and not re.search(r"\bdatname\b|\bpid = ", node.value)
    ]
    assert unscoped == []
