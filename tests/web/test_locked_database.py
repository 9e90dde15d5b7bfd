"""A table that another session has locked: every page ends within its limit, and names the session.

`HORSIES_TEST_OUTAGES=long pytest -s tests/web/test_locked_database.py` locks every table, and prints the
time of each page.
"""

from __future__ import annotations

import asyncio
import os
import time

import httpx
import psycopg
import pytest

from horsies.app import Horsies
from horsies.web import reading
from tests.support.database import Database
from tests.support.locks import locked
from tests.support.rows import add_task, ago
from tests.support.web_rows import GETS, POSTS, fill, path_of
from tests.support.web_server import Ask, client_of

IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
SAMPLE = ["horsies_tasks", "horsies_workers"]
# The limit of a statement, that of the doctor's checks, and the slack of a busy machine.
PAGE_SECONDS = 8.0
DOCTOR_SECONDS = 25.0


def tables_of(connection: Database) -> list[str]:
    found = connection.execute(
        "SELECT tablename FROM pg_tables WHERE tablename LIKE 'horsies\\_%' ORDER BY 1"
    )
    return [name for (name,) in found] if IS_LONG else SAMPLE


@pytest.mark.timeout(1_800 if IS_LONG else 240)
def test_with_any_table_locked_every_page_ends_and_names_the_holder(
    app: Horsies, connection: Database, process_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not IS_LONG:
        limits = reading._LIMITS.replace(b"'500'", b"'50'")
        assert limits != reading._LIMITS
        monkeypatch.setattr(reading, "_LIMITS", limits)
    examples = fill(app, connection)
    paths = [path_of(route, examples) for route in GETS]
    wrong: list[str] = []
    named: dict[str, int] = {}

    async def look(client: httpx.AsyncClient, table: str, pid: int) -> None:
        for path in paths:
            began = time.monotonic()
            answer = await client.get(path)
            seconds = time.monotonic() - began
            is_named = f"pid {pid} (user" in answer.text
            named[table] = named.get(table, 0) + is_named
            if IS_LONG:
                print(f"{table:32} {path:60.60} {answer.status_code} {seconds:6.2f} s")
            limit = DOCTOR_SECONDS if "doctor" in path else PAGE_SECONDS
            if seconds > limit or (answer.status_code >= 500 and not is_named):
                wrong.append(f"{path} with {table}: {seconds:.1f} s, {answer.text[:300]}")

    async def main() -> None:
        async with client_of(app, actions=True, payload=True) as client:
            assert (await client.get("/queues")).status_code == 200
            for table in tables_of(connection):
                with locked(process_url, table) as pid:
                    await look(client, table, pid)

    asyncio.run(main())
    assert wrong == []
    assert named["horsies_tasks"] > len(paths) / 2


@pytest.mark.timeout(1_800 if IS_LONG else 240)
def test_with_any_table_locked_every_change_ends_and_names_the_holder(
    app: Horsies, connection: Database, process_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that needs the table is refused; the others are made, or refused for another reason."""
    monkeypatch.setattr(reading, "CHANGE_LIMITS", reading.CHANGE_LIMITS._replace(lock_ms=50))
    monkeypatch.setattr(reading, "_LIMITS", reading._LIMITS.replace(b"'500'", b"'50'"))
    examples = fill(app, connection)
    wrong: list[str] = []
    named: dict[str, set[str]] = {}

    async def change(client: httpx.AsyncClient, path: str, table: str, pid: int) -> None:
        began = time.monotonic()
        answer = await client.post(path, headers={"X-Horsies-Intent": "action"})
        seconds = time.monotonic() - began
        if is_named := f"pid {pid} (user" in answer.text:
            named.setdefault(table, set()).add(path)
        if seconds > PAGE_SECONDS or (answer.status_code >= 500 and not is_named):
            wrong.append(f"{path} with {table}: {seconds:.1f} s, {answer.text[:300]}")

    async def main() -> None:
        async with client_of(app, actions=True, payload=True) as client:
            assert (await client.get("/queues")).status_code == 200
            for table in tables_of(connection):
                with locked(process_url, table) as pid:
                    for route in POSTS:
                        await change(client, path_of(route, examples), table, pid)

    asyncio.run(main())
    assert wrong == []
    for verb in ("cancel", "retry"):
        assert f"/api/tasks/{examples['tasks']}/{verb}" in named["horsies_tasks"]


def test_the_page_has_the_command_that_ends_the_session(
    ask: Ask, connection: Database, process_url: str
) -> None:
    with locked(process_url, "horsies_tasks") as pid:
        page = ask("/")
        document = ask("/api/overview").json()
        metrics = ask("/metrics").text
    assert page.status_code == 504
    assert f"<code>SELECT pg_terminate_backend({pid})</code>" in page.text
    assert "the filter" not in page.text
    assert document["code"] == "DATABASE_LOCKED"
    assert document["pid"] == pid
    assert document["remedy"] == f"SELECT pg_terminate_backend({pid})"
    assert "\nhorsies_up 0.0\n" in metrics


@pytest.mark.parametrize(
    ("path", "table", "claim"),
    [
        ("/names/charge_card", "horsies_task_attempts", "None of the newest failures"),
        ("/names/charge_card", "horsies_measures", "No attempt has ended"),
        ("/names/charge_card", "horsies_workers", "None of the newest failures"),
        ("/queues/payments", "horsies_measures", "No attempt of this queue"),
        ("/queues", "horsies_measures", "No queue is in use"),
        ("/failures", "horsies_task_attempts", "No attempt"),
    ],
)
def test_a_part_of_a_page_that_is_locked_names_the_holder_and_claims_nothing(
    ask: Ask,
    app: Horsies,
    connection: Database,
    process_url: str,
    path: str,
    table: str,
    claim: str,
) -> None:
    fill(app, connection)
    with locked(process_url, table) as pid:
        page = ask(path).text
    assert f"pid {pid} (user" in page
    assert f"<code>SELECT pg_terminate_backend({pid})</code>" in page
    assert claim not in page


def test_a_lock_on_a_table_that_the_checks_read_is_on_the_overview(
    ask: Ask, connection: Database, process_url: str
) -> None:
    with locked(process_url, "horsies_schedule_state") as pid:
        (line, *_) = ask("/api/overview").json()["attention"]
    assert line["code"] == "DATABASE_LOCKED"
    assert f"pid {pid} (user" in line["sentence"]


def test_a_lock_on_a_table_that_only_the_checks_read_hides_no_gauge_and_is_alerted(
    ask: Ask, connection: Database, process_url: str
) -> None:
    add_task(connection, queue_name="mail", enqueued_at=ago(9))
    with locked(process_url, "horsies_refusals"):
        metrics = ask("/metrics").text
    assert "\nhorsies_up 1.0\n" in metrics
    assert 'horsies_queue_tasks{queue="mail",state="due"} 1.0' in metrics
    assert 'horsies_findings{code="NOT_CHECKED",level="red"} 1.0' in metrics


def test_the_doctor_runs_the_checks_that_can_be_run(
    ask: Ask, connection: Database, process_url: str
) -> None:
    with locked(process_url, "horsies_schedule_state") as pid:
        connection.execute("SELECT pg_sleep(1.1)")  # a lock is reported after a second
        checks = {one["id"]: one for one in ask("/api/doctor").json()["checks"]}
    assert checks["locks"]["level"] == "red"
    (found,) = checks["locks"]["findings"]
    assert found["remedy"] == f"SELECT pg_terminate_backend({pid})"
    assert checks["schedules"]["level"] == "unknown"
    assert checks["workers"]["level"] == "green"


def test_a_change_names_the_session_that_keeps_it_waiting(
    app: Horsies, connection: Database, process_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = reading.CHANGE_LIMITS._replace(lock_ms=100)
    monkeypatch.setattr(reading, "CHANGE_LIMITS", quick)

    async def main(pid: int) -> None:
        async with client_of(app, actions=True) as client:
            answer = await client.post(
                "/api/queues/default/pause", headers={"X-Horsies-Intent": "action"}
            )
        assert answer.status_code == 504, answer.text
        assert answer.json()["pid"] == pid

    with psycopg.connect(process_url, application_name="report") as holder:
        holder.execute("LOCK TABLE horsies_queues IN SHARE MODE")
        connection.execute("SELECT pg_sleep(0.2)")
        asyncio.run(main(holder.info.backend_pid))
