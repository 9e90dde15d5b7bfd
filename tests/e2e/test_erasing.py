"""Tasks are erased in bounded transactions beside a worker that goes on working.

`HORSIES_TEST_ERASED=1000000 pytest -s tests/e2e/test_erasing.py` erases a million and prints what it cost.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from horsies.monitor.erasing import ERASE_BATCH
from tests.support.database import Database
from tests.support.tables import wait_until_empty
from tests.support.traces import PERSON, tables_with, traces
from tests.support.wait import wait_until
from tests.support.workers import Fleet

TASKS = int(os.environ.get("HORSIES_TEST_ERASED", "3000"))
PERSONAL = "tests.support.apps.personal:app"
IS_LONG = TASKS > 100_000
# Each with an attempt, in the order of their ids.
FILL = """
INSERT INTO horsies_tasks (
    id, task_name, queue_name, status, args, kwargs, result, enqueue_sha, sent_at, completed_at)
SELECT (lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint - n), 12, '0') || '7000' || '8000'
        || lpad(to_hex(n), 12, '0'))::uuid,
    'old', 'default', 'COMPLETED', '[]', '{"customer":"anna-1984","n":' || n || '}',
    '{"ok":"anna-1984"}', 'sha', now(), now()
FROM generate_series(1, %s) AS n;
"""
ATTEMPTS = """
INSERT INTO horsies_task_attempts (task_id, attempt, outcome, finished_at, error_message)
SELECT id, 1, 'COMPLETED', now(), 'anna-1984' FROM horsies_tasks
"""
# How many rows each transaction has changed, and for how long it has held them.
WITNESS = """
CREATE TABLE public.witness (transaction bigint, tasks bigint, seconds float8);
CREATE FUNCTION public.witness() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.witness SELECT txid_current(), count(*), extract(epoch FROM clock_timestamp() - now())
    FROM erased WHERE task_name = 'old';
    RETURN NULL;
END $$;
CREATE TRIGGER witness_deleted AFTER DELETE ON horsies_tasks REFERENCING OLD TABLE AS erased
    FOR EACH STATEMENT EXECUTE FUNCTION public.witness();
CREATE TRIGGER witness_updated AFTER UPDATE ON horsies_tasks REFERENCING OLD TABLE AS erased
    FOR EACH STATEMENT EXECUTE FUNCTION public.witness();
"""
LEFT = """
SELECT (SELECT count(*) FROM horsies_tasks WHERE task_name = 'old' AND coalesce(kwargs, result) IS NOT NULL)
    + (SELECT count(*) FROM horsies_task_attempts WHERE error_message = 'anna-1984')
"""
GONE = """
DROP TRIGGER witness_deleted ON horsies_tasks;
DROP TRIGGER witness_updated ON horsies_tasks;
DROP FUNCTION public.witness();
DROP TABLE public.witness;
"""


@pytest.fixture
def witness(connection: Database) -> Iterator[Database]:
    connection.execute(FILL.encode() % str(TASKS).encode())
    connection.execute(ATTEMPTS.encode())
    connection.execute("ANALYZE")
    connection.execute(WITNESS.encode())
    yield connection
    connection.execute(GONE.encode())


@pytest.mark.timeout(3_600 if IS_LONG else 60)
@pytest.mark.parametrize("command", ["delete", "redact"])
def test_many_tasks_are_erased_in_bounded_transactions_beside_a_worker(
    fleet: Fleet, programs: ModuleType, process_url: str, witness: Database, command: str
) -> None:
    fleet.start()
    words = [command, "--name", "old", "--yes", "--database-url", process_url]
    began = time.monotonic()
    erasing = subprocess.Popen(
        [sys.executable, "-m", "horsies", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    waits: list[float] = []
    while erasing.poll() is None or not waits:
        sent = time.monotonic()
        assert programs.add.send(2, 3).unwrap().get(30_000).ok_value == 5
        waits.append(time.monotonic() - sent)
    out, err = erasing.communicate()
    assert erasing.returncode == 0, err
    assert f"{TASKS:,} tasks {command.removesuffix('e')}ed" in out
    counts = witness.execute(
        "SELECT max(tasks), count(*), max(seconds) FROM witness WHERE tasks > 0"
    ).fetchone()
    assert counts is not None
    assert counts[0] <= ERASE_BATCH
    assert counts[1] >= TASKS / ERASE_BATCH
    assert witness.execute(LEFT).fetchone() == (0,)
    waits.sort()
    seconds = time.monotonic() - began
    shown = [waits[int(len(waits) * share)] * 1_000 for share in (0.5, 0.99, 0.9999)]
    print(
        f"\n{command}: {TASKS:,} tasks in {seconds:.1f} s, {counts[1]:,} transactions, the longest "
        f"{counts[2] * 1_000:.0f} ms; meanwhile {len(waits):,} tasks ran, median {shown[0]:.0f} ms, "
        f"99 % {shown[1]:.0f} ms, slowest {shown[2]:.0f} ms"
    )


@pytest.fixture(scope="module")
def personal(programs: ModuleType) -> Iterator[ModuleType]:
    """The application, once the database of the tests is known."""
    module = importlib.import_module("tests.support.apps.personal")
    yield module
    module.app.close()


def leave_traces(personal: ModuleType) -> list[Any]:
    """Send and start everything that names the person; return the handles."""
    app = personal.app
    named = personal.greet.with_options(
        headers={"user": PERSON}, idempotency_key=PERSON, queue_name="default"
    )
    late = personal.greet.with_options(delay=timedelta(hours=1)).send(PERSON).unwrap()
    late.cancel(reason=f"{PERSON} called").unwrap()
    visit = personal.visit.send(PERSON).unwrap()
    app.signal(visit.task_id, "word", PERSON).unwrap()
    run = personal.journey(PERSON).start(workflow_key=PERSON, key=PERSON).unwrap()
    run.signal("word", PERSON).unwrap()
    app.keys.set("default", PERSON, weight=2).unwrap()
    sent = [task.send(PERSON).unwrap() for task in (named, personal.refuse, personal.crash)]
    return [late, visit, run, *sent]


@pytest.mark.parametrize("command", ["delete", "redact"])
def test_no_trace_is_left_of_tasks_and_runs_that_a_worker_ran(
    fleet: Fleet, personal: ModuleType, connection: Database, process_url: str, command: str
) -> None:
    fleet.start(application=PERSONAL, config={"log_capture": {}})
    handles = leave_traces(personal)
    for handle in handles:
        handle.get(30_000)
    failed = handles[-1].task_id
    personal.app.retry_task(failed).unwrap()
    wait_until_empty(connection)
    before = tables_with(connection)
    assert before >= {"horsies_task_logs", "horsies_steps", "horsies_actions", "horsies_lanes"}
    shown = erase(fleet, command)
    assert traces(connection) == [], shown


def erase(fleet: Fleet, command: str) -> str:
    words = [command, PERSONAL, "--argument", PERSON, "--with-runs", "--yes"]
    erased = subprocess.run(
        [sys.executable, "-m", "horsies", *words],
        env=fleet.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert erased.returncode == 0, erased.stderr
    return erased.stdout


def test_keys_that_all_calls_of_a_task_share_keep_their_pause_and_their_rate(
    fleet: Fleet, personal: ModuleType, connection: Database
) -> None:
    fleet.start(application=PERSONAL)
    shared = [personal.remind, personal.write, personal.collect]
    for task in shared:
        task.send(PERSON).unwrap().get(30_000).unwrap()
    for name in ("write", "collect"):
        personal.app.keys.pause("default", f"task:{name}").unwrap()
    registered = "SELECT FROM horsies_task_defaults WHERE fixed_key IS NOT NULL"
    wait_until(lambda: connection.execute(registered).rowcount == len(shared))
    assert "3 tasks and runs deleted" in erase(fleet, "delete")
    for task in shared:
        task.send("bert").unwrap()
    # A claim takes the tasks of all keys that may start: once this one has ended, none of them could.
    personal.greet.send("bert").unwrap().get(30_000).unwrap()
    found = connection.execute("SELECT task_name::text, status::text FROM horsies_tasks ORDER BY 1")
    waiting = [(name, "PENDING") for name in ("collect", "remind", "write")]
    assert found.fetchall() == [waiting[0], ("greet", "COMPLETED"), *waiting[1:]]
