"""Schedules of workflows with real schedulers and workers: every slot one run, and every run ends."""

from __future__ import annotations

import importlib
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.database import Database
from tests.support.schedulers import APPLICATION, GATE_VARIABLE, config_of, enter, start_scheduler
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal


def flow(name: str, **fields: Any) -> dict[str, Any]:
    """A schedule as JSON: a workflow every second, none of its slots missed."""
    defaults = {
        "definition": "e2e.slot-flow",
        "kwargs": {"label": name},
        "catch_up_missed": True,
    }
    return defaults | {"name": name, "pattern": {"type": "interval", "seconds": 1}} | fields


def run_slots(connection: Database, name: str) -> dict[datetime, str]:
    """The slots that became runs, in their order, and how the runs stand."""
    rows = connection.execute(
        "SELECT scheduled_for, status FROM horsies_workflows WHERE schedule_name = %s "
        "ORDER BY scheduled_for",
        (name,),
    ).fetchall()
    found = {moment.astimezone(UTC): status for moment, status in rows}
    assert len(found) == len(rows), rows
    return found


def test_schedulers_that_die_start_every_slot_once_and_workers_bring_every_run_to_its_end(
    fleet: Fleet, programs: ModuleType, journal: Journal, connection: Database
) -> None:
    importlib.import_module("tests.support.apps.scheduled")  # its workflow has a key from now on
    config = config_of(flow("flow"), flow("turns", overlap="queue"))
    first = enter(connection, programs.app, config)
    fleet.start(application=APPLICATION)
    doomed = start_scheduler(fleet, config)
    wait_until(lambda: len(run_slots(connection, "flow")) >= 3, 30, doomed.log)
    doomed.signal(signal.SIGKILL)
    doomed.wait()
    both = [start_scheduler(fleet, config) for _ in range(2)]
    at_death = len(run_slots(connection, "flow"))
    wait_until(lambda: len(run_slots(connection, "flow")) >= at_death + 4, 30, both[0].log)
    assert [one.stop() for one in both] == [0, 0]
    names = ("flow", "turns")
    wait_until(
        lambda: (
            {status for name in names for status in run_slots(connection, name).values()}
            == {"COMPLETED"}
        ),
    )
    for name in names:
        slots = list(run_slots(connection, name))
        assert slots == [first[name] + timedelta(seconds=number) for number in range(len(slots))]
        labels = [line.label for line in journal.lines("end") if line.label.startswith(name)]
        assert sorted(labels) == [f"{name} {slot.isoformat()}" for slot in slots]
    assert "Traceback" not in "".join(one.log() for one in both)


def test_a_worker_with_a_scheduler_starts_the_runs_it_then_works_on(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    importlib.import_module("tests.support.apps.scheduled")
    config = config_of(flow("flow"))
    first = enter(connection, programs.app, config)
    worker = fleet.start("--with-scheduler", application=APPLICATION, config=config)
    wait_until(
        lambda: list(run_slots(connection, "flow").values())[:2] == ["COMPLETED"] * 2,
        30,
        worker.log,
    )
    slots = list(run_slots(connection, "flow"))
    assert slots == [first["flow"] + timedelta(seconds=number) for number in range(len(slots))]
    assert worker.stop() == 0


def test_a_workflow_that_takes_its_time_to_be_built_does_not_hold_up_the_worker(
    fleet: Fleet, programs: ModuleType, connection: Database, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    slow = flow("slow", definition="e2e.slow-flow", kwargs={})
    worker = fleet.start(
        "--with-scheduler",
        application=APPLICATION,
        config=config_of(slow),
        environment={GATE_VARIABLE: str(gate)},
    )

    def wait_for_a_build() -> None:
        known = worker.log().count("building")
        wait_until(lambda: worker.log().count("building") > known, 30, worker.log)

    wait_until(lambda: run_slots(connection, "slow"), 30, worker.log)
    gate.touch()
    wait_for_a_build()
    assert programs.add.send(1, 2).unwrap().get(timeout_ms=30_000).unwrap() == 3
    known = len(run_slots(connection, "slow"))
    gate.unlink()
    wait_until(lambda: len(run_slots(connection, "slow")) >= known + 2, 30, worker.log)
    gate.touch()
    wait_for_a_build()
    assert worker.stop() == 0
    assert "a workflow is still being built" in worker.log()
