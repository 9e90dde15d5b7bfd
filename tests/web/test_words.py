"""Numbers, durations, times, ids and statuses as the pages show them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from horsies.monitor.overview import WorkerHealth
from horsies.states import TaskAttemptOutcome, TaskStatus, WorkflowStatus, WorkflowTaskStatus
from horsies.web import words

AT = datetime(2026, 11, 16, 14, 10, 22, 123_456, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (1_204, "1,204"),
        (0.25, "0.2"),
        (9.96, "10"),
        (31.4, "31"),
        (2.0, "2"),
    ],
)
def test_numbers_have_separators_and_few_digits(value: float | None, text: str) -> None:
    assert words.number(value) == text


def test_a_lower_bound_and_an_estimate_are_marked() -> None:
    assert words.number(10_000, at_least=True) == "10,000+"
    texts = [words.estimate(value) for value in (None, 412, 9_813, 1_234_567, 24_000_000, 3.1e9)]
    assert texts == ["-", "≈ 410", "≈ 9,800", "≈ 1.2 M", "≈ 24 M", "≈ 3.1 G"]


def test_durations_and_ages_use_the_units_of_the_commands() -> None:
    assert [words.duration(value) for value in (None, 0.0, 0.0004, 0.18, 1.9, 252.0)] == [
        "-",
        "0ms",
        "0.4ms",
        "180ms",
        "1.9s",
        "4m12s",
    ]
    assert [words.ago(value) for value in (None, 0.4, 252.0)] == ["-", "0s ago", "4m12s ago"]


def test_a_time_is_an_element_in_utc() -> None:
    east = AT.astimezone(timezone(timedelta(hours=5)))
    assert words.when(east) == (
        '<time datetime="2026-11-16T14:10:22.123Z" title="2026-11-16 14:10:22 UTC">'
        "2026-11-16 14:10:22</time>"
    )
    assert words.when(None) == "-"
    aged = words.ago(AT, now=AT + timedelta(minutes=41))
    assert aged.endswith(" data-ago>41m00s ago</time>")


def test_an_id_is_shortened_to_its_ends() -> None:
    assert words.short_id("01a1dd43-0000-7000-8000-000000007e51") == "01a1dd43…7e51"
    assert [words.short_id(value) for value in ("worker-3", None)] == ["worker-3", "-"]


@pytest.mark.parametrize(
    "status",
    [*TaskStatus, *TaskAttemptOutcome, *WorkflowStatus, *WorkflowTaskStatus, *WorkerHealth],
)
def test_every_status_has_a_kind_of_its_own_choice(status: str) -> None:
    assert status.upper() in " ".join(words._KINDS.values()).split()


def test_a_status_is_sign_word_and_class() -> None:
    assert words.status(TaskStatus.FAILED) == (
        '<span class="status status-failed"><span class="sign" aria-hidden="true">✗</span> failed</span>'
    )
    assert "worker failure" in words.status("WORKER_FAILURE")
    assert words.status("unserved", "no worker").endswith("> no worker</span>")


def test_a_hostile_status_is_escaped() -> None:
    shown = words.status("<script>")
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
