"""Workers are killed again and again under mixed workflows: every run ends as its nodes' outcomes say."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from types import ModuleType

import pytest

from horsies.db.statements.workflows import retry_run, signal_run
from tests.support import runs
from tests.support.database import Database, steps_of
from tests.support.oracle.random_runs import SIGNAL, Mixed, mixed
from tests.support.oracle.rules import Oracle
from tests.support.oracle.tree import End
from tests.support.tables import wait_until_empty
from tests.support.workers import Fleet

APPLICATION = "tests.support.apps.flows:app"

RUNS = int(os.environ.get("HORSIES_CRASH_RUNS", "15"))
KILLS = max(3, RUNS // 10)
WORKERS = 2


def start_everything(connection: Database, flows: ModuleType, chance: Random) -> dict[str, Mixed]:
    drawn = [mixed(chance, flows) for _ in range(RUNS)]
    started = runs.start(connection, *(one.spec for one in drawn))
    for run_id, one in zip(started, drawn, strict=True):
        for number in range(one.signals):
            signal_run.fetch(connection, run_id, SIGNAL, str(number))
    return dict(zip(started, drawn, strict=True))


def kill_now_and_then(
    fleet: Fleet, connection: Database, chance: Random, steer: Callable[[], None]
) -> None:
    """Kill a worker as soon as there was some progress since the last one, and start another."""
    for _ in range(KILLS):
        wanted = progress(connection) + chance.randint(1, 10)
        steer()
        while progress(connection) < wanted and is_anything_open(connection):
            connection.execute("SELECT pg_sleep(%s)", (chance.random() * 0.05,))
        victim = chance.choice([one for one in fleet.workers if one.process.poll() is None])
        victim.signal(signal.SIGKILL)
        victim.wait()
        steer()
        fleet.start(application=APPLICATION)


def progress(connection: Database) -> int:
    (row,) = connection.execute("SELECT count(*) FROM horsies_task_attempts")
    return int(row[0])


def is_anything_open(connection: Database) -> bool:
    (row,) = connection.execute(
        "SELECT count(*) FROM horsies_workflows WHERE status IN ('RUNNING', 'PAUSED')"
    )
    return bool(row[0])


def recorded_ends(connection: Database) -> dict[tuple[str, int, int | None], End]:
    """How the last task of every node and item ended, as the database recorded it."""
    rows = connection.execute(
        "SELECT task.workflow_id::text, task.workflow_node_index, task.workflow_item_index, task.status, "
        "task.result, node.sub_workflow_id::text FROM horsies_tasks AS task "
        "JOIN horsies_workflow_tasks AS node "
        "ON node.workflow_id = task.workflow_id AND node.task_index = task.workflow_node_index "
        "ORDER BY task.id"
    )
    return {
        (run, index, item): End(
            (run, index, item),
            status,
            None if result is None else json.loads(result),
            child_id=child,
        )
        for run, index, item, status, result, child in rows
    }


def replayed(connection: Database, started: dict[str, Mixed]) -> Oracle:
    """The statuses that follow from the recorded outcomes."""
    ends, oracle = recorded_ends(connection), Oracle()
    for run_id, one in started.items():
        oracle.start(run_id, one.shape)
    while oracle.enqueued:
        for place in oracle.enqueued.pop(0):
            oracle.finish([ends.pop(place)])
    assert not ends, "tasks that the rules do not predict"
    return oracle


def stored(connection: Database) -> dict[str, tuple[str, list[str]]]:
    """The status of every run and of its nodes."""
    rows = connection.execute(
        "SELECT run.id::text, run.status, array_agg(node.status::text ORDER BY node.task_index) "
        "FROM horsies_workflows AS run JOIN horsies_workflow_tasks AS node ON node.workflow_id = run.id "
        "GROUP BY run.id"
    )
    return {run: (status, statuses) for run, status, statuses in rows}


class Retries:
    """Retries runs at any moment: while they run, when a node has failed, when they have ended."""

    def __init__(self, connection: Database, started: Iterable[str]) -> None:
        self._connection = connection
        self._run_ids = list(started)
        self.answers: Counter[str | None] = Counter()

    def __call__(self) -> None:
        for run_id in self._run_ids:
            (row,) = retry_run.fetch(self._connection, run_id, None)
            self.answers[row.answer] += 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_retried", [False, True], ids=["", "retried"])
def test_killed_workers_leave_no_run_in_another_state_than_its_outcomes_say(
    fleet: Fleet, connection: Database, flows: ModuleType, is_retried: bool
) -> None:
    chance = Random(os.environ.get("HORSIES_CRASH_SEED", "workflows"))
    before = runs.deadlocks(connection)
    for _ in range(WORKERS):
        fleet.start(application=APPLICATION)
    with steps_of(connection, 1):  # maps grow between the kills
        started = start_everything(connection, flows, chance)
        retries = Retries(connection, started)
        kill_now_and_then(fleet, connection, chance, retries if is_retried else lambda: None)
        runs.wait_for_ends(connection, 300)
    wait_until_empty(connection, 60)
    oracle = replayed(connection, started)
    assert stored(connection) == {
        run.id: (run.status, [node.status for node in run.nodes]) for run in oracle.runs.values()
    }
    assert (retries.answers["retried"] > 0) == is_retried, retries.answers
    assert runs.problems(connection) == []
    assert runs.deadlocks(connection) == before
