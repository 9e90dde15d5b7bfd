"""The promises to type checkers, kept: mypy in strict mode and pyright find the same errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
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
