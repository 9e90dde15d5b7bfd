"""Large payload for people: shown, exported and searched with the store, deleted with its task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from horsies import AppConfig, Horsies, PayloadStore, PostgresConfig, TableStore
from horsies.codec.calls import EncodedCall
from horsies.db.payload_keeper import FIRST
from horsies.db.statements.erasing import delete_tasks, redact_tasks
from horsies.db.statements.payloads import sweep_payloads
from horsies.db.statements.workers import delete_old_tasks
from horsies.monitor.actions import retry_task
from horsies.monitor.arguments import NoMask, parse_argument
from horsies.monitor.personal_data import Wanted, find_script
from horsies.tasks.broker import BrokerErrorCode
from horsies.testing import run_pending
from horsies.web import AllowAll, create_app
from horsies.worker.payload_sweep import delete_released
from tests.support.applications import store_task
from tests.support.command_line import Run
from tests.support.database import Database, lock_waiters
from tests.support.file_store import Directory, FileStore
from tests.support.wait import wait_until

READING = BrokerErrorCode.MONITORING_QUERY_FAILED
LARGE = "ada" * 1_000
_END = "UPDATE horsies_tasks SET status = 'COMPLETED', completed_at = now() - interval '9 hours'"


APPLICATION = """
import os

from horsies import AppConfig, Horsies, PostgresConfig, TableStore
from tests.support.file_store import FileStore

directory = os.environ["PAYLOAD_DIRECTORY"]
store = FileStore(directory) if directory else TableStore()
app = Horsies(AppConfig(broker=PostgresConfig.from_env(store=store, store_above_bytes=1_000)))
"""
KINDS = pytest.mark.parametrize("directory", [False, True], indirect=True, ids=["table", "outside"])


@pytest.fixture
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Directory | None:
    """A store outside the database, or None for a table."""
    return Directory(tmp_path / "objects") if getattr(request, "param", False) else None


@pytest.fixture
def app(process_url: str, database: Database, directory: Directory | None) -> Iterator[Horsies]:
    store: PayloadStore | TableStore = FileStore(directory.place) if directory else TableStore()
    broker = PostgresConfig(database_url=process_url, store=store, store_above_bytes=1_000)
    made = Horsies(AppConfig(broker=broker))
    yield made
    made.close()


@pytest.fixture
def locator(
    tmp_path: Path,
    process_url: str,
    monkeypatch: pytest.MonkeyPatch,
    directory: Directory | None,
) -> str:
    """A program that has the store."""
    monkeypatch.setenv("PAYLOAD_DIRECTORY", directory.place if directory else "")
    monkeypatch.setenv("HORSIES_DATABASE_URL", process_url)
    program = tmp_path / "program_with_a_store.py"
    program.write_text(APPLICATION)
    return f"{program}:app"


def page(app: Horsies, path: str) -> httpx.Response:
    """A page of the dashboard."""

    async def read() -> httpx.Response:
        dashboard: Any = create_app(app, policy=AllowAll("anna"), payload=True)
        transport = httpx.ASGITransport(dashboard)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = await client.get(path)
        await app.close_async()
        return found

    return asyncio.run(read())


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


def test_an_export_has_the_payload_and_says_which_store_is_missing(
    app: Horsies, horsies: Run, locator: str
) -> None:
    sent = store_task(app).send({"name": LARGE}).unwrap()
    readable = horsies("export", sent.task_id, locator)
    assert json.loads(readable.out)["args"] == [{"name": LARGE}]
    assert readable.err == ""
    stored = horsies("export", sent.task_id)
    assert stored.code == 0
    assert LARGE not in stored.out
    assert stored.err.splitlines() == [
        "Some texts are kept in a store that is missing here or does not have them (table): name the "
        "application that has it."
    ]


@pytest.mark.parametrize("directory", [True], indirect=True)
def test_pages_and_commands_show_the_payload_masked_and_survive_an_outage(
    app: Horsies, horsies: Run, locator: str, directory: Directory
) -> None:
    sent = store_task(app).send({"name": LARGE, "password": "hunter2"}).unwrap()
    path = f"/tasks/{sent.task_id}"
    shown = page(app, path).text
    assert LARGE[:100] in shown
    assert "hunter2" not in shown
    given = ("show", sent.task_id, "--payload", "--json", "--module", locator)
    assert json.loads(horsies(*given).out)["args"][0]["name"] == LARGE
    directory.close()
    during = page(app, path)
    assert during.status_code == 200
    assert "stored elsewhere" in during.text
    assert json.loads(horsies(*given).out)["args"] == "stored elsewhere"
    failed = horsies("export", sent.task_id, locator)
    assert failed.code == 1
    assert "The store 'files' does not answer: ConnectionError: no such directory" in failed.err
    searched = horsies("delete", "--argument", LARGE, "--dry-run", "--module", locator)
    assert searched.code == 1
    assert "The store 'files' does not answer" in searched.err


@KINDS
@pytest.mark.parametrize("command", ["delete", "redact"])
def test_no_object_is_left_of_an_erased_task(
    app: Horsies,
    horsies: Run,
    database: Database,
    locator: str,
    directory: Directory | None,
    command: str,
) -> None:
    sent = store_task(app).send({"name": LARGE}).unwrap()
    store_task(app).send({"name": "bob" * 1_000}).unwrap()
    database.execute(_END.encode())
    by = ("--argument", f"name={LARGE}", "--module", locator)
    erased = horsies(command, *by, "--yes")
    assert erased.code == 0, erased.err
    ((kept,),) = database.execute("SELECT id::text FROM horsies_payloads").fetchall()
    ((owner,),) = database.execute("SELECT owner_id::text FROM horsies_payload_owners").fetchall()
    assert owner != sent.task_id
    assert directory is None or directory.names() == {kept}


@pytest.mark.parametrize("directory", [True], indirect=True)
def test_an_erased_object_is_deleted_once_its_store_answers(
    app: Horsies, horsies: Run, database: Database, locator: str, directory: Directory
) -> None:
    sent = store_task(app).send({"name": LARGE}).unwrap()
    database.execute(_END.encode())
    directory.close()
    erased = horsies("delete", sent.task_id, "--module", locator, "--yes")
    assert erased.code == 0
    assert "A worker will delete large payload within an hour: The store 'files'" in erased.err
    assert objects(database) == 1
    directory.open()
    delete_released(app.config.broker)
    assert (objects(database), directory.names()) == (0, set())


@pytest.mark.parametrize("directory", [True], indirect=True)
def test_an_object_that_got_an_owner_while_it_was_released_is_kept(
    app: Horsies, database: Database, directory: Directory
) -> None:
    store_task(app).send({"name": LARGE}).unwrap()
    database.execute("UPDATE horsies_payloads SET released_at = now()")
    delete_released(app.config.broker)
    assert (objects(database), len(directory.names())) == (1, 1)
    database.execute("DELETE FROM horsies_tasks")
    delete_released(app.config.broker)
    assert (objects(database), directory.names()) == (0, set())


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


@KINDS
@pytest.mark.parametrize("erase", [delete_tasks, redact_tasks], ids=["delete", "redact"])
def test_a_task_that_is_being_erased_is_not_sent_again(
    app: Horsies, database: Database, process_url: str, directory: Directory | None, erase: Any
) -> None:
    """A copy would keep the arguments, and refer to objects that are deleted."""
    sent = store_task(app).send({"name": LARGE}).unwrap()
    database.execute(_END.encode())
    with psycopg.connect(process_url) as erasing, ThreadPoolExecutor(1) as threads:
        erase.fetch(erasing, [sent.task_id])
        again = threads.submit(app.retry_task, sent.task_id)
        wait_until(lambda: lock_waiters(database) == 1 or again.done())
        erasing.commit()
        assert again.result(30).is_err()
    assert database.execute("SELECT FROM horsies_tasks WHERE args IS NOT NULL").rowcount == 0
    delete_released(app.config.broker)
    assert objects(database) == 0
    assert directory is None or directory.names() == set()


@pytest.mark.parametrize("call", [None, EncodedCall('["bob"]', "{}")], ids=["as it was", "edited"])
def test_a_task_that_is_sent_again_keeps_no_payload_that_it_does_not_have(
    app: Horsies, database: Database, call: EncodedCall | None
) -> None:
    @app.task("repeat")
    def repeat(text: str) -> str:
        return text * 2

    sent = repeat.send(LARGE).unwrap()
    assert run_pending(app).completed == 1
    assert objects(database) == 2  # the argument and the result
    retry_task(app.get_broker(), sent.task_id, call=call).unwrap()
    assert [row.id for row in redact_tasks.fetch(database, [sent.task_id])] == [sent.task_id]
    assert objects(database) == (1 if call is None else 0)


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
