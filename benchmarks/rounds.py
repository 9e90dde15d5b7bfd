"""Rounds: measures every variant in turn on an idle machine, and prints medians with their range."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.machine import MACHINE

T = TypeVar("T")

REPOSITORY = Path(__file__).parents[1]


def begin_round() -> None:
    """Wait until no other process uses the machine."""
    MACHINE.wait_until_idle()


def heading(text: str) -> None:
    """Print the title of a table, marked if one of its rounds began on a busy machine."""
    print(f"\n{text}{MACHINE.take_mark()}")


def alternate(variants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every variant once per round; rotate the order, so that no variant is always first."""
    names = list(variants)
    found: dict[str, list[T]] = {name: [] for name in names}
    for done in range(rounds):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(variants[name]())
    return found


def median(runs: Sequence[Mapping[str, float]], metric: str) -> float:
    """Return the median of a metric over several rounds."""
    return statistics.median(run[metric] for run in runs)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Format a median with its range."""
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def ratios(
    runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], metric: str
) -> list[float]:
    """Return the ratio of each round, which load during the whole round does not change."""
    return [one[metric] / other[metric] for one, other in zip(runs, base, strict=True)]


@dataclass(frozen=True, slots=True)
class Checkout:
    """The code to measure, identified by the interpreter for which it is installed, and its own
    database.
    """

    url: str
    python: str = sys.executable

    @classmethod
    def at(cls, path: Path, url: str) -> Checkout:
        """Return the checkout in this folder, with the interpreter of its virtual environment."""
        python = path / ".venv" / "bin" / "python"
        if not python.exists():
            raise FileNotFoundError(
                f"{path} has no .venv/bin/python; run `make .venv/.ready` there."
            )
        return cls(url, str(python))

    def measure(self, figure: str, **arguments: Any) -> dict[str, float]:
        """Measure a figure of ``benchmarks.figures`` once, in a separate process."""
        begin_round()
        command = [self.python, "-m", "benchmarks.figures", figure, json.dumps(arguments)]
        environment = {**os.environ, "HORSIES_DATABASE_URL": self.url}
        answer = subprocess.run(
            command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        measured: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
        return measured

    @property
    def has_windows(self) -> bool:
        """Return whether a child of this code's worker can hold several tasks."""
        return _has_window_flag(self.python)


@cache
def _has_window_flag(python: str) -> bool:
    command = [python, "-m", "horsies", "worker", "--help"]
    environment = {**os.environ, "COLUMNS": "200"}
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return "--window" in answer.stdout
