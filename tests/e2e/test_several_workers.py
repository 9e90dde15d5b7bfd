"""One `horsies worker` for several applications: independent workers, one set of signals, one exit code;
and one `horsies metrics` for their databases.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import psutil
import psycopg
import pytest

from horsies.app import Horsies
from tests.support.database import Database, backends
from tests.support.rows import add_task
from tests.support.tables import wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import Fleet, RunningWorker, is_gone

PROJECT = """
import os
import time
from pathlib import Path
from horsies import Horsies

app = Horsies({url!r})


@app.task("add")
def add(a: int, b: int) -> int:
    return a + b


@app.task("rest")
def rest() -> None:
    while True:
        time.sleep(0.01)
"""
DOWN = "postgresql://app@127.0.0.1:1/down"


@pytest.fixture
def other(other_url: str) -> Iterator[Database]:
    with psycopg.connect(other_url, autocommit=True) as connection:
        yield connection


def written(folder: Path, name: str, url: str) -> str:
    (folder / f"{name}.py").write_text(PROJECT.format(url=url))
    return str(folder / f"{name}.py")


def start(fleet: Fleet, *arguments: str) -> RunningWorker:
    command = [sys.executable, "-m", "horsies", "worker", *arguments, "-c", "1"]
    return fleet.launch("worker", command, fleet.environment())


def send(url: str, name: str, **values: object) -> str:
    app = Horsies(url)
    try:
        return str(app.send_by_name(name, values).unwrap().task_id)
    finally:
        app.close()


def worker_of(group: RunningWorker, locator: str) -> int:
    """The worker process of one application."""
    found = psutil.Process(group.pid).children()
    (pid,) = [one.pid for one in found if locator in one.cmdline()]
    return int(pid)


def test_two_databases_are_served_and_stopped_together(
    fleet: Fleet,
    connection: Database,
    other: Database,
    tmp_path: Path,
    process_url: str,
    other_url: str,
) -> None:
    orders, media = written(tmp_path, "orders", process_url), written(tmp_path, "media", other_url)
    group = start(fleet, f"a={orders}", media)
    for url, database in ((process_url, connection), (other_url, other)):
        wait_for_status(database, send(url, "add", a=1, b=2), "COMPLETED")
    group.signal(signal.SIGTERM)
    assert group.wait() == 0, group.log()
    assert group.family() == []


def test_a_killed_worker_comes_back_and_the_other_never_stops(
    fleet: Fleet,
    connection: Database,
    other: Database,
    tmp_path: Path,
    process_url: str,
    other_url: str,
) -> None:
    orders, media = written(tmp_path, "orders", process_url), written(tmp_path, "media", other_url)
    group = start(fleet, orders, media)
    wait_for_status(connection, send(process_url, "add", a=1, b=2), "COMPLETED")
    wait_for_status(other, send(other_url, "add", a=1, b=2), "COMPLETED")
    survivor = worker_of(group, media)
    os.kill(worker_of(group, orders), signal.SIGKILL)
    wait_for_status(connection, send(process_url, "add", a=3, b=4), "COMPLETED")
    assert worker_of(group, media) == survivor
    assert (
        f"the worker of {orders} ended (signal 9 (SIGKILL)); it is restarted in 1 s" in group.log()
    )
    group.signal(signal.SIGTERM)
    assert group.wait() == 0, group.log()


def test_a_second_signal_interrupts_the_tasks_of_all(
    fleet: Fleet,
    connection: Database,
    other: Database,
    tmp_path: Path,
    process_url: str,
    other_url: str,
) -> None:
    orders, media = written(tmp_path, "orders", process_url), written(tmp_path, "media", other_url)
    group = start(fleet, orders, media)
    wait_for_status(connection, send(process_url, "rest"), "RUNNING")
    wait_for_status(other, send(other_url, "rest"), "RUNNING")
    group.signal(signal.SIGTERM)
    wait_until(lambda: group.log().count("graceful shutdown") >= 2, what=group.log)
    group.signal(signal.SIGINT)
    assert group.wait() == 3, group.log()


def test_the_workers_shut_down_when_their_supervisor_is_killed(
    fleet: Fleet, connection: Database, tmp_path: Path, process_url: str, other_url: str
) -> None:
    orders, media = written(tmp_path, "orders", process_url), written(tmp_path, "media", other_url)
    group = start(fleet, orders, media)
    wait_for_status(connection, send(process_url, "add", a=1, b=2), "COMPLETED")
    workers = [worker_of(group, orders), worker_of(group, media)]
    group.family()
    group.signal(signal.SIGKILL)
    wait_until(lambda: all(map(is_gone, workers)), what=group.log)
    wait_until(lambda: not backends(connection, "horsies:%"))


def test_one_database_that_is_down_does_not_keep_the_other_from_being_served(
    fleet: Fleet, connection: Database, tmp_path: Path, process_url: str
) -> None:
    orders, down = written(tmp_path, "orders", process_url), written(tmp_path, "down", DOWN)
    group = start(fleet, down, orders)
    wait_for_status(connection, send(process_url, "add", a=1, b=2), "COMPLETED")
    assert backends(connection, "horsies:%")
    group.signal(signal.SIGTERM)
    group.wait()
    assert group.family() == []


def test_a_wrong_locator_is_refused_before_anything_runs(
    fleet: Fleet, connection: Database, tmp_path: Path, process_url: str
) -> None:
    orders = written(tmp_path, "orders", process_url)
    group = start(fleet, orders, f"{orders}:missing")
    assert group.wait() == 1
    assert "has no attribute 'missing'" in group.log()
    assert "children ready" not in group.log()


def test_flags_of_one_application_are_refused_with_several(fleet: Fleet) -> None:
    group = start(fleet, "a:app", "b:app", "--queues", "mail")
    assert group.wait() == 1
    assert "Several applications and --queues exclude each other" in group.log()


def test_one_server_of_metrics_labels_the_gauges_of_each_database(
    fleet: Fleet, connection: Database, other: Database, process_url: str, other_url: str
) -> None:
    add_task(connection, queue_name="mail")
    add_task(other, queue_name="video")
    databases = {"orders": process_url, "media": other_url, "down": DOWN}
    named = [word for one in databases.items() for word in ("--database-url", "=".join(one))]
    words = [sys.executable, "-m", "horsies", "metrics", "--port", "0", *named]
    process = fleet.launch("metrics", words, fleet.environment())
    (port,) = wait_until(lambda: re.findall(r"http://127.0.0.1:(\d+)/metrics", process.log()), 30)

    def get(path: str) -> str:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            text: str = response.read().decode()
            return text

    text = get("/metrics")
    ups = dict(re.findall(r'^horsies_up\{database="(\w+)"\} (\S+)$', text, re.M))
    assert ups == {"orders": "1.0", "media": "1.0", "down": "0.0"}
    assert 'horsies_queue_tasks{database="media",queue="video",state="due"} 1.0' in text
    assert 'horsies_queue_tasks{database="orders",queue="mail",state="due"} 1.0' in text
    assert get("/readyz") == "the database down cannot be read\n"
