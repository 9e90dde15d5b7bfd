"""Rows that the database refuses to change cost neither a worker nor another task."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any, LiteralString

import pytest

from tests.support.database import Database
from tests.support.poison import DEFERRED, IMMEDIATE, SECRET, poisoned
from tests.support.tables import attempts, task, wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import Fleet

FLOWS = "tests.support.apps.flows:app"
ENDS = "NEW.id = {} AND NEW.status IN ('COMPLETED', 'FAILED')"


def blocked_lines(fleet: Fleet) -> list[str]:
    logs = (line for worker in fleet.workers for line in worker.log().splitlines())
    return [line for line in logs if "is blocked" in line]


def status(fleet: Fleet, *command: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "horsies", *command, "--database-url", fleet.database_url, "--json"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("state", "trigger"), [("54000", IMMEDIATE), ("XX000", DEFERRED)])
def test_an_outcome_that_cannot_be_recorded_blocks_its_task_alone(
    fleet: Fleet,
    programs: ModuleType,
    connection: Database,
    state: str,
    trigger: LiteralString,
) -> None:
    poison = programs.sleep.send(0.0).unwrap()
    with poisoned(connection, ENDS, poison.task_id, state=state, trigger=trigger):
        workers = [fleet.start(processes=1) for _ in range(2)]
        wait_until(lambda: any(worker.events("blocked") for worker in workers))
        others = [programs.add.send(n, 1).unwrap() for n in range(30)]
        assert [sent.get(30_000).unwrap() for sent in others] == list(range(1, 31))
        owner = next(worker for worker in workers if worker.events("blocked"))
        overview = status(fleet, "status")
        assert overview["blocked"]["count"] == 1
        (first,) = overview["blocked"]["first"]
        assert (first["id"], first["action"]) == (poison.task_id, "record")
        assert state in first["error"]
        assert "poisonous" in first["error"]
        assert task(connection, poison.task_id).status == "RUNNING"
    assert poison.get(30_000).ok_value == "done"
    (line,) = blocked_lines(fleet)
    assert poison.task_id in line
    assert state in line
    assert SECRET not in owner.log()
    assert len(attempts(connection, poison.task_id)) == 1
    assert status(fleet, "status")["blocked"] == {"count": 0, "first": []}
    assert [worker.stop() for worker in workers] == [0, 0]


def test_a_run_that_cannot_advance_keeps_its_results_and_stops_no_other_run(
    fleet: Fleet, flows: ModuleType, connection: Database
) -> None:
    poison = flows.chain(3).start().unwrap()
    condition = "NEW.workflow_id = {} AND NEW.status = 'COMPLETED' AND NEW.task_index = 1"
    with poisoned(connection, condition, poison.workflow_id, table="horsies_workflow_tasks"):
        worker = fleet.start(application=FLOWS)
        event = worker.wait_for("blocked")
        assert event["workflow_id"] == poison.workflow_id
        assert flows.chain(3).start().unwrap().get(30_000).is_ok()
        problems = status(fleet, "workflow", "audit")["found"]
        assert [one["workflow_id"] for one in problems] == [poison.workflow_id]
        assert "refuses to record" in str(problems)
    assert poison.get(30_000).ok_value == 3
    assert status(fleet, "workflow", "audit")["found"] == []
    assert worker.stop() == 0


def test_a_worker_that_stops_gives_a_refused_outcome_up(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    poison = programs.add.with_options(headers={"request_id": "r-17"}).send(1, 1).unwrap()
    with poisoned(connection, ENDS, poison.task_id):
        worker = fleet.start(processes=1, config={"log_headers": ["request_id"]})
        worker.wait_for("blocked")
        assert worker.stop() == 3
    (event,) = worker.events("outcomes_lost")
    assert event["task_ids"] == [poison.task_id]
    (line,) = [one for one in worker.log().splitlines() if "outcome" in one and "is lost" in one]
    assert f"[request_id=r-17] the outcome of add {poison.task_id} is lost" in line


def test_tasks_that_cannot_be_recovered_do_not_keep_others_from_it(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    doomed = fleet.start(processes=4)
    poison = [programs.sleep.send(600).unwrap() for _ in range(2)]
    innocent = [programs.sleep.send(600).unwrap() for _ in range(2)]
    wait_until(lambda: len(fleet.journal.lines("start")) == 4)
    refused = "NEW.id IN ({}, {})"
    with poisoned(connection, refused, *(one.task_id for one in poison)):
        heirs = [fleet.start(processes=1) for _ in range(2)]
        doomed.signal(signal.SIGKILL)
        for sent in innocent:
            wait_for_status(connection, sent.task_id, "FAILED")
        assert programs.add.send(1, 1).unwrap().get(30_000).ok_value == 2
        assert {task(connection, one.task_id).status for one in poison} == {"RUNNING"}
        assert status(fleet, "status")["blocked"]["count"] == 2
    assert len(blocked_lines(fleet)) == 2
    assert [worker.stop() for worker in heirs] == [0, 0]


def test_a_task_that_cannot_be_claimed_does_not_keep_others_from_it(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    poison = programs.add.send(1, 1).unwrap()
    with poisoned(connection, "NEW.id = {}", poison.task_id):
        workers = [fleet.start(processes=2) for _ in range(2)]
        others = [programs.add.send(n, 1).unwrap() for n in range(30)]
        assert [sent.get(30_000).unwrap() for sent in others] == list(range(1, 31))
        assert len(blocked_lines(fleet)) == 1
    assert poison.get(30_000).ok_value == 2
    assert [worker.stop() for worker in workers] == [0, 0]


def test_a_task_that_cannot_expire_does_not_keep_others_from_it(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    late = [programs.add.send(n, 1).unwrap() for n in range(3)]
    ids = [sent.task_id for sent in late]
    connection.execute("UPDATE horsies_tasks SET good_until = now() - interval '1 minute'")
    with poisoned(connection, "NEW.id = {}", ids[0]):
        worker = fleet.start(processes=1)
        for task_id in ids[1:]:
            wait_for_status(connection, task_id, "EXPIRED")
        assert programs.add.send(1, 1).unwrap().get(30_000).ok_value == 2
        assert worker.wait_for("blocked")["id"] == ids[0]
    wait_for_status(connection, ids[0], "EXPIRED")
    assert len(blocked_lines(fleet)) == 1
    assert worker.stop() == 0


def test_a_prefetched_task_that_cannot_start_does_not_keep_others_from_it(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    config = {"prefetch_buffer": 3, "claim_lease_ms": 2_000}
    first = programs.sleep.send(0.5).unwrap()
    (poison, *others) = programs.add.send_many(programs.add.bind(n, 1) for n in range(5)).unwrap()
    condition = "NEW.id = {} AND OLD.status = 'CLAIMED'"
    with poisoned(connection, condition, poison.task_id):
        worker = fleet.start(processes=1, config=config)
        assert [sent.get(30_000).unwrap() for sent in others] == [2, 3, 4, 5]
        assert first.get(30_000).is_ok()
        assert worker.wait_for("blocked")["id"] == poison.task_id
    assert poison.get(30_000).ok_value == 1
    assert worker.stop() == 0
