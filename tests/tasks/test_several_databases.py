"""One function as a task of two applications: the caller's function chooses the database."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from horsies import Horsies
from horsies.task import TaskFunction
from tests.support.database import Database
from tests.support.tables import tasks


@pytest.fixture
def other_app(other_url: str) -> Iterator[Horsies]:
    application = Horsies(other_url)
    yield application
    application.close()


def charge(customer_id: int, cents: int) -> int:
    return cents


def test_sends_go_to_the_database_that_a_function_of_the_caller_chooses(
    app: Horsies, other_app: Horsies, connection: Database, other_url: str
) -> None:
    charges = (app.task("charge")(charge), other_app.task("charge")(charge))

    def charge_for(customer_id: int) -> TaskFunction[[int, int], int]:
        return charges[customer_id % 2]

    sent = [charge_for(customer).enqueue(customer, 100).task_id for customer in range(4)]
    assert {one.id for one in tasks(connection)} == {sent[0], sent[2]}
    with psycopg.connect(other_url, autocommit=True) as other:
        assert {one.id for one in tasks(other)} == {sent[1], sent[3]}
