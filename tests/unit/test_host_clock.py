"""The comparison of a worker's clock with the database's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from horsies.worker.host_clock import HostClock

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def ahead(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


@pytest.mark.parametrize(("seconds", "words"), [(600, "behind"), (-600, "ahead of")])
def test_a_wrong_clock_is_logged_once_until_it_is_right(
    caplog: pytest.LogCaptureFixture, seconds: float, words: str
) -> None:
    clock, now = HostClock(), NOON.timestamp()
    clock.note(ahead(4.9), now, 0.0)
    assert caplog.messages == []
    for _ in range(2):
        clock.note(ahead(seconds), now, 0.0)
    (message,) = caplog.messages
    assert message.startswith(f"the clock of this host is 10 min {words} the database's, so times")
    assert clock.ahead_seconds == seconds
    clock.note(NOON, now, 0.0)
    clock.note(ahead(seconds), now, 0.0)
    assert len(caplog.messages) == 2


def test_a_difference_of_about_five_seconds_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, now = HostClock(), NOON.timestamp()
    for seconds in (5.1, 4.9, 5.1, 2.6, 5.1):
        clock.note(ahead(seconds), now, 0.0)
    assert len(caplog.messages) == 1


def test_a_slow_answer_is_not_taken_for_a_wrong_clock(caplog: pytest.LogCaptureFixture) -> None:
    HostClock().note(ahead(-20), NOON.timestamp(), 60.0)
    assert caplog.messages == []
