"""The output of commands in the documentation is that of the commands."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.doc_pages import blocks, page
from tests.support.rows import add_attempt, add_task, add_worker, ago


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(
        datetime(2026, 11, 15, 3, 31, tzinfo=UTC).timestamp() + seconds, UTC
    )


def documented(name: str, start: str) -> tuple[str, str]:
    """Return the id in the documented command, and its documented output."""
    (found,) = [
        block.text for block in blocks(page(name)) if block.text.startswith(f"$ horsies {start}")
    ]
    command, _, expected = found.partition("\n")
    return command.split()[-1], expected


def test_a_task_is_shown_as_in_the_documentation(horsies: Run, database: Database) -> None:
    task_id, expected = documented("operating.md", "show")
    process = {"worker_hostname": "vm", "worker_pid": 1788}
    add_task(
        database,
        id=task_id,
        task_name="charge_card",
        queue_name="payments",
        priority=1,
        status="FAILED",
        error_code="CARD_REFUSED",
        sent_at=at(56.970),
        enqueued_at=at(57.081),
        claimed_at=at(59.164),
        started_at=at(59.164),
        failed_at=at(59.178),
        timeout_ms=30_000,
        claimed_by_worker_id="01a1dd43-015d-7e56-a478-f3081dcc4f6d",
        task_options='{"retry_policy":null,"good_until":null}',
        **process,
    )
    add_attempt(
        database,
        task_id,
        outcome="FAILED",
        started_at=at(59.164),
        finished_at=at(59.178),
        error_code="CARD_REFUSED",
        error_message="the bank said no",
        **process,
    )
    assert horsies("show", task_id).out == expected


def test_a_task_is_explained_as_in_the_documentation(horsies: Run, database: Database) -> None:
    task_id, expected = documented("explain.md", "explain")
    for seconds in (14_402, 14_401):
        add_task(database, queue_name="payments", enqueued_at=ago(seconds))
    add_task(database, id=task_id, queue_name="payments", enqueued_at=ago(14_400))
    add_worker(database, queues=["mail"])
    database.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) "
        "VALUES ('payments', now() - interval '90 min')"
    )
    assert horsies("explain", task_id).out == expected


def test_an_ended_task_is_explained_by_its_end(horsies: Run, database: Database) -> None:
    task_id = add_task(database, status="COMPLETED", completed_at=ago(7_200))
    subject, end = horsies("explain", task_id).out.splitlines()
    assert subject == f"task {task_id}: COMPLETED"
    assert re.fullmatch(r"-   ENDED: It completed at \d{4}-\d\d-\d\d [\d:]{8} UTC, 2 h ago\.", end)
