"""Pure Jinja filters for numbers, durations, times, ids and statuses. They return text, which the
templates escape; times and statuses are HTML elements, which escape their parts here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from typing import Any

from markupsafe import Markup

from horsies.words import NOTHING, age, elapsed, memory
from horsies.workflow.run.draw import SYMBOLS

_STATUS = Markup(
    '<span class="status {kind}"><span class="sign" aria-hidden="true">{sign}</span> {word}</span>'
)
# The statuses of tasks, attempts, runs, nodes, workers, queues and schedules, with their class and
# sign.
_KINDS = {
    "status-ok": "COMPLETED ALIVE SERVED DONE ACTIVE",
    "status-failed": "FAILED WORKER_FAILURE LOST BROKEN OVERDUE UNSERVED REFUSED",
    "status-running": "RUNNING",
    "status-waiting": "PENDING CLAIMED READY ENQUEUED DELAYED",
    "status-paused": "PAUSED HELD SILENT POLLING",
    "status-off": "CANCELLED EXPIRED SKIPPED STOPPED ENDED",
}
_SIGNS = {
    "status-ok": SYMBOLS.statuses["COMPLETED"],
    "status-failed": SYMBOLS.statuses["FAILED"],
    "status-running": SYMBOLS.statuses["RUNNING"],
    "status-waiting": SYMBOLS.statuses["ENQUEUED"],
    "status-paused": SYMBOLS.statuses["PAUSED"],
    "status-off": SYMBOLS.statuses["SKIPPED"],
}
_KIND_OF = {word: kind for kind, words in _KINDS.items() for word in words.split()}
_SIGN_OF = {**SYMBOLS.statuses, "SILENT": "!", "POLLING": "~", "UNSERVED": "!", "OVERDUE": "!"}


def number(value: float | None, at_least: bool = False) -> str:
    """Format a count with separators; small fractions keep a digit, and a lower bound ends with "+"."""
    if value is None:
        return NOTHING
    has_fraction = abs(value) < 10 and round(value, 1) != round(value)
    text = f"{value:,.1f}" if has_fraction else f"{round(value):,}"
    return f"{text}+" if at_least else text


def estimate(value: float | None) -> str:
    """Format an estimate with two digits or three: ≈ 412, ≈ 9,800, ≈ 1.2 M."""
    if value is None:
        return NOTHING
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            digits = ".2g" if value < 10 * size else ",.0f"
            return f"≈ {value / size:{digits}} {unit}"
    return f"≈ {float(f'{value:.2g}'):,.0f}"


def duration(seconds: float | None) -> str:
    """Format a duration with two or three digits: 12ms, 1.4s, 42s, 4m12s, 3h05m, 5d04h."""
    return NOTHING if seconds is None else elapsed(seconds)


def ago(value: datetime | float | None, now: datetime | None = None) -> str:
    """Format an age in seconds; format the age of a time as a ``<time>`` element."""
    if value is None:
        return NOTHING
    if isinstance(value, datetime):
        seconds = ((now or datetime.now(UTC)) - value).total_seconds()
        return _time(value, f"{age(seconds)} ago", " data-ago")
    return f"{age(value)} ago"


def when(value: datetime | None) -> str:
    """Format a time as a ``<time>`` element in UTC; the pages' script turns it into local time."""
    if value is None:
        return NOTHING
    return _time(value, f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}")


def _time(value: datetime, text: str, kind: str = "") -> Markup:
    utc = value.astimezone(UTC)
    iso = utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    title = f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    # The values are numbers, so escaping is unnecessary, and `Markup.format` takes five times as
    # long.
    return Markup(f'<time datetime="{iso}" title="{title}"{kind}>{text}</time>')  # noqa: S704


def short_id(value: str | None) -> str:
    """Shorten a UUID to its two ends: the time at the front and the random part at the back."""
    if value is None:
        return NOTHING
    text = str(value)
    return f"{text[:8]}…{text[-4:]}" if len(text) == 36 else text


def cut(text: str, length: int) -> str:
    """Shorten a text to this length, with an ellipsis at the end."""
    return text if len(text) <= length else text[: length - 1] + "…"


@lru_cache(maxsize=256)
def status(value: str | Enum | None, word: str | None = None) -> str:
    """Format a status as a coloured sign and word; ``word`` replaces the status's name."""
    if value is None:
        return NOTHING
    name = str(value.value if isinstance(value, Enum) else value)
    kind = _KIND_OF.get(name.upper(), "status-waiting")
    sign = _SIGN_OF.get(name.upper(), _SIGNS[kind])
    shown = name.lower().replace("_", " ") if word is None else word
    return _STATUS.format(kind=kind, sign=sign, word=shown)


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "duration": duration,
    "estimate": estimate,
    "memory": memory,
    "number": number,
    "short_id": short_id,
    "status": status,
    "when": when,
}
