"""Shutdown: its stages, and when each begins."""

from __future__ import annotations

from horsies.worker.agenda import NEVER, RELEASE_PATIENCE_SECONDS, Shutdown


def begun(grace_seconds: float | None, requests: int = 1) -> Shutdown:
    shutdown = Shutdown(grace_seconds)
    for _ in range(requests):
        shutdown.request()
    assert shutdown.begin(100.0)
    return shutdown


def test_nobody_asked() -> None:
    shutdown = Shutdown(5.0)
    assert not shutdown.is_requested
    assert not shutdown.wants_interruption(1e9)
    assert shutdown.next_at() == shutdown.release_ends_at() == NEVER


def test_a_stop_begins_once() -> None:
    shutdown = begun(None)
    assert shutdown.is_requested
    assert not shutdown.begin(101.0)


def test_without_a_grace_period_what_runs_may_take_its_time() -> None:
    shutdown = begun(None)
    assert shutdown.next_at() == NEVER
    assert not shutdown.wants_interruption(1e9)


def test_the_end_of_the_grace_period_interrupts_once() -> None:
    shutdown = begun(5.0)
    assert shutdown.next_at() == 105.0
    assert not shutdown.wants_interruption(104.9)
    assert shutdown.wants_interruption(105.0)
    shutdown.note_interruption(2, forced=1)
    assert shutdown.has_interrupted
    assert shutdown.next_at() == NEVER
    assert not shutdown.wants_interruption(200.0)


def test_tasks_that_agree_to_be_interrupted_do_not_force_the_stop() -> None:
    shutdown = begun(5.0)
    shutdown.note_interruption(2, forced=0)
    assert not shutdown.has_interrupted
    shutdown.request()
    assert not shutdown.wants_interruption(200.0)


def test_a_grace_period_that_met_nothing_interrupted_nothing() -> None:
    shutdown = begun(5.0)
    shutdown.note_interruption(0, forced=0)
    assert not shutdown.has_interrupted
    assert not shutdown.wants_interruption(200.0)


def test_a_second_request_interrupts_at_once_and_a_third_leaves() -> None:
    shutdown = begun(None, requests=2)
    assert shutdown.wants_interruption(100.0)
    assert not shutdown.is_immediate
    shutdown.request()
    assert shutdown.is_immediate


def test_a_lost_database_is_waited_for_a_while_unless_somebody_presses() -> None:
    assert begun(None).release_ends_at() == 100.0 + RELEASE_PATIENCE_SECONDS
    assert begun(None, requests=2).release_ends_at() == 100.0
