"""Limits of keys while workers are killed, read from a journal outside of the database and from the rows."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby, pairwise, zip_longest
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import psycopg
import pytest

from horsies import Debounce
from tests.support.clocks import settable_clock
from tests.support.database import Database
from tests.support.keys import add_keyed
from tests.support.poison import poisoned
from tests.support.private_server import PrivateServer
from tests.support.proxy import Proxy
from tests.support.tables import count
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Fleet, Journal, RunningWorker

APPLICATION = "tests.support.apps.limited_keys:app"
IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
SECONDS = 60 if IS_LONG else 6
KEYS = 40 if IS_LONG else 8
# Tasks of each key; the first key of each queue has ten times as many.
TASKS = 40 if IS_LONG else 8
SOON_SECONDS = 0.3
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


def seconds_to_start(number: int) -> float | None:
    """How long after its send a task of the fifo queue may start. Of sixteen tasks, the second four are late
    before a worker has started, and the last four are about to be late while the tasks before them run.
    """
    return (None, SOON_SECONDS, None, SECONDS / 3)[number // 4 % 4]


def send(limited: ModuleType) -> int:
    """Send the tasks of each key in order, those of the noisy key first; return their number."""
    sent = 0
    for key in range(KEYS):
        numbers = range(TASKS * (10 if key == 0 else 1))
        calls = (limited.capped.bind(f"key{key}", number) for number in numbers)
        limited.capped.send_many(calls).unwrap()
        for seconds, block in groupby(numbers, seconds_to_start):
            ordered = limited.ordered
            if seconds is not None:
                deadline = datetime.now(UTC) + timedelta(seconds=seconds)
                ordered = ordered.with_options(good_until=deadline)
            ordered.send_many(limited.ordered.bind(f"key{key}", one) for one in block).unwrap()
        sent += 2 * len(numbers)
    for key in range(4):
        limited.rated.send_many(
            limited.rated.bind(f"key{key}", number) for number in range(10 * TASKS)
        ).unwrap()
        sent += 10 * TASKS
    return sent


class Kill(NamedTuple):
    """When a worker with its children, or a single child, was killed at the earliest."""

    at: float
    pids: frozenset[int]
    worker: bool


def most_at_once(lines: list[Line], kills: list[Kill]) -> int:
    """The most attempts of one key that ran at an instant. An attempt without an end ran at least until its
    child or its worker was killed.
    """
    # A killed child is also on the list of its worker, which is killed later.
    killed_at = {pid: kill.at for kill in reversed(kills) for pid in kill.pids}
    events: list[tuple[float, int, str]] = []
    by_child: dict[int, list[Line]] = defaultdict(list)
    for line in sorted(lines):
        by_child[line.pid].append(line)
    for pid, written in by_child.items():
        for line, following in zip_longest(written, written[1:]):
            events.append((line.at, 1 if line.what == "start" else -1, line.key))
            if line.what == "start" and (following is None or following.what == "start"):
                assert pid in killed_at, f"{line} has no end, and nobody killed its process"
                events.append((max(line.at, killed_at[pid]), -1, line.key))
    running: Counter[str] = Counter()
    most = 0
    for _, step, key in sorted(events):
        running[key] += step
        most = max(most, running[key])
    return most


COMPLETED = """SELECT count(*) FROM horsies_tasks
    WHERE status = 'COMPLETED' AND queue_name IN ('capped', 'ordered', 'rated')"""
# The tasks that were too late for a start, or for another attempt.
LATE = """SELECT lane_key, (args::json ->> 1)::integer FROM horsies_tasks
    WHERE status IN ('EXPIRED', 'FAILED') AND queue_name = 'ordered'"""
OPEN_TASKS = "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
# Every claim, at the moment that limits are about and with the time until which the starts of its key are
# paid for, and the end of every place, with any outcome.
NOTE_CLAIMS = """
CREATE TABLE e2e_claims (
    queue_name text, lane_key text, step integer, at timestamptz, paid_until timestamptz);
CREATE FUNCTION e2e_note_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.e2e_claims VALUES (NEW.queue_name, NEW.lane_key, TG_ARGV[0]::integer,
        CASE TG_ARGV[0] WHEN '1' THEN NEW.claimed_at ELSE clock_timestamp() END,
        (SELECT meter.next_at FROM public.horsies_meters AS meter
         WHERE meter.queue_name = NEW.queue_name AND meter.lane = NEW.lane));
    RETURN NULL;
END $$;
CREATE TRIGGER e2e_note_claim AFTER UPDATE ON horsies_tasks FOR EACH ROW
    WHEN (OLD.status = 'PENDING' AND NEW.status IN ('CLAIMED', 'RUNNING'))
    EXECUTE FUNCTION e2e_note_claim('1');
CREATE TRIGGER e2e_note_end AFTER UPDATE ON horsies_tasks FOR EACH ROW
    WHEN (OLD.status IN ('CLAIMED', 'RUNNING') AND NEW.status NOT IN ('CLAIMED', 'RUNNING'))
    EXECUTE FUNCTION e2e_note_claim('-1');
"""
NO_CLAIMS = "DROP FUNCTION e2e_note_claim CASCADE; DROP TABLE e2e_claims"
# An end at the moment of a start comes before it.
OVERLAPS = """SELECT coalesce(max(overlap), 0) FROM (
    SELECT sum(step) OVER (PARTITION BY lane_key ORDER BY at, step ROWS UNBOUNDED PRECEDING) AS overlap
    FROM e2e_claims WHERE queue_name = %s) AS found"""
# A claim is stamped after its start is allowed, on a busy machine up to a fifth of a second after it. The
# clock had made a step of so many seconds before the claims since a moment.
RATES = """SELECT coalesce(max(starts), 0) FROM (
    SELECT count(*) OVER (
        PARTITION BY lane_key ORDER BY at
        RANGE BETWEEN CURRENT ROW AND interval '0.8 seconds' FOLLOWING) AS starts
    FROM (
        SELECT lane_key, CASE WHEN at < %s::timestamptz THEN at ELSE at - %s * interval '1 second' END AS at
        FROM e2e_claims WHERE queue_name = 'rated' AND step = 1) AS claims) AS found"""
NO_STEP = ("infinity", 0)
# The claims that were not paid for, exactly: a start is paid for with the seconds between two starts, and no
# later than a burst after it. Together this allows N + burst - 1 starts per period.
UNPAID = """SELECT count(*) FROM (
    SELECT count(*) AS starts, min(at) AS at, paid_until,
        lag(paid_until) OVER (PARTITION BY lane_key ORDER BY paid_until) AS paid_before
    FROM e2e_claims WHERE queue_name = 'rated' AND step = 1 GROUP BY lane_key, paid_until) AS found
WHERE paid_until IS NULL OR paid_until > at + (%s + 0.00001) * interval '1 second'
    OR paid_until - paid_before < (starts * %s - 0.00001) * interval '1 second'"""
RATE = (BURST / PER_SECOND, 1 / PER_SECOND)
# How many starts of a key were too many for all of its time.
SURPLUS = """SELECT coalesce(max(surplus), 0)::integer FROM (
    SELECT ceil(count(*) - extract(epoch FROM max(at) - min(at)) * %s) AS surplus
    FROM e2e_claims WHERE queue_name = 'rated' AND step = 1 GROUP BY lane_key) AS found"""
CLAIMS = "SELECT count(*) FROM e2e_claims WHERE queue_name = %s AND step = 1"


@contextmanager
def noted_claims(connection: Database) -> Iterator[None]:
    """Have the database itself write down every claim and every end of a place."""
    connection.execute(NOTE_CLAIMS)
    try:
        yield
    finally:
        connection.execute(NO_CLAIMS)


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


def number(connection: Database, query: str, *values: str | float | datetime) -> int:
    ((found,),) = connection.execute(query.encode(), values).fetchall()
    return int(found)


def late_tasks(connection: Database) -> set[tuple[str, int]]:
    """The keys and the numbers of tasks that were not completed, all of which had a deadline."""
    late: set[tuple[str, int]] = set(connection.execute(LATE).fetchall())
    assert all(seconds_to_start(number) is not None for _, number in late), late
    return late


def send_newest(limited: ModuleType, number: int) -> None:
    """Send one more value of each debounced key: each value takes the place of one that still waits."""
    for key in range(4):
        document = limited.newest.with_options(
            idempotency_key=f"document {key}",
            debounce=Debounce(quiet=timedelta(milliseconds=300), at_most=timedelta(seconds=2)),
        )
        document.send(f"key{key}", number).unwrap()


def kill_one_after_another(
    fleet: Fleet, limited: ModuleType, workers: list[RunningWorker]
) -> list[Kill]:
    """Kill a worker or a child about every second, in turn, with sends in between. Another worker takes the
    place of a killed worker.
    """
    until = time.monotonic() + SECONDS
    kills: list[Kill] = []
    while time.monotonic() < until or len(kills) < 2:
        pause = time.monotonic() + random.uniform(0.5, 1.5)
        wait_until(partial(_is_past, pause))
        is_worker = len(kills) % 2 == 0
        kills.append(kill_worker(workers) if is_worker else kill_child(fleet, workers))
        send_newest(limited, 2 * len(kills) - 2)
        if is_worker:
            workers.append(fleet.start(application=APPLICATION, processes=3))
        send_newest(limited, 2 * len(kills) - 1)
    return kills


def kill_worker(workers: list[RunningWorker]) -> Kill:
    victim = workers.pop(random.randrange(len(workers)))
    kill = Kill(time.monotonic(), frozenset(victim.family()) | victim.seen_pids, worker=True)
    victim.signal(signal.SIGKILL)
    return kill


def kill_child(fleet: Fleet, workers: list[RunningWorker]) -> Kill:
    """Kill the child that wrote the newest line of the journal, of those that live."""

    def living() -> list[int]:
        alive = {pid for worker in workers for pid in worker.family()}
        return [line.pid for line in sorted(read(fleet.journal)) if line.pid in alive]

    child = wait_until(living)[-1]
    kill = Kill(time.monotonic(), frozenset({child}), worker=False)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return kill


@pytest.mark.timeout(600 if IS_LONG else 300)
def test_limits_hold_while_workers_and_children_are_killed(
    fleet: Fleet, limited: ModuleType, journal: Journal, connection: Database
) -> None:
    sent = send(limited)
    wait_until(partial(_is_past, time.monotonic() + SOON_SECONDS))
    with noted_claims(connection):
        workers = [fleet.start(application=APPLICATION, processes=3) for _ in range(4)]
        kills = kill_one_after_another(fleet, limited, workers)
        wait_until(lambda: number(connection, OPEN_TASKS) == 0, 180)
        by_queue: dict[str, list[Line]] = defaultdict(list)
        for line in read(journal):
            by_queue[line.queue].append(line)
        late = late_tasks(connection)
        assert number(connection, COMPLETED) + len(late) == sent, "nothing is lost"
        overlaps = {queue: number(connection, OVERLAPS, queue) for queue in ("capped", "ordered")}
        rate, claims = number(connection, RATES, *NO_STEP), number(connection, CLAIMS, "rated")
        unpaid = number(connection, UNPAID, *RATE)
        surplus = number(connection, SURPLUS, limited.PER_SECOND)
    seen = {queue: most_at_once(by_queue[queue], kills) for queue in overlaps}
    print(
        f"{len(kills)} kills, {sum(kill.worker for kill in kills)} of workers, {sent} tasks, "
        f"{len(late)} of them late, {claims} claims under the rate, at most {rate} in 0.8 s and "
        f"{surplus} above it in all; "
        f"most of a key at once {seen} by the journal, {overlaps} by the claims"
    )
    assert {kill.worker for kill in kills} == {True, False}
    assert seen["capped"] <= overlaps["capped"] <= limited.CAP
    assert seen["ordered"] <= overlaps["ordered"] <= 1
    assert unpaid == 0
    assert rate <= limited.PER_SECOND + limited.BURST - 1
    assert surplus <= limited.BURST + 0.2 * limited.PER_SECOND
    assert sum(one.what == "start" for one in by_queue["rated"]) <= claims
    assert ("key1", 4) in late, "it was late before the first worker started"
    assert_in_order(by_queue["ordered"], late)
    for key in range(4):
        newest = [one for one in by_queue["newest"] if one.what == "end" and one.key == f"key{key}"]
        assert 2 * len(kills) - 1 in [one.number for one in newest], (
            f"the newest value of key{key} was run"
        )
    # A kill delays the ends of the keys whose places it held, until it is noticed, but no first start.
    started = [one.key for one in sorted(by_queue["capped"]) if one.what == "start"]
    assert_none_starved({key: started.index(key) for key in started}, started)


def assert_in_order(lines: list[Line], late: Set[tuple[str, int]] = frozenset()) -> None:
    """Each key of the fifo queue has ended its tasks in the order of their sends, and all of them except
    those that were too late.
    """
    for key in (f"key{number}" for number in range(KEYS)):
        ends = [one.number for one in sorted(lines) if one.what == "end" and one.key == key]
        # A task whose child was killed after its last line runs again, and nothing passes it.
        assert ends == sorted(ends), f"{key} ended in the order {ends}"
        sent = range(TASKS * (10 if key == "key0" else 1))
        assert set(sent) - set(ends) <= {number for of_key, number in late if of_key == key}
        assert set(ends) <= set(sent)


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


STEP_SECONDS = 5 if IS_LONG else 3
RATED_KEYS = 10 if IS_LONG else 2


def test_rates_hold_while_the_clock_of_the_database_is_stepped(
    own_server: PrivateServer, own_fleet: Fleet
) -> None:
    keys = [f"key{number}" for number in range(RATED_KEYS)]
    with (
        settable_clock(own_server) as clock,
        psycopg.connect(own_server.url, autocommit=True) as connection,
    ):
        connection.execute(NOTE_CLAIMS)
        for key in keys:
            add_rated(connection, key, 400)
        for _ in range(4 if IS_LONG else 2):
            own_fleet.start(application=APPLICATION, processes=3)
        wait_until(lambda: all(len(one) > PER_SECOND for one in starts_by_key(own_fleet, keys)))
        step_ends_at = clock_after(connection, STEP_SECONDS)
        clock.write_text(f"+{STEP_SECONDS}s")
        forward = time.monotonic()
        wait_until(lambda: min(map(max, starts_by_key(own_fleet, keys))) > forward + 1.5)
        across = number(connection, RATES, step_ends_at, STEP_SECONDS)
        unpaid = number(connection, UNPAID, *RATE)
        clock.write_text("+0")
        back = time.monotonic() + STEP_SECONDS + 1
        wait_until(lambda: min(map(max, starts_by_key(own_fleet, keys))) > back)
        most = number(connection, RATES, *NO_STEP)
    found = starts_by_key(own_fleet, keys)
    silent = max(after - before for began in found for before, after in pairwise(began))
    total = sum(map(len, found))
    print(
        f"{total} starts, at most {most} of a key in 0.8 s of the database's clock, {across} across "
        f"the step forward, silent for at most {silent:.1f} s"
    )
    assert unpaid == 0
    assert most <= PER_SECOND + BURST - 1
    # A step forward pays for the starts before it, so it allows a burst more.
    assert across <= PER_SECOND + 2 * BURST - 1
    assert silent <= STEP_SECONDS + 1


def clock_after(connection: Database, seconds: int) -> datetime:
    query = "SELECT clock_timestamp() + %s * interval '1 second'"
    ((found,),) = connection.execute(query, [seconds]).fetchall()
    assert isinstance(found, datetime)
    return found


def add_rated(connection: Database, key: str, count: int) -> None:
    for number in range(count):
        call = json.dumps({"key": key, "number": number})
        add_keyed(connection, key, queue="rated", task_name="rated", kwargs=call, args="[]")


def starts_by_key(fleet: Fleet, keys: list[str]) -> list[list[float]]:
    """When tasks of each of these keys began; a moment before all of them for a key without any."""
    began: dict[str, list[float]] = {key: [] for key in keys}
    for line in sorted(read(fleet.journal)):
        if line.what == "start":
            began[line.key].append(line.at)
    return [began[key] or [0.0] for key in keys]


def starts(journal: Journal) -> list[float]:
    return [line.at for line in sorted(read(journal)) if line.what == "start"]


RECORDED = "NEW.id = {} AND NEW.status IN ('COMPLETED', 'FAILED')"


def test_the_place_of_a_task_that_is_recorded_late_is_offered_to_others(
    fleet: Fleet, limited: ModuleType, connection: Database
) -> None:
    """The worker that records it is busy; the one that could go on lives on notifications."""
    of_key = limited.rest.with_options(queue_name="ordered", key="a")
    first = of_key.send("first").unwrap()
    with poisoned(connection, RECORDED, first.task_id):
        busy = fleet.start(application=APPLICATION, processes=1, config=HARDLY_POLLS)
        fleet.journal.release("first")
        busy.wait_for("blocked")
        limited.rest.send("busy").unwrap()
        wait_until(lambda: count(connection, "RUNNING") == 2)
        fleet.start(application=APPLICATION, processes=1, config=HARDLY_POLLS)
        second = of_key.send("first").unwrap()
        other = limited.rest.with_options(queue_name="ordered", key="b").send("first").unwrap()
        assert other.get(30_000).is_ok(), (
            "the idle worker has looked at the lane of the second task"
        )
    assert first.get(30_000).is_ok()
    assert second.get(30_000).is_ok()
    fleet.journal.release("busy")


# A claim of the key "frozen" stays open, with its locks, until the test ends it.
FREEZE = """
CREATE FUNCTION e2e_freeze() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    WHILE NOT pg_try_advisory_xact_lock_shared(4242, 4242) LOOP
        PERFORM pg_sleep(0.02);
    END LOOP;
    RETURN NULL;
END $$;
CREATE TRIGGER e2e_freeze AFTER UPDATE ON horsies_tasks FOR EACH ROW
    WHEN (OLD.status = 'PENDING' AND NEW.status = 'RUNNING' AND NEW.lane_key = 'frozen')
    EXECUTE FUNCTION e2e_freeze();
SELECT pg_advisory_lock(4242, 4242);
"""
THAW = "SELECT pg_advisory_unlock_all(); DROP FUNCTION e2e_freeze CASCADE"
LOCKED_LANES = """SELECT count(*) FROM pg_locks
    WHERE locktype = 'advisory' AND classid = 1751348597 AND objsubid = 2 AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""


@contextmanager
def frozen_claims(connection: Database) -> Iterator[None]:
    """Keep the claims of one key open in this block."""
    connection.execute(FREEZE)
    try:
        yield
    finally:
        connection.execute(THAW)


@pytest.mark.parametrize("queue", ["capped", "ordered"])
def test_a_worker_that_freezes_while_it_has_locked_a_key_stops_no_other_key(
    fleet: Fleet, limited: ModuleType, journal: Journal, connection: Database, queue: str
) -> None:
    task = getattr(limited, queue)
    with frozen_claims(connection):
        frozen = fleet.start(application=APPLICATION, processes=1)
        task.send_many(task.bind("frozen", number) for number in range(2)).unwrap()
        wait_until(lambda: number(connection, LOCKED_LANES) == 1)
        frozen.signal(signal.SIGSTOP)
        fleet.start(application=APPLICATION, processes=2)
        others = [task.bind(f"key{key}", number) for key in range(4) for number in range(5)]
        task.send_many(others).unwrap()
        wait_until(lambda: count(connection, "COMPLETED") == len(others))
        assert number(connection, LOCKED_LANES) >= 1, "the key was locked all the time"
        assert not any(line.key == "frozen" for line in read(journal)), (
            "nothing has passed the lock"
        )
    frozen.signal(signal.SIGCONT)
    wait_until(lambda: count(connection, "COMPLETED") == len(others) + 2)


def test_limits_hold_when_the_database_is_restarted_under_load(
    own_server: PrivateServer, own_fleet: Fleet, limited: ModuleType
) -> None:
    for _ in range(4 if IS_LONG else 2):
        own_fleet.start(application=APPLICATION, processes=3)
    calls = [
        {"task": queue, "kwargs": {"key": f"key{key}", "number": number}}
        for queue in ("capped", "ordered")
        for key in range(KEYS)
        for number in range(TASKS * (10 if key == 0 else 1))
    ]
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        registered = "SELECT count(*) FROM horsies_task_defaults WHERE task_name = 'ordered'"
        wait_until(lambda: number(connection, registered) == 1)
        connection.execute("SELECT horsies_send_many_v1(%s::jsonb)", (json.dumps(calls),))
    for goal in (20, 100):
        wait_until(lambda goal=goal: len(starts(own_fleet.journal)) > goal)  # type: ignore[misc]
        own_server.crash()
        own_server.start()
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        wait_until(lambda: number(connection, OPEN_TASKS) == 0, 180)
        assert number(connection, COMPLETED) == len(calls), "nothing is lost"
    lines = read(own_fleet.journal)
    assert most_at_once([one for one in lines if one.queue == "capped"], []) <= limited.CAP
    ordered = [one for one in lines if one.queue == "ordered"]
    assert most_at_once(ordered, []) == 1
    assert_in_order(ordered)


def start_deaf(fleet: Fleet, proxy: Proxy) -> RunningWorker:
    """Start a worker that receives notifications until it is ready, as it checks, and none later."""
    broker = {"broker": {"session_database_url": proxy.url}}
    worker = fleet.start(application=APPLICATION, processes=3, config=broker)
    proxy.is_silent = True
    return worker


def test_without_any_notification_everything_runs_by_the_poll(
    fleet: Fleet, limited: ModuleType, journal: Journal, connection: Database
) -> None:
    with ExitStack() as proxies:
        ways = [proxies.enter_context(Proxy(fleet.database_url)) for _ in range(3)]
        first, _ = [start_deaf(fleet, way) for way in ways[:2]]
        sent = send(limited)
        wait_until(lambda: number(connection, COMPLETED) > sent / 3)
        first.signal(signal.SIGKILL)
        start_deaf(fleet, ways[2])
        wait_until(lambda: number(connection, OPEN_TASKS) == 0, 180)
        late = late_tasks(connection)
        assert number(connection, COMPLETED) + len(late) == sent, "nothing is lost"
        limited.capped.with_options(delay=timedelta(milliseconds=300)).send("late", 0).unwrap()
        limited.ordered.send("late", 0).unwrap()
        wait_until(lambda: number(connection, COMPLETED) == sent - len(late) + 2)
    assert_in_order([one for one in read(journal) if one.queue == "ordered"], late)
