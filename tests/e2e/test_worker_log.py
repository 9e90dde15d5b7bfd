"""The output of a worker on standard error."""

from __future__ import annotations

import json
import os
import shutil
import sys
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.support.database import terminate, with_password
from tests.support.workers import APPLICATION, FORKSERVER, Fleet


def test_a_json_log_holds_nothing_else(fleet: Fleet, programs: ModuleType) -> None:
    worker = fleet.start("--log-format", "json", "--loglevel", "debug", "--quiet-tasks")
    programs.explode.send().unwrap().get(30_000)
    programs.log_lines.send("words").unwrap().get(30_000)
    assert worker.stop() == 0
    for line in worker.log().splitlines():
        assert json.loads(line)["logger"] != "horsies.tasks"


@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_a_password_never_reaches_the_log(
    fleet: Fleet, programs: ModuleType, connection: psycopg.Connection[Any], method: str
) -> None:
    url = with_password(fleet.database_url, "hunter2")
    worker = fleet.start("--loglevel", "debug", "--start-method", method, database_url=url)
    terminate(connection, fleet.listening())
    programs.log_lines.send(f"at {url}").unwrap().get(30_000)
    programs.explode.send(f"cannot reach {url}").unwrap().get(30_000)
    assert worker.stop() == 0
    assert "cannot reach" in worker.log()
    assert "postgres:***@" in worker.log()
    assert "hunter2" not in worker.log()


def test_a_text_log_names_the_task_in_every_line_of_it(fleet: Fleet, programs: ModuleType) -> None:
    worker = fleet.start("--start-method", "fork")
    sent = programs.log_lines.send("words").unwrap()
    sent.get(30_000)
    assert worker.stop() == 0
    end = f"INFO     horsies.tasks [{worker.pid}] log_lines {sent.task_id} #1 completed after "
    assert end in worker.log()
    lines = [line for line in worker.log().splitlines() if line.endswith("words")]
    assert len(lines) == 3
    assert all(f"[log_lines {sent.task_id} #1]" in line for line in lines)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not installed")
def test_a_worker_on_one_cpu_has_one_child_by_default(fleet: Fleet) -> None:
    one = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", one, sys.executable, "-m", "horsies", "worker", APPLICATION]
    worker = fleet.launch("worker", command, fleet.environment())
    worker.wait_until_ready()
    assert "Concurrency config: processes=1," in worker.log()
    assert worker.stop() == 0


def test_the_start_of_a_worker_is_told_in_a_few_lines(fleet: Fleet) -> None:
    worker = fleet.start(*FORKSERVER, "--max-claim-batch", "4")
    assert (
        "Concurrency config: processes=2, cluster_wide_cap=unlimited, max_claim_per_worker=2, "
        "max_claim_batch=4, queue_caps=none" in worker.log()
    )
    assert "children ready: 2 (forkserver)" in worker.log()
    assert len(worker.log().splitlines()) < 10
    assert worker.stop() == 0
