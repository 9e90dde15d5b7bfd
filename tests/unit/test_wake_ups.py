"""What a woken worker owes: a claim that leaves no task, or to pass the wake-up on."""

from __future__ import annotations

from horsies.worker.agenda import NEVER
from horsies.worker.notifications import PASS_SECONDS, REST_SECONDS, WakeUps


def test_a_wake_up_is_passed_on_a_little_later_unless_it_is_served() -> None:
    wake_ups = WakeUps()
    assert wake_ups.pass_at == NEVER
    wake_ups.note_wake({"a"}, 100.0)
    wake_ups.note_wake({"b"}, 100.002)
    assert (wake_ups.owed, wake_ups.pass_at) == ({"a", "b"}, 100.0 + PASS_SECONDS)
    wake_ups.note_served()
    assert (wake_ups.owed, wake_ups.pass_at) == (set(), NEVER)


def test_news_without_a_wake_up_owes_nothing() -> None:
    wake_ups = WakeUps()
    wake_ups.note_wake((), 100.0)
    assert wake_ups.pass_at == NEVER


def test_while_no_other_worker_waits_wake_ups_are_passed_on_rarely() -> None:
    wake_ups = WakeUps()
    wake_ups.note_wake({"a"}, 100.0)
    wake_ups.note_passed(0, 100.0)
    assert wake_ups.pass_at == NEVER
    wake_ups.note_wake({"a"}, 100.1)
    assert wake_ups.pass_at == 100.0 + REST_SECONDS
    wake_ups.note_passed(2, 101.0)
    wake_ups.note_wake({"a"}, 101.0)
    assert wake_ups.pass_at == 101.0 + PASS_SECONDS


def test_a_worker_that_waits_stores_it_once() -> None:
    wake_ups = WakeUps()
    assert not wake_ups.must_store
    wake_ups.waits = True
    assert wake_ups.must_store
    wake_ups.is_stored = True
    assert not wake_ups.must_store
    wake_ups.note_passed(1, 100.0)
    assert wake_ups.must_store, "the table says that it does not wait"
