"""The life of a task as a drawing, and tracebacks as frames: pure functions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from xml.etree import ElementTree

import pytest

from horsies.db.statements.monitor import TaskDetail
from horsies.db.statements.tasks import TaskAttemptInfo
from horsies.states import TaskAttemptOutcome
from horsies.web.task_life import draw_life, life_of
from horsies.web.tracebacks import Folded, Frame, Text, read_traceback

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def task(status: str, age: float, **columns: Any) -> TaskDetail:
    empty = dict.fromkeys(TaskDetail._fields)
    given = {"sent_at": START, "created_at": START, "enqueued_at": START, "age_seconds": age}
    return TaskDetail(**{**empty, **given, "status": status, **columns})


def attempt(number: int, begin: float, end: float, **columns: Any) -> TaskAttemptInfo:
    given: dict[str, Any] = {
        "outcome": TaskAttemptOutcome.FAILED,
        "will_retry": True,
        "error_code": "SLOW",
        **dict.fromkeys(("error_message", "failed_reason", "worker_id", "worker_process_name")),
        "worker_hostname": "vm-1",
        "worker_pid": 7,
        **columns,
    }
    return TaskAttemptInfo("id", number, started_at=at(begin), finished_at=at(end), **given)


def kinds(detail: TaskDetail, *attempts: TaskAttemptInfo) -> list[tuple[str, float, str]]:
    life = life_of(detail, attempts)
    return [(one.kind, round(one.seconds, 3), " ".join(one.notes[:1])) for one in life]


def test_waits_and_attempts_follow_each_other() -> None:
    found = kinds(task("RUNNING", 50, started_at=at(45)), attempt(2, 31, 32), attempt(1, 2, 2.5))
    assert found == [
        ("wait", 2, ""),
        ("run", 0.5, "SLOW"),
        ("wait", 28.5, ""),
        ("run", 1, "SLOW"),
        ("wait", 13, ""),
        ("run", 5, "running"),
    ]


@pytest.mark.parametrize(
    ("detail", "kind", "seconds", "note"),
    [
        (task("PENDING", 10), "wait", 10, "waiting"),
        (task("PENDING", 10, enqueued_at=at(70)), "wait", 60, "waiting"),
        (task("PENDING", 10, enqueued_at=datetime(9999, 12, 31, tzinfo=UTC)), "wait", 0, "waiting"),
        (task("CLAIMED", 10, claimed_at=at(0)), "wait", 10, "claimed"),
        (task("CANCELLED", 10, failed_at=at(4)), "wait", 4, "cancelled"),
        (task("EXPIRED", 10, failed_at=at(4)), "wait", 4, "expired"),
    ],
)
def test_a_life_without_attempts(detail: TaskDetail, kind: str, seconds: float, note: str) -> None:
    assert kinds(detail) == [(kind, seconds, note)]


def test_an_attempt_that_was_cancelled_ends_the_life() -> None:
    cancelled = attempt(1, 1, 4, error_code="TASK_CANCELLED", will_retry=False)
    life = life_of(task("CANCELLED", 10, failed_at=at(4)), [cancelled])
    assert [(one.kind, one.status) for one in life] == [
        ("wait", "status-waiting"),
        ("run", "status-off"),
    ]


def test_a_long_life_is_folded_in_the_middle() -> None:
    attempts = [attempt(number, number * 10, number * 10 + 1) for number in range(1, 41)]
    life = life_of(task("FAILED", 500), attempts)
    assert sum(one.kind == "run" for one in life) == 10
    (fold,) = (one for one in life if one.kind == "fold")
    assert fold.notes == ("30 attempts",)
    assert len(draw_life(life)) < 10_000


def test_the_drawing_is_valid_escaped_and_does_not_overlap() -> None:
    hostile = '"><script>&\x00\u202e'
    attempts = [
        attempt(1, 2, 3, worker_hostname=hostile, error_code=hostile),
        attempt(2, 30, 30.1, outcome=TaskAttemptOutcome.COMPLETED, will_retry=False),
    ]
    root = ElementTree.fromstring(draw_life(life_of(task("COMPLETED", 40), attempts)))
    runs = [one for one in root if one.get("class", "").startswith("life-run")]
    edges = [(float(run.attrib["x"]), float(run.attrib["width"])) for run in runs]
    assert len(edges) == 2
    assert edges[0][0] + edges[0][1] < edges[1][0]
    assert edges[1][0] + edges[1][1] < float(root.attrib["width"])
    assert "script" not in {element.tag for element in root.iter()}


TRACEBACK = """Traceback (most recent call last):
  File "/app/shop.py", line 3, in charge
    pay(
        order)
  File "/usr/lib/python3.12/asyncio/runners.py", line 9, in run
    return 1
  File "/app/.venv/lib/python3.12/site-packages/x.py", line 10, in y
    ~~~^^^
  File "/app/pay.py", line 7, in pay
    raise Refused(card)
shop.Refused: 4111
second line of the message

The above exception was the direct cause of the following exception:

  File "<string>", line 1
"""


def test_frames_of_libraries_are_folded() -> None:
    parts = read_traceback(TRACEBACK, with_messages=True)
    assert [type(part) for part in parts] == [Text, Frame, Folded, Frame, Text, Text, Text, Frame]
    first, folded = parts[1], parts[2]
    assert isinstance(first, Frame)
    assert isinstance(folded, Folded)
    assert (first.file, first.line, first.function) == ("/app/shop.py", 3, "charge")
    assert first.source == ["pay(", "    order)"]
    assert [frame.line for frame in folded.frames] == [9, 10]


def test_messages_need_the_right_to_see_them() -> None:
    parts = read_traceback(TRACEBACK, with_messages=False)
    assert [part.text for part in parts if isinstance(part, Text)] == [
        "Traceback (most recent call last):"
    ]
    assert "4111" not in str(parts)


@pytest.mark.parametrize("text", ["", "\n\n", "  File", "x" * 100_000, '  File "a", line 9' * 9])
def test_any_text_is_read(text: str) -> None:
    assert len(read_traceback(text, with_messages=True)) <= 1
