"""Counts of attempts by real workers: in their metrics, and in the database after their end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import psycopg
import pytest

from tests.support import tables
from tests.support.scrapes import port_of, scraped
from tests.support.wait import wait_until
from tests.support.workers import Fleet

COLUMNS = ("done", "failed", "retried", "crashed", "stopped")
SUMS = (
    f"SELECT {', '.join(f'coalesce(sum({column}), 0)' for column in COLUMNS)} FROM horsies_measures"
)
BUCKETS = "SELECT coalesce(sum(bucket), 0) FROM horsies_measures, unnest({}) AS bucket"
ENDS = """SELECT CASE WHEN will_retry THEN 'retried' WHEN outcome = 'COMPLETED' THEN 'completed'
    WHEN error_code = 'WORKER_CRASHED' THEN 'crashed' ELSE 'failed' END, count(*)
FROM horsies_task_attempts GROUP BY 1"""


def ends_of(port: int) -> Counter[str]:
    """The attempts of a worker by their end."""
    ends: Counter[str] = Counter()
    counted = scraped(port).get("horsies_attempts")
    for sample in counted.samples if counted else ():
        ends[sample.labels["outcome"]] += round(sample.value)
    return +ends


def command(fleet: Fleet, *words: str) -> str:
    """The output of a command that succeeds."""
    done = subprocess.run(
        [sys.executable, "-m", "horsies", *words],
        env=os.environ | {"DATABASE_URL": fleet.database_url},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


@pytest.mark.pooled
def test_counters_and_measures_agree_with_the_attempts(
    fleet: Fleet,
    programs: ModuleType,
    connection: psycopg.Connection[Any],
) -> None:
    worker = fleet.start("--metrics-port", "0", "--quiet-tasks", "--name", "counter")
    port = port_of(worker)
    programs.noop.send_many([programs.noop.bind() for _ in range(2_000)]).unwrap()
    others = [
        programs.explode.send().unwrap(),
        programs.fail_then_work.send().unwrap(),
        programs.crash_then_work.send().unwrap(),
        programs.segfault.send().unwrap(),
    ]
    for handle in others:
        handle.get(30_000)
    wait_until(lambda: tables.count(connection, "PENDING", "RUNNING") == 0, 60, worker.log)
    truth = Counter(dict(connection.execute(ENDS).fetchall()))
    assert truth["completed"] == 2_002
    # The last turn is committed a moment before the worker counts it.
    wait_until(lambda: ends_of(port) == truth, what=lambda: (ends_of(port), truth))
    found = scraped(port)
    deaths = {one.labels["cause"]: one.value for one in found["horsies_child_deaths"].samples}
    assert deaths["signal 11 (SIGSEGV)"] == 1.0
    started = [one for one in found["horsies_wait_seconds"].samples if one.name.endswith("_count")]
    assert [one.value for one in started] == [truth.total()]
    with urlopen(f"http://127.0.0.1:{port}/livez", timeout=30) as response:
        assert response.read() == b"alive\n"
    with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as response:
        assert response.read() == b"ready\n"

    answer = command(fleet, "health", "--worker", "counter", "--json")
    assert json.loads(answer)["workers"][0]["ping_ms"] > 0
    assert worker.stop() == 0
    sums = connection.execute(SUMS).fetchone()
    assert sums == (truth["completed"], truth["failed"], truth["retried"], truth["crashed"], 0)
    for column in ("waited", "ran"):
        assert connection.execute(BUCKETS.format(column)).fetchone() == (truth.total(),)
    row = connection.execute("SELECT children FROM horsies_workers").fetchone()
    assert row is not None
    assert isinstance(row[0], list), "written with the last snapshot"


def test_a_killed_worker_loses_its_own_counts_and_no_others(
    fleet: Fleet, programs: ModuleType, connection: psycopg.Connection[Any]
) -> None:
    options = ("--metrics-port", "0", "--quiet-tasks")
    workers = [fleet.start(*options, processes=1, ready=False) for _ in range(3)]
    for worker in workers:
        worker.wait_until_ready()
    port = port_of(workers[0])
    programs.noop.send_many([programs.noop.bind() for _ in range(600)]).unwrap()
    killed = wait_until(lambda: ends_of(port)["completed"], 30, workers[0].log)
    workers[0].signal(signal.SIGKILL)
    workers[0].wait()
    wait_until(lambda: tables.count(connection, "PENDING", "CLAIMED", "RUNNING") == 0, 60)
    for worker in workers[1:]:
        assert worker.stop() == 0
    by_worker = dict(
        connection.execute(
            "SELECT worker_id, count(*) FROM horsies_task_attempts GROUP BY 1"
        ).fetchall()
    )
    row = connection.execute("SELECT coalesce(sum(done), 0) FROM horsies_measures").fetchone()
    assert row is not None
    attempts = sum(by_worker.values())
    of_killed = connection.execute(
        "SELECT count(*) FROM horsies_task_attempts AS attempt JOIN horsies_workers AS worker"
        " USING (worker_id) WHERE worker.pid = %s",
        (workers[0].pid,),
    ).fetchone()
    assert of_killed is not None
    assert of_killed[0] >= killed
    assert row[0] == attempts - of_killed[0], "it was killed before its first flush"


def test_the_gauges_of_the_cluster_have_a_process_of_their_own(
    fleet: Fleet, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('mail', now())")
    words = [sys.executable, "-m", "horsies", "metrics", "--port", "0"]
    environment = os.environ | {"DATABASE_URL": fleet.database_url}
    process = fleet.launch("metrics", words, environment)
    (port,) = wait_until(lambda: re.findall(r"http://127.0.0.1:(\d+)/metrics", process.log()), 30)
    gauges = scraped(int(port))
    assert [one.value for one in gauges["horsies_up"].samples] == [1.0]
    paused = {one.labels["queue"]: one.value for one in gauges["horsies_queue_paused"].samples}
    assert paused["mail"] == 1.0
    assert process.stop() == 0
