"""Keys in real workers: no key waits for the backlog of another, and nothing is left waiting."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from types import ModuleType
from typing import NamedTuple

import psycopg
import pytest

from tests.support.database import Database
from tests.support.scrapes import port_of, scraped
from tests.support.tables import count, task
from tests.support.wait import wait_until
from tests.support.workers import Fleet

APPLICATION = "tests.support.apps.keyed:app"
IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
# How long the late transaction stays open after its key has run empty.
HELD_SECONDS = 10 if IS_LONG else 0
# How many tasks are sent at once, each with a key of its own.
KEYS_AT_ONCE = 100_000 if IS_LONG else 6_000


@pytest.fixture
def keyed(programs: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.keyed")
    yield module
    module.app.close()


def order(connection: Database) -> list[str | None]:
    """The keys of the tasks in the order of their starts."""
    query = "SELECT lane_key FROM horsies_tasks WHERE claimed_at IS NOT NULL ORDER BY claimed_at"
    return [key for (key,) in connection.execute(query)]


def test_a_key_does_not_wait_for_the_backlog_of_another(
    fleet: Fleet, keyed: ModuleType, connection: Database
) -> None:
    keyed.work.send_many(keyed.work.bind("noisy", 10) for _ in range(300)).unwrap()
    fleet.start(application=APPLICATION, processes=2)
    wait_until(lambda: count(connection, "COMPLETED") > 20)
    keyed.work.send("quiet").unwrap()
    keyed.plain.send().unwrap()
    wait_until(lambda: count(connection, "COMPLETED") == 302)
    keys = order(connection)
    assert keys.index("quiet") < 250
    assert keys.index(None) < 250


def test_tasks_with_keys_wake_an_idle_worker(
    fleet: Fleet, keyed: ModuleType, connection: Database
) -> None:
    fleet.start(application=APPLICATION, processes=2)
    keyed.work.send("a").unwrap()
    wait_until(lambda: count(connection, "COMPLETED") == 1)
    keyed.work.with_options(delay=timedelta(milliseconds=300)).send("b").unwrap()
    wait_until(lambda: count(connection, "COMPLETED") == 2)
    keyed.twice.send("a").unwrap()
    wait_until(lambda: count(connection, "COMPLETED") == 3)


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel)[1:], ids=lambda level: level.name)
def test_a_late_commit_is_noticed_after_its_key_has_run_empty(
    fleet: Fleet,
    keyed: ModuleType,
    connection: Database,
    process_url: str,
    level: psycopg.IsolationLevel,
) -> None:
    """The worker has passed the place of the tasks that commit last; it hardly polls. Sends that commit at
    once are the measure of what is late on this machine.
    """
    fleet.start(application=APPLICATION, processes=2)
    with ExitStack() as sessions:
        late = [late_send(sessions, keyed, process_url, level, f"late {one}") for one in range(3)]
        keys = [f"late {number % 3}" for number in range(20)]
        keyed.work.send_many(keyed.work.bind(key) for key in keys).unwrap()
        wait_until(lambda: count(connection, "COMPLETED") == len(keys))
        held_until = time.monotonic() + HELD_SECONDS
        wait_until(lambda: time.monotonic() >= held_until)
        late_ms, prompt_ms = [], []
        for one in late:
            late_ms.append(ms_to_start(connection, one))
            prompt = late_send(sessions, keyed, process_url, level, "prompt")
            prompt_ms.append(ms_to_start(connection, prompt))
    print(
        f"started {late_ms} ms after commits that were {HELD_SECONDS} s late, others {prompt_ms} ms"
    )
    assert min(late_ms) <= 3 * max(prompt_ms)


class Uncommitted(NamedTuple):
    """A task that was sent, and the transaction of its send, which is still open."""

    task_id: str
    session: Database


def late_send(
    sessions: ExitStack, keyed: ModuleType, url: str, level: psycopg.IsolationLevel, key: str
) -> Uncommitted:
    session = sessions.enter_context(psycopg.connect(url))
    session.isolation_level = level
    handle = keyed.work.with_options(transaction=session).send(key).unwrap()
    return Uncommitted(handle.task_id, session)


def ms_to_start(connection: Database, sent: Uncommitted) -> float:
    """Commit a send, and return how many milliseconds later its task started."""
    ((commits_at,),) = connection.execute("SELECT clock_timestamp()").fetchall()
    sent.session.commit()
    wait_until(lambda: task(connection, sent.task_id).status == "COMPLETED")
    started = "SELECT started_at FROM horsies_tasks WHERE id = %s"
    ((started_at,),) = connection.execute(started, [sent.task_id]).fetchall()
    late_ms: float = 1000 * (started_at - commits_at).total_seconds()
    return round(late_ms, 1)


@pytest.mark.timeout(900 if IS_LONG else 180)
def test_very_many_keys_in_one_send_cost_a_worker_neither_memory_nor_long_turns(
    fleet: Fleet, keyed: ModuleType, connection: Database
) -> None:
    worker = fleet.start("--metrics-port", "0", "--quiet-tasks", application=APPLICATION)
    port = port_of(worker)
    before_mb = parent_mb(port)
    keyed.work.send_many(
        keyed.work.bind(f"key {number}") for number in range(KEYS_AT_ONCE)
    ).unwrap()
    peak_mb = before_mb

    def are_done() -> bool:
        nonlocal peak_mb
        peak_mb = max(peak_mb, parent_mb(port))
        return not connection.execute(OPEN_TASKS).rowcount

    wait_until(are_done, 600)
    assert count(connection, "COMPLETED") == KEYS_AT_ONCE
    turns = turns_by_bound(port)
    longest = next(bound for bound, number in turns.items() if number == turns["+Inf"])
    print(
        f"{before_mb:.1f} MB, at most {peak_mb:.1f} MB; the longest turn took up to {longest} s, turns up to "
        f"so many seconds: {turns}"
    )
    assert peak_mb - before_mb <= 30
    assert turns["0.025"] >= 0.9 * turns["+Inf"], "no turn goes through all keys"


OPEN_TASKS = "SELECT FROM horsies_tasks WHERE status <> 'COMPLETED' LIMIT 1"


def parent_mb(port: int) -> float:
    """The memory of a worker's own process."""
    samples = scraped(port)["horsies_worker_memory_bytes"].samples
    (used,) = [one.value for one in samples if "parent" in one.labels.values()]
    return float(used) / 2**20


def turns_by_bound(port: int) -> dict[str, int]:
    """How many turns took at most so many seconds."""
    samples = scraped(port)["horsies_turn_duration_seconds"].samples
    return {one.labels["le"]: int(one.value) for one in samples if one.name.endswith("_bucket")}


def test_a_burst_worker_runs_what_has_keys(
    fleet: Fleet, keyed: ModuleType, connection: Database
) -> None:
    keyed.work.send_many(keyed.work.bind(f"tenant {number % 7}") for number in range(40)).unwrap()
    keyed.plain.send().unwrap()
    worker = fleet.start("--burst", application=APPLICATION, ready=False)
    assert worker.process.wait(60) == 0
    assert count(connection, "COMPLETED") == 41


def test_async_children_take_the_tasks_of_their_kind(
    fleet: Fleet, keyed: ModuleType, connection: Database
) -> None:
    fleet.start("--async-children", "1", application=APPLICATION, processes=1)
    keyed.async_work.send_many(keyed.async_work.bind(key) for key in "abcabc").unwrap()
    keyed.work.send_many(keyed.work.bind(key) for key in "abc").unwrap()
    wait_until(lambda: count(connection, "COMPLETED") == 9)
