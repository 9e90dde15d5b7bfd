"""Tasks are erased in bounded transactions beside a worker that goes on working.

`HORSIES_TEST_ERASED=1000000 pytest -s tests/e2e/test_erasing.py` erases a million and prints what it cost.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.request import urlopen

import httpx
import pytest

from horsies.monitor.erasing import ERASE_BATCH
from horsies.monitor.orders import BATCH
from horsies.web.app import ROUTES
from tests.support.database import Database
from tests.support.receiver import Receiver, receiving
from tests.support.span_file import SPANS_VARIABLE, read_spans
from tests.support.tables import wait_until_empty
from tests.support.traces import PERSON, tables_with, traces
from tests.support.wait import wait_until
from tests.support.web_rows import paths_of
from tests.support.web_server import client_of
from tests.support.workers import Fleet, RunningWorker

TASKS = int(os.environ.get("HORSIES_TEST_ERASED", "3000"))
PERSONAL = "tests.support.apps.personal:app"
IS_LONG = TASKS > 100_000
# Of a transaction, and of 99 of 100 tasks beside it: on a busy machine they take a tenth of it.
LONGEST_SECONDS = 10.0
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
# How many rows each transaction has changed, and its age when it records its progress, as its last statement.
WITNESS = """
CREATE TABLE public.witness (transaction bigint, tasks bigint, seconds float8);
CREATE FUNCTION public.witness_tasks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.witness SELECT txid_current(), count(*), 0 FROM erased WHERE task_name = 'old';
    RETURN NULL;
END $$;
CREATE FUNCTION public.witness_age() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.witness SELECT txid_current(), 0, extract(epoch FROM clock_timestamp() - now());
    RETURN NULL;
END $$;
CREATE TRIGGER witness_deleted AFTER DELETE ON horsies_tasks REFERENCING OLD TABLE AS erased
    FOR EACH STATEMENT EXECUTE FUNCTION public.witness_tasks();
CREATE TRIGGER witness_updated AFTER UPDATE ON horsies_tasks REFERENCING OLD TABLE AS erased
    FOR EACH STATEMENT EXECUTE FUNCTION public.witness_tasks();
CREATE TRIGGER witness_recorded AFTER UPDATE ON horsies_actions
    FOR EACH STATEMENT EXECUTE FUNCTION public.witness_age();
"""
ERASURES = """
SELECT max(tasks)::integer, count(*), max(seconds) FROM (
    SELECT sum(tasks) AS tasks, max(seconds) AS seconds FROM witness GROUP BY transaction) AS erasing
WHERE tasks > 0
"""
LEFT = """
SELECT (SELECT count(*) FROM horsies_tasks WHERE task_name = 'old' AND coalesce(kwargs, result) IS NOT NULL)
    + (SELECT count(*) FROM horsies_task_attempts WHERE error_message = 'anna-1984')
"""
GONE = """
DROP TRIGGER witness_deleted ON horsies_tasks;
DROP TRIGGER witness_updated ON horsies_tasks;
DROP TRIGGER witness_recorded ON horsies_actions;
DROP FUNCTION public.witness_tasks();
DROP FUNCTION public.witness_age();
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


# A search finds ids, which are erased in smaller batches than the tasks of filters.
BY = {"--name old": ERASE_BATCH, "--argument anna-1984": BATCH}


@pytest.mark.timeout(7_200 if IS_LONG else 240)
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("command", ["delete", "redact"])
def test_many_tasks_are_erased_in_bounded_transactions_beside_a_worker(
    fleet: Fleet,
    programs: ModuleType,
    process_url: str,
    witness: Database,
    command: str,
    by: str,
) -> None:
    fleet.start()
    words = [command, *by.split(), "--yes", "--database-url", process_url]
    began = time.monotonic()
    out, waits = run_beside(programs, words)
    done = [line.split() for line in out.splitlines() if line.endswith(" is done.")]
    assert sum(int(words[0].replace(",", "")) for words in done) == TASKS
    erasures = witness.execute(ERASURES).fetchone()
    assert erasures is not None
    largest, count, longest_seconds = erasures
    assert largest <= BY[by]
    assert count >= TASKS / BY[by]
    assert witness.execute(LEFT).fetchone() == (0,)
    median, slow, slowest = (waits[int(len(waits) * share)] for share in (0.5, 0.99, 0.9999))
    print(
        f"\n{command} {by}: {TASKS:,} tasks in {time.monotonic() - began:.1f} s, {count:,} transactions, the "
        f"longest {longest_seconds * 1_000:.0f} ms; meanwhile {len(waits):,} tasks ran, median "
        f"{median * 1_000:.0f} ms, 99 % {slow * 1_000:.0f} ms, slowest {slowest * 1_000:.0f} ms"
    )
    assert longest_seconds < LONGEST_SECONDS
    assert slow < LONGEST_SECONDS


def run_beside(programs: ModuleType, words: list[str]) -> tuple[str, list[float]]:
    """Run a command; return its output, and how long each task that was sent meanwhile has taken, sorted."""
    erasing = subprocess.Popen(
        [sys.executable, "-m", "horsies", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    waits: list[float] = []
    while erasing.poll() is None or not waits:
        sent = time.monotonic()
        assert programs.add.send(2, 3).unwrap().get(60_000).ok_value == 5
        waits.append(time.monotonic() - sent)
    out, err = erasing.communicate()
    assert erasing.returncode == 0, err
    return out, sorted(waits)


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
    large = personal.repeat.send(PERSON * 200).unwrap()
    sent = [task.send(PERSON).unwrap() for task in (named, personal.refuse, personal.crash)]
    return [late, visit, run, large, *sent]


class Watched(NamedTuple):
    """A worker, and what it writes outside the database."""

    worker: RunningWorker
    spans: Path

    def written(self) -> dict[str, str]:
        return {"log": self.worker.log(), "spans": self.spans.read_text()}

    def metrics(self) -> str:
        port = self.worker.wait_for("metrics_served")["port"]
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            text: str = response.read().decode()
        return text

    def wait_until_written(self, personal: ModuleType, connection: Database) -> None:
        """Wait for the lines and the spans of all attempts so far."""
        last = personal.greet.send("bert").unwrap()
        last.get(30_000)
        wait_until(lambda: f"{last.task_id} #1 completed" in self.worker.log())
        attempts = set(connection.execute(ATTEMPTED).fetchall())
        wait_until(lambda: attempts <= {_attempt(span) for span in read_spans(self.spans)})


# Attempts with a span: the library's own tasks have none.
ATTEMPTED = """
SELECT attempt.task_id::text, attempt.attempt FROM horsies_task_attempts AS attempt
JOIN horsies_tasks AS task ON task.id = attempt.task_id WHERE NOT starts_with(task.task_name, 'horsies.')
"""


def _attempt(span: Any) -> tuple[object, object]:
    return span.attributes.get("messaging.message.id"), span.attributes.get("horsies.attempt")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def watch(fleet: Fleet, receiver: Receiver, connection: Database) -> Watched:
    """Start a worker that logs, traces, counts and announces everything."""
    spans = fleet.directory / "spans"
    config = {
        "log_capture": {},
        "log_headers": ["user"],
        "tracing": {},
        "webhooks": [receiver.webhook()],
    }
    worker = fleet.start(
        *("--metrics-port", "0"),
        application=PERSONAL,
        config=config,
        environment={SPANS_VARIABLE: str(spans)},
    )
    wait_until(lambda: connection.execute("SELECT FROM horsies_webhooks").fetchone() is not None)
    return Watched(worker, spans)


@pytest.mark.parametrize("command", ["delete", "redact"])
def test_no_trace_is_left_of_tasks_and_runs_that_a_worker_ran(
    fleet: Fleet, personal: ModuleType, connection: Database, receiver: Receiver, command: str
) -> None:
    watched = watch(fleet, receiver, connection)
    handles = leave_traces(personal)
    for handle in handles:
        handle.get(30_000)
    failed = handles[-1].task_id
    personal.app.retry_task(failed).unwrap()
    wait_until_empty(connection)
    watched.wait_until_written(personal, connection)
    before = tables_with(connection)
    assert before >= {"horsies_task_logs", "horsies_steps", "horsies_actions", "horsies_lanes"}
    assert "horsies_payloads" in before
    written = watched.written()
    assert {name for name, text in written.items() if PERSON in text} == {"log", "spans"}
    pages = asyncio.run(
        pages_around(personal, lambda: erase(fleet, command), lambda: known_places(connection))
    )
    assert pages.before >= {
        *("/history", "/queues/default", "/api/queues/default/keys"),
        *(f"{prefix}/tasks/{failed}" for prefix in ("", "/api")),
    }
    assert (traces(connection), pages.after) == ([], set()), pages.shown
    assert ("Not reached: " in pages.shown, PERSON in pages.shown) == (True, False)
    assert PERSON not in str(personal.app.retry_task(failed).err_value)
    later = personal.refuse.send("bert").unwrap()
    later.get(30_000)
    wait_until(
        lambda: later.task_id in {one.event["data"].get("task_id") for one in receiver.accepted()}
    )
    assert PERSON not in watched.metrics()
    assert watched.worker.stop() == 0
    for name, text in watched.written().items():
        new = text.removeprefix(written[name])
        assert ("bert" in new, PERSON in new) == (True, False), name
    assert not [one.event for one in receiver.received if PERSON.encode() in one.body]


class Pages(NamedTuple):
    """The pages and answers that name the person before and after an erasure, and what it printed."""

    before: set[str]
    shown: str
    after: set[str]


async def pages_around(
    personal: ModuleType, erase: Callable[[], str], places: Callable[[], dict[str, list[str]]]
) -> Pages:
    """Walk one dashboard, which may keep what it has read, before and after the tasks are erased."""
    async with client_of(personal.app, actions=True, payload=True) as client:
        paths = {path for route in READS for path in paths_of(route, places())}
        before = await naming(client, paths)
        shown = await asyncio.to_thread(erase)
        paths |= {path for route in READS for path in paths_of(route, places())}
        return Pages(before, shown, await naming(client, paths))


# With every page, download and answer of the API, and the metrics.
READS = [route for route in ROUTES if route.method == "GET"]


async def naming(client: httpx.AsyncClient, paths: Iterable[str]) -> set[str]:
    """The paths whose answers name the person."""
    found = set()
    for path in sorted(paths):
        answer = await client.get(path)
        assert answer.status_code < 500, (path, answer.text)
        if PERSON in answer.text:
            found.add(path)
    return found


def known_places(connection: Database) -> dict[str, list[str]]:
    """The ids and names in the tables, by the folder that they have in a path."""
    own = "WHERE NOT starts_with(task_name, 'horsies.webhook.')"
    queries = {
        "queues": "SELECT 'default'",
        "tasks": f"SELECT id::text FROM horsies_tasks {own}",
        "payload": "VALUES ('args'), ('kwargs'), ('result')",
        "workers": "SELECT worker_id FROM horsies_workers",
        "workflows": "SELECT id::text FROM horsies_workflows",
        "nodes": "SELECT DISTINCT node_id::text FROM horsies_workflow_tasks",
        "failures": "SELECT DISTINCT fingerprint FROM horsies_task_attempts WHERE fingerprint <> ''",
        "names": f"SELECT DISTINCT task_name::text FROM horsies_tasks {own}",
        "orders": "SELECT order_id::text FROM horsies_actions WHERE order_id IS NOT NULL",
    }
    return {
        folder: [str(one) for (one,) in connection.execute(query.encode()).fetchall()]
        for folder, query in queries.items()
    }


def erase(fleet: Fleet, command: str) -> str:
    words = [command, PERSONAL, "--argument", PERSON, "--with-runs", "--yes"]
    erased = subprocess.run(
        [sys.executable, "-m", "horsies", *words],
        env=fleet.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert erased.returncode == 0, erased.stdout
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
