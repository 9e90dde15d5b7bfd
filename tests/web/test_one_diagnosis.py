"""One diagnosis: a finding that the doctor calls red is on the overview, and in the explanation of
its subject.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from psycopg import sql

from horsies import Horsies, Ok
from horsies.db.statement import Script
from horsies.findings import CATALOGUE, Finding, Level
from horsies.monitor.diagnose import doctor, slow
from horsies.monitor.diagnose.checks import Check, red
from horsies.monitor.facts import Facts
from horsies.web import attention
from tests.support.alerts import reached_by
from tests.support.database import Database
from tests.support.red_states import RED_STATES, add_overdue_schedule
from tests.support.rows import add_run
from tests.support.web_server import Ask, client_of


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the slow checks take longer than the overview waits for them."""
    monkeypatch.setattr(attention, "PATIENCE_SECONDS", 60.0)


# A state of the whole server, which has a test of its own.
NOT_MADE_OF_ROWS = {"TRIGGERS_SILENT"}


@pytest.mark.parametrize("code", RED_STATES)
def test_what_the_doctor_calls_red_is_on_the_overview_and_explained(
    ask: Ask, connection: Database, code: str
) -> None:
    made = RED_STATES[code](connection)
    checks = ask("/api/doctor").json()["checks"]
    found = [one for check in checks for one in check["findings"] if one["code"] == code]
    assert {one["level"] for one in found} == {"red"}
    lines = [one for one in ask("/api/overview").json()["attention"] if one["code"] == code]
    assert [one["subject"] for one in lines] == [one["subject"] for one in found]
    sentences = [one["sentence"].removesuffix(".") for one in found]
    assert all(
        line["sentence"].startswith(text) for line, text in zip(lines, sentences, strict=True)
    )
    assert f'data-key="{code} ' in ask("/").text
    reasons = ask(f"/api{made.path}/explain").json()["reasons"]
    assert (made.explained or code) in {one["code"] for one in reasons}
    (alerted,) = [one for one in alerting(ask("/metrics").text) if one["code"] == code]
    assert reached_by(code, alerted["level"]) == ["HorsiesFindingRed"]


def alerting(metrics: str) -> list[dict[str, str]]:
    """The labels of the findings that the metrics count."""
    (family,) = [
        one for one in text_string_to_metric_families(metrics) if one.name == "horsies_findings"
    ]
    return [sample.labels for sample in family.samples if sample.value]


def test_every_red_code_of_the_catalogue_is_made_here() -> None:
    reds = {code for code, entry in CATALOGUE.items() if entry.level is Level.RED}
    assert reds - NOT_MADE_OF_ROWS <= set(RED_STATES)


def makes_red(check: Check) -> Check:
    def find(facts: Facts) -> Script[Iterable[Finding]]:
        yield from ()
        return [red(f"{check.id} is wrong.")]

    return replace(check, find=find, probe=None)


def test_the_red_findings_of_all_checks_are_on_the_overview(
    ask: Ask, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", tuple(map(makes_red, doctor.CHECKS)))
    ids = [check.id for check in doctor.CHECKS]
    lines = {one["code"]: one for one in ask("/api/overview").json()["attention"]}
    assert set(lines) == {one.upper().replace("-", "_") for one in ids}
    assert {one["severity"] for one in lines.values()} == {"failing", "stopped"}
    page = ask("/").text
    assert f"and {len(ids) - 12} more" in page
    alerts = alerting(ask("/metrics").text)
    assert {one["code"] for one in alerts} == set(lines)
    assert {one["level"] for one in alerts} == {"red"}


def test_a_disabled_trigger_is_on_the_overview(ask: Ask, connection: Database) -> None:
    connection.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER horsies_task_inserted")
    try:
        lines = {one["code"]: one for one in ask("/api/overview").json()["attention"]}
    finally:
        connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER horsies_task_inserted")
    line = lines["TRIGGERS"]
    assert line["subject"] == "the database server"
    assert line["sentence"] == "The trigger horsies_task_inserted on horsies_tasks is disabled."


def test_a_run_without_triggers_is_explained(ask: Ask, connection: Database) -> None:
    run = add_run(connection)
    name = sql.Identifier(connection.info.dbname)
    setting = sql.SQL("ALTER DATABASE {} {} session_replication_role {}")
    connection.execute(setting.format(name, sql.SQL("SET"), sql.SQL("= replica")))
    try:
        reasons = ask(f"/api/workflows/{run}/explain").json()["reasons"]
        lines = ask("/api/overview").json()["attention"]
        (check,) = [
            one for one in ask("/api/doctor?full=1").json()["checks"] if one["id"] == "triggers"
        ]
    finally:
        connection.execute(setting.format(name, sql.SQL("RESET"), sql.SQL("")))
    (silent,) = [one for one in reasons if one["code"] == "TRIGGERS_SILENT"]
    assert silent["blocks"]
    assert silent["remedy"] == (
        f'ALTER DATABASE "{connection.info.dbname}" RESET session_replication_role; '
        "-- then restart the workers"
    )
    assert [one["code"] for one in check["findings"]] == ["TRIGGERS_SILENT"]
    assert check["findings"][0]["sentence"] == silent["sentence"]
    assert "TRIGGERS_SILENT" in [one["code"] for one in lines]


def test_the_metric_counts_the_schedules_of_the_findings(ask: Ask, connection: Database) -> None:
    add_overdue_schedule(connection)
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, updated_at) "
        "VALUES ('caught up', now() - interval '1 hour', now())"
    )
    (check,) = [one for one in ask("/api/doctor").json()["checks"] if one["id"] == "schedules"]
    assert [one["subject"] for one in check["findings"]] == ["schedule nightly"]
    assert "\nhorsies_schedules_overdue 1.0\n" in ask("/metrics").text


def test_viewers_share_a_run_of_the_slow_checks_and_do_not_wait_long(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, may_end = list[object](), threading.Event()

    def run_doctor(*arguments: object) -> object:
        runs.append(arguments)
        assert may_end.wait(30)
        found = Finding("CRASHES", "Task leak ended its process.", Level.RED)
        return Ok([doctor.CheckReport("crashes", "", (found,))])

    async def codes(client: httpx.AsyncClient) -> set[str]:
        answer = await client.get("/api/overview")
        return {line["code"] for line in answer.json()["attention"]}

    async def main() -> None:
        async with client_of(app) as client:
            assert "CRASHES" not in await codes(client)
            may_end.set()
            while "CRASHES" not in await codes(client):
                pass  # the request itself lets the other task run

    monkeypatch.setattr(slow, "run_doctor", run_doctor)
    monkeypatch.setattr(attention, "PATIENCE_SECONDS", 0.01)
    asyncio.run(asyncio.wait_for(main(), 30))
    assert len(runs) == 1
