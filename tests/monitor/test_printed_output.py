"""The output that the documentation prints is the output of the commands."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg.types.json import Jsonb

from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.doc_pages import blocks, documented, page, plain
from tests.support.rows import add_attempt, add_snapshot, add_task, add_worker, ago

TASK_ID = "01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a"
WORKER_ID = "01a1dd43-015d-7e56-a478-f3081dcc4f6d"
DAY = "2026-11-15 03:31:"
SHOP = """
from horsies import (
    AppConfig, CustomQueueConfig, Horsies, PostgresConfig, QueueMode, TaskError, TaskResult
)

app = Horsies(AppConfig(
    broker=PostgresConfig(database_url="postgresql://app@127.0.0.1:1/shop"),
    queue_mode=QueueMode.CUSTOM,
    custom_queues=[
        CustomQueueConfig(name="payments", priority=1, max_concurrency=3),
        CustomQueueConfig(name="mail", priority=50, max_concurrency=10),
        CustomQueueConfig(name="reports", priority=100),
    ],
    cluster_wide_cap=15,
))


@app.task("charge_card", queue_name="payments")
def charge_card(order_id: int) -> TaskResult[None, TaskError]: ...


@app.task("send_mail", queue_name="mail")
def send_mail(order_id: int) -> TaskResult[None, TaskError]: ...
"""


@pytest.fixture
def shop(database: Database) -> None:
    """A shop that sends mail, charges cards, and has no worker for its reports."""
    add_worker(
        database,
        worker_id=WORKER_ID,
        hostname="vm",
        pid=1766,
        queues=["payments", "mail"],
        name="pay-1",
    )
    add_snapshot(
        database,
        WORKER_ID,
        memory_usage_mb=71.0,
        children_memory_mb=120.0,
        queue_max_concurrency=Jsonb({"mail": 10, "payments": 3}),
        cluster_wide_cap=15,
    )
    for queue, seconds in (*[("mail", 2)] * 7, ("mail", -600), *[("reports", 42)] * 2):
        add_task(database, queue_name=queue, enqueued_at=ago(seconds))
    for _ in range(4):
        add_task(database, queue_name="mail", status="RUNNING", claimed_by_worker_id=WORKER_ID)
    mailed, paid = (
        add_task(database, queue_name=queue, status="COMPLETED") for queue in ("mail", "payments")
    )
    for task_id, count in ((mailed, 100), (paid, 6)):
        for number in range(count):
            add_attempt(database, task_id, attempt=number)
    add_attempt(database, paid, attempt=6, outcome="FAILED", error_code="CARD_REFUSED")
    add_failed_task(database)


def add_failed_task(database: Database) -> None:
    with database.transaction():
        database.execute("SET LOCAL timezone = 'UTC'")
        add_task(
            database,
            id=TASK_ID,
            task_name="charge_card",
            queue_name="payments",
            priority=1,
            status="FAILED",
            error_code="CARD_REFUSED",
            sent_at=f"{DAY}56.970",
            created_at=ago(17),
            enqueued_at=f"{DAY}57.081",
            claimed_at=f"{DAY}59.164",
            started_at=f"{DAY}59.164",
            failed_at=f"{DAY}59.178",
            timeout_ms=30_000,
            claimed_by_worker_id=WORKER_ID,
            worker_hostname="vm",
            worker_pid=1788,
            task_options='{"retry_policy":null,"good_until":null}',
        )
        add_attempt(
            database,
            TASK_ID,
            outcome="FAILED",
            started_at=f"{DAY}59.164",
            finished_at=f"{DAY}59.178",
            error_code="CARD_REFUSED",
            error_message="the bank said no",
            worker_hostname="vm",
            worker_pid=1788,
        )


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    "commands",
    [
        ["status"],
        ["workers"],
        ["queues pause payments", "queues", "queues resume payments", "queues pause payment"],
        ["tasks --status failed"],
        [f"show {TASK_ID}"],
    ],
    ids=lambda commands: commands[0].split()[0],
)
def test_commands_print_what_the_documentation_shows(horsies: Run, commands: list[str]) -> None:
    for command in commands:
        finished = horsies(*command.split())
        shown = documented("operating.md", f"horsies {command}")
        assert plain(finished.out + finished.err) == plain(shown)


def test_a_blocked_task_is_shown_as_in_the_documentation(horsies: Run, database: Database) -> None:
    (shown,) = [one.text for one in blocks(page("operating.md")) if " blocked task(s)" in one.text]
    task_id = shown.split()[shown.split().index("task") + 1].rstrip(",")
    add_task(database, id=task_id, status="RUNNING")
    database.execute(
        "INSERT INTO horsies_blocked (id, kind, status, generation, action, error, since) SELECT id, "
        "'task', status, generation, 'record', '23514 no such card', now() - interval '42 s' "
        "FROM horsies_tasks"
    )
    assert plain(horsies("status").out).endswith(plain(shown))


def test_a_worker_prints_the_banner_of_the_documentation(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "background.py").write_text(SHOP)
    command = "horsies worker shop.background:app --processes 2 --queues payments,mail --name pay-1"
    own_end, its_end = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"NO_COLOR": "1"},
        stdout=subprocess.DEVNULL,
        stderr=its_end,
    )
    os.close(its_end)
    printed = ""
    with open(own_end, encoding="utf-8", newline="") as terminal:
        while "children ready" not in printed:
            printed += terminal.readline()
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0
    shown = plain(documented("workers.md", command))
    assert shown in plain(printed)
    assert "tasks      charge_card, send_mail" in shown
