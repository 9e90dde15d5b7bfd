"""The promises to type checkers, kept: mypy in strict mode and pyright find the same errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

from tests.support.doc_pages import PAGES, blocks, files, page, title

ROOT = Path(__file__).parents[2]
# Pages whose blocks are files that import each other.
WITH_FILES = (
    *("docs/install.md", "docs/tutorial.md", "docs/workflow-tutorial.md", "docs/testing.md"),
)
WRONG = {
    'add.send("x")': "[arg-type]",
    "add.send(1).unwrap().get().ok_value.upper()": "[attr-defined]",
    'app.task("x", timeout_ms="1s")': "[call-overload]",
}


def test_calls_are_checked_and_results_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("\n".join(["from tests.typed.sending import add, app", *WRONG]))
    right = sorted(str(path) for path in (ROOT / "tests" / "typed").glob("*.py"))
    found, trouble, _ = api.run(["--no-error-summary", str(wrong), *right])
    assert trouble == ""
    errors = [line for line in found.splitlines() if ": error: " in line]
    # Nothing in the right files, where each type: ignore stands for an error that was found too.
    # By their names: what mypy remembers from a run before, it tells with the path of then.
    assert [Path(line.split(": error: ")[0]).name for line in errors] == [
        f"{wrong.name}:{number}" for number in range(2, 2 + len(WRONG))
    ]
    assert [line.split()[-1] for line in errors] == list(WRONG.values())


def test_pyright_finds_the_errors_that_mypy_finds() -> None:
    folder = ROOT / "tests" / "typed"
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    command += ["--level", "error", "--outputjson", str(folder)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(checked.stdout)["generalDiagnostics"]
    # It is set to disregard "type: ignore", so that it reports each of these lines by itself.
    ignored = {
        f"{path.name}:{number}"
        for path in folder.glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if path.name != Path(__file__).name and "# type: ignore[" in line
    }
    places = {
        f"{Path(one['file']).name}:{one['range']['start']['line'] + 1}": one["message"]
        for one in found
    }
    assert {place: text for place, text in places.items() if place not in ignored} == {}
    assert ignored - places.keys() == set()


def _strict_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what mypy says about the modules of a folder, which import each other by their names."""
    monkeypatch.chdir(folder)
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    options += ["--cache-dir", str(ROOT / ".mypy_cache")]
    found, trouble, _ = api.run([*options, *sorted(one.name for one in folder.glob("*.py"))])
    return found + trouble


def test_the_examples_of_the_pages_pass_strict_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in PAGES:
        text = "\n".join(block.text for block in blocks(path.read_text("utf-8")) if block.is_run)
        if text and title(path) not in WITH_FILES:
            (tmp_path / f"{path.stem.replace('-', '_')}_page.py").write_text(text)
    assert _strict_errors(tmp_path, monkeypatch) == ""


@pytest.mark.parametrize("name", WITH_FILES)
def test_the_files_of_a_page_pass_strict_checks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file_name, content in files(page(name.removeprefix("docs/"))).items():
        (tmp_path / file_name).write_text(content)
    assert _strict_errors(tmp_path, monkeypatch) == ""
