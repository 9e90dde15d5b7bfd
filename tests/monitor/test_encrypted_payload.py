"""Encrypted payload for people: masked without the key, shown and searched with it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from horsies import AppConfig, FernetCodec, Horsies, PostgresConfig
from horsies.monitor.arguments import NoMask, parse_argument
from horsies.monitor.personal_data import Wanted, find_script
from horsies.tasks.broker import BrokerErrorCode
from tests.support.applications import store_task
from tests.support.command_line import Run
from tests.support.database import Database

READING = BrokerErrorCode.MONITORING_QUERY_FAILED


@pytest.fixture
def app(process_url: str, database: Database) -> Iterator[Horsies]:
    codec = FernetCodec(FernetCodec.new_key())
    made = Horsies(AppConfig(broker=PostgresConfig(database_url=process_url, codec=codec)))
    yield made
    made.close()


def test_a_command_without_the_key_shows_the_word_encrypted(app: Horsies, horsies: Run) -> None:
    sent = store_task(app).send({"name": "ada"}).unwrap()
    shown = horsies("show", sent.task_id, "--payload").out
    assert '"encrypted"' in shown
    assert "ada" not in shown
    assert "__horsies" not in shown
    document = json.loads(horsies("show", sent.task_id, "--payload", "--json").out)
    assert document["args"] == "encrypted"


def test_an_argument_is_found_with_the_key(app: Horsies) -> None:
    task = store_task(app)
    task.send({"name": "bob"}).unwrap()
    sent = task.send({"name": "ada"}).unwrap()
    argument = parse_argument("ada", NoMask())
    for wanted, expected in ((argument, []), (argument.among_encrypted(), [sent.task_id])):
        found = app.get_broker().perform(READING, find_script(Wanted(argument=wanted)))
        assert found.unwrap().tasks == expected
