"""Batches in real workers: one call for several tasks, and an outcome for each of them."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.support.database import Database
from tests.support.tables import attempts, count, task, tasks, wait_until_empty
from tests.support.wait import wait_until
from tests.support.workers import Fleet, RunningWorker

APPLICATION = "tests.support.apps.batched:app"
IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"


class Call(NamedTuple):
    name: str
    pid: int
    items: list[Any]
    ids: list[str]


@pytest.fixture(scope="module")
def batched(programs: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.batched")
    yield module
    module.app.close()


def start(fleet: Fleet, *options: str, processes: int = 1, **more: Any) -> RunningWorker:
    return fleet.start(*options, application=APPLICATION, processes=processes, **more)


def calls(fleet: Fleet) -> list[Call]:
    path = Path(f"{fleet.journal.path}.batches")
    lines = path.read_text().splitlines() if path.exists() else []
    return [Call(*json.loads(line)) for line in lines]


def send(function: Any, items: list[Any]) -> list[str]:
    """Send a task for each item, and return their ids in order."""
    handles = function.send_many([function.bind(item) for item in items]).unwrap()
    return [handle.task_id for handle in handles]


def values(connection: Database, ids: list[str]) -> list[Any]:
    return [json.loads(task(connection, one).result or "null") for one in ids]


@pytest.mark.parametrize("processes", [1, 3])
def test_one_call_takes_what_waits_in_order_and_each_task_has_its_value(
    fleet: Fleet, batched: ModuleType, connection: Database, processes: int
) -> None:
    ids = send(batched.double, list(range(100)))
    start(fleet, processes=processes)
    wait_until(lambda: count(connection, "COMPLETED") == 100)
    made = sorted(calls(fleet), key=lambda call: call.items)
    assert [len(call.items) for call in made] == [40, 40, 20]
    assert [item for call in made for item in call.items] == list(range(100))
    assert [one for call in made for one in call.ids] == ids
    assert values(connection, ids) == [{"ok": 2 * number} for number in range(100)]
    pids = {call.ids[0]: call.pid for call in made}
    rows = attempts(connection)
    assert len(rows) == 100, "each task has one attempt"
    assert {row.task_id: row.worker_pid for row in rows} == {
        one: pids[call.ids[0]] for call in made for one in call.ids
    }


def test_only_the_tasks_that_failed_are_retried(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    numbers = [*range(8), -1]
    ids = dict(zip(numbers, send(batched.stumble, numbers), strict=True))
    start(fleet)
    wait_until_empty(connection)
    first, second = calls(fleet)
    assert first.items == numbers
    assert sorted(second.items) == [1, 3, 5, 7]
    made = Counter(row.task_id for row in attempts(connection))
    assert {number: made[one] for number, one in ids.items()} == {
        number: 2 if number % 2 and number > 0 else 1 for number in numbers
    }
    failed = task(connection, ids[-1])
    assert (failed.status, failed.error_code) == ("FAILED", "NEGATIVE")
    assert count(connection, "COMPLETED") == 8


def test_the_call_has_the_tasks_of_its_items_alone(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    bad, *good = send(batched.stumble, [0, 2, 4])
    connection.execute("UPDATE horsies_tasks SET args = '[\"x\"]' WHERE id = %s", [bad])
    start(fleet)
    wait_until(lambda: count(connection, "COMPLETED") == 2)
    (call,) = calls(fleet)
    assert (call.items, call.ids) == ([2, 4], good)
    assert values(connection, good) == [{"ok": 2}, {"ok": 4}]
    assert log_owners(connection) == {good[0]}


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("explode", "UNHANDLED_EXCEPTION", "raised OSError: no room for 3"),
        ("forget", "BATCH_RESULT_MISMATCH", "returned 2 outcome(s) for 3 task(s)"),
    ],
)
def test_a_failed_call_fails_each_of_its_tasks(
    fleet: Fleet, batched: ModuleType, connection: Database, name: str, code: str, message: str
) -> None:
    send(getattr(batched, name), [1, 2, 3])
    start(fleet)
    wait_until(lambda: count(connection, "FAILED") == 3)
    for row in attempts(connection):
        assert row.error_code == code
        assert message in row.error_message


def test_a_batch_of_one_is_a_plain_call(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    start(fleet)
    assert batched.double.enqueue(4).result(timeout_ms=30_000) == 8
    sent = batched.forget.enqueue(4)
    wait_until(lambda: count(connection, "FAILED") == 1)
    assert task(connection, sent.task_id).error_code == "BATCH_RESULT_MISMATCH"


def test_a_call_that_kills_its_process_costs_each_task_one_attempt(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    ids = send(batched.die, list(range(12)))
    start(fleet)
    wait_until(lambda: count(connection, "COMPLETED") == 12)
    made = [(row.attempt, row.error_code) for row in attempts(connection)]
    assert made == [(1, "WORKER_CRASHED"), (2, None)] * 12
    assert log_owners(connection) == {ids[0]}
    assert values(connection, ids) == [{"ok": number} for number in range(12)]


def test_the_shortest_time_limit_ends_the_call(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    send(batched.linger, [600.0, 600.0])
    limited = batched.linger.with_options(timeout_ms=300)
    limited.send_many([batched.linger.bind(600.0)]).unwrap()
    start(fleet)
    wait_until(lambda: count(connection, "FAILED") == 3)
    assert {row.error_code for row in tasks(connection)} == {"TASK_TIMEOUT"}
    assert len(calls(fleet)) == 1
    assert Counter(row.error_message for row in attempts(connection)) == {
        "The task ran longer than its timeout_ms=300.": 1,
        "The call of the batch ran longer than timeout_ms=300, the shortest limit of its tasks.": 2,
    }
    assert batched.double.enqueue(1).result(timeout_ms=30_000) == 2


def test_a_call_goes_on_until_all_of_its_tasks_are_cancelled(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    handles = batched.linger.send_many([batched.linger.bind(600.0) for _ in range(3)]).unwrap()
    start(fleet, processes=2)
    wait_until(lambda: calls(fleet))
    for handle in handles[:2]:
        handle.cancel().unwrap()
    # The worker has read both requests when it has run what was sent after them.
    assert batched.double.enqueue(1).result(timeout_ms=30_000) == 2
    assert count(connection, "RUNNING") == 3
    handles[2].cancel().unwrap()
    wait_until(lambda: count(connection, "CANCELLED") == 3)


def test_a_stopping_worker_ends_the_call(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    send(batched.linger, [600.0] * 3)
    worker = start(fleet)
    wait_until(lambda: calls(fleet))
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(30) == 0
    assert [row.error_code for row in tasks(connection)] == ["WORKER_STOPPED"] * 3


def test_what_a_stopped_call_has_done_counts_and_the_rest_was_stopped(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    first, second = send(batched.salvage, [1, 2])
    worker = start(fleet, "--shutdown-grace", "1")
    wait_until(lambda: calls(fleet))
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(30) == 0
    assert values(connection, [first]) == [{"ok": 1}]
    assert task(connection, second).status == "PENDING"
    start(fleet)
    wait_until(lambda: count(connection, "COMPLETED") == 2)
    assert values(connection, [second]) == [{"ok": 2}]


def test_a_time_limit_spares_what_the_call_has_done(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    limited = batched.salvage.with_options(timeout_ms=2_000)
    first, second = limited.send_many([batched.salvage.bind(one) for one in (1, 2)]).unwrap()
    start(fleet)
    wait_until_empty(connection)
    assert task(connection, first.task_id).status == "COMPLETED"
    assert task(connection, second.task_id).error_code == "TASK_TIMEOUT"


def test_batches_are_of_one_key_and_keep_its_cap(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    send(batched.tenant, [("a", number) for number in range(10)])
    send(batched.tenant, [("b", number) for number in range(4)])
    start(fleet, processes=2)
    wait_until(lambda: count(connection, "COMPLETED") == 14)
    made = calls(fleet)
    assert all(len({key for key, _ in call.items}) == 1 for call in made)
    assert max(len(call.items) for call in made) <= 3
    assert any(len(call.items) == 3 for call in made)


def test_a_batch_keeps_the_cap_of_its_queue(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    send(batched.narrow, list(range(20)))
    start(fleet, processes=2)
    wait_until(lambda: count(connection, "COMPLETED") == 20)
    assert max(len(call.items) for call in calls(fleet)) == 4


def test_a_batch_keeps_the_limit_of_a_claim(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    send(batched.double, list(range(20)))
    start(fleet, "--max-claim-batch", "8")
    wait_until(lambda: count(connection, "COMPLETED") == 20)
    assert [len(call.items) for call in calls(fleet)] == [8, 8, 4]


def log_owners(connection: Database) -> set[str]:
    """The tasks that have the log of their first attempt."""
    query = "SELECT task_id::text FROM horsies_task_logs WHERE attempt = 1"
    return {one for (one,) in connection.execute(query).fetchall()}


def test_the_first_task_has_the_log_of_its_call(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    ids = send(batched.double, list(range(5)))
    start(fleet)
    wait_until(lambda: count(connection, "COMPLETED") == 5)
    rows = connection.execute("SELECT task_id::text, body FROM horsies_task_logs").fetchall()
    assert [one for one, _ in rows] == ids[:1]
    assert "doubling 5" in rows[0][1]


def has_gone_on(fleet: Fleet, connection: Database, seen: int) -> bool:
    """Whether there was another call, or none is left."""
    return len(calls(fleet)) > seen or count(connection, "PENDING", "RUNNING") == 0


def test_nothing_is_lost_while_children_and_workers_are_killed(
    fleet: Fleet, batched: ModuleType, connection: Database
) -> None:
    total, kills = (2_000, 40) if IS_LONG else (400, 6)
    ids = send(batched.slow, list(range(total)))
    workers = [start(fleet, processes=2) for _ in range(2)]
    for number in range(kills):
        wait_until(partial(has_gone_on, fleet, connection, len(calls(fleet))))
        if number % 2:
            victim = workers.pop(0)
            victim.signal(signal.SIGKILL)
            workers.append(start(fleet, processes=2))
        else:
            with suppress(ProcessLookupError):
                os.kill(calls(fleet)[-1].pid, signal.SIGKILL)
    wait_until(lambda: count(connection, "COMPLETED") == total, 120)
    assert values(connection, ids) == [{"ok": number} for number in range(total)]
    runs = Counter(item for call in calls(fleet) for item in call.items)
    tries = Counter(row.task_id for row in attempts(connection))
    assert runs.keys() == set(range(total))
    for number, one in enumerate(ids):
        assert runs[number] <= tries[one], "a task runs once for each attempt"
