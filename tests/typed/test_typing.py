"""The promises to the type checker, kept: every file under tests/typed is checked in strict mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
WRONG = {
    'add.send("x")': "[arg-type]",
    "add.send(1).unwrap().get().ok_value.upper()": "[attr-defined]",
    'app.task("x", good_until=None)': "[arg-type]",
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
    errors = found.splitlines()
    # Nothing in the right files, where each type: ignore stands for an error that was found too.
    # By their names: what mypy remembers from a run before, it tells with the path of then.
    assert [Path(line.split(": error: ")[0]).name for line in errors] == [
        f"{wrong.name}:{number}" for number in range(2, 2 + len(WRONG))
    ]
    assert [line.split()[-1] for line in errors] == list(WRONG.values())
