"""Output to a pipe whose reader ends early, as in ``horsies tasks | head``."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.support.database import Database
from tests.support.rows import add_task

FAR_MORE_THAN_A_PIPE_HOLDS = 1_000  # rows of 80 characters; a pipe holds 64 KiB
HORSIES = f"{shlex.quote(sys.executable)} -m horsies"


def in_shell(script: str, url: str) -> subprocess.CompletedProcess[str]:
    """Run a pipeline that fails if any of its programs does."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        env={**os.environ, "HORSIES_DATABASE_URL": url},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def many_tasks(connection: Database) -> list[str]:
    return [add_task(connection) for _ in range(FAR_MORE_THAN_A_PIPE_HOLDS)]


@pytest.mark.usefixtures("many_tasks")
@pytest.mark.parametrize("pipe", ["| head -1", "| true", "2>&1 | head -1", "--json | head -1"])
def test_a_listing_whose_reader_ends_early_is_no_failure(process_url: str, pipe: str) -> None:
    listing = f"{HORSIES} tasks --limit 1000 {pipe}"
    finished = in_shell(listing, process_url)
    notes = [line for line in finished.stderr.splitlines() if "There may be more" not in line]
    assert (finished.returncode, notes) == (0, [])


@pytest.mark.parametrize("reader", ["head -1", "true"])
def test_a_page_of_the_documentation_whose_reader_ends_early(process_url: str, reader: str) -> None:
    finished = in_shell(f"{HORSIES} docs configuration | {reader}", process_url)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.usefixtures("connection")
def test_a_watch_ends_with_its_reader(process_url: str) -> None:
    watch = f"{HORSIES} status --watch --every 0.2 | head -1"
    finished = in_shell(watch, process_url)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_a_change_is_finished_without_its_reader(
    connection: Database, many_tasks: list[str], process_url: str
) -> None:
    chosen = many_tasks[:20]
    finished = in_shell(f"{HORSIES} cancel {' '.join(chosen)} | true", process_url)
    assert (finished.returncode, finished.stderr) == (0, "")
    rows = connection.execute("SELECT id FROM horsies_tasks WHERE status = 'CANCELLED'").fetchall()
    assert {str(task_id) for (task_id,) in rows} == set(chosen)


def test_a_refusal_keeps_its_exit_code_without_a_reader(process_url: str) -> None:
    finished = in_shell(f"{HORSIES} show nonsense 2>&1 | true", process_url)
    assert finished.returncode == 4
