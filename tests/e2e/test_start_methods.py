"""The same worker on children from every start method."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.support.rows import insert_raw
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal, is_gone

AWKWARD = "tests.support.apps.noisy_import:app"


@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_a_worker_works_and_stops_with_every_start_method(
    fleet: Fleet, journal: Journal, programs: ModuleType, method: str
) -> None:
    worker = fleet.start("--start-method", method)
    assert f"children ready: 2 ({method})" in worker.log()
    assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
    assert programs.add_async.send(1, 2).unwrap().get(30_000).ok_value == 3
    crashed = programs.exit_at_once.send(9).unwrap().get(30_000).err_value
    assert crashed.error_code == "WORKER_CRASHED"
    inner_id = programs.send_another.send(20, 22).unwrap().get(30_000).ok_value
    assert programs.app.get_result(inner_id, 30_000).ok_value == 42
    sent = programs.sleep.send(0.4).unwrap()
    wait_until(lambda: journal.lines("start", sent.task_id))
    family = worker.family()
    assert worker.stop() == 0
    assert sent.get(0).ok_value == "done"
    assert all(map(is_gone, family))


@pytest.mark.parametrize(("method", "imports"), [("forkserver", 2), ("fork", 1), ("spawn", 3)])
def test_an_import_prints_once_and_its_files_stay_open_in_children(
    fleet: Fleet,
    programs: ModuleType,
    connection: psycopg.Connection[Any],
    method: str,
    imports: int,
) -> None:
    worker = fleet.start(
        *("--start-method", method),
        application=AWKWARD,
        environment={"PYTHONUNBUFFERED": ""},
    )
    task_id = insert_raw(connection, "read_and_log", '["hello"]')
    read = programs.app.get_result(task_id, 30_000).ok_value
    assert read.startswith('"""An application whose import prints')
    assert (fleet.directory / "awkward.log").read_text() == "hello\n"
    assert worker.stop() == 0
    assert worker.log().count("the awkward application is imported") == imports
