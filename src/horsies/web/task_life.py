"""Pure functions that draw one task's life as SVG: its send, waits and attempts. All text is escaped.
Lengths grow with the logarithm of the time, so that attempts of milliseconds stay visible next to a wait
of an hour.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from markupsafe import Markup

from horsies.db.statements.monitor import TaskDetail
from horsies.db.statements.tasks import TaskAttemptInfo
from horsies.error_codes import OutcomeCode
from horsies.states import TaskStatus
from horsies.web.masking import visible
from horsies.web.words import cut, duration

Kind = Literal["wait", "run", "fold"]

HEIGHT = 76
# The maximum number of attempts to draw; of more attempts, only the first and the last are drawn.
ATTEMPTS_FIRST, ATTEMPTS_LAST = 3, 7

_LINE = 30
_MARGIN = 10
_TEXT_MAX = 22
_CHARACTER = 7
_PARKED_YEAR = 9999  # The year in the due time of tasks that wait for an event.

_SVG = Markup(
    '<svg class="life" role="img" aria-label="{label}" width="{width:.0f}" height="{height}" '
    'viewBox="0 0 {width:.0f} {height}"><title>{label}</title>{parts}</svg>'
)
_WAIT = Markup('<line class="life-wait" x1="{x:.0f}" y1="{y}" x2="{end:.0f}" y2="{y}"/>')
_RUN = Markup(
    '<rect class="life-run {status}" x="{x:.0f}" y="{y}" width="{width:.0f}" height="16" rx="3">'
    "<title>{title}</title></rect>"
)
_DOT = Markup('<circle class="life-sent" cx="{x:.0f}" cy="{y}" r="4"/>')
_TEXT = Markup('<text class="{kind}" x="{x:.0f}" y="{y}" text-anchor="{anchor}">{text}</text>')


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a task's life. ``notes`` are the lines below it; ``status`` is the CSS class of a
    status.
    """

    kind: Kind
    seconds: float
    label: str
    notes: tuple[str, ...] = ()
    status: str = "status-waiting"


def life_of(task: TaskDetail, attempts: Sequence[TaskAttemptInfo]) -> list[Stretch]:
    """Return the stretches of a task from its send to its end, or until now while it is unfinished."""
    at = task.sent_at or task.created_at
    now = task.created_at + timedelta(seconds=task.age_seconds)
    found: list[Stretch] = []
    for attempt in sorted(attempts, key=lambda one: one.attempt):
        started = attempt.started_at or attempt.finished_at
        found += _wait(at, started)
        found.append(_attempt(attempt, started))
        at = attempt.finished_at
    if not found or found[-1].status != "status-off":  # A cancelled attempt has no successor.
        found += _open_end(task, at, now)
    return _folded(found)


def _attempt(attempt: TaskAttemptInfo, started: datetime) -> Stretch:
    seconds = (attempt.finished_at - started).total_seconds()
    is_done = attempt.outcome == "COMPLETED"
    code = "done" if is_done else attempt.error_code or attempt.outcome.lower()
    notes = (code, _place(attempt.worker_hostname, attempt.worker_pid))
    ends = {"done": "status-ok", OutcomeCode.TASK_CANCELLED.value: "status-off"}
    status = ends.get(code, "status-failed")
    return Stretch("run", seconds, duration(max(seconds, 0)), notes, status)


def _open_end(task: TaskDetail, at: datetime, now: datetime) -> Iterator[Stretch]:
    """Yield the current attempt, the current wait, or an end without an attempt."""
    place = _place(task.worker_hostname, task.worker_pid)
    match TaskStatus(task.status):
        case TaskStatus.RUNNING if task.started_at is not None:
            yield from _wait(at, task.started_at)
            seconds = (now - task.started_at).total_seconds()
            label = duration(max(seconds, 0))
            yield Stretch("run", seconds, label, ("running", place), "status-running")
        case TaskStatus.CLAIMED if task.claimed_at is not None:
            yield from _wait(at, task.claimed_at)
            seconds = (now - task.claimed_at).total_seconds()
            yield Stretch("wait", seconds, duration(max(seconds, 0)), ("claimed", place))
        case TaskStatus.PENDING if task.enqueued_at > now:
            is_parked = task.enqueued_at.year >= _PARKED_YEAR
            seconds = 0.0 if is_parked else (task.enqueued_at - now).total_seconds()
            label = "until an event" if is_parked else f"due in {duration(seconds)}"
            yield Stretch("wait", seconds, label, ("waiting",))
        case TaskStatus.PENDING:
            seconds = (now - max(at, task.enqueued_at)).total_seconds()
            yield Stretch("wait", seconds, f"{duration(max(seconds, 0))} so far", ("waiting",))
        case TaskStatus.CANCELLED | TaskStatus.EXPIRED:
            ended = task.failed_at or task.completed_at or at
            yield from _wait(at, ended, (task.status.lower(),), "status-off")
        case _:
            return


def _wait(
    begin: datetime, end: datetime, notes: tuple[str, ...] = (), status: str = "status-waiting"
) -> Iterator[Stretch]:
    seconds = max((end - begin).total_seconds(), 0.0)
    if seconds >= 0.0005 or notes:
        yield Stretch("wait", seconds, duration(seconds), notes, status)


def _place(hostname: str | None, pid: int | None) -> str:
    return "" if hostname is None else hostname if pid is None else f"{hostname} pid {pid}"


def _folded(stretches: list[Stretch]) -> list[Stretch]:
    """Replace the middle of a long life with one stretch."""
    runs = [place for place, one in enumerate(stretches) if one.kind == "run"]
    if len(runs) <= ATTEMPTS_FIRST + ATTEMPTS_LAST + 1:
        return stretches
    begin, end = runs[ATTEMPTS_FIRST], runs[-ATTEMPTS_LAST]
    hidden = stretches[begin:end]
    count = sum(one.kind == "run" for one in hidden)
    seconds = sum(one.seconds for one in hidden)
    fold = Stretch("fold", seconds, duration(seconds), (f"{count} attempts",))
    return [*stretches[:begin], fold, *stretches[end:]]


def draw_life(stretches: Sequence[Stretch]) -> Markup:
    """Draw the stretches from left to right, starting with the send."""
    x = float(_MARGIN)
    parts = [
        _DOT.format(x=x, y=_LINE),
        _TEXT.format(kind="life-note", x=x - 4, y=_LINE + 22, anchor="start", text="sent"),
    ]
    x += 26
    for stretch in stretches:
        width = _width(stretch)
        parts += _drawn(stretch, x, width)
        x += width
    return _SVG.format(
        label=_described(stretches), width=x + _MARGIN, height=HEIGHT, parts=Markup("").join(parts)
    )


def _drawn(stretch: Stretch, x: float, width: float) -> Iterator[Markup]:
    middle = x + width / 2
    notes = [_cut(note) for note in stretch.notes if note]
    if stretch.kind == "run":
        title = visible(" ".join([stretch.label, *stretch.notes]))
        yield _RUN.format(status=stretch.status, x=x, y=_LINE - 8, width=width, title=title)
    else:
        yield _WAIT.format(x=x, y=_LINE, end=x + width)
    yield _TEXT.format(
        kind="life-label", x=middle, y=_LINE - 14, anchor="middle", text=_cut(stretch.label)
    )
    for row, note in enumerate(notes):
        kind = "life-code" if row == 0 and stretch.kind == "run" else "life-note"
        yield _TEXT.format(kind=kind, x=middle, y=_LINE + 22 + row * 15, anchor="middle", text=note)


def _width(stretch: Stretch) -> float:
    longest = max(len(_cut(text)) for text in ("", stretch.label, *stretch.notes))
    by_time = 24 + 16 * math.log10(1 + max(stretch.seconds, 0) * 1000)
    return max(by_time, longest * _CHARACTER + 14)


def _cut(text: str) -> str:
    return cut(visible(text).replace("\n", " "), _TEXT_MAX)


def _described(stretches: Sequence[Stretch]) -> str:
    verbs = {"wait": "waited", "run": "ran", "fold": "then"}
    parts = [
        visible(" ".join(part for part in (verbs[one.kind], one.label, *one.notes) if part))
        for one in stretches
    ]
    return "; ".join(["Life of the task: sent", *parts])
