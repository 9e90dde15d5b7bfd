"""The pages run as they are shown: README, the first example, the tutorials."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment, running_worker
from tests.support.doc_pages import REPOSITORY, blocks, files, page
from tests.support.followed_pages import follow_with_worker

QUICKSTART = REPOSITORY / "examples" / "quickstart"


def test_the_first_example_works_as_it_is_shown(tmp_path: Path, database_url: str) -> None:
    commands, log = follow_with_worker("install.md", tmp_path, database_url)
    assert commands == ["horsies version", "python send.py"]
    assert "WARNING" not in log
    assert "ERROR" not in log


def test_the_page_shows_the_quickstart() -> None:
    shown = files(page("install.md"))
    assert shown == {name: (QUICKSTART / name).read_text() for name in ("tasks.py", "send.py")}


def test_the_readme_is_short_and_shows_code_that_runs() -> None:
    text = page("README.md")
    assert len(text.split()) < 700
    orders, workflow = [block.text for block in blocks(text) if block.is_python]
    assert orders in (QUICKSTART / "checkout.py").read_text()
    shown = workflow.replace("\n", "").replace(" ", "")
    assert shown in (QUICKSTART / "workflow.py").read_text().replace(
        'if __name__ == "__main__":', ""
    ).replace("\n", "").replace(" ", "")


def test_the_order_of_the_readme_and_its_task_are_stored_together(
    database_url: str, tmp_path: Path
) -> None:
    script = (
        "import psycopg, checkout\n"
        "with psycopg.connect(checkout.app.database_url) as connection:\n"
        "    connection.execute('CREATE TABLE orders (id integer PRIMARY KEY)')\n"
        "checkout.place_order(17)\n"
        "try:\n    checkout.place_order(17)\nexcept psycopg.errors.UniqueViolation:\n    pass\n"
        "print(len(checkout.app.tasks_where().unwrap().rows))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=QUICKSTART,
        env=environment(HORSIES_DATABASE_URL=database_url),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "1\n", done.stderr


def test_the_workflow_of_the_readme_runs(tmp_path: Path, database_url: str) -> None:
    with running_worker(QUICKSTART, database_url, "workflow.py", tmp_path / "log"):
        done = subprocess.run(
            [sys.executable, "workflow.py"],
            cwd=QUICKSTART,
            env=environment(HORSIES_DATABASE_URL=database_url),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.stdout == "3 pieces, receipt R17\n", done.stderr


@pytest.mark.parametrize("name", ["tutorial.md", "workflow-tutorial.md"])
def test_a_tutorial_can_be_followed(name: str, tmp_path: Path, database_url: str) -> None:
    commands, _ = follow_with_worker(name, tmp_path, database_url)
    scripts = {f"python {one}" for one in files(page(name)) if one != "tasks.py"}
    assert set(commands) == scripts | {"horsies check tasks.py"}
