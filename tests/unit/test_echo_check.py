"""Whether notifications arrive: what missing echoes mean, and when a connection is given up."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from horsies.worker.notifications import (
    FIRST_REST_SECONDS,
    LAST_REST_SECONDS,
    PATIENCE_SECONDS,
    Hearing,
)


def called(at: float = 100.0) -> Hearing:
    hearing = Hearing()
    hearing.note_call(at)
    return hearing


def verdict(hearing: Hearing, now: float) -> tuple[bool, bool]:
    hearing.judge(now)
    return hearing.hears, hearing.gives_up


def test_who_never_called_misses_no_echo() -> None:
    assert verdict(Hearing(), 1e9) == (True, False)


def test_an_echo_that_came_proves_that_we_hear() -> None:
    hearing = called()
    hearing.note_delivery()
    assert verdict(hearing, 102.0) == (True, False)


def test_an_echo_that_is_missing_at_the_next_call_is_silence() -> None:
    assert verdict(called(), 102.0) == (False, True)


def test_an_echo_has_a_moment_to_come_back_however_often_we_call() -> None:
    hearing = called(100.0)
    assert verdict(hearing, 100.0 + PATIENCE_SECONDS / 2) == (True, False)
    hearing.note_call(100.0 + PATIENCE_SECONDS / 2)
    assert verdict(hearing, 100.0 + PATIENCE_SECONDS) == (False, True)


def test_echoes_to_a_connection_that_is_gone_are_not_waited_for() -> None:
    hearing = called()
    hearing.note_lost()
    assert verdict(hearing, 102.0) == (True, False)


def test_a_new_connection_alone_does_not_prove_that_we_hear_again() -> None:
    hearing = called()
    hearing.judge(102.0)
    hearing.note_lost()
    assert verdict(hearing, 103.0) == (False, False)
    hearing.note_delivery()
    assert verdict(hearing, 104.0) == (True, False)


def test_a_connection_that_speaks_at_the_last_moment_is_kept() -> None:
    hearing = called()
    hearing.judge(102.0)
    hearing.note_delivery()
    assert not hearing.gives_up


def replacements(hearing: Hearing, seconds: int) -> list[int]:
    """When the connection is given up, with a call every second and none ever heard."""
    given_up = []
    for now in range(seconds):
        hearing.judge(float(now))
        if hearing.gives_up:
            given_up.append(now)
            hearing.note_lost()
        hearing.note_call(float(now))
    return given_up


def test_connections_that_do_not_help_are_replaced_ever_more_rarely() -> None:
    given_up = replacements(Hearing(), 600)
    gaps = [later - earlier for earlier, later in pairwise(given_up)]
    assert gaps[0] == FIRST_REST_SECONDS
    assert gaps == sorted(gaps)
    assert set(gaps[4:]) == {LAST_REST_SECONDS}


def test_after_a_time_of_hearing_the_next_silence_is_answered_at_once() -> None:
    hearing = Hearing()
    replacements(hearing, 600)
    hearing.note_delivery()
    hearing.note_call(601.0)
    assert verdict(hearing, 603.0) == (False, True)


@given(st.lists(st.sampled_from(["call", "delivery", "lost", "judge"]), max_size=50))
def test_whatever_happened_a_delivery_ends_the_silence(events: list[str]) -> None:
    hearing = Hearing()
    for now, event in enumerate(events):
        match event:
            case "call":
                hearing.note_call(float(now))
            case "delivery":
                hearing.note_delivery()
            case "lost":
                hearing.note_lost()
            case _:
                hearing.judge(float(now))
        assert hearing.hears or event != "delivery"
        assert not (hearing.hears and hearing.gives_up)
    hearing.note_delivery()
    assert verdict(hearing, 1e9) == (True, False)
