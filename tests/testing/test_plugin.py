"""The pytest plugin: the project of the documentation runs, and other projects pay nothing for it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from horsies.app import Horsies
from horsies.testing import HorsiesDatabase, plugin
from tests.support import doc_pages
from tests.support.ports import free_port

# The page's own test with a worker, and then a failure.
FAILING = """
import pytest
import test_worker

@pytest.mark.horsies_worker("--async-children", "1")
def test_that_fails(horsies_worker):
    test_worker.test_with_a_worker(horsies_worker)
    assert horsies_worker.pid == "reached"
"""
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def test_the_project_of_the_page_runs_and_a_failed_test_shows_its_worker(
    tmp_path: Path, server_url: str
) -> None:
    files = doc_pages.files(doc_pages.page("testing.md"))
    for name, text in {**files, "test_failing.py": FAILING}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "horsies.testing.plugin"]
    done = subprocess.run(
        [*command, "--ignore=test_worker.py"],
        cwd=tmp_path,
        env={**os.environ, **ALONE, "HORSIES_TEST_DATABASE_URL": server_url},
        capture_output=True,
        text=True,
        timeout=110,
    )
    expected = sum(text.count("\ndef test_") for text in files.values()) - 1
    assert f"1 failed, {expected} passed" in done.stdout, done.stdout + done.stderr
    assert '== "reached"' in done.stdout
    _, title, log = done.stdout.partition("log of horsies worker")
    assert title
    assert "horsies.app" in log


def test_the_plugin_imports_nothing_of_the_engine() -> None:
    script = (
        "import sys, horsies.testing.plugin; print(*(m for m in sys.modules if 'horsies' in m))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=True
    )
    assert set(done.stdout.split()) == {
        *("horsies", "horsies._version", "horsies.current_task", "horsies.encryption"),
        *("horsies.errors", "horsies.testing", "horsies.testing.plugin"),
    }


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    (found,) = entry_points(group="pytest11", name="horsies")
    assert found.load() is plugin


def test_a_project_that_names_no_application_gets_the_line_to_write(
    request: pytest.FixtureRequest,
) -> None:
    with pytest.raises(pytest.UsageError, match=r'horsies_app = "package\.module:app"'):
        request.getfixturevalue("horsies_app")


SHOP = "from horsies import Horsies\napp = Horsies('postgresql://localhost/shop')\n"
NEEDS_DATABASE = "def test_database(horsies_database): ..."


def test_a_server_out_of_reach_gets_one_sentence_without_its_password(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "test_shop.py").write_text(NEEDS_DATABASE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nhorsies_app = shop:app\npythonpath = .\n")
    server = f"postgresql://app:hunter2@127.0.0.1:{free_port()}/shop"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--tb=long", "-p", "horsies.testing.plugin"],
        cwd=tmp_path,
        env={**os.environ, **ALONE, "HORSIES_TEST_DATABASE_URL": server},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert "The server of HORSIES_TEST_DATABASE_URL cannot be used" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr


def test_the_fixture_of_a_failed_test_shows_no_password(app: Horsies) -> None:
    database = HorsiesDatabase(app, "postgresql://app:hunter2@db.example/shop")
    assert "hunter2" not in repr(database)
