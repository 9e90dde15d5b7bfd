"""The echo: which statements are logged, and that nothing of a task is."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.db.statements.tasks import read_outcomes
from horsies.ids import new_id
from horsies.worker.connection import open_turns
from tests.support.applications import add_task, run_closing, store_task

LINE = re.compile(r"^[a-z_, ]+ (took|failed after) \d+\.\d ms$")


@pytest.fixture
def talkative(process_url: str, connection: Connection[Any]) -> Iterator[Horsies]:
    application = Horsies(AppConfig(broker=PostgresConfig(database_url=process_url, echo=True)))
    yield application
    application.close()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "horsies.sql")
    return caplog


def messages(lines: pytest.LogCaptureFixture) -> list[str]:
    logged = [one.getMessage() for one in lines.records if one.name == "horsies.sql"]
    assert all(map(LINE.match, logged)), lines.text
    return [line.split()[0] for line in logged]


def test_a_send_is_logged_by_name_and_without_its_arguments(
    talkative: Horsies, lines: pytest.LogCaptureFixture
) -> None:
    sent = store_task(talkative).send("4111-secret").unwrap()
    assert messages(lines) == ["insert_task"]
    assert "secret" not in lines.text
    assert sent.task_id not in lines.text


def test_both_faces_are_logged(talkative: Horsies, lines: pytest.LogCaptureFixture) -> None:
    add = add_task(talkative)
    run_closing(talkative, add.send_async(1, 2)).unwrap()
    talkative.pause_queue("default").unwrap()
    assert messages(lines) == [
        *("insert_task", "list_queue_states", "pause_queue", "record_action"),
    ]


def test_a_statement_that_fails_is_logged_at_once(
    talkative: Horsies, lines: pytest.LogCaptureFixture, connection: Connection[Any]
) -> None:
    store = store_task(talkative)
    store.send(1).unwrap()
    lines.clear()
    connection.execute("ALTER TABLE horsies_tasks ADD CONSTRAINT closed CHECK (false) NOT VALID")
    try:
        failed = store.send("4111-secret")
        assert failed.is_err()
        assert messages(lines) == ["insert_task"]
        assert "failed after" in lines.text
        assert "secret" not in lines.text
    finally:
        connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT closed")


def test_a_turn_is_logged_as_one_line(
    process_url: str, connection: Connection[Any], lines: pytest.LogCaptureFixture
) -> None:
    database = Database(PostgresConfig(database_url=process_url, echo=True))
    pipeline = open_turns(database)
    with pipeline.connection:
        pipeline.run([read_outcomes([new_id()]), read_outcomes([])])
        assert [record.getMessage().partition(" took")[0] for record in lines.records] == [
            "read_outcomes, read_outcomes"
        ]
        lines.clear()
        with pytest.raises(psycopg.DataError):
            pipeline.run([read_outcomes(["4111-secret"])])
        assert messages(lines) == ["read_outcomes"]
    assert "secret" not in lines.text


def test_without_the_setting_nothing_is_logged(
    app: Horsies, lines: pytest.LogCaptureFixture
) -> None:
    store_task(app).send(1).unwrap()
    assert messages(lines) == []
