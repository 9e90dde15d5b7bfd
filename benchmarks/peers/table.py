"""Formats figures as text: rates from samples, ratios to Horsies, tables. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.peers.adapter import CRASHING_NUMBER

OURS = "horsies"
NOTHING = "-"


class Column(NamedTuple):
    """A figure, its number of digits, and its workload."""

    figure: str
    digits: int
    workload: str


# The columns of figures by their headings.
COLUMNS: dict[str, Column] = {
    "drain, 2 slots": Column("drain 2", 0, "drain 2"),
    "4 slots": Column("drain 4", 0, "drain 4"),
    "8 slots": Column("drain 8", 0, "drain 8"),
    "result p50, ms": Column("p50", 1, "latency"),
    "p99, ms": Column("p99", 1, "latency"),
    "send/s": Column("send", 0, "sending"),
    "bulk/s": Column("bulk", 0, "sending"),
    "5 ms tasks, part of ideal": Column("naps", 2, "naps"),
    "drain, recycled": Column("recycling", 0, "recycling"),
    "memory, MB": Column("memory", 0, "latency"),
}


@dataclass
class Measured:
    """The results of one run for a peer."""

    facts: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)
    crash: str = ""
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, workload: str, figures: Mapping[str, float | str], failed: str) -> None:
        """Add the figures of one round."""
        for name, figure in figures.items():
            if isinstance(figure, str):
                self.crash = figure
            else:
                self.figures.setdefault(name, []).append(figure)
        if failed:
            self.failed[workload] = failed

    def cell(self, column: Column) -> str:
        """Format a figure, or the reason why it is missing."""
        values = self.figures.get(column.figure, [])
        return cell(values, column.digits) if values else self._failure(column.workload)

    def crash_cell(self) -> str:
        """Format the effect of a crash, or the reason why it is unknown."""
        return self.crash or self._failure("crash")

    def _failure(self, workload: str) -> str:
        reason = self.failed.get(workload, "").replace("|", "/")
        return f"failed: {reason}" if reason else NOTHING


def steady_rate(samples: Sequence[Sequence[float]]) -> float:
    """Return tasks/s between the first sample with 5 % of the tasks done and the last one.

    This excludes the start of the worker. If all tasks ended between two samples, the rate is computed
    from these two samples.
    """
    last_at, last = samples[-1]
    before = [sample for sample in samples if sample[1] < last]
    begun = [sample for sample in before if sample[1] >= last * 0.05]
    first_at, first = begun[0] if begun else before[-1]
    return (last - first) / (last_at - first_at)


def crash_sentence(journal: Sequence[str], state: str, is_alive: bool) -> str:
    """Describe the outcomes of 100 tasks, one of which killed its process."""
    started = [int(line.split()[1]) for line in journal if line.startswith("start")]
    ended = [int(line.split()[1]) for line in journal if line.startswith("end")]
    finished = len(set(ended) - {CRASHING_NUMBER})
    parts = [f"{finished} of 99 others finished"]
    if again := len(started) - len(set(started)) - max(started.count(CRASHING_NUMBER) - 1, 0):
        parts.append(f"{again} of them started twice")
    if not is_alive:
        parts.append("the worker ended")
    runs = started.count(CRASHING_NUMBER)
    times = "once" if runs == 1 else f"{runs} times"
    return f"{', '.join(parts)}; the task itself: started {times}, now {state}"


def cell(values: Sequence[float], digits: int) -> str:
    """Format a median, with its range if there are several values."""
    if not values:
        return NOTHING
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def ratio(values: Sequence[float], ours: Sequence[float]) -> str:
    """Format the ratio of two medians as a multiple of Horsies' figure."""
    if not values or not ours:
        return NOTHING
    return f"{statistics.median(values) / statistics.median(ours):.2f}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plain(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with aligned columns for a terminal."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def figure_rows(
    measured: Mapping[str, Measured], columns: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of the figures."""
    rows = [
        [title(peer, found), *(found.cell(COLUMNS[column]) for column in columns)]
        for peer, found in measured.items()
    ]
    return ["", *columns], rows


def ratio_rows(measured: Mapping[str, Measured]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of the ratios to Horsies."""
    ours = measured[OURS].figures if OURS in measured else {}
    rows = [
        [
            peer,
            *(
                ratio(found.figures.get(column.figure, []), ours.get(column.figure, []))
                for column in COLUMNS.values()
            ),
        ]
        for peer, found in measured.items()
    ]
    return ["", *COLUMNS], rows


def fact_rows(measured: Mapping[str, Measured]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of the properties that figures do not show."""
    rows = [
        [
            peer,
            " and ".join(found.facts["servers"]),
            found.facts["isolates"],
            found.facts["results"],
            found.facts["durable"],
            found.crash_cell(),
        ]
        for peer, found in measured.items()
    ]
    heads = ["", "server", "isolation", "results", "durable", "a task that ends its process"]
    return heads, rows


def setting_rows(measured: Mapping[str, Measured]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and rows of the table of settings."""
    rows = [
        [peer, f"`{choice['setting']}`", _linked(choice)]
        for peer, found in measured.items()
        for choice in found.facts["choices"]
    ]
    return ["", "setting", "reason"], rows


def _linked(choice: Mapping[str, str]) -> str:
    link = choice["link"].removeprefix("docs/")
    return f"[{choice['reason']}]({link})"


def title(peer: str, found: Measured) -> str:
    """Return the name of a peer with its version."""
    release = found.facts.get("version", "")
    return peer if peer.startswith(OURS) else f"{peer} {release}".strip()


def document(
    measured: Mapping[str, Measured], about: str, left_out: Mapping[str, str]
) -> dict[str, str]:
    """Return every region of the pages by name."""
    missing = "".join(f"\nLeft out: {peer}: {why}\n" for peer, why in left_out.items())
    return {
        "figures": f"{about}\n\n{markdown(*figure_rows(measured, list(COLUMNS)))}{missing}",
        "ratios": markdown(*ratio_rows(measured)),
        "facts": markdown(*fact_rows(measured)),
        "settings": markdown(*setting_rows(measured)),
    }


def with_regions(text: str, regions: Mapping[str, str]) -> str:
    """Replace the measured regions of a page; add all regions to a page without any."""
    found = [name for name in regions if f"<!-- measured: {name} -->\n" in text]
    if not found:
        return "\n".join(region(name, regions[name]) for name in regions)
    for name in found:
        before, rest = text.split(f"<!-- measured: {name} -->\n", 1)
        after = rest.split(f"<!-- end measured: {name} -->\n", 1)[1]
        text = before + region(name, regions[name]) + after
    return text


def region(name: str, content: str) -> str:
    """Format a region with its markers."""
    return f"<!-- measured: {name} -->\n\n{content.strip()}\n\n<!-- end measured: {name} -->\n"
