"""`horsies init`: the project that it writes can be checked, tested and run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horsies._version import __version__
from horsies.cli.main import command_line
from tests.support.commands import environment
from tests.support.doc_pages import blocks
from tests.support.wait import wait_until

FILES = {
    *("README.md", "pyproject.toml", "Dockerfile", ".gitignore"),
    *("requirements.txt", "requirements-dev.txt"),
    *("my_shop/__init__.py", "my_shop/__main__.py", "my_shop/app.py", "my_shop/tasks.py"),
    *("my_shop/workflows.py", "tests/conftest.py", "tests/test_tasks.py"),
}


def run(directory: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=directory,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("projects")
    written = run(parent, "horsies", "init", "my-shop")
    assert written.returncode == 0, written.stderr
    assert "horsies worker my_shop.app" in written.stdout
    return parent / "my-shop"


def test_all_files_carry_the_name_of_the_project(project: Path) -> None:
    files = [path for path in project.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    written = {str(path.relative_to(project)) for path in files}
    assert written - {".pytest_cache"} >= FILES
    assert not [path for path in files if "project_name" in path.read_text()]
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert described["name"] == "my_shop"
    wheel = f"./wheels/horsies-{__version__}-py3-none-any.whl"
    assert f"{wheel}[binary]" in (project / "requirements.txt").read_text().splitlines()
    assert f"{wheel}[dev]" in (project / "requirements-dev.txt").read_text().splitlines()


def test_its_tests_pass_without_any_setting(project: Path) -> None:
    done = run(project, "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_the_commands_of_its_readme_run(project: Path, database_url: str) -> None:
    text = (project / "README.md").read_text()
    shown = "".join(block.text for block in blocks(text) if block.language == "console")
    assert "$ horsies worker my_shop.app --with-scheduler\n" in shown
    # A second terminal has neither the environment nor the variable of the first one.
    second = "$ . .venv/bin/activate\n$ export HORSIES_DATABASE_URL=embedded://\n"
    assert f"{second}$ python -m my_shop\n$ pytest\n" in shown
    checked = run(project, "horsies", "check", "my_shop.app", HORSIES_DATABASE_URL=database_url)
    assert checked.stdout.startswith("ok: "), checked.stderr
    log = project / "worker.log"
    command = [sys.executable, "-m", "horsies", "worker", "my_shop.app", "--with-scheduler"]
    env = environment(HORSIES_DATABASE_URL=database_url)
    with log.open("w") as output:
        worker = subprocess.Popen([*command, "-c", "1"], cwd=project, env=env, stderr=output)
    try:
        wait_until(lambda: "listening on" in log.read_text() or worker.poll() is not None, 60)
        sent = run(project, "my_shop", HORSIES_DATABASE_URL=database_url)
    finally:
        worker.terminate()
        assert worker.wait(60) == 0, log.read_text()
    assert sent.stdout == "price of a saddle: 90\nvalue of the stock: 102\n", sent.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("used", "is not empty"),
        ("file", "is a file"),
        # A module of Python, an installed package, and names that a distribution cannot have.
        *(
            (name, "cannot be the name of a package")
            for name in ("queue", "typer", "_shop", "日本")
        ),
    ],
)
def test_a_directory_that_does_not_do_is_refused_in_one_sentence(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    refused = CliRunner().invoke(command_line(["init"]), ["init", str(tmp_path / name)])
    assert refused.exit_code == 1
    (sentence,) = refused.stderr.splitlines()
    assert name in sentence
    assert reason in sentence
    assert {path.name for path in tmp_path.rglob("*")} == {"used", "thesis.txt", "file"}


def test_the_printed_commands_quote_the_directory(tmp_path: Path) -> None:
    written = CliRunner().invoke(command_line(["init"]), ["init", str(tmp_path / "my shop")])
    assert written.exit_code == 0
    assert f"cd '{tmp_path}/my shop'\n" in written.stdout
    assert (tmp_path / "my shop" / "my_shop" / "app.py").exists()
