"""Limits of keys while workers are killed, read from a journal outside of the database and from the rows."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import psycopg
import pytest

from horsies import Debounce
from tests.support.clocks import settable_clock
from tests.support.database import Database
from tests.support.keys import add_keyed
from tests.support.private_server import PrivateServer
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal

APPLICATION = "tests.support.apps.limited_keys:app"
IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
SECONDS = 60 if IS_LONG else 6
KEYS = 40 if IS_LONG else 8
# Tasks of each key; the first key of each queue has ten times as many.
TASKS = 40 if IS_LONG else 8
# As the application says.
PER_SECOND, BURST = 20, 2


class Line(NamedTuple):
    at: float
    pid: int
    what: str
    queue: str
    key: str
    number: int


@pytest.fixture
def limited(programs: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.limited_keys")
    yield module
    module.app.close()


def read(journal: Journal) -> list[Line]:
    path = Path(f"{journal.path}.keys")
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [
        Line(float(at), int(pid), what, queue, key, int(number))
        for at, pid, what, queue, key, number in lines
    ]


def send(limited: ModuleType) -> int:
    """Send the tasks of each key in order, those of the noisy key first; return their number."""
    sent = 0
    for task in (limited.capped, limited.ordered):
        for key in range(KEYS):
            count = TASKS * (10 if key == 0 else 1)
            task.send_many(task.bind(f"key{key}", number) for number in range(count)).unwrap()
            sent += count
    for key in range(4):
        limited.rated.send_many(
            limited.rated.bind(f"key{key}", number) for number in range(10 * TASKS)
        ).unwrap()
        sent += 10 * TASKS
    return sent


def most_at_once(lines: list[Line]) -> int:
    """The most attempts of one key that ran at an instant; those of killed children have no end."""
    ended = {(line.pid, line.key, line.number) for line in lines if line.what != "start"}
    running: Counter[str] = Counter()
    most = 0
    for line in sorted(lines):
        if line.what == "start" and (line.pid, line.key, line.number) in ended:
            running[line.key] += 1
            most = max(most, running[line.key])
        elif line.what != "start":
            running[line.key] -= 1
    return most


COMPLETED = """SELECT count(*) FROM horsies_tasks
    WHERE status = 'COMPLETED' AND queue_name IN ('capped', 'ordered', 'rated')"""
OPEN_TASKS = "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
# Starts and ends in their order; an end at the moment of a start comes before it.
OVERLAPS = """SELECT coalesce(max(overlap), 0) FROM (
    SELECT sum(step) OVER (PARTITION BY lane ORDER BY at, step ROWS UNBOUNDED PRECEDING) AS overlap FROM (
        SELECT task.lane, event.at, event.step FROM horsies_tasks AS task
        CROSS JOIN LATERAL (VALUES
            (task.claimed_at, 1), (coalesce(task.completed_at, task.failed_at), -1)) AS event (at, step)
        WHERE task.queue_name = %s AND task.claimed_at IS NOT NULL AND event.at IS NOT NULL) AS events
    ) AS found"""
RATES = """SELECT coalesce(max(starts), 0) FROM (
    SELECT count(*) OVER (
        PARTITION BY task.lane ORDER BY task.claimed_at
        RANGE BETWEEN CURRENT ROW AND interval '0.97 seconds' FOLLOWING) AS starts
    FROM horsies_tasks AS task WHERE task.queue_name = 'rated' AND task.claimed_at IS NOT NULL) AS found"""


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


def number(connection: Database, query: str, *values: str) -> int:
    ((found,),) = connection.execute(query.encode(), values).fetchall()
    return int(found)


def send_newest(limited: ModuleType, number: int) -> None:
    """Send one more value of each debounced key: each value takes the place of one that still waits."""
    for key in range(4):
        document = limited.newest.with_options(
            idempotency_key=f"document {key}",
            debounce=Debounce(quiet=timedelta(milliseconds=300), at_most=timedelta(seconds=2)),
        )
        document.send(f"key{key}", number).unwrap()


@pytest.mark.timeout(600 if IS_LONG else 300)
def test_limits_hold_while_workers_are_killed(
    fleet: Fleet, limited: ModuleType, journal: Journal, connection: Database
) -> None:
    sent = send(limited)
    workers = [fleet.start(application=APPLICATION, processes=3) for _ in range(4)]
    until = time.monotonic() + SECONDS
    kills = 0
    while time.monotonic() < until:
        pause = time.monotonic() + random.uniform(0.5, 1.5)
        wait_until(partial(_is_past, pause))
        victim = workers.pop(random.randrange(len(workers)))
        victim.signal(signal.SIGKILL)
        send_newest(limited, 2 * kills)
        workers.append(fleet.start(application=APPLICATION, processes=3))
        kills += 1
        send_newest(limited, 2 * kills - 1)
    wait_until(lambda: number(connection, OPEN_TASKS) == 0, 180)
    lines = read(journal)
    by_queue: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_queue[line.queue].append(line)
    print(f"{kills} kills, {sent} tasks, {len(lines)} lines")
    assert number(connection, COMPLETED) == sent, "nothing is lost"
    assert most_at_once(by_queue["capped"]) <= limited.CAP
    assert most_at_once(by_queue["ordered"]) <= 1
    assert number(connection, OVERLAPS, "capped") <= limited.CAP
    assert number(connection, OVERLAPS, "ordered") <= 1
    for key in range(KEYS):
        ends = [
            one.number
            for one in by_queue["ordered"]
            if one.what == "end" and one.key == f"key{key}"
        ]
        # A task whose child was killed after its last line runs again, and nothing passes it.
        assert ends == sorted(ends), f"key{key} ended in the order {ends}"
        assert set(ends) == set(range(TASKS * (10 if key == 0 else 1)))
    for key in range(4):
        newest = [one for one in by_queue["newest"] if one.what == "end" and one.key == f"key{key}"]
        assert 2 * kills - 1 in [one.number for one in newest], (
            f"the newest value of key{key} was run"
        )
    assert number(connection, RATES) <= limited.PER_SECOND + limited.BURST - 1
    # A kill delays the ends of the keys whose places it held, until it is noticed, but no first start.
    started = [one.key for one in sorted(by_queue["capped"]) if one.what == "start"]
    assert_none_starved({key: started.index(key) for key in started}, started)


def test_a_noisy_key_starves_no_other(
    fleet: Fleet, limited: ModuleType, journal: Journal, connection: Database
) -> None:
    send(limited)
    fleet.start(application=APPLICATION, processes=3)
    wait_until(lambda: number(connection, OPEN_TASKS) == 0, 180)
    tasks = [
        (one.key, one.number)
        for one in sorted(read(journal))
        if one.queue == "capped" and one.what == "start"
    ]
    # The first attempts, in order: a retry waits for its time, while the noisy key goes on.
    started = [key for key, _ in dict.fromkeys(tasks)]
    assert_none_starved({key: place for place, key in enumerate(started)}, started)


def assert_none_starved(places: dict[str, int], keys: list[str]) -> None:
    """While the noisy key had tasks, the others had their turns: each had reached its place in `keys`
    before a third of the noisy key's tasks.
    """
    noisy = {key: keys[:place].count("key0") for key, place in places.items() if key != "key0"}
    print(f"the other keys waited for {noisy} of {keys.count('key0')} tasks of the noisy key")
    assert len(noisy) == KEYS - 1
    assert max(noisy.values()) <= keys.count("key0") / 3


STEP_SECONDS = 3


def test_rates_hold_while_the_clock_of_the_database_is_stepped(
    own_server: PrivateServer, own_fleet: Fleet
) -> None:
    with (
        settable_clock(own_server) as clock,
        psycopg.connect(own_server.url, autocommit=True) as connection,
    ):
        for number in range(400):
            call = json.dumps({"key": "acme", "number": number})
            add_keyed(connection, "acme", queue="rated", task_name="rated", kwargs=call, args="[]")
        for _ in range(2):
            own_fleet.start(application=APPLICATION, processes=3)
        wait_until(lambda: len(starts(own_fleet.journal)) > PER_SECOND)
        clock.write_text(f"+{STEP_SECONDS}s")
        forward = time.monotonic()
        wait_until(lambda: starts(own_fleet.journal)[-1] > forward + 1.5)
        clock.write_text("+0")
        back = time.monotonic()
        wait_until(lambda: starts(own_fleet.journal)[-1] > back + STEP_SECONDS + 1)
    began = starts(own_fleet.journal)
    most = max(sum(one <= other < one + 1 for other in began) for one in began)
    silent = max(after - before for before, after in pairwise(began))
    print(f"{len(began)} starts, at most {most} in a second, silent for at most {silent:.1f} s")
    # A step forward pays for the starts before it, so it allows a burst more; a start may be a little late.
    assert most <= PER_SECOND + 2 * BURST + 3
    assert silent <= STEP_SECONDS + 1


def starts(journal: Journal) -> list[float]:
    return [line.at for line in sorted(read(journal)) if line.what == "start"]
