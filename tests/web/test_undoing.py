"""What undoes a bulk order, in words; `test_actions.py` runs the commands."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta

import pytest

from horsies.ids import first_id_at, new_id
from horsies.monitor.order_plan import Order, OrderVerb
from horsies.monitor.queries import TaskFilters
from horsies.web.undoing import IDS_MAX, Undoing, undo_order

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
OPTIONS = ("--since", "--until")
FINAL = " This cannot be undone"


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (OrderVerb.DELETE_TASKS, f"{FINAL}."),
        (OrderVerb.REDACT_TASKS, f"{FINAL}."),
        (OrderVerb.CANCEL_RUNS, f"{FINAL}."),
        (OrderVerb.PAUSE_RUNS, " To undo it: horsies workflow resume ID, for each run"),
        (OrderVerb.RESUME_RUNS, " To undo it: horsies workflow pause ID, for each run"),
        (OrderVerb.RETRY_RUNS, " To stop it: horsies workflow pause ID, for each run"),
    ],
)
def test_an_order_without_a_command_for_all_of_it_says_so(verb: OrderVerb, words: str) -> None:
    assert undo_order(Order("o", verb, at=NOON)) == words


def test_a_purge_names_the_tasks_that_it_cancelled() -> None:
    filters = TaskFilters(queues=["mail boxes"])
    oldest, newest = first_id_at(NOON), first_id_at(NOON + timedelta(hours=1))
    again = (
        "horsies retry --status CANCELLED --queue 'mail boxes' "
        "--since 2026-01-31T12:00:00.000500Z --until 2026-01-31T13:00:00.001500Z"
    )
    for verb in (OrderVerb.PURGE_QUEUE, OrderVerb.CANCEL_TASKS):
        words = undo_order(Order("o", verb, tasks=filters, oldest=oldest, newest=newest))
        assert words == f"{FINAL}; to send all cancelled tasks of that time again: {again}"


@pytest.mark.parametrize(
    "filters",
    [
        TaskFilters(error_codes=["NO"]),
        TaskFilters(workers=["host-1"]),
        TaskFilters(retried_only=True),
        TaskFilters(fingerprint="ab12"),
    ],
)
def test_no_command_takes_tasks_that_the_order_left_out(filters: TaskFilters) -> None:
    oldest, newest = first_id_at(NOON), first_id_at(NOON + timedelta(hours=1))
    order = Order("o", OrderVerb.CANCEL_TASKS, tasks=filters, oldest=oldest, newest=newest)
    words = undo_order(order)
    assert words == f"{FINAL}; to send one of them again: horsies retry ID"
    unbounded = undo_order(Order("o", OrderVerb.PURGE_QUEUE, tasks=TaskFilters(queues=["mail"])))
    assert unbounded == words


def test_many_selected_tasks_are_not_named_one_by_one() -> None:
    ids = tuple(new_id() for _ in range(IDS_MAX + 1))
    some, many = (Order("o", OrderVerb.CANCEL_TASKS, ids=one) for one in (ids[1:], ids))
    assert undo_order(some).endswith(f"to send them again: horsies retry {' '.join(ids[1:])}")
    assert undo_order(many) == f"{FINAL}; to send one of them again: horsies retry ID"


def test_the_times_of_a_command_are_those_of_the_new_ids() -> None:
    """For every millisecond of a second, which no rounding may move to another one."""
    for number in range(1_000):
        at = NOON + timedelta(milliseconds=number)
        words = shlex.split(undo_order(Order("o", OrderVerb.RETRY_TASKS, at=at)))
        since, until = (datetime.fromisoformat(words[words.index(one) + 1]) for one in OPTIONS)
        assert first_id_at(since) <= first_id_at(at) < first_id_at(until)
        assert until - since == timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("verb", "words", "command", "rest"),
    [
        (OrderVerb.DELETE_TASKS, " This cannot be undone.", "", ""),
        (OrderVerb.PAUSE_RUNS, " To undo it", "horsies workflow resume ID", ", for each run"),
    ],
)
def test_the_command_is_set_apart(verb: OrderVerb, words: str, command: str, rest: str) -> None:
    sentence = undo_order(Order(id="1", verb=verb))
    assert Undoing.of(sentence) == (words, command, rest)
