"""Encrypted payload for people: masked without the key, shown and searched with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from horsies import AppConfig, FernetCodec, Horsies, PostgresConfig
from horsies.encryption import Payloads
from horsies.monitor.arguments import NoMask, parse_argument
from horsies.monitor.personal_data import Wanted, find_script
from horsies.tasks.broker import BrokerErrorCode
from tests.support.applications import store_task
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_attempt, add_task

READING = BrokerErrorCode.MONITORING_QUERY_FAILED


KEY = FernetCodec.new_key()
APPLICATION = """
import os

from horsies import AppConfig, FernetCodec, Horsies, PostgresConfig

codec = FernetCodec(os.environ["PAYLOAD_KEY"])
app = Horsies(AppConfig(broker=PostgresConfig.from_env(codec=codec)))
"""


@pytest.fixture
def locator(tmp_path: Path, process_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program that has the key."""
    monkeypatch.setenv("PAYLOAD_KEY", KEY)
    monkeypatch.setenv("HORSIES_DATABASE_URL", process_url)
    program = tmp_path / "confidential_program.py"
    program.write_text(APPLICATION)
    return f"{program}:app"


@pytest.fixture
def app(process_url: str, database: Database) -> Iterator[Horsies]:
    codec = FernetCodec(KEY)
    made = Horsies(AppConfig(broker=PostgresConfig(database_url=process_url, codec=codec)))
    yield made
    made.close()


def test_a_command_without_the_key_shows_the_word_encrypted(app: Horsies, horsies: Run) -> None:
    sent = store_task(app).send({"name": "grace"}).unwrap()
    shown = horsies("show", sent.task_id, "--payload").out
    assert '"encrypted"' in shown
    assert "grace" not in shown
    assert "__horsies" not in shown
    document = json.loads(horsies("show", sent.task_id, "--payload", "--json").out)
    assert document["args"] == "encrypted"


def test_an_argument_is_found_with_the_key(app: Horsies) -> None:
    task = store_task(app)
    task.send({"name": "bob"}).unwrap()
    sent = task.send({"name": "grace"}).unwrap()
    argument = parse_argument("grace", NoMask())
    for wanted, expected in ((argument, []), (argument.among_encrypted(), [sent.task_id])):
        found = app.get_broker().perform(READING, find_script(Wanted(argument=wanted)))
        assert found.unwrap().tasks == expected


def test_an_export_is_readable_with_the_key_and_says_which_key_is_missing(
    app: Horsies, horsies: Run, locator: str
) -> None:
    sent = store_task(app).send({"name": "grace"}).unwrap()
    readable = horsies("export", sent.task_id, locator)
    assert json.loads(readable.out)["args"] == [{"name": "grace"}]
    assert readable.err == ""
    stored = horsies("export", sent.task_id)
    assert stored.code == 0
    assert "grace" not in stored.out
    assert FernetCodec(KEY).key_id in stored.out
    assert stored.err.splitlines() == [
        "Some texts are encrypted with a key that is missing here "
        f"({FernetCodec(KEY).key_id}): name the application that has it."
    ]


def test_a_list_of_failures_shows_messages_with_the_key(
    app: Horsies, horsies: Run, database: Database, locator: str
) -> None:
    message = f"no line for grace {'x' * 300}"
    encrypted = Payloads(FernetCodec(KEY)).encrypt_message(message)
    failed = add_task(database, status="FAILED")
    add_attempt(
        database,
        failed,
        outcome="FAILED",
        error_code="BUSY",
        error_message=encrypted,
        fingerprint="ef96c64c5a97",
    )
    for asked in ((), ("--fingerprint", "ef96c64c5a97")):
        shown = json.loads(horsies("failures", *asked, "--json", "--module", locator).out)
        group = shown if asked else shown["failures"][0]
        assert group["message"] == message[:200]
        assert group["newest_task_id"] == failed
        shown = json.loads(horsies("failures", *asked, "--json").out)
        assert (shown if asked else shown["failures"][0])["message"] == "encrypted"
