"""Webhooks end to end: a receiver gets every subscribed end at least once, signed, whatever is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import sql

from horsies import AppConfig, Horsies, PostgresConfig
from tests.support.database import Database
from tests.support.private_server import PrivateServer
from tests.support.receiver import Received, Receiver, receiving
from tests.support.rows import add_task, insert_raw
from tests.support.tables import attempts, task
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, Journal, RunningWorker, is_guard

# How long processes are killed at random; a longer run is for releases.
KILL_SECONDS = float(os.environ.get("HORSIES_WEBHOOK_KILL_SECONDS", "5"))
# The longer run restarts the server of the database as well.
IS_LONG = KILL_SECONDS >= 30


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def start(fleet: Fleet, receiver: Receiver, connection: Database, **changes: Any) -> RunningWorker:
    """Start a worker with a webhook, and wait until the webhook is registered."""
    config = {"webhooks": [receiver.webhook(**changes)], **QUICK_RECOVERY}
    worker = fleet.start(config=config)
    wait_until(lambda: connection.execute("SELECT FROM horsies_webhooks").fetchone() is not None)
    return worker


def of_task(receiver: Receiver, task_id: str) -> Received:
    """The accepted delivery of the end of a task."""

    def found() -> list[Received]:
        return [one for one in receiver.accepted() if one.event["data"].get("task_id") == task_id]

    return wait_until(found)[0]


def delivery(connection: Database, task_id: str) -> str:
    """The id of the task that delivers the end of another one."""

    def found() -> Any:
        query = "SELECT id::text FROM horsies_tasks WHERE task_name LIKE %s AND kwargs LIKE %s"
        return connection.execute(query, ("horsies.webhook.%", f"%{task_id}%")).fetchone()

    return str(wait_until(found)[0])


def test_failures_cancellations_and_runs_are_delivered_signed(
    fleet: Fleet,
    receiver: Receiver,
    programs: ModuleType,
    connection: Database,
    journal: Journal,
) -> None:
    worker = start(fleet, receiver, connection)
    failed = programs.refuse.send().unwrap()
    got = of_task(receiver, failed.task_id)
    assert got.is_signed()
    assert got.path == "/hook?token=hidden"
    assert abs(time.time() - int(got.headers["webhook-timestamp"])) < 60
    assert got.headers["content-type"] == "application/json; charset=utf-8"
    assert (got.event["type"], got.event["id"]) == ("task.failed", got.id)
    assert got.event["data"]["error_code"] == "OUT_OF_STOCK"
    stopped = programs.sleep.send(600).unwrap()
    wait_until(lambda: journal.lines("start"))
    stopped.cancel().unwrap()
    assert of_task(receiver, stopped.task_id).event["type"] == "task.cancelled"
    node = programs.noop.node(node_id="only")()
    run = programs.app.workflow("tiny", [node], definition_key="webhooks.tiny").start().unwrap()
    (ended,) = wait_until(
        lambda: [one for one in receiver.accepted() if one.event["type"] == "run.ended"]
    )
    facts = ended.event["data"]
    assert (facts["run_id"], facts["status"]) == (run.workflow_id, "COMPLETED")
    assert all(one.is_signed() for one in receiver.received)
    log = worker.log()
    assert worker.stop() == 0
    assert "hidden" not in log


def test_a_receiver_that_fails_is_tried_again_with_the_same_id(
    fleet: Fleet, receiver: Receiver, programs: ModuleType, connection: Database
) -> None:
    receiver.answers = [500, 0, 404, 200]
    start(fleet, receiver, connection)
    sent = programs.refuse.send().unwrap()
    got = of_task(receiver, sent.task_id)
    assert [one.answered for one in receiver.received] == [500, 0, 404, 200]
    assert {one.id for one in receiver.received} == {got.id}
    assert all(one.is_signed() for one in receiver.received)
    job = delivery(connection, sent.task_id)
    wait_until(lambda: task(connection, job).status == "COMPLETED")
    codes = [one.error_code for one in attempts(connection, job)]
    assert codes == ["WEBHOOK_FAILED", "WEBHOOK_FAILED", "WEBHOOK_FAILED", None]
    assert not [one for one in receiver.received if "webhook" in one.event["data"]["task_name"]]


def test_a_receiver_that_is_slow_or_down_gets_the_event_later(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    with receiving() as receiver:
        start(fleet, receiver, connection, timeout_seconds=0.3)
        receiver.is_awake.clear()
        sent = programs.refuse.send().unwrap()
        job = delivery(connection, sent.task_id)
        wait_until(lambda: attempts(connection, job))
        assert "timed out" in (attempts(connection, job)[0].error_message or "")
    known = len(attempts(connection, job))
    wait_until(lambda: len(attempts(connection, job)) > known + 1)
    assert "Connection refused" in (attempts(connection, job)[-1].error_message or "")
    receiver.received.clear()
    with receiving(receiver):
        assert of_task(receiver, sent.task_id).is_signed()
        wait_until(lambda: task(connection, job).status == "COMPLETED")


def test_a_receiver_that_is_gone_is_not_tried_again(
    fleet: Fleet, receiver: Receiver, programs: ModuleType, connection: Database
) -> None:
    receiver.answers = [410]
    start(fleet, receiver, connection)
    job = delivery(connection, programs.refuse.send().unwrap().task_id)
    wait_until(lambda: task(connection, job).status == "FAILED")
    assert [one.error_code for one in attempts(connection, job)] == ["WEBHOOK_GONE"]
    counted = connection.execute("SELECT count(*) FROM horsies_tasks").fetchone()
    assert counted == (2,), "the failure of a delivery is not announced"


def test_nothing_is_sent_to_a_private_address(
    fleet: Fleet, receiver: Receiver, programs: ModuleType, connection: Database
) -> None:
    # The loopback address as a number, which only the resolver recognises: an address that is visibly
    # private is refused when the webhook is configured.
    url = f"https://2130706433:{receiver.port}/hook"
    start(fleet, receiver, connection, url=url, allow_private=False)
    job = delivery(connection, programs.refuse.send().unwrap().task_id)
    wait_until(lambda: task(connection, job).status == "FAILED")
    (attempt,) = attempts(connection, job)
    assert attempt.error_code == "WEBHOOK_ADDRESS_PRIVATE"
    assert "allow_private=True" in (attempt.error_message or "")
    assert not receiver.received


def test_the_end_of_a_lost_workers_task_is_delivered(
    fleet: Fleet, receiver: Receiver, programs: ModuleType, connection: Database, journal: Journal
) -> None:
    victim = start(fleet, receiver, connection)
    sent = programs.sleep.send(600).unwrap()
    wait_until(lambda: journal.lines("start"))
    victim.signal(signal.SIGKILL)
    victim.wait()
    start(fleet, receiver, connection)
    got = of_task(receiver, sent.task_id)
    assert got.event["data"]["error_code"] == "WORKER_CRASHED"
    assert got.is_signed()


def test_a_child_killed_during_a_delivery_delivers_again(
    fleet: Fleet, receiver: Receiver, programs: ModuleType, connection: Database
) -> None:
    worker = start(fleet, receiver, connection, timeout_seconds=60)
    receiver.is_awake.clear()
    sent = programs.refuse.send().unwrap()
    job = delivery(connection, sent.task_id)
    pid = wait_until(lambda: task(connection, job).worker_pid)
    # A child that is killed before it has begun a task costs no attempt.
    wait_until(lambda: receiver.arrived)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: attempts(connection, job))
    receiver.is_awake.set()
    assert of_task(receiver, sent.task_id).is_signed()
    wait_until(lambda: task(connection, job).status == "COMPLETED")
    assert attempts(connection, job)[0].error_code == "WORKER_CRASHED"
    assert worker.stop() == 0


def test_findings_are_delivered_when_they_open_and_when_they_close(
    fleet: Fleet, receiver: Receiver, connection: Database
) -> None:
    lost = add_task(connection, queue_name="elsewhere")
    start(fleet, receiver, connection, on=["finding.opened", "finding.closed"])

    def of(kind: str) -> list[Received]:
        return findings(receiver, kind, "QUEUE_UNSERVED")

    opened = wait_until(lambda: of("finding.opened"))[0]
    assert opened.is_signed()
    assert opened.event["data"]["subject"] == "queue elsewhere"
    connection.execute("DELETE FROM horsies_tasks WHERE id = %s", (lost,))
    # The check of the next minute, now.
    insert_raw(connection, "horsies.findings", "[]")
    wait_until(lambda: of("finding.closed"))
    assert len(of("finding.opened")) == 1


def findings(receiver: Receiver, kind: str, code: str) -> list[Received]:
    """The accepted events of one type about findings with this code."""
    events = [one for one in receiver.accepted() if one.event["type"] == kind]
    return [one for one in events if one.event["data"]["code"] == code]


def test_findings_of_slow_checks_are_delivered_and_stay_open_between_their_looks(
    fleet: Fleet, receiver: Receiver, connection: Database
) -> None:
    def look(*, slow: bool) -> None:
        """Send the check of a minute in the past in which slow checks run, or do not."""
        minute = "date_bin('10 minutes', now(), 'epoch')" + ("" if slow else " - interval '1 min'")
        due = {"task_name": "horsies.findings", "args": "[]", "kwargs": "{}"}
        sent = add_task(connection, **due, enqueued_at=sql.SQL(minute))
        wait_until(lambda: task(connection, sent).status == "COMPLETED")

    start(fleet, receiver, connection, on=["finding.opened", "finding.closed"])
    connection.execute("ALTER TABLE horsies_workflows DISABLE TRIGGER horsies_workflows_truncated")
    try:
        look(slow=True)
        wait_until(lambda: findings(receiver, "finding.opened", "TRIGGERS"))
    finally:
        connection.execute(
            "ALTER TABLE horsies_workflows ENABLE TRIGGER horsies_workflows_truncated"
        )
    look(slow=False)
    open_now = "SELECT FROM horsies_findings WHERE code = 'TRIGGERS'"
    assert connection.execute(open_now).fetchone() is not None, "nobody has looked again"
    look(slow=True)
    wait_until(lambda: findings(receiver, "finding.closed", "TRIGGERS"))
    assert len(findings(receiver, "finding.opened", "TRIGGERS")) == 1


class Storm(NamedTuple):
    """A database and its workers; the database has a server of its own if the test restarts it."""

    url: str
    fleet: Fleet
    server: PrivateServer | None

    def rows(self, query: str) -> set[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return set(connection.execute(query.encode()).fetchall())

    def start(self, receiver: Receiver) -> RunningWorker:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return start(self.fleet, receiver, connection)


@pytest.fixture
def storm(request: pytest.FixtureRequest) -> Storm:
    names = ("own_server", "own_fleet") if IS_LONG else ("process_url", "fleet")
    place, fleet = (request.getfixturevalue(name) for name in names)
    return Storm(place.url, fleet, place) if IS_LONG else Storm(place, fleet, None)


class Sender:
    """Sends tasks that fail or are cancelled, and starts runs, by the names that the workers know."""

    def __init__(self, url: str) -> None:
        broker = PostgresConfig(database_url=url)
        self.app = Horsies(AppConfig(broker=broker, resend_on_transient_err=True))
        self.sent: set[tuple[str, str]] = set()

        @self.app.task("refuse")
        def refuse(code: str = "OUT_OF_STOCK") -> None: ...

        @self.app.task("noop")
        def noop() -> None: ...

        self._refuse, self._noop = refuse, noop

    def send(self) -> None:
        """Cause seven ends; sends that an outage refuses are left out."""
        failing = self._refuse.send_many([self._refuse.bind()] * 5)
        self.sent |= {("task.failed", one.task_id) for one in failing.unwrap_or([])}
        late = self._noop.with_options(delay=timedelta(hours=1)).send().ok()
        if late is not None and late.cancel().is_ok():
            self.sent.add(("task.cancelled", late.task_id))
        node = self._noop.node(node_id="only")()
        run = self.app.workflow("tiny", [node], definition_key="webhooks.tiny").start().ok()
        if run is not None:
            self.sent.add(("run.ended", run.workflow_id))


# Every end that has an event, and what has not ended.
ENDS = """
SELECT 'task.' || lower(status::text), id::text FROM horsies_tasks
WHERE NOT starts_with(task_name, 'horsies.') AND status IN ('FAILED', 'CANCELLED')
UNION ALL SELECT 'run.ended', id::text FROM horsies_workflows WHERE completed_at IS NOT NULL
"""
OPEN = """
SELECT id FROM horsies_tasks
WHERE NOT starts_with(task_name, 'horsies.') AND status IN ('PENDING', 'CLAIMED', 'RUNNING')
UNION ALL SELECT id FROM horsies_workflows WHERE completed_at IS NULL
"""


def kill_one(storm: Storm, receiver: Receiver, workers: list[RunningWorker]) -> None:
    """Kill a child, or a worker and start another one."""
    victim = random.choice(workers)
    if random.random() < 0.2:
        victim.signal(signal.SIGKILL)
        victim.wait()
        workers.remove(victim)
        workers.append(storm.start(receiver))
        return
    children = [pid for pid in victim.family() if not is_guard(pid)]
    with suppress(ProcessLookupError, IndexError):
        os.kill(random.choice(children), signal.SIGKILL)


def rage(storm: Storm, receiver: Receiver, sender: Sender) -> None:
    """Send and kill for a time; for a fifth of it the receiver is down. The server restarts in between."""
    flaky = [random.choice([200, 200, 500, 0]) for _ in range(2_000)] + [200]
    workers = [storm.start(receiver) for _ in range(2)]
    began, server = time.monotonic(), storm.server
    while (share := (time.monotonic() - began) / KILL_SECONDS) < 1:
        receiver.answers = [0] if 0.4 < share < 0.6 else flaky
        sender.send()
        if share > 0.5 and server is not None:
            server.crash()
            server.start()
            server = None
        kill_one(storm, receiver, workers)
        time.sleep(0.1)
    # A delivery that fails nine times in a row would wait for a minute; the storm is over.
    receiver.answers = [200]


def end_of(one: Received) -> tuple[str, str]:
    """The end that an event announces."""
    data = one.event["data"]
    return one.event["type"], data["run_id" if one.event["type"] == "run.ended" else "task_id"]


@pytest.mark.timeout(1_200 if IS_LONG else 240)
def test_every_end_is_delivered_under_kills_and_a_flaky_receiver(
    storm: Storm, receiver: Receiver
) -> None:
    sender = Sender(storm.url)
    rage(storm, receiver, sender)
    patience = 120 + 2 * KILL_SECONDS
    wait_until(lambda: not storm.rows(OPEN), patience, lambda: storm.rows(OPEN))
    ends = storm.rows(ENDS)
    assert sender.sent <= ends
    assert {kind for kind, _ in sender.sent} == {"task.failed", "task.cancelled", "run.ended"}

    def missing() -> set[tuple[Any, ...]]:
        return ends - {end_of(one) for one in receiver.accepted()}

    wait_until(lambda: not missing(), patience, missing)
    received = list(receiver.received)
    assert all(one.is_signed() for one in received)
    ids: dict[tuple[str, str], set[str]] = {}
    for one in received:
        ids.setdefault(end_of(one), set()).add(one.id)
    assert ids.keys() == ends
    assert all(len(found) == 1 for found in ids.values()), "one event per end"
    kinds = Counter(kind for kind, _ in ends)
    print(f"{dict(kinds)}, {len(received)} requests, {len(storm.fleet.workers)} workers")
