"""Every help text fits one screen and begins with an example."""

from __future__ import annotations

import re

import pytest

from horsies.cli import main
from tests.support.every_command import CONTEXTS, HELP_COLUMNS

ROWS = 40


@pytest.mark.parametrize("path", CONTEXTS)
def test_a_help_text_begins_with_an_example_and_fits_one_screen(path: str) -> None:
    lines = CONTEXTS[path].get_help().splitlines()
    example = re.compile(rf"\$ .*\b{path}\b")
    assert example.match(lines[0]), (
        f"{path} has no example: write Example: into the docstring of its function"
    )
    assert f"Usage: {path}" in "\n".join(lines)
    assert len(lines) <= ROWS, f"{path} has {len(lines)} rows of help: shorten its texts"
    assert max(map(len, lines)) <= HELP_COLUMNS


@pytest.mark.parametrize("path", CONTEXTS)
def test_a_usage_line_has_single_brackets(path: str) -> None:
    pieces = CONTEXTS[path].command.collect_usage_pieces(CONTEXTS[path])
    assert not re.search(r"\[\[|\]\]|\{\w+\}", " ".join(pieces))


def test_the_overview_names_every_command() -> None:
    lines = [line for commands in main._GROUPS.values() for line in commands]
    grouped = {name for line in lines for name in line.split(", ")}
    assert set(main._MODULES) - grouped == {"version"}  # the usage line has --version


def test_an_option_shows_the_clauses_that_fit_and_its_default() -> None:
    worker = CONTEXTS["horsies worker"].get_help()
    assert re.search(r"^  --max-tasks-per-child N +Replace a child .+ tasks \[100\]$", worker, re.M)
    assert "started threads" not in worker
    assert re.search(r"^  LOCATOR +package\.module:app or path/to/file\.py:app$", worker, re.M)
