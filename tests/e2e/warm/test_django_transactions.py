"""The outcome of a task commits with the atomic block of Django."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.tables import attempts, wait_until_empty
from tests.support.transactions import assert_effects_match, bookings, receipts
from tests.support.workers import RunningWorker

WORKER = {"application": "tests.support.apps.django_booking:app", "processes": 1}


@pytest.fixture
def site(booking: ModuleType) -> ModuleType:
    return importlib.import_module("tests.support.apps.django_booking")


@pytest.mark.pooled
@pytest.mark.parametrize("how", ["commit", "raise after"])
def test_the_outcome_commits_with_an_atomic_block(
    worker: RunningWorker, site: ModuleType, effects: Database, how: str
) -> None:
    sent = site.book_with_django.send(4, how).unwrap()
    assert sent.get(30_000).ok_value == 4
    assert bookings(effects) == [4]
    assert [one.outcome for one in attempts(effects, sent.task_id)] == ["COMPLETED"]
    assert receipts(effects) == [4]
    wait_until_empty(effects)


@pytest.mark.parametrize(
    ("how", "code", "sentence"),
    [
        ("raise", "UNHANDLED_EXCEPTION", "inside the block"),
        ("roll back", "TRANSACTION_NOT_COMMITTED", "rolled back or is still open"),
        ("nested", "TRANSACTION_NOT_COMMITTED", "inside a savepoint"),
        ("outside", "TRANSACTION_NOT_COMMITTED", "commits every statement by itself"),
    ],
)
def test_an_atomic_block_that_does_not_commit_leaves_nothing(
    worker: RunningWorker,
    site: ModuleType,
    effects: Database,
    how: str,
    code: str,
    sentence: str,
) -> None:
    error = site.book_with_django.send(4, how).unwrap().get(30_000).err_value
    assert error.error_code == code
    assert sentence in (error.message or "")
    assert bookings(effects) == []
    assert receipts(effects) == []
    wait_until_empty(effects)


def test_the_connection_of_a_task_works_beside_that_of_django(
    worker: RunningWorker, site: ModuleType, booking: ModuleType, effects: Database
) -> None:
    assert booking.book.send(1, 0.0).unwrap().get(30_000).ok_value == 1
    assert site.book_beside_django.send(5).unwrap().get(30_000).ok_value == 6
    assert bookings(effects) == [1, 6]
    wait_until_empty(effects)
    assert_effects_match(effects, "book")
