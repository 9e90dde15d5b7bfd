"""The task life cycle as a table: nothing leaves an end, and nothing is missing."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from horsies.states import TASK_TERMINAL_STATES, TaskAttemptOutcome, TaskStatus
from tests.support.transitions import TASK_TRANSITIONS, TaskVerb, allowed

LEGAL: dict[tuple[str, str], str] = {
    ("claim_and_start", "PENDING"): "RUNNING",
    ("claim", "PENDING"): "CLAIMED",
    ("start", "CLAIMED"): "RUNNING",
    ("complete", "RUNNING"): "COMPLETED",
    ("fail", "RUNNING"): "FAILED",
    ("retry", "RUNNING"): "PENDING",
    ("park", "RUNNING"): "PENDING",
    ("release", "CLAIMED"): "PENDING",
    ("release", "RUNNING"): "PENDING",
    ("expire", "PENDING"): "EXPIRED",
    ("cancel", "PENDING"): "CANCELLED",
    ("cancel", "CLAIMED"): "CANCELLED",
    ("cancel", "RUNNING"): "CANCELLED",
}


@pytest.mark.parametrize("status", sorted(TASK_TERMINAL_STATES))
@pytest.mark.parametrize("verb", get_args(TaskVerb))
def test_nothing_leaves_a_terminal_state(verb: TaskVerb, status: TaskStatus) -> None:
    assert allowed(verb, status) is None


@pytest.mark.parametrize(
    ("verb", "status"), list(itertools.product(get_args(TaskVerb), list(TaskStatus)))
)
def test_exactly_the_legal_transitions_are_allowed(verb: TaskVerb, status: TaskStatus) -> None:
    assert allowed(verb, status) == LEGAL.get((verb, status.value))


def test_an_unknown_verb_is_a_mistake_and_not_a_refusal() -> None:
    with pytest.raises(KeyError):
        allowed("finish", TaskStatus.RUNNING)  # type: ignore[arg-type]


def test_every_verb_is_declared_once() -> None:
    verbs = [transition.verb for transition in TASK_TRANSITIONS]
    assert sorted(verbs) == sorted(get_args(TaskVerb))


def test_the_ends_are_the_four_terminal_states() -> None:
    ends = {status for status in TaskStatus if status.is_terminal}
    assert ends == set(TASK_TERMINAL_STATES)
    assert {end.value for end in ends} == {"COMPLETED", "FAILED", "CANCELLED", "EXPIRED"}


def test_every_state_is_reached_by_a_verb() -> None:
    reached = {transition.to_status for transition in TASK_TRANSITIONS}
    assert reached == set(TaskStatus)


def test_the_outcomes_of_an_attempt_are_those_of_the_table() -> None:
    assert [outcome.value for outcome in TaskAttemptOutcome] == [
        "COMPLETED",
        "FAILED",
        "WORKER_FAILURE",
    ]
