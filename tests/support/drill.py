"""The table of an on-call drill: the findings after each break, and the seconds until they appear.

`python -m tests.support.drill` runs the drill in a browser and on the command line, and prints one table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

VARIABLE = "HORSIES_TEST_DRILL"
# Read at import, because tests of the command line remove these variables.
ROWS = os.environ.get(VARIABLE)
COLUMNS = {
    "shown": "Where it is shown",
    "seen": "Shown after, s",
    "browser": "Page loaded in, s",
    "command": "Command",
    "answered": "Command answers in, s",
    "live": "Live again after, s",
}


def note(name: str, **facts: str | float) -> None:
    """Print facts about a break, and store them for the table."""
    print(f"\n| {name} | " + " | ".join(f"{key} {_text(value)}" for key, value in facts.items()))
    if ROWS is not None:
        with Path(ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"break": name, **facts}) + "\n")


def table_of(lines: Iterable[str]) -> str:
    """Return the facts as a table in Markdown, one row for each break."""
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        facts = json.loads(line)
        rows.setdefault(facts.pop("break"), {}).update(facts)
    head = ["Break", *COLUMNS.values()]
    body = [
        [name, *(_text(facts.get(key, "")) for key in COLUMNS)]
        for name, facts in sorted(rows.items())
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.1f}"


def codes_of(overview: dict[str, Any]) -> list[str]:
    """Return the codes of the overview's lines, or the error's code without an overview."""
    return [one["code"] for one in overview.get("attention", [overview])]


def main() -> int:
    """Run the drill and print its table; return its exit code."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "rows"
        path.touch()
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-m", "browser", TESTS],
            env=os.environ | {VARIABLE: str(path)},
            stdout=sys.stderr,
            check=False,
        )
        print(table_of(path.read_text("utf-8").splitlines()))
    return ended.returncode


TESTS = "tests/web/test_real_drill.py"

if __name__ == "__main__":
    sys.exit(main())
