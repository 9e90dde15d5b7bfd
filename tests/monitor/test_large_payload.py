"""Large payload for people: shown and searched with the store, deleted with its task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from horsies import AppConfig, Horsies, PostgresConfig, TableStore
from horsies.db.payload_keeper import FIRST
from horsies.db.statements.erasing import delete_tasks, redact_tasks
from horsies.db.statements.payloads import sweep_payloads
from horsies.db.statements.workers import delete_old_tasks
from horsies.monitor.arguments import NoMask, parse_argument
from horsies.monitor.personal_data import Wanted, find_script
from horsies.tasks.broker import BrokerErrorCode
from tests.support.applications import store_task
from tests.support.command_line import Run
from tests.support.database import Database

READING = BrokerErrorCode.MONITORING_QUERY_FAILED
LARGE = "ada" * 1_000
_END = "UPDATE horsies_tasks SET status = 'COMPLETED', completed_at = now() - interval '9 hours'"


@pytest.fixture
def app(process_url: str, database: Database) -> Iterator[Horsies]:
    broker = PostgresConfig(database_url=process_url, store=TableStore(), store_above_bytes=1_000)
    made = Horsies(AppConfig(broker=broker))
    yield made
    made.close()


def objects(database: Database) -> int:
    ((count,),) = database.execute("SELECT count(*) FROM horsies_payloads").fetchall()
    return int(count)


def test_a_command_without_the_store_says_that_the_payload_is_elsewhere(
    app: Horsies, horsies: Run
) -> None:
    sent = store_task(app).send({"name": LARGE}).unwrap()
    shown = horsies("show", sent.task_id, "--payload").out
    assert '"stored elsewhere"' in shown
    assert "__horsies" not in shown
    document = json.loads(horsies("show", sent.task_id, "--payload", "--json").out)
    assert document["args"] == "stored elsewhere"


def test_an_argument_is_found_in_the_store(app: Horsies) -> None:
    task = store_task(app)
    task.send({"name": "bob" * 1_000}).unwrap()
    sent = task.send({"name": LARGE}).unwrap()
    argument = parse_argument(LARGE, NoMask()).among_encrypted()
    found = app.get_broker().perform(READING, find_script(Wanted(argument=argument)))
    assert found.unwrap().tasks == [sent.task_id]


@pytest.mark.parametrize("erase", [delete_tasks, redact_tasks], ids=["delete", "redact"])
def test_an_object_goes_with_the_last_task_that_shares_it(
    app: Horsies, database: Database, erase: Any
) -> None:
    sent = store_task(app).send({"name": LARGE}).unwrap()
    database.execute(_END.encode())
    again = app.retry_task(sent.task_id).unwrap()
    erase.fetch(database, [sent.task_id])
    assert objects(database) == 1
    database.execute(_END.encode())
    erase.fetch(database, [again.task_id])
    assert objects(database) == 0


def test_retention_deletes_objects_with_their_tasks(app: Horsies, database: Database) -> None:
    old = "01000000-0000-7000-8000-000000000000"
    store_task(app).send({"name": LARGE}).unwrap()
    database.execute(_END.encode())
    database.execute("UPDATE horsies_tasks SET id = %s", [old])
    database.execute("UPDATE horsies_payload_owners SET owner_id = %s", [old])
    assert objects(database) == 1
    delete_old_tasks.fetch(database, 1.0, 10)
    assert objects(database) == 0


def test_a_send_that_is_rolled_back_or_repeated_leaves_an_object_for_the_sweep(
    app: Horsies, database: Database
) -> None:
    task = store_task(app)
    with database.transaction(force_rollback=True):
        task.with_options(transaction=database).send({"name": LARGE}).unwrap()
    once = task.with_options(idempotency_key="once")
    first, second = once.send({"name": LARGE}).unwrap(), once.send({"name": LARGE}).unwrap()
    assert first.task_id == second.task_id
    assert objects(database) >= 3
    after: str | None = FIRST
    pages = 0
    while after is not None:
        after, pages = sweep_payloads.fetch(database, after, 0.0, 2)[0].id, pages + 1
    assert pages > 1
    assert objects(database) == 1
    ((owner,),) = database.execute("SELECT owner_id::text FROM horsies_payload_owners").fetchall()
    assert owner == first.task_id
