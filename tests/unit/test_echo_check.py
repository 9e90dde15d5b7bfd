"""The echo check: the meaning of missing echoes, and when a connection is given up."""

from __future__ import annotations

from heapq import heapify, heapreplace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horsies.worker.notifications import (
    FIRST_REST_SECONDS,
    LAST_REST_SECONDS,
    PATIENCE_SECONDS,
    EchoCheck,
)


def called(at: float = 100.0) -> EchoCheck:
    echo_check = EchoCheck()
    echo_check.note_call(at)
    return echo_check


def verdict(echo_check: EchoCheck, now: float) -> tuple[bool, bool]:
    echo_check.judge(now)
    return echo_check.is_receiving, echo_check.needs_new_connection


def test_who_never_called_misses_no_echo() -> None:
    assert verdict(EchoCheck(), 1e9) == (True, False)


def test_an_echo_that_came_proves_that_we_hear() -> None:
    echo_check = called()
    echo_check.note_delivery()
    assert verdict(echo_check, 102.0) == (True, False)


def test_an_echo_that_is_missing_at_the_next_call_is_silence() -> None:
    assert verdict(called(), 102.0) == (False, True)


def test_an_echo_has_a_moment_to_come_back_however_often_we_call() -> None:
    echo_check = called(100.0)
    assert verdict(echo_check, 100.0 + PATIENCE_SECONDS / 2) == (True, False)
    echo_check.note_call(100.0 + PATIENCE_SECONDS / 2)
    assert verdict(echo_check, 100.0 + PATIENCE_SECONDS) == (False, True)


def test_echoes_to_a_connection_that_is_gone_are_not_waited_for() -> None:
    echo_check = called()
    echo_check.note_lost()
    assert verdict(echo_check, 102.0) == (True, False)


def test_a_new_connection_alone_does_not_prove_that_we_hear_again() -> None:
    echo_check = called()
    echo_check.judge(102.0)
    echo_check.note_lost()
    assert verdict(echo_check, 103.0) == (False, False)
    echo_check.note_delivery()
    assert verdict(echo_check, 104.0) == (True, False)


def test_a_connection_that_speaks_at_the_last_moment_is_kept() -> None:
    echo_check = called()
    echo_check.judge(102.0)
    echo_check.note_delivery()
    assert not echo_check.needs_new_connection


def replacements(echo_check: EchoCheck, seconds: int) -> list[int]:
    """When the connection is given up, with a call every second and none ever heard."""
    given_up = []
    for now in range(seconds):
        echo_check.judge(float(now))
        if echo_check.needs_new_connection:
            given_up.append(now)
            echo_check.note_lost()
        echo_check.note_call(float(now))
    return given_up


def test_connections_that_do_not_help_are_replaced_ever_more_rarely() -> None:
    given_up = replacements(EchoCheck(), 600)
    gaps = [later - earlier for earlier, later in pairwise(given_up)]
    assert gaps[0] == FIRST_REST_SECONDS
    assert gaps == sorted(gaps)
    assert set(gaps[4:]) == {LAST_REST_SECONDS}


def test_after_a_time_of_hearing_the_next_silence_is_answered_at_once() -> None:
    echo_check = EchoCheck()
    replacements(echo_check, 600)
    echo_check.note_delivery()
    echo_check.note_call(601.0)
    assert verdict(echo_check, 603.0) == (False, True)


def heartbeats(echo_check: EchoCheck, count: int) -> list[bool]:
    """Send heartbeats during which nothing arrives; return which of them called."""
    calls = []
    for _ in range(count):
        calls.append(echo_check.wants_call)
        echo_check.note_heartbeat()
        if calls[-1]:
            echo_check.note_call(100.0)
    return calls


def test_a_caller_calls_again_after_one_heartbeat_in_which_nothing_arrived() -> None:
    echo_check = EchoCheck()
    assert heartbeats(echo_check, 1) == [True]
    echo_check.note_delivery()  # its own echo
    assert heartbeats(echo_check, 2) == [False, True]
    echo_check.note_delivery()
    assert heartbeats(echo_check, 2) == [False, True]


def test_whoever_hears_another_worker_is_patient_and_calls_if_that_one_is_silent() -> None:
    echo_check = EchoCheck()
    heartbeats(echo_check, 1)
    echo_check.note_delivery()  # its own echo
    assert heartbeats(echo_check, 1) == [False]
    echo_check.note_delivery()  # that of another one
    assert heartbeats(echo_check, 4) == [False, False, False, True]
    assert heartbeats(echo_check, 2) == [True, True], "until something arrives"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [2, 10, 200])
def test_many_workers_agree_on_one_caller(count: int, seed: int) -> None:
    """They start in any order, and their heartbeats vary by a tenth; an echo takes a fiftieth of an
    interval to arrive.
    """
    random, workers = Random(seed), [EchoCheck() for _ in range(count)]
    agenda = [(random.uniform(0, 1), number) for number in range(count)]
    calls, echoes = list[float](), list[float]()
    heapify(agenda)
    while agenda[0][0] < 60:
        now, number = agenda[0]
        if echoes and echoes[0] <= now:
            echoes.pop(0)
            for worker in workers:
                worker.note_delivery()
            continue
        if heartbeats(workers[number], 1) == [True]:
            calls.append(now)
            echoes.append(now + 0.02)
        heapreplace(agenda, (now + random.uniform(0.9, 1), number))
    settled = [at for at in calls if at > 30]
    assert 30 / 3 <= len(settled) <= 30 / 1.5, "one worker calls with every second heartbeat"


def test_a_new_connection_calls_whatever_the_last_one_delivered() -> None:
    echo_check = EchoCheck()
    echo_check.note_delivery()
    echo_check.note_lost()
    assert echo_check.wants_call


@given(st.lists(st.sampled_from(["call", "delivery", "lost", "judge"]), max_size=50))
def test_whatever_happened_a_delivery_ends_the_silence(events: list[str]) -> None:
    echo_check = EchoCheck()
    for now, event in enumerate(events):
        match event:
            case "call":
                echo_check.note_call(float(now))
            case "delivery":
                echo_check.note_delivery()
            case "lost":
                echo_check.note_lost()
            case _:
                echo_check.judge(float(now))
        assert echo_check.is_receiving or event != "delivery"
        assert not (echo_check.is_receiving and echo_check.needs_new_connection)
    echo_check.note_delivery()
    assert verdict(echo_check, 1e9) == (True, False)
