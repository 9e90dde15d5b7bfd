"""The shape of the house: small functions, modules one can read, names that say something."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "horsies"
MODULES = sorted(SOURCE.rglob("*.py"))
FUNCTION_LINES_MAX = 60
MODULE_LINES_MAX = 500
# Metaphors that a reader would have to look up; docs/internals/glossary.md has the words in use.
RETIRED_WORDS = {
    *("together", "settle", "settled", "settlement", "rescue", "stray", "strays", "desk"),
    *("ear", "hear", "hears", "heard", "hearing", "deaf", "farewell", "goodbye", "duty"),
    *("duties", "roster", "bury", "buried", "surroundings", "steer", "steered"),
    *("steering", "survey", "portrait", "recall", "told", "brothers", "moment"),
    *("moments", "borrow"),
}
EMPTY_NAMES = {"utils", "helpers", "common", "base", "manager", "misc", "types"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_is_short_documented_and_made_of_small_functions(path: Path) -> None:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= MODULE_LINES_MAX
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
