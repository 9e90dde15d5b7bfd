"""An on-call drill with real breaks: killed processes, held locks, a frozen server, tasks that really fail.

Each break is on the overview, or a page explains it, and one command names its cause. `python -m
tests.support.drill` prints the drill table with the times. Rows stand for the breaks in
`test_incident_drill.py`, which is quick and needs no browser; all commands and all pages, with every table
locked and on a frozen server, are in `test_locked_database.py` and `test_frozen_server.py`.
"""

from __future__ import annotations

import importlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect

from horsies.db.migrate import apply_migrations
from horsies.workflow.nodes.nodes import SignalNode
from tests.support import commands
from tests.support.database import Database
from tests.support.drill import codes_of, note
from tests.support.private_server import PrivateServer
from tests.support.routes import programs as programs
from tests.support.routes import route as route
from tests.support.schedulers import config_of, every, sent, start_scheduler
from tests.support.wait import wait_until
from tests.support.web_server import WebServer, served, watched
from tests.support.workers import Fleet

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CAPPED = "tests.support.apps.capped:app"
# Deadlines only. Workers store their counts every half minute; the badge of a page changes after ten seconds
# without an answer.
SEEN_SECONDS = 90
WAIT_MS = 120_000


@dataclass(slots=True)
class Scene:
    """Where a break happens: a database, the producers' programs, workers, and an operator's command line."""

    connection: Database
    url: str
    programs: ModuleType
    fleet: Fleet
    directory: Path
    held: ExitStack = field(default_factory=ExitStack)
    # The task or run that the operator asks about.
    subject: str = ""
    broke_at: float = 0.0

    @property
    def capped(self) -> ModuleType:
        return importlib.import_module("tests.support.apps.capped")

    def break_now(self) -> None:
        self.broke_at = time.monotonic()

    def send(self, task: Any, *arguments: object) -> None:
        """Send a task, which is the subject from now on."""
        self.subject = task.send(*arguments).unwrap().task_id

    def operate(self, *words: str) -> tuple[str, float]:
        """Run a command as an operator does; return its output as one line, and the seconds it took."""
        began = time.monotonic()
        ended = commands.horsies(self.directory, *words, DATABASE_URL=self.url, COLUMNS="300")
        seconds = time.monotonic() - began
        return " ".join((ended.stdout + ended.stderr).split()), seconds

    def hold(self, statement: str, *values: str) -> None:
        """Run a statement in another session, whose transaction stays open until the end of the test."""
        holder = self.held.enter_context(psycopg.connect(self.url, application_name="report"))
        holder.execute(statement.encode(), values)


@pytest.fixture
def scene(
    connection: Database, process_url: str, programs: ModuleType, fleet: Fleet, tmp_path: Path
) -> Iterator[Scene]:
    scene = Scene(connection, process_url, programs, fleet, tmp_path)
    with scene.held:
        yield scene


def pause_the_queue(scene: Scene) -> None:
    scene.fleet.start(processes=1)
    scene.break_now()
    scene.operate("queues", "pause", "default", "--reason", "the bank is down")
    scene.send(scene.programs.noop)


def kill_the_only_worker_of_a_queue(scene: Scene) -> None:
    """Another worker, which serves another queue, lives on and recovers what the dead one held."""
    alpha = scene.fleet.start(
        "--name", "alpha", "--queues", "wide", processes=1, application=CAPPED
    )
    scene.fleet.start("--queues", "narrow", processes=1, application=CAPPED)
    scene.break_now()
    alpha.signal(signal.SIGKILL)
    scene.send(scene.capped.occupy_wide, 0.0)


def kill_the_scheduler(scene: Scene) -> None:
    """Its last task has ended: the next slot would not wait for that one."""
    scene.fleet.start(processes=1)
    scheduler = start_scheduler(scene.fleet, config_of(every(2, "nightly")))
    wait_until(
        lambda: [one.status for one in sent(scene.connection, "nightly")][:1] == ["COMPLETED"]
    )
    scene.break_now()
    scheduler.signal(signal.SIGKILL)


def reach_the_cap(scene: Scene) -> None:
    """One task holds the only place of its queue, and the next one waits."""
    scene.fleet.start("--queues", "narrow", processes=2, application=CAPPED)
    scene.send(scene.capped.occupy_narrow_once, 600.0)
    wait_until(lambda: status_of(scene) == "RUNNING")
    scene.send(scene.capped.occupy_narrow_once, 0.0)


def status_of(scene: Scene) -> str:
    query = "SELECT status FROM horsies_tasks WHERE id = %s"
    row = scene.connection.execute(query, (scene.subject,)).fetchone()
    assert row is not None
    return str(row[0])


def fail_fifteen_times(scene: Scene) -> None:
    scene.fleet.start(processes=1)
    scene.break_now()
    for _ in range(15):
        scene.send(scene.programs.refuse)


def crash_fifteen_times(scene: Scene) -> None:
    scene.fleet.start(processes=1)
    scene.break_now()
    for _ in range(15):
        scene.send(scene.programs.segfault)


def retry_1_200_times(scene: Scene) -> None:
    """The tasks end well: their retries are all that can be seen."""
    scene.fleet.start(processes=2)
    scene.break_now()
    for _ in range(400):
        scene.send(scene.programs.ask_for_retry, 0.01, 3)


def send_a_name_that_no_worker_has(scene: Scene) -> None:
    scene.fleet.start(processes=1)
    scene.break_now()
    scene.subject = scene.programs.app.send_by_name("pay").unwrap().task_id


def lock_the_row_of_a_task(scene: Scene) -> None:
    """The task is locked before a worker can claim it."""
    scene.send(scene.programs.noop)
    scene.hold("SELECT FROM horsies_tasks WHERE id = %s FOR UPDATE", scene.subject)
    scene.fleet.start(processes=1)


def lock_the_table_of_tasks(scene: Scene) -> None:
    scene.fleet.start(processes=1)
    scene.break_now()
    scene.hold("LOCK TABLE horsies_tasks IN ACCESS EXCLUSIVE MODE")


def wait_for_a_signal(scene: Scene) -> None:
    scene.fleet.start(processes=1)
    approval = SignalNode("approve", node_id="approval")
    run = scene.programs.app.workflow("w", [approval], definition_key="drill.v1").start()
    scene.subject = run.unwrap().workflow_id


@dataclass(frozen=True, slots=True)
class Break:
    """A break, its line on the overview, and the command whose answer has these words.

    A break without a line has a page that names the cause, as the overview itself does if it cannot be read.
    SUBJECT stands for the id that the break leaves.
    """

    make: Callable[[Scene], None]
    line: str | None
    command: str
    says: str
    page: str = "/"

    @property
    def shown(self) -> str:
        return "its explanation" if self.line is None else f"overview: {self.line}"


EXPLANATION = "/tasks/SUBJECT/explain"
BREAKS = {
    "queue paused": Break(
        pause_the_queue, "QUEUE_PAUSED", "explain queue default", "(the bank is down)"
    ),
    "worker dead": Break(
        kill_the_only_worker_of_a_queue,
        "WORKERS_LOST",
        "explain queue wide",
        "The last one, alpha, was lost",
    ),
    "schedule overdue": Break(
        kill_the_scheduler,
        "NO_SCHEDULER",
        "explain schedule nightly",
        "no scheduler is connected",
    ),
    "cap reached": Break(reach_the_cap, None, "explain SUBJECT", "QUEUE_CAP", EXPLANATION),
    "15 plain failures": Break(
        fail_fifteen_times, "TASK_FAILING", "doctor", "Task refuse has 15 failures in 10 minutes"
    ),
    "poison": Break(
        crash_fifteen_times, "CRASHES", "doctor", "Task segfault ended its process 15 times"
    ),
    "retry storm": Break(
        retry_1_200_times, "TASK_RETRYING", "doctor", "task ask_for_retry were retried 1,200 times"
    ),
    "unknown task name": Break(
        send_a_name_that_no_worker_has, "TASK_UNKNOWN", "explain queue default", "'pay'"
    ),
    "row locked": Break(
        lock_the_row_of_a_task, None, "explain SUBJECT", "pg_terminate_backend(", EXPLANATION
    ),
    "table locked": Break(
        lock_the_table_of_tasks, "DATABASE_LOCKED", "status", "pg_terminate_backend("
    ),
    "run waits for a signal": Break(
        wait_for_a_signal,
        None,
        "explain SUBJECT",
        "horsies workflow signal SUBJECT approve",
        "/workflows/SUBJECT/explain",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_real_break_is_seen_in_a_browser_and_named_by_one_command(
    page: Page, dashboard: WebServer, scene: Scene, name: str
) -> None:
    broken = BREAKS[name]
    if name == "table locked":  # the answer is 504, which the console of the browser reports
        page.context.watch.expected.append("504")  # type: ignore[attr-defined]
    broken.make(scene)
    says = broken.says.replace("SUBJECT", scene.subject)
    if broken.line is not None:
        wait_until(
            lambda: broken.line in codes_of(dashboard.get("/api/overview").json()), SEEN_SECONDS
        )
        note(name, seen=time.monotonic() - scene.broke_at)
    loaded = seconds_to_show(page, broken, scene, says)
    note(name, shown=broken.shown, browser=loaded)
    wait_until_named(scene, name, broken, says)


def seconds_to_show(page: Page, broken: Break, scene: Scene, says: str) -> float:
    """Open the page of a break, and return when it showed the break."""
    began = time.monotonic()
    page.goto(broken.page.replace("SUBJECT", scene.subject))
    if broken.line is not None and broken.line != "DATABASE_LOCKED":
        expect(page.locator(f'[data-key^="{broken.line} "]').first).to_be_visible()
    else:
        expect(page.get_by_text(says).first).to_be_visible()
    return time.monotonic() - began


def wait_until_named(scene: Scene, name: str, broken: Break, says: str) -> None:
    """Repeat the command until it names the cause, and note how long its last answer took.

    The counts of the last attempts may come with the next store of the worker.
    """
    answers: list[str] = []

    def is_named() -> bool:
        words = broken.command.replace("SUBJECT", scene.subject).split()
        text, seconds = scene.operate(*words)
        answers.append(text)
        if says in text:
            command = broken.command.replace("SUBJECT", "ID")
            note(name, command=f"`horsies {command}`", answered=seconds)
        return says in text

    wait_until(is_named, SEEN_SECONDS, lambda: answers[-1])


def test_a_frozen_server_is_seen_in_a_browser_and_on_the_command_line(
    browser: Browser, tmp_path: Path
) -> None:
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
                ended = commands.horsies(tmp_path, "status", DATABASE_URL=server.url)
                answered = time.monotonic() - began
                stale = re.compile(r"stale since \d\d:\d\d:\d\d")
                expect(page.locator("[data-badge]")).to_have_text(stale, timeout=WAIT_MS)
                seen = time.monotonic() - began
                other = tabs.new_page()
                other.goto("/queues", timeout=WAIT_MS)
                expect(other.get_by_text("did not answer")).to_be_visible()
            thawed_at = time.monotonic()
            expect(page.locator("[data-badge]")).to_have_text("live", timeout=WAIT_MS)
            live = time.monotonic() - thawed_at
    finally:
        server.remove()
    assert (ended.returncode, "did not answer in time" in ended.stderr) == (1, True), ended.stderr
    note("database frozen", shown="badge: stale since", seen=seen, live=live)
    note("database frozen", command="`horsies status`", answered=answered)
