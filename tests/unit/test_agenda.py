"""When the worker's loop has something to do."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from horsies.worker.agenda import LOOK_AHEAD_SECONDS, NEVER, Agenda, BurstStep, burst_step

LOOKED_AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def agenda() -> Agenda:
    """An agenda at second 100 that has just claimed nothing, and looked ahead."""
    agenda = Agenda(poll_seconds=5.0)
    agenda.tick(100.0)
    agenda.note_claim(wanted=2, got=0)
    agenda.note_look_ahead(100.0, None, looked_at=LOOKED_AT)
    return agenda


def test_a_fresh_worker_claims_and_looks_ahead_at_once() -> None:
    agenda = Agenda(poll_seconds=5.0)
    assert agenda.may_have_work
    assert agenda.wants_look_ahead(100.0)
    assert agenda.next_at() <= 100.0


def test_an_idle_worker_sleeps_until_its_poll(agenda: Agenda) -> None:
    assert not agenda.may_have_work
    assert agenda.next_at() == 105.0
    agenda.tick(104.9)
    assert agenda.last_look == LOOKED_AT
    assert not agenda.wants_look_ahead(104.9)
    agenda.tick(105.0)
    assert agenda.last_look is None
    assert agenda.poll_at == 110.0


def test_a_poll_that_finds_something_due_leads_to_a_claim(agenda: Agenda) -> None:
    agenda.tick(105.0)
    assert not agenda.may_have_work
    agenda.note_look_ahead(105.0, 0.0, looked_at=LOOKED_AT)
    assert agenda.may_have_work
    assert agenda.last_look == LOOKED_AT


def test_a_poll_also_asks_what_is_due_or_late_even_when_no_child_is_idle(agenda: Agenda) -> None:
    agenda.tick(105.0)
    assert agenda.wants_look_ahead(105.0)


def test_the_next_due_time_bounds_the_sleep(agenda: Agenda) -> None:
    agenda.note_look_ahead(100.0, 1.5)
    assert agenda.next_at() == 101.5
    agenda.tick(101.5)
    assert agenda.may_have_work
    assert agenda.due_at == NEVER


def test_what_is_due_now_is_claimed_at_once(agenda: Agenda) -> None:
    agenda.note_look_ahead(100.0, 0.0)
    assert agenda.may_have_work
    assert agenda.due_at == NEVER


def test_a_due_time_after_the_poll_does_not_lengthen_the_sleep(agenda: Agenda) -> None:
    agenda.note_look_ahead(100.0, 60.0)
    assert agenda.next_at() == 105.0


def test_a_full_claim_means_that_there_may_be_more(agenda: Agenda) -> None:
    agenda.wake()
    agenda.note_claim(wanted=4, got=4)
    assert agenda.may_have_work
    assert not agenda.wants_look_ahead(101.0)


def test_a_short_claim_ends_in_one_look_ahead(agenda: Agenda) -> None:
    agenda.wake()
    agenda.note_claim(wanted=4, got=3)
    assert not agenda.may_have_work
    assert agenda.wants_look_ahead(101.0)
    agenda.note_look_ahead(101.0, None)
    assert not agenda.wants_look_ahead(200.0)


def test_looks_ahead_keep_their_distance(agenda: Agenda) -> None:
    agenda.note_claim(wanted=1, got=0)
    assert not agenda.wants_look_ahead(100.0 + LOOK_AHEAD_SECONDS / 2)
    assert agenda.next_at() == 100.0 + LOOK_AHEAD_SECONDS
    assert agenda.wants_look_ahead(100.0 + LOOK_AHEAD_SECONDS)


def test_a_notification_makes_a_claim_worth_its_while(agenda: Agenda) -> None:
    agenda.wake()
    assert agenda.may_have_work


def test_a_later_claim_outlives_a_look_ahead(agenda: Agenda) -> None:
    agenda.wake_at(103.0)
    agenda.note_look_ahead(101.0, None)
    assert agenda.next_at() == 103.0
    agenda.tick(102.9)
    assert not agenda.may_have_work
    agenda.tick(103.0)
    assert agenda.may_have_work
    assert agenda.next_at() == 105.0


def test_a_slow_look_ahead_is_followed_by_a_rest_of_ten_times_its_length(agenda: Agenda) -> None:
    agenda.note_look_ahead(101.0, None, taken_seconds=0.05)
    agenda.note_claim(wanted=1, got=0)
    assert not agenda.wants_look_ahead(101.4)
    assert agenda.next_at() == pytest.approx(101.5)
    assert agenda.wants_look_ahead(101.51)


@pytest.mark.parametrize(
    ("is_calm", "ended", "looked_after", "step"),
    [
        (False, 0, None, "go_on"),
        (False, 3, 3, "go_on"),
        (True, 3, None, "look_again"),
        (True, 4, 3, "look_again"),
        (True, 3, 3, "stop"),
        (True, 0, 0, "stop"),
    ],
)
def test_a_burst_ends_after_a_look_that_led_to_no_attempt(
    is_calm: bool, ended: int, looked_after: int | None, step: BurstStep
) -> None:
    assert burst_step(is_calm=is_calm, ended=ended, looked_after=looked_after) == step


def test_an_agenda_is_calm_once_it_has_claimed_and_looked_in_vain(agenda: Agenda) -> None:
    assert agenda.is_calm
    agenda.wake_at(110.0)
    assert not agenda.is_calm
    agenda.claim_at = NEVER
    agenda.look_everywhere()
    assert not agenda.is_calm
    assert agenda.last_look is None
    agenda.note_claim(wanted=1, got=0)
    assert not agenda.is_calm
    agenda.note_look_ahead(101.0, 3600.0)
    assert agenda.is_calm
