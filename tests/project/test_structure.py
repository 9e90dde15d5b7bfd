"""The structure of the package: small functions, searchable names, a short way for a task."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tools.way import files_on_the_way, main_line

SOURCE = Path(__file__).parents[2] / "src" / "horsies"
MODULES = sorted(SOURCE.rglob("*.py"))
FUNCTION_LINES_MAX = 60
# Metaphors that a reader would have to look up; docs/internals/glossary.md has the words in use.
RETIRED_WORDS = {
    *("together", "settle", "settled", "settlement", "rescue", "stray", "strays", "desk"),
    *("ear", "hear", "hears", "heard", "hearing", "deaf", "farewell", "goodbye", "duty"),
    *("duties", "roster", "bury", "buried", "surroundings", "steer", "steered"),
    *("steering", "survey", "portrait", "recall", "told", "brothers", "moment"),
    *("moments", "borrow"),
}
# The files that one task enters, traced; see `tools.way`.
MAIN_LINE_MAX, WAY_MAX = 14, 56
EMPTY_NAMES = {"utils", "helpers", "common", "base", "manager", "misc", "types"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_is_documented_and_made_of_small_functions(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    assert path.stem not in EMPTY_NAMES
    assert ast.get_docstring(tree), "a module says what it is for"
    too_long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert not too_long


COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def quadratic(tree: ast.AST) -> list[str]:
    """The comprehensions that search the sequence they go through for each of its elements."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, COMPREHENSIONS):
            continue
        walked = {ast.unparse(one.iter) for one in node.generators}
        found += [
            f"line {call.lineno}: {ast.unparse(call)}"
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("count", "index")
            and ast.unparse(call.func.value) in walked
        ]
    return found


def test_no_comprehension_searches_the_sequence_that_it_goes_through() -> None:
    # With ten thousand schedules, a count per name takes seconds of every start.
    assert quadratic(ast.parse("{name for name in names if names.count(name) > 1}"))
    assert not quadratic(ast.parse("[name for name in names if others.count(name) > 1]"))
    found = {
        str(path.relative_to(SOURCE)): places
        for path in MODULES
        if (places := quadratic(ast.parse(path.read_text("utf-8"))))
    }
    assert found == {}


def test_sql_is_written_in_sql_files_only() -> None:
    allowed = {"migrate.py", "listen.py", "caller_transaction.py", "check.py"}
    words = ("INSERT INTO horsies", "UPDATE horsies", "DELETE FROM horsies", "FROM horsies_")
    offenders = [
        path.name
        for path in MODULES
        if path.name not in allowed and any(word in path.read_text("utf-8") for word in words)
    ]
    assert offenders == [], "statements live in db/statements"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_class_or_function_is_named_by_a_retired_word(path: Path) -> None:
    named = [path.stem] + [
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    assert [name for name in named if RETIRED_WORDS & set(words_of(name))] == []


def words_of(name: str) -> list[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    return re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


@pytest.mark.slow
def test_a_task_enters_few_files_and_the_page_about_its_way_names_them() -> None:
    assert len(main_line()) <= MAIN_LINE_MAX
    assert len(files_on_the_way()) <= WAY_MAX
