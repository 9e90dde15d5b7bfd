"""Workers that serve some of the queues only."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import ModuleType

import pytest

from horsies import SleepNode
from tests.support.database import Database
from tests.support.tables import task, wait_for_status
from tests.support.workers import Fleet

TEAMS = "tests.support.apps.teams:app"


@pytest.fixture
def teams(programs: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.teams")
    yield module
    module.app.close()


def worker_of(connection: Database, task_id: str) -> str | None:
    """The name of the worker that ran the task last."""
    found = connection.execute(
        "SELECT worker.name FROM horsies_task_attempts AS tried "
        "JOIN horsies_workers AS worker USING (worker_id) "
        "WHERE task_id = %s ORDER BY attempt DESC LIMIT 1",
        (task_id,),
    ).fetchone()
    return None if found is None else found[0]


def test_each_worker_serves_its_queues_and_all_of_them_maintain_the_others(
    fleet: Fleet, teams: ModuleType, connection: Database
) -> None:
    flags = {
        "post": ("--queues", "mail"),
        "press": ("--queues", "urgent,reports", "--exclude-queues", "urgent"),
        "watch": ("--exclude-queues", "mail,reports"),
    }
    workers = {
        name: fleet.start("--name", name, *more, application=TEAMS, processes=1)
        for name, more in flags.items()
    }
    assert "[post " in workers["post"].log()
    sent = {
        "post": teams.mail.send().unwrap(),
        "press": teams.report.send().unwrap(),
        "watch": teams.alarm.send().unwrap(),
    }
    for name, handle in sent.items():
        assert handle.get(30_000).is_ok()
        assert worker_of(connection, handle.task_id) == name
    # The built-in task of the sleep runs in the queue of the mail, and not in the first one.
    assert workers["watch"].stop() == 0
    rest = SleepNode(0.01)
    last = teams.mail.node(waits_for=[rest])()
    run = teams.app.workflow("later", [rest, last], definition_key="later").start().unwrap()
    assert run.get(30_000).is_ok()
    # A worker of another queue expires tasks, and recovers those of a worker that was killed; the place
    # under the cluster-wide cap is then free for its own tasks.
    until = datetime.now(UTC) + timedelta(seconds=2)
    late = teams.alarm.with_options(good_until=until).send().unwrap()
    wait_for_status(connection, late.task_id, "EXPIRED")
    lost = teams.mail.send(60).unwrap()
    wait_for_status(connection, lost.task_id, "RUNNING")
    waiting = teams.report.send().unwrap()
    workers["post"].signal(signal.SIGKILL)
    assert waiting.get(30_000).is_ok()
    assert task(connection, lost.task_id).error_code == "WORKER_CRASHED"
