"""How far a stop has come, and what follows from it."""

from __future__ import annotations

from horsies.worker.agenda import NEVER
from horsies.worker.shutdown import RELEASE_PATIENCE_SECONDS, Farewell


def begun(grace_seconds: float | None, requests: int = 1) -> Farewell:
    farewell = Farewell(grace_seconds)
    for _ in range(requests):
        farewell.ask()
    assert farewell.begin(100.0)
    return farewell


def test_nobody_asked() -> None:
    farewell = Farewell(5.0)
    assert not farewell.is_asked
    assert not farewell.wants_interruption(1e9)
    assert farewell.next_at() == farewell.release_ends_at() == NEVER


def test_a_stop_begins_once() -> None:
    farewell = begun(None)
    assert farewell.is_asked
    assert not farewell.begin(101.0)


def test_without_a_grace_period_what_runs_may_take_its_time() -> None:
    farewell = begun(None)
    assert farewell.next_at() == NEVER
    assert not farewell.wants_interruption(1e9)


def test_the_end_of_the_grace_period_interrupts_once() -> None:
    farewell = begun(5.0)
    assert farewell.next_at() == 105.0
    assert not farewell.wants_interruption(104.9)
    assert farewell.wants_interruption(105.0)
    farewell.note_interruption(2)
    assert farewell.has_interrupted
    assert farewell.next_at() == NEVER
    assert not farewell.wants_interruption(200.0)


def test_a_grace_period_that_met_nothing_interrupted_nothing() -> None:
    farewell = begun(5.0)
    farewell.note_interruption(0)
    assert not farewell.has_interrupted
    assert not farewell.wants_interruption(200.0)


def test_a_second_request_interrupts_at_once_and_a_third_leaves() -> None:
    farewell = begun(None, requests=2)
    assert farewell.wants_interruption(100.0)
    assert not farewell.is_immediate
    farewell.ask()
    assert farewell.is_immediate


def test_a_lost_database_is_waited_for_a_while_unless_somebody_presses() -> None:
    assert begun(None).release_ends_at() == 100.0 + RELEASE_PATIENCE_SECONDS
    assert begun(None, requests=2).release_ends_at() == 100.0
