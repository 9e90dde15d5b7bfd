"""Windows of a worker that serves several queues: the present or past contents of other queues do
not close them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from types import ModuleType
from urllib.request import urlopen

import pytest

from horsies import SignalNode
from tests.support.database import Database
from tests.support.tables import wait_until_empty
from tests.support.wait import wait_until
from tests.support.workers import Fleet

APPLICATION = "tests.support.apps.lanes:app"
COUNT = 1_000
# What is in the first queue, and where the short tasks are.
SITUATIONS = (
    ("a delayed task", ("last",)),
    ("a run that waits for a signal", ("last",)),
    ("an unknown task", ("last",)),
    ("nothing since a task ended", ("last",)),
    ("short tasks", ("last", "third", "second", "fourth", "first")),
    ("a task, but it is paused", ("last",)),
)


@pytest.fixture
def lanes(programs: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.lanes")
    yield module
    module.app.close()


def hold_a_task(lanes: ModuleType, what: str) -> None:
    """Bring the first queue into this situation, in which it has no task that this worker may claim."""
    match what:
        case "a delayed task":
            lanes.alarm.schedule(3_600).unwrap()
        case "a run that waits for a signal":
            approval = SignalNode("approve", value_type=str)
            nodes = [approval, lanes.alarm.node(waits_for=[approval])()]
            lanes.app.workflow("approved", nodes, definition_key="approved").start().unwrap()
        case "an unknown task":
            lanes.app.send_by_name("elsewhere", queue_name="first").unwrap()
        case "nothing since a task ended":
            assert lanes.alarm.send().unwrap().get(30_000).is_ok()
        case "a task, but it is paused":
            lanes.app.pause_queue("first").unwrap()
            lanes.alarm.send().unwrap()


def counts(port: int) -> dict[str, int]:
    """The turns of the worker, and the tasks that it handed out alone and in windows."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = re.findall(r'^horsies_tasks_handed_out_total{way="(\w+)"} (\S+)$', text, re.MULTILINE)
    turns = re.findall(r"^(horsies_turns)_total (\S+)$", text, re.MULTILINE)
    return {name: int(float(value)) for name, value in [*found, *turns]}


def drain(lanes: ModuleType, connection: Database, queues: tuple[str, ...]) -> None:
    """Let the worker find all tasks at once, and wait until they have ended."""
    before = ended(connection)
    for queue in queues:
        lanes.app.pause_queue(queue).unwrap()
    for number in range(5):
        task = lanes.blink.with_options(queue_name=queues[number % len(queues)])
        task.send_many([lanes.blink.bind() for _ in range(COUNT // 5)]).unwrap()
    for queue in queues:
        lanes.app.resume_queue(queue).unwrap()
    wait_until(lambda: ended(connection) == before + COUNT, 60)


def ended(connection: Database) -> int:
    found = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE task_name = 'blink' AND status = 'COMPLETED'"
    ).fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.timeout(120)
def test_most_short_tasks_go_out_in_windows_whatever_a_better_queue_holds(
    fleet: Fleet, lanes: ModuleType, connection: Database
) -> None:
    options = ("--metrics-port", "0", "--quiet-tasks")
    worker = fleet.start(*options, processes=2, application=APPLICATION)
    port = int(worker.wait_for("metrics_served")["port"])
    lanes.blink.send_many([lanes.blink.bind() for _ in range(50)]).unwrap()
    wait_until_empty(connection, 30)
    for first, queues in SITUATIONS:
        hold_a_task(lanes, first)
        before = counts(port)
        drain(lanes, connection, queues)
        now = counts(port)
        grown = {name: now[name] - before[name] for name in now}
        print(first, queues, grown)
        assert grown["window"] + grown["alone"] >= COUNT
        assert grown["window"] > COUNT / 2, f"short tasks went out one at a time: {first}"
        assert grown["horsies_turns"] < COUNT / 4, f"a turn carried few tasks: {first}"
