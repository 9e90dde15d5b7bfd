"""Figures as text: rates from samples, ratios to Horsies, tables. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.adapter import CRASHING_NUMBER

OURS = "horsies"
NOTHING = "-"
# Head of a column: its figure, its number of digits.
COLUMNS: dict[str, tuple[str, int]] = {
    "drain, 2 slots": ("drain 2", 0),
    "4 slots": ("drain 4", 0),
    "8 slots": ("drain 8", 0),
    "result p50, ms": ("p50", 1),
    "p99, ms": ("p99", 1),
    "send/s": ("send", 0),
    "bulk/s": ("bulk", 0),
    "5 ms tasks, part of ideal": ("naps", 2),
    "drain, recycled": ("recycling", 0),
    "memory, MB": ("memory", 0),
}
SHORT = ("drain, 2 slots", "4 slots", "8 slots", "result p50, ms", "bulk/s", "memory, MB")


@dataclass
class Measured:
    """What one run found out about a peer."""

    facts: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, list[float]] = field(default_factory=dict)
    crash: str = ""


def steady_rate(samples: Sequence[Sequence[float]]) -> float:
    """Return tasks/s between the first sample with 5 % of the tasks done and the last one.

    This leaves the start of the worker out. If all tasks ended between two samples, it is their rate
    between these.
    """
    last_at, last = samples[-1]
    before = [sample for sample in samples if sample[1] < last]
    begun = [sample for sample in before if sample[1] >= last * 0.05]
    first_at, first = begun[0] if begun else before[-1]
    return (last - first) / (last_at - first_at)


def crash_sentence(journal: Sequence[str], state: str, is_alive: bool) -> str:
    """Say what became of 100 tasks of which one ended its process."""
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
    """Write a median, and its range where there are several values."""
    if not values:
        return NOTHING
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def ratio(values: Sequence[float], ours: Sequence[float]) -> str:
    """Write the ratio of two medians, as a multiple of ours."""
    if not values or not ours:
        return NOTHING
    return f"{statistics.median(values) / statistics.median(ours):.2f}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plain(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table with aligned columns for a terminal."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def figure_rows(
    measured: Mapping[str, Measured], columns: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the figures."""
    rows = [
        [title(peer, found), *(cell(found.figures.get(name, []), digits) for name, digits in picks)]
        for picks in [[COLUMNS[column] for column in columns]]
        for peer, found in measured.items()
    ]
    return ["", *columns], rows


def ratio_rows(measured: Mapping[str, Measured]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the ratios to Horsies."""
    ours = measured[OURS].figures if OURS in measured else {}
    rows = [
        [
            peer,
            *(
                ratio(found.figures.get(name, []), ours.get(name, []))
                for name, _ in COLUMNS.values()
            ),
        ]
        for peer, found in measured.items()
    ]
    return ["", *COLUMNS], rows


def fact_rows(measured: Mapping[str, Measured]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the properties that figures do not show."""
    rows = [
        [
            peer,
            " and ".join(found.facts["servers"]),
            found.facts["isolates"],
            found.facts["results"],
            found.facts["durable"],
            found.crash or NOTHING,
        ]
        for peer, found in measured.items()
    ]
    heads = ["", "server", "isolation", "results", "durable", "a task that ends its process"]
    return heads, rows


def setting_rows(measured: Mapping[str, Measured]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the settings."""
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
    measured: Mapping[str, Measured], about: str, failed: Mapping[str, str]
) -> dict[str, str]:
    """Return every region of the pages by name."""
    missing = "".join(f"\nFailed: {step}: {why}\n" for step, why in failed.items())
    return {
        "figures": f"{about}\n\n{markdown(*figure_rows(measured, list(COLUMNS)))}{missing}",
        "ratios": markdown(*ratio_rows(measured)),
        "facts": markdown(*fact_rows(measured)),
        "settings": markdown(*setting_rows(measured)),
        "short": f"{markdown(*figure_rows(measured, SHORT))}\n{about}\n",
    }


def with_regions(text: str, regions: Mapping[str, str]) -> str:
    """Replace the measured regions of a page; a page without any gets all of them."""
    found = [name for name in regions if f"<!-- measured: {name} -->\n" in text]
    if not found:
        return "\n".join(region(name, regions[name]) for name in regions)
    for name in found:
        before, rest = text.split(f"<!-- measured: {name} -->\n", 1)
        after = rest.split(f"<!-- end measured: {name} -->\n", 1)[1]
        text = before + region(name, regions[name]) + after
    return text


def region(name: str, content: str) -> str:
    """Write a region with its markers."""
    return f"<!-- measured: {name} -->\n\n{content.strip()}\n\n<!-- end measured: {name} -->\n"
