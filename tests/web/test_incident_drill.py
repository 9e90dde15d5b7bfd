"""An on-call drill: each break is on the overview, or answered by one command and one page, with its cause.

`python -m tests.support.drill` prints the drill table with the times. In the browser a worker is really
killed and tasks really fail; elsewhere rows stand for the break. All commands, on a frozen server too, are
in `tests/monitor/test_locked_database.py`.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect
from psycopg.types.json import Jsonb

from horsies.app import Horsies
from horsies.db.migrate import apply_migrations
from horsies.workflow.nodes.nodes import SignalNode
from tests.support.command_line import Run
from tests.support.commands import environment
from tests.support.database import Database
from tests.support.drill import note
from tests.support.private_server import PrivateServer
from tests.support.rows import (
    add_attempt,
    add_snapshot,
    add_task,
    add_worker,
    ago,
    insert_raw,
)
from tests.support.wait import wait_until
from tests.support.web_server import Ask, WebServer, served, watched
from tests.support.workers import Fleet

TASK = "01a1dd00-0000-7000-8000-000000000001"
# A deadline only: the badge changes after ten seconds without an answer, a frozen page ends after eight.
WAIT_MS = 120_000


def serve(connection: Database, tasks: dict[str, str] | None = None, cap: int | None = None) -> str:
    known = Jsonb({"tasks": {"pay": "f"} if tasks is None else tasks, "workflows": {}})
    worker = add_worker(connection, queues=["mail"], known_tasks=known)
    caps = {} if cap is None else {"mail": cap}
    add_snapshot(connection, worker, queue_max_concurrency=Jsonb(caps))
    return worker


def send(connection: Database) -> None:
    add_task(connection, id=TASK, queue_name="mail", task_name="pay", enqueued_at=ago(9))


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


def kill_a_worker(connection: Database, fleet: Fleet) -> float:
    """Kill one of two workers, and return when."""
    alpha = fleet.start("--name", "alpha", processes=1)
    fleet.start("--name", "beta", processes=1)
    began = time.monotonic()
    alpha.signal(signal.SIGKILL)
    return began


def run_failing_tasks(connection: Database, fleet: Fleet) -> float:
    """Send tasks that fail to a worker, and return when."""
    fleet.start(processes=1)
    began = time.monotonic()
    for _ in range(15):
        insert_raw(connection, "refuse", "[]")
    return began


@contextmanager
def holding(url: str, statement: str) -> Iterator[None]:
    with psycopg.connect(url, application_name="report") as holder:
        holder.execute(statement.encode())
        yield


@dataclass(frozen=True)
class Break:
    """A break, its line on the overview, and the command that names the cause with these words.

    A break without a line has a page that names the cause. `make` writes the rows that the break leaves;
    `really` makes it with workers.
    """

    make: Callable[[Database], object]
    line: str | None
    command: tuple[str, ...]
    says: str
    statement: str | None = None
    page: str = "/"
    really: Callable[[Database, Fleet], float] | None = None

    @property
    def shown(self) -> str:
        return "its explanation" if self.line is None else f"overview: {self.line}"

    def begin(self, connection: Database, fleet: Fleet) -> float:
        """Make the break, for real if that is possible, and return when it began."""
        if self.really is not None:
            return self.really(connection, fleet)
        began = time.monotonic()
        self.make(connection)
        return began

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
        really=kill_a_worker,
    ),
    "schedule overdue": Break(
        miss_a_slot, "NO_SCHEDULER", ("explain", "schedule", "nightly"), "no scheduler is connected"
    ),
    "cap reached": Break(
        reach_the_cap, None, ("explain", TASK), "QUEUE_CAP", page=f"/tasks/{TASK}/explain"
    ),
    "15 plain failures": Break(
        measure(failed=15),
        "TASK_FAILING",
        ("doctor",),
        "Task pay has 15 failures in 10 minutes",
        really=run_failing_tasks,
    ),
    # `CRASHES` joins the overview with the checks that run once a minute.
    "poison": Break(poison, "TASK_FAILING", ("doctor",), "Task pay ended its process 15 times"),
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
        f"/tasks/{TASK}/explain",
    ),
    "table locked": Break(
        wait_in_a_free_queue,
        "DATABASE_LOCKED",
        ("status",),
        "pg_terminate_backend(",
        "LOCK TABLE horsies_tasks",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_on_the_overview_or_answered_by_one_command(
    ask: Ask, horsies: Run, connection: Database, process_url: str, name: str
) -> None:
    broken = BREAKS[name]
    broken.make(connection)
    with broken.held(process_url):
        document = ask("/api/overview").json()
        began = time.monotonic()
        answer = horsies(*broken.command)
        answered = time.monotonic() - began
    words = " ".join(broken.command).replace(TASK, "ID")
    note(name, command=f"`horsies {words}`", answered=answered)
    if broken.line is not None:
        assert broken.line in codes_of(document)
    assert broken.says in " ".join((answer.out + answer.err).split())


def codes_of(overview: dict[str, Any]) -> list[str]:
    """The codes of the lines, or that of the answer in place of the overview."""
    return [one["code"] for one in overview.get("attention", [overview])]


def start_waiting_run(app: Horsies) -> str:
    approval = SignalNode("approve", node_id="approval")
    return app.workflow("w", [approval], definition_key="w.v1").start().unwrap().workflow_id


def test_a_run_that_waits_for_a_signal_is_answered_by_one_command(
    app: Horsies, horsies: Run, connection: Database
) -> None:
    run_id = start_waiting_run(app)
    began = time.monotonic()
    answer = horsies("explain", run_id)
    answered = time.monotonic() - began
    note("run waits for a signal", command="`horsies explain ID`", answered=answered)
    assert f"horsies workflow signal {run_id} approve" in " ".join(answer.out.split())


def test_the_reason_of_a_pause_is_on_the_line(ask: Ask, connection: Database) -> None:
    pause(connection)
    lines = ask("/api/overview").json()["attention"]
    (line,) = [one for one in lines if one["code"] == "QUEUE_PAUSED"]
    assert "by anna (the bank is down)" in line["sentence"]


@pytest.mark.browser
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_seen_in_a_browser(
    page: Page,
    dashboard: WebServer,
    fleet: Fleet,
    connection: Database,
    process_url: str,
    name: str,
) -> None:
    broken = BREAKS[name]
    if name == "table locked":  # the answer is 504, which the console of the browser reports
        page.context.watch.expected.append("504")  # type: ignore[attr-defined]
    broke_at = broken.begin(connection, fleet)
    with broken.held(process_url):
        if broken.line is not None:
            # Workers store their counts every half minute.
            wait_until(lambda: broken.line in codes_of(dashboard.get("/api/overview").json()), 90)
            note(name, seen=time.monotonic() - broke_at)
        began = time.monotonic()
        page.goto(broken.page)
        if broken.line is not None and broken.statement is None:
            expect(page.locator(f'[data-key^="{broken.line} "]').first).to_be_visible()
        else:
            expect(page.get_by_text(broken.says).first).to_be_visible()
        seconds = time.monotonic() - began
    note(name, shown=broken.shown, browser=seconds)


@pytest.mark.browser
def test_a_run_that_waits_for_a_signal_is_explained_in_a_browser(
    page: Page, app: Horsies, connection: Database
) -> None:
    run_id = start_waiting_run(app)
    began = time.monotonic()
    page.goto(f"/workflows/{run_id}/explain")
    expect(page.get_by_text(f"horsies workflow signal {run_id} approve")).to_be_visible()
    seconds = time.monotonic() - began
    note("run waits for a signal", shown="its explanation", browser=seconds)


@pytest.mark.browser
@pytest.mark.slow
def test_a_frozen_server_is_seen_in_a_browser_and_on_the_command_line(browser: Browser) -> None:
    """The postmaster accepts connections in the kernel, and nothing answers."""
    server = PrivateServer()
    try:
        with psycopg.connect(server.url) as connection:
            apply_migrations(connection)
        with (
            served("--database-url", server.url) as dashboard,
            watched(browser, dashboard) as tabs,
        ):
            tabs.watch.expected += ["503", "Failed to load"]  # type: ignore[attr-defined]
            page = tabs.new_page()
            page.goto("/")
            expect(page.locator("[data-badge]")).to_have_text("live")
            with server.frozen():
                began = time.monotonic()
                command = [sys.executable, "-m", "horsies", "status"]
                variables = environment(DATABASE_URL=server.url, COLUMNS="300")
                ended = subprocess.run(
                    command, env=variables, capture_output=True, text=True, check=False
                )
                answered = time.monotonic() - began
                stale = re.compile(r"stale since \d\d:\d\d:\d\d")
                expect(page.locator("[data-badge]")).to_have_text(stale, timeout=WAIT_MS)
                seen = time.monotonic() - began
                other = tabs.new_page()
                other.goto("/queues", timeout=WAIT_MS)
                expect(other.get_by_text("did not answer")).to_be_visible()
            expect(page.locator("[data-badge]")).to_have_text("live", timeout=WAIT_MS)
    finally:
        server.remove()
    assert (ended.returncode, "did not answer in time" in ended.stderr) == (1, True), ended.stderr
    note("database frozen", shown="badge: stale since", seen=seen)
    note("database frozen", command="`horsies status`", answered=answered)
