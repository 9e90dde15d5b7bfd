"""Every line that installs Horsies names a clone or a wheel: on the index the name is another project's."""

from __future__ import annotations

import re
import subprocess

import pytest

from horsies._version import __version__
from tests.support.doc_pages import REPOSITORY

NAME = "horsies"
# The name as a word of its own, with or without extras and a version.
BY_NAME = rf"{NAME}(?:[\[=<>~!,\"'`\s]|$)"
INSTALLS_BY_NAME = re.compile(
    rf"\b(?:pip3?|pipx|uv|poetry|pdm|conda)\s+(?:pip\s+)?(?:install|add)\s+(?:.*[\s'\"])?['\"]?{BY_NAME}"
)
# An item of a list of dependencies, or a line of a requirements file; `name @ address` is a path.
REQUIRES_BY_NAME = re.compile(rf"^(?:.*[\"'])?{NAME}(?:\[[\w,]+\])?\s*(?:[=<>~!].*|[\"'].*)?$")
REQUIREMENTS = re.compile(r"(pyproject\.toml|requirements[\w-]*\.txt|Pipfile|environment\.ya?ml)$")
OWN = "pyproject.toml"  # extras that name other extras of the same installation


def lines() -> list[tuple[str, str]]:
    """All lines of all files of the repository, with the names of the files."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=REPOSITORY, text=True).split("\n")
    found = []
    for name in filter(None, listed):
        path = REPOSITORY / name
        if path.suffix not in (".png", ".ico", ".woff2") and path.is_file():
            found += [(name, line) for line in path.read_text("utf-8", "replace").splitlines()]
    return found


def test_no_line_installs_the_name_alone() -> None:
    own_test = f"tests/project/{__name__.rpartition('.')[2]}.py"
    wrong = [
        f"{name}: {line.strip()}"
        for name, line in lines()
        if name != own_test
        and (
            INSTALLS_BY_NAME.search(line)
            or (name != OWN and REQUIREMENTS.search(name) and REQUIRES_BY_NAME.search(line))
        )
    ]
    assert wrong == []


def test_the_wheels_of_the_pages_have_the_version_of_this_release() -> None:
    named = {
        found
        for name, line in lines()
        if name.endswith((".md", "Dockerfile"))
        for found in re.findall(rf"{NAME}-(\d[\w.]*)-py3", line)
    }
    assert named == {__version__}


@pytest.mark.parametrize(
    ("line", "is_by_name"),
    [
        ("$ pip install horsies", True),
        ("pip install 'horsies[web]'", True),
        ("RUN /opt/venv/bin/pip install --no-cache-dir horsies==0.1.0", True),
        ("uv add horsies", True),
        ("`pip install 'horsies[binary]'` and", True),
        ("pip install '/path/to/horsies[web]'", False),
        ("pip install './wheels/horsies-0.1.0-py3-none-any.whl[binary]'", False),
        ("pip install '../..[embedded]' django", False),
    ],
)
def test_the_pattern_finds_commands(line: str, is_by_name: bool) -> None:
    assert bool(INSTALLS_BY_NAME.search(line)) == is_by_name


@pytest.mark.parametrize(
    ("line", "is_by_name"),
    [
        ('dependencies = ["horsies[binary]"]', True),
        ('dev = ["horsies[dev]", "pytest"]', True),
        ("horsies[binary]~=0.1", True),
        ('dependencies = ["horsies[binary] @ {root:uri}/wheels/x.whl"]', False),
        ("./wheels/horsies-0.1.0-py3-none-any.whl[binary,metrics]", False),
    ],
)
def test_the_pattern_finds_requirements(line: str, is_by_name: bool) -> None:
    assert bool(REQUIRES_BY_NAME.search(line)) == is_by_name
