"""The logs of attempts on the command line and in the API, and their end."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from horsies.config.app import RecoveryConfig
from horsies.db.pipeline import Pipeline
from horsies.db.statements.erasing import delete_tasks, redact_tasks
from horsies.db.statements.turn import store_logs
from horsies.worker.reaper import sweep
from tests.support.command_line import Run
from tests.support.database import Database, lock_waiters
from tests.support.rows import add_task
from tests.support.wait import wait_until

BODY = (
    "2026-11-18T06:00:00.123Z INFO shop: token=abc\n2026-11-18T06:00:01.000Z INFO shop: \x1b[2J\n"
)


def add_log(
    connection: Database, task_id: str, attempt: int = 1, dropped: int = 0, hours: float = 0
) -> None:
    connection.execute(
        "INSERT INTO horsies_task_logs (task_id, generation, attempt, body, dropped, cut_after, created_at)"
        " VALUES (%s, %s, %s, %s, %s, 1, now() - %s * interval '1 hour')",
        [task_id, attempt, attempt, BODY, dropped, hours],
    )


def test_the_lines_of_all_attempts_or_of_one_are_printed(horsies: Run, database: Database) -> None:
    task_id = add_task(database)
    add_log(database, task_id)
    add_log(database, task_id, attempt=2, dropped=1_234)
    shown = horsies("logs", task_id).out.splitlines()
    assert [line[:9] for line in shown if line.startswith("attempt")] == ["attempt 1", "attempt 2"]
    assert shown[4:6] == [BODY.splitlines()[0], "[1,234 lines left out]"]
    assert shown[-1].endswith("shop: \\x1b[2J")
    assert "attempt 1" not in horsies("logs", task_id[:13], "--attempt", "2").out
    (first, second) = json.loads(horsies("logs", task_id, "--json").out)["logs"]
    assert (first["attempt"], first["dropped"], first["last"]) == (1, 0, [])
    assert (second["dropped"], len(second["first"]), len(second["last"])) == (1_234, 1, 1)


def test_a_task_without_a_log_and_a_missing_task_are_told_apart(
    horsies: Run, database: Database
) -> None:
    silent = horsies("logs", add_task(database))
    assert (silent.code, silent.out) == (0, "")
    assert "Nothing is kept" in silent.err
    missing = horsies("logs", "019a0000-0000-7000-8000-000000000000")
    assert missing.code == 4


@pytest.mark.parametrize(("hours", "is_kept"), [(23, True), (25, False)])
def test_logs_have_their_own_retention(
    database: Database, process_url: str, hours: float, is_kept: bool
) -> None:
    task_id = add_task(database, status="COMPLETED")
    add_log(database, task_id, hours=hours)
    sweep(Pipeline(database), RecoveryConfig(log_retention_hours=24))
    assert database.execute("SELECT count(*) FROM horsies_task_logs").fetchone() == (is_kept,)
    assert database.execute("SELECT count(*) FROM horsies_tasks").fetchone() == (1,)


def test_logs_are_deleted_with_their_task(database: Database) -> None:
    kept, deleted = add_task(database), add_task(database)
    add_log(database, kept)
    add_log(database, deleted)
    database.execute("DELETE FROM horsies_tasks WHERE id = %s", [deleted])
    rows = database.execute("SELECT task_id::text FROM horsies_task_logs").fetchall()
    assert rows == [(kept,)]


ERASE = pytest.mark.parametrize("erase", [delete_tasks, redact_tasks], ids=["delete", "redact"])


def store_late(connection: Any, task_id: str) -> None:
    """Store what an attempt has logged whose worker lost the task and came back."""
    store_logs.fetch(connection, [task_id], [1], [1], [BODY], [0], [2])


def logs(database: Database) -> int:
    ((count,),) = database.execute("SELECT count(*) FROM horsies_task_logs").fetchall()
    return int(count)


@ERASE
def test_a_worker_that_comes_back_stores_no_log_of_an_erased_task(
    database: Database, erase: Any
) -> None:
    kept, erased = (add_task(database, status="FAILED", generation=2) for _ in range(2))
    erase.fetch(database, [erased])
    for task_id in (kept, erased):
        store_late(database, task_id)
    rows = database.execute("SELECT task_id::text FROM horsies_task_logs").fetchall()
    assert rows == [(kept,)]


@ERASE
@pytest.mark.parametrize("logs_first", [True, False], ids=["log first", "erasure first"])
def test_a_log_and_an_erasure_at_the_same_time_leave_no_log(
    database: Database, process_url: str, erase: Any, logs_first: bool
) -> None:
    task_id = add_task(database, status="FAILED", generation=2)
    with (
        psycopg.connect(process_url) as first,
        psycopg.connect(process_url, autocommit=True) as second,
        ThreadPoolExecutor(1) as threads,
    ):
        if logs_first:
            store_late(first, task_id)
            other = threads.submit(erase.fetch, second, [task_id])
        else:
            erase.fetch(first, [task_id])
            other = threads.submit(store_late, second, task_id)
        wait_until(lambda: lock_waiters(database) == 1 or other.done())
        first.commit()
        other.result(30)
    assert logs(database) == 0
