"""Stores the measured results on disk, so that a stopped run can be continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.peers.bench import Sizes


class OtherSizesError(Exception):
    """The results on disk were measured with other sizes."""


@dataclass(frozen=True)
class Result:
    """One workload of one peer in one round: its figures, or the reason of its failure."""

    round_number: int
    peer: str
    workload: str
    figures: dict[str, float | str]
    failed: str = ""
    was_busy: bool = False

    @property
    def key(self) -> tuple[int, str, str]:
        """Identify the measurement."""
        return self.round_number, self.peer, self.workload


@dataclass
class Results:
    """The results of a run, written to a file one by one: a line with the sizes, then a line per result."""

    path: Path
    sizes: Sizes
    _by_key: dict[tuple[int, str, str], Result] = field(default_factory=dict)

    def begin(self) -> None:
        """Delete earlier results."""
        self.path.write_text(json.dumps(asdict(self.sizes)) + "\n", "utf-8")

    def resume(self) -> None:
        """Read earlier results, without failed workloads, which are repeated."""
        if not self.path.exists():
            return self.begin()
        sizes, *lines = self.path.read_text("utf-8").splitlines()
        if json.loads(sizes) != asdict(self.sizes):
            raise OtherSizesError(
                f"The results in {self.path} were measured with other sizes; run without RESUME."
            )
        found = [Result(**json.loads(line)) for line in lines]
        self._by_key = {result.key: result for result in found if not result.failed}
        return None

    def add(self, result: Result) -> None:
        """Keep a result."""
        self._by_key[result.key] = result
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def __contains__(self, key: tuple[int, str, str]) -> bool:
        """Return whether a measurement is stored."""
        return key in self._by_key

    def __iter__(self) -> Iterator[Result]:
        """Yield every result."""
        return iter(self._by_key.values())
