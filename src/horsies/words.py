"""Formats durations, sizes, counts, times and names for logs, pages and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
_KILOBYTE, _MEGABYTE, _GIGABYTE = 1024, 1024**2, 1024**3
NOTHING = "-"


def elapsed(seconds: float) -> str:
    """Format a duration with two or three digits: 0.4ms, 12ms, 1.4s, 42s, 4m12s, 3h05m, 5d04h."""
    seconds = max(seconds, 0.0)
    if 0 < seconds < 0.00095:
        return f"{max(seconds * 1000, 0.1):.1f}ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"


def age(seconds: float | None) -> str:
    """Format a duration in whole seconds or the two largest units: 4s, 4m12s, 3h05m, 5d04h."""
    if seconds is None:
        return NOTHING
    return f"{max(int(seconds), 0)}s" if seconds < _MINUTE else elapsed(seconds)


def lasting(seconds: float) -> str:
    """Format a duration for a sentence: 0.2 s, 12 s, 4 min, 3 h 5 min, 5 d 4 h, 7 d."""
    seconds = max(seconds, 0.0)
    if seconds < 1:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min"
    large, unit, small, rest = (
        (_HOUR, "h", _MINUTE, "min") if whole < _DAY else (_DAY, "d", _HOUR, "h")
    )
    remainder = whole % large // small
    return f"{whole // large} {unit}" + (f" {remainder} {rest}" if remainder else "")


def size(count: float) -> str:
    """Format a byte count: 12 KB, 412 MB, 1.3 GB."""
    if count < _MEGABYTE:
        return f"{count / _KILOBYTE:.0f} KB"
    if count < 1000 * _MEGABYTE:
        return f"{count / _MEGABYTE:.0f} MB"
    return f"{count / _GIGABYTE:.1f} GB"


def memory(megabytes: float | None) -> str:
    """Format an amount of memory in megabytes: 412 MB, 1.3 GB."""
    return NOTHING if megabytes is None else size(megabytes * _MEGABYTE)


def megabytes(number: float) -> str:
    """Format megabytes to compare them with a setting in megabytes: 412 MB, 1,340 MB."""
    return f"{number:,.0f} MB"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 task, 1,187 tasks."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Sequence[str], most: int = 10) -> str:
    """Join names for a sentence, with a limit on their number: a, b, c, and 7 more."""
    rest = f", and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def timestamp(value: datetime | None) -> str | None:
    """Format a time in UTC to the millisecond."""
    if value is None:
        return None
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def first_sentence(text: str) -> str:
    """Return the first sentence of a message without its full stop, to use it inside another sentence."""
    return text.partition(". ")[0].rstrip(".")
