"""Whether the rest of a batch is worth a moment's wait."""

from __future__ import annotations

import pytest

from horsies.worker.agenda import PATIENCE_SECONDS, SHORT_SECONDS, Pace


def test_the_rest_of_a_batch_of_short_tasks_is_waited_for() -> None:
    pace = Pace()
    pace.note_hand_out(["a", "b"], now=10.0)
    pace.note_end("a", 0.0002, now=10.0015)
    wait = pace.linger_seconds(10.0016)
    assert wait > 0.0
    assert pace.linger_seconds(10.0016 + wait / 2) == pytest.approx(wait / 2)
    assert pace.linger_seconds(10.0017 + wait) == 0.0


def test_nobody_waits_long_after_the_last_report() -> None:
    pace = Pace()
    pace.note_hand_out(["a", "b"], now=10.0)
    pace.note_end("a", 0.0002, now=10.0003)
    wait = pace.linger_seconds(10.0004)
    assert 0.0 < wait < PATIENCE_SECONDS / 2
    assert pace.linger_seconds(10.0005 + wait) == 0.0


def test_a_batch_that_is_complete_is_not_waited_for() -> None:
    pace = Pace()
    pace.note_hand_out(["a"], now=10.0)
    pace.note_end("a", 0.0002, now=10.0003)
    assert pace.linger_seconds(10.0003) == 0.0


def test_nobody_waits_longer_than_the_patience_after_the_hand_out() -> None:
    pace = Pace()
    pace.note_hand_out(["a", "b"], now=10.0)
    pace.note_end("a", 0.0002, now=10.0019)
    assert pace.linger_seconds(10.00195) > 0.0
    assert pace.linger_seconds(10.0 + PATIENCE_SECONDS) == 0.0


def test_long_tasks_end_the_waiting_and_short_ones_bring_it_back() -> None:
    pace = Pace()
    for number in range(20):
        pace.note_hand_out([f"long {number}"], now=float(number))
        pace.note_end(f"long {number}", 10 * SHORT_SECONDS, now=number + 0.01)
    pace.note_hand_out(["a", "b", "c"], now=100.0)
    pace.note_end("a", SHORT_SECONDS, now=100.0001)
    assert pace.linger_seconds(100.0002) == 0.0
    for number in range(60):
        pace.note_hand_out([f"short {number}"], now=float(number))
        pace.note_end(f"short {number}", 0.0003, now=number + 0.0003)
    pace.note_hand_out(["a", "b", "c"], now=200.0)
    pace.note_end("a", 0.0003, now=200.0003)
    assert pace.linger_seconds(200.0004) > 0.0


def test_children_out_of_step_are_brought_together_again() -> None:
    """One long task, then two children of which each gets its next task while the other one reports."""
    pace = Pace()
    pace.note_end("the first one", 60.0, now=99.0)
    now = 100.0
    pace.note_hand_out(["0"], now)
    for number in range(1, 50):
        now += 0.001
        pace.note_hand_out([str(number)], now)
        pace.note_end(str(number - 1), 0.0001, now)
    assert pace.linger_seconds(now + 0.0001) > 0.0
