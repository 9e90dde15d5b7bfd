"""The recipe for continuous integration: its files parse, and its commands run in a new project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from horsies.cli.main import command_line
from tests.support.commands import environment
from tests.support.doc_pages import blocks, page, rows, section
from tests.support.followed_pages import sessions

PAGE = page("ci.md")
VARIABLE = "HORSIES_DATABASE_URL"
# Installs from an index; `horsies init` writes the file that it reads.
INSTALL = "pip install -r requirements-dev.txt"


def recipes() -> list[dict[str, Any]]:
    """The jobs of the page, each as a list of commands."""
    return [yaml.safe_load(block.text) for block in blocks(PAGE) if block.language == "yaml"]


def scripts() -> list[list[str]]:
    """The commands of each job, in order."""
    return [
        [step["run"] for step in job["steps"] if "run" in step] if "steps" in job else job["script"]
        for recipe in recipes()
        for job in (recipe["jobs"]["test"] if "jobs" in recipe else recipe["test"],)
    ]


def supported(system: str) -> list[str]:
    """The versions of Python or PostgreSQL that the page about versions lists."""
    found = dict(one[:2] for one in rows(section(page("versioning.md"), "What is supported")))
    return found[system].split(", ")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project, named as on the page."""
    parent = tmp_path_factory.mktemp("ci")
    done = run(parent, "horsies init shop")
    assert done.returncode == 0, done.stderr
    return parent / "shop"


def variables() -> list[dict[str, str]]:
    """What each job sets in its environment."""
    github, *others = recipes()
    return [github["jobs"]["test"]["env"], *(one["test"]["variables"] for one in others)]


def run(
    directory: Path, command: str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=directory,
        env=environment(**(environ or {})),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_every_job_runs_the_commands_of_the_page() -> None:
    setting, *shown = [command for command, _ in sessions(PAGE)]
    whole, *others = scripts()
    assert setting == f"export {VARIABLE}={variables()[0][VARIABLE]}"
    assert shown == whole == [INSTALL, "horsies check shop.app", "pytest"]
    assert others == [whole, [INSTALL, "pytest"]]


def test_the_commands_pass_in_a_new_project(project: Path) -> None:
    assert (project / "requirements-dev.txt").exists()
    for command in scripts()[0]:
        if command != INSTALL:
            done = run(project, command, variables()[0])
            assert done.returncode == 0, done.stdout + done.stderr


def test_the_versions_are_supported_ones() -> None:
    github, gitlab, service = recipes()
    job = github["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == supported("Python")
    (python,) = [step for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert python["with"]["python-version"] == "${{ matrix.python }}"
    for recipe in (gitlab, service):
        assert recipe["test"]["image"].removeprefix("python:") in supported("Python")
    (server,) = service["test"]["services"]
    assert server.removeprefix("postgres:") in supported("PostgreSQL")


def test_the_service_is_the_server_that_the_tests_ask_for() -> None:
    first, second, last = variables()
    assert first == second == {VARIABLE: "embedded://"}
    url = f"postgresql://postgres:{last['POSTGRES_PASSWORD']}@postgres/postgres"
    assert last == {
        "POSTGRES_PASSWORD": "test",
        VARIABLE: url,
        "HORSIES_TEST_DATABASE_URL": url,
    }


def test_the_other_commands_of_the_page_exist() -> None:
    commands: Any = typer.main.get_command(command_line())
    for words in re.findall(r"`horsies ([^`]+)`", PAGE):
        name, *flags = words.split()
        known = {one for option in commands.commands[name].params for one in option.opts}
        assert set(flags) <= known, words
