"""An on-call drill with the rows that breaks leave: each is on the overview, or one command names its cause.

`test_real_drill.py` has the same breaks for real, in a browser and with the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import psycopg
import pytest
from psycopg.types.json import Jsonb

from horsies.app import Horsies
from horsies.web import attention
from horsies.workflow.nodes.nodes import SignalNode
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.drill import codes_of
from tests.support.keys import Ring, add_keyed, fail, limit
from tests.support.rows import (
    add_attempt,
    add_run,
    add_snapshot,
    add_task,
    add_worker,
    ago,
)
from tests.support.web_server import Ask

TASK = "01a1dd00-0000-7000-8000-000000000001"
HANGING = "01a1dd00-0000-7000-8000-000000000002"
# A deadline only: the badge changes after ten seconds without an answer, a frozen page ends after eight.
WAIT_MS = 120_000


def serve(
    connection: Database,
    tasks: dict[str, str] | None = None,
    cap: int | None = None,
    processes: int = 4,
) -> str:
    known = Jsonb({"tasks": {"pay": "f"} if tasks is None else tasks, "workflows": {}})
    worker = add_worker(connection, queues=["mail"], known_tasks=known, processes=processes)
    caps = {} if cap is None else {"mail": cap}
    add_snapshot(connection, worker, queue_max_concurrency=Jsonb(caps))
    return worker


def send(connection: Database, age: float = 9) -> None:
    add_task(connection, id=TASK, queue_name="mail", task_name="pay", enqueued_at=ago(age))


def pause(connection: Database) -> None:
    serve(connection)
    send(connection)
    connection.execute("INSERT INTO horsies_queues VALUES ('mail', now() - interval '9 seconds')")
    connection.execute(
        "INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail) "
        "VALUES ('anna', 'cli', 'pause_queue', 'queue mail', 'done', 'the bank is down')"
    )


def lose_the_only_worker(connection: Database) -> None:
    add_worker(connection, name="alpha", queues=["mail"], stopped_at=ago(34), was_lost=True)
    add_worker(connection, queues=["reports"])
    send(connection)


def miss_a_slot(connection: Database) -> None:
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, updated_at) "
        "VALUES ('nightly', now() - interval '1 hour', now() - interval '1 hour')"
    )


def reach_the_cap(connection: Database) -> None:
    worker = serve(connection, cap=1)
    flying = {"claimed_by_worker_id": worker, "claimed_at": ago(99), "started_at": ago(99)}
    add_task(connection, queue_name="mail", task_name="pay", status="RUNNING", **flying)
    send(connection)


def fail_in_a_halting_key(connection: Database) -> None:
    """The first booking of an account has failed, and two later ones wait."""
    serve(connection)
    limit(connection, queue="mail", is_fifo=True, halts=True)
    for age in (90, 60, 30):
        add_keyed(connection, "acme", queue="mail", task_name="pay", enqueued_at=ago(age))
    (first,) = Ring(connection, "mail").take(1)
    fail(connection, first)


def occupy_every_child(connection: Database, age: float = 99) -> None:
    worker = serve(connection, processes=1)
    flying = {"claimed_by_worker_id": worker, "claimed_at": ago(age), "started_at": ago(age)}
    add_task(
        connection, queue_name="mail", task_name="hang", status="RUNNING", id=HANGING, **flying
    )
    send(connection, age)


def measure(**counts: int) -> Callable[[Database], None]:
    def make(connection: Database) -> None:
        names = [counts.get(name, 0) for name in ("failed", "retried", "crashed")]
        connection.execute(
            "INSERT INTO horsies_measures VALUES "
            "(now(), 1, 'mail', 'pay', 0, %s, %s, %s, 0, 0, 0, "
            "array_fill(0, ARRAY[16]), array_fill(0, ARRAY[16]))",
            names,
        )

    return make


def poison(connection: Database) -> None:
    measure(crashed=15)(connection)
    for _ in range(15):
        task = add_task(connection, task_name="pay", status="FAILED", failed_at=ago(5))
        add_attempt(connection, task, outcome="WORKER_FAILURE", error_code="WORKER_CRASHED")


def send_an_unknown_name(connection: Database) -> None:
    serve(connection, {"other": "f"})
    send(connection)


def wait_in_a_free_queue(connection: Database) -> None:
    serve(connection)
    send(connection)


@contextmanager
def holding(url: str, statement: str) -> Iterator[None]:
    with psycopg.connect(url, application_name="report") as holder:
        holder.execute(statement.encode())
        yield


@dataclass(frozen=True)
class Break:
    """The rows that a break leaves, its line on the overview, and the command that names the cause."""

    make: Callable[[Database], object]
    line: str | None
    command: tuple[str, ...]
    says: str
    statement: str | None = None

    def held(self, url: str) -> AbstractContextManager[None]:
        return nullcontext() if self.statement is None else holding(url, self.statement)


BREAKS = {
    "queue paused": Break(
        pause, "QUEUE_PAUSED", ("explain", "queue", "mail"), "by anna (the bank is down)"
    ),
    "worker dead": Break(
        lose_the_only_worker,
        "WORKERS_LOST",
        ("explain", "queue", "mail"),
        "The last one, alpha, was lost",
    ),
    "schedule overdue": Break(
        miss_a_slot, "NO_SCHEDULER", ("explain", "schedule", "nightly"), "no scheduler is connected"
    ),
    "cap reached": Break(reach_the_cap, None, ("explain", TASK), "QUEUE_CAP"),
    "key halted": Break(
        fail_in_a_halting_key,
        "KEY_HALTED",
        ("explain", "queue", "mail"),
        "horsies keys resume mail acme",
    ),
    "all children hang": Break(
        occupy_every_child, None, ("explain", TASK), f"run other tasks, such as {HANGING} for"
    ),
    "all children hang for long": Break(
        partial(occupy_every_child, age=600),
        "QUEUE_STALLED",
        ("doctor",),
        f"the oldest is {HANGING}, for 10 min",
    ),
    "queue name misspelt": Break(
        wait_in_a_free_queue, None, ("explain", "queue", "mial"), "the known ones are: mail"
    ),
    "15 plain failures": Break(
        measure(failed=15),
        "TASK_FAILING",
        ("doctor",),
        "Task pay has 15 failures in 10 minutes",
    ),
    "poison": Break(poison, "CRASHES", ("doctor",), "Task pay ended its process 15 times"),
    "retry storm": Break(
        measure(retried=1200), "TASK_RETRYING", ("doctor",), "task pay were retried 1,200 times"
    ),
    "unknown task name": Break(
        send_an_unknown_name, "TASK_UNKNOWN", ("explain", "queue", "mail"), "'pay'"
    ),
    "row locked": Break(
        wait_in_a_free_queue,
        None,
        ("explain", TASK),
        "pg_terminate_backend(",
        f"SELECT FROM horsies_tasks WHERE id = '{TASK}' FOR UPDATE",
    ),
    "table locked": Break(
        wait_in_a_free_queue,
        "DATABASE_LOCKED",
        ("status",),
        "pg_terminate_backend(",
        "LOCK TABLE horsies_tasks",
    ),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the slow checks take longer than the overview waits for them."""
    monkeypatch.setattr(attention, "PATIENCE_SECONDS", 60.0)


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_on_the_overview_or_answered_by_one_command(
    ask: Ask, horsies: Run, connection: Database, process_url: str, name: str
) -> None:
    broken = BREAKS[name]
    broken.make(connection)
    with broken.held(process_url):
        document = ask("/api/overview").json()
        answer = horsies(*broken.command)
    if broken.line is not None:
        assert broken.line in codes_of(document)
    assert broken.says in " ".join((answer.out + answer.err).split())


def start_waiting_run(app: Horsies) -> str:
    approval = SignalNode("approve", node_id="approval")
    return app.workflow("w", [approval], definition_key="w.v1").start().unwrap().workflow_id


def test_a_run_that_waits_for_a_signal_is_answered_by_one_command(
    app: Horsies, horsies: Run, connection: Database
) -> None:
    run_id = start_waiting_run(app)
    answer = horsies("explain", run_id)
    assert f"horsies workflow signal {run_id} approve" in " ".join(answer.out.split())


def test_a_line_distinguishes_crashes_from_other_failures(ask: Ask, connection: Database) -> None:
    poison(connection)
    lines = {one["code"]: one["sentence"] for one in ask("/api/overview").json()["attention"]}
    assert "15 of them ended their process (crashes)" in lines["TASK_FAILING"]
    assert lines["CRASHES"].startswith("Task pay ended its process 15 times within an hour")


def test_the_reason_of_a_pause_is_on_the_line(ask: Ask, connection: Database) -> None:
    pause(connection)
    lines = ask("/api/overview").json()["attention"]
    (line,) = [one for one in lines if one["code"] == "QUEUE_PAUSED"]
    assert "by anna (the bank is down)" in line["sentence"]


def test_the_line_of_a_run_that_was_paused_by_hand_has_its_author_and_reason(
    ask: Ask, connection: Database
) -> None:
    by_hand = add_run(connection, name="halted", status="PAUSED", paused_at=ago(90_000))
    error = '{"error_code": "NO_CARD", "message": "no card"}'
    failed = add_run(connection, name="broken", status="PAUSED", paused_at=ago(60), error=error)
    for run in (by_hand, failed):
        connection.execute(
            "INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail) "
            "VALUES ('anna', 'cli', 'pause_run', %s, 'done', 'the bank is down')",
            (f"run {run}",),
        )
    lines = ask("/api/overview").json()["attention"]
    said = {one["subject"]: one["sentence"] for one in lines if one["code"] == "RUN_PAUSED"}
    assert said["run halted"].endswith(": paused by anna (the bank is down).")
    assert "anna" not in said["run broken"]
