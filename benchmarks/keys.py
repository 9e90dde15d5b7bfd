"""The cost of keys: drains with no, one, few and very many keys, one task of a key behind a million tasks
of another key, a key with many tasks during an open transaction, and a key at its cap for which many
workers compete. For quick results, HORSIES_BENCH_TASKS, HORSIES_BENCH_BACKLOG and HORSIES_BENCH_ROUNDS
set fewer tasks, a smaller backlog and fewer rounds.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import psycopg

from benchmarks.lifecycle import RESULT, WORKER
from benchmarks.rounds import Checkout, alternate, begin_round, heading, median, ratios, spread
from benchmarks.worker import connect, costs
from horsies.db.migrate import apply_migrations
from horsies.db.pipeline import Pipeline
from horsies.tasks.keys import lane_of
from horsies.tasks.outcome import Outcome
from horsies.testing.database import created_database
from horsies.worker.busy_lanes import NO_MARKS
from horsies.worker.keyed import KeyRings
from horsies.worker.turn import EVERYWHERE, Bookmarks, Claimer, TurnRequest, take_turn

CHILDREN = 4
ROUNDS = int(os.environ.get("HORSIES_BENCH_ROUNDS", "5"))
# During these drains, ten times more tasks wait, so that each of 100,000 keys has a task.
TASKS = int(os.environ.get("HORSIES_BENCH_TASKS", "10000"))
NEVER_REPLACED = ["--max-tasks-per-child", "0"]
# The tasks and keys of each drain, and the required fraction of the rate without keys.
PLAIN = "no keys"
DRAINS: dict[str, tuple[str, float, float | None]] = {
    PLAIN: ("noop", 0, None),
    "one key": ("noop", 1 / TASKS, 0.8),
    "few keys": ("noop", 0.001, 0.8),
    "many keys": ("noop", 1, 0.8),
    "a key each": ("noop", 10, 0.8),
    "a key each, capped": ("capped", 10, 0.625),
}
WINDOWS: dict[str, tuple[str, float, float | None]] = {
    PLAIN: ("burst", 0, None),
    "few keys": ("burst", 0.001, None),
    "a key each": ("burst", 10, None),
}
# The minimum ratio of the slowest drain with keys to the fastest.
FLAT_TARGET = 0.8

BACKLOG = int(os.environ.get("HORSIES_BENCH_BACKLOG", "1000000"))
# More tasks than all rounds claim together.
SMALL_BACKLOG = 5_000
CLAIMS = 200
BATCH = 8
CLAIM_TARGET = 1.3

# The number of tasks of one key drained during an open transaction, and the number of tasks per
# part of the drain.
OPEN_TASKS = 2 * TASKS
OPEN_PART = max(1, OPEN_TASKS // 10)
OPEN_TARGET, OPEN_GROWTH_TARGET = 0.8, 1.5

WORKERS = 8
HOT_TASKS = max(60, TASKS // 20)
HOT_TARGET = 0.7

_ADD = """
INSERT INTO horsies_tasks (
    id, task_name, queue_name, args, kwargs, sent_at, enqueue_sha, lane_key, lane, held, enqueued_at,
    updated_at)
SELECT gen_random_uuid(), 'noop', 'default', '[]', '{}', now(), repeat('a', 64), %s, %s, true, now(), now()
FROM generate_series(1, %s)
"""


def keys(url: str) -> bool:
    """Run the parts of the benchmark; each prints its own table."""
    checks = [
        _drains(url, "no-op tasks", DRAINS),
        _drains(url, "very short tasks in windows", WINDOWS),
        _claims(url),
        _open_transaction(url),
        _hot(url),
    ]
    return all(checks)


def _drains(url: str, title: str, variants: Mapping[str, tuple[str, float, float | None]]) -> bool:
    """Drain every variant in alternating rounds, and judge only drains with a target."""
    here = Checkout(url)
    arguments = {"children": CHILDREN, "count": TASKS, "flags": NEVER_REPLACED}
    found = alternate(
        {
            name: partial(here.measure, "keys", task=task, keys=round(TASKS * part), **arguments)
            for name, (task, part, _) in variants.items()
        },
        ROUNDS,
    )
    heading(
        f"keys: {title}, {CHILDREN} children, {TASKS:,} of {10 * TASKS:,} that wait, tasks/s, median "
        f"(min-max) of {ROUNDS}; the ratio is to the same tasks without keys"
    )
    good = True
    for name, (_, part, target) in variants.items():
        runs = found[name]
        parts = ratios(runs, found[PLAIN], "rate")
        aim = "" if target is None else f"  target {target}"
        shown = spread([run["rate"] for run in runs])
        print(f"  {name:20}{round(TASKS * part):>9,}{shown:>26}  ratio {spread(parts, 2)}{aim}")
        print(f"  {'':20}per task: {costs(runs)}")
        good &= target is None or statistics.median(parts) >= target
    with_keys = [name for name, (_, part, target) in variants.items() if part and target == 0.8]
    if not with_keys:
        return good
    rates = [median(found[name], "rate") for name in with_keys]
    flat = min(rates) / max(rates)
    print(f"  slowest number of keys to fastest: {flat:.2f}, target {FLAT_TARGET}")
    return good and flat >= FLAT_TARGET


def _claims(url: str) -> bool:
    """Send one task of key B behind many and behind few tasks of key A; B must be in the next claim, at
    the same cost.
    """
    sizes = {"few": SMALL_BACKLOG, "many": BACKLOG}
    with ExitStack() as stack:
        variants: dict[str, Callable[[], dict[str, float]]] = {}
        for name, size in sizes.items():
            database = stack.enter_context(created_database(url))
            _load(database, size)
            variants[name] = partial(_claim_beside, database)
        found = alternate(variants, ROUNDS)
    parts = ratios(found["many"], found["few"], "claim_ms")
    late = sum(run["late"] for runs in found.values() for run in runs)
    heading(
        f"keys: a claim of two tasks with one of B, {CLAIMS} in each of {ROUNDS} rounds, ms, median (min-max)"
    )
    for name, size in sizes.items():
        times = spread([run["claim_ms"] for run in found[name]], 2)
        print(f"  beside {size:>9,} of A{times:>26}")
    print(f"  ratio {spread(parts, 2)}, target {CLAIM_TARGET}")
    claims = 2 * ROUNDS * CLAIMS
    print(f"  B was in the next claim: {claims - late:,.0f} of {claims:,}")
    return statistics.median(parts) <= CLAIM_TARGET and late == 0


def _load(url: str, count: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        apply_migrations(connection)
        connection.execute("SET synchronous_commit = off")
        connection.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER USER")
        connection.execute(_ADD, ("A", lane_of("default", "A").number, count))
        connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER USER")
        connection.execute("VACUUM (ANALYZE) horsies_tasks")
        connection.execute("CHECKPOINT")


def _claim_beside(url: str) -> dict[str, float]:
    begin_round()
    lane, cursor, taken, late = lane_of("default", "B").number, 0, list[float](), 0
    claimer = Claimer(WORKER, "host", ("default",), (None,))
    outcomes: list[Outcome] = []
    with connect(url) as connection:
        pipeline = Pipeline(connection)
        for _ in range(CLAIMS):
            connection.execute(_ADD, ("B", lane, 1))
            started = time.perf_counter()
            turned = take_turn(
                pipeline, claimer, outcomes, TurnRequest(pids=(1, 2), cursors=[cursor])
            )
            taken.append(time.perf_counter() - started)
            (answer,) = turned.lanes
            cursor = answer.lane or 0
            late += lane not in [task.lane for task in turned.claimed]
            outcomes = [Outcome.completed(task, RESULT) for task in turned.claimed]
        take_turn(pipeline, claimer, outcomes, TurnRequest())
    return {"claim_ms": statistics.median(taken) * 1e3, "late": late}


def _open_transaction(url: str) -> bool:
    """Drain one key through a worker's turns, without and with another open transaction."""
    found = alternate(
        {"none": partial(_drain_key, url, False), "open": partial(_drain_key, url, True)}, ROUNDS
    )
    parts = ratios(found["open"], found["none"], "rate")
    growth = [run["last"] / run["first"] for run in found["open"]]
    heading(
        f"keys: {OPEN_TASKS:,} tasks of one key, turns of {BATCH} without children, tasks/s, "
        f"median (min-max) of {ROUNDS}"
    )
    for name, runs in found.items():
        print(f"  transaction: {name:8}{spread([run['rate'] for run in runs]):>26}")
    print(f"  ratio {spread(parts, 2)}, target {OPEN_TARGET}")
    print(f"  the last tenth to the first {spread(growth, 2)}, target {OPEN_GROWTH_TARGET}")
    return (
        statistics.median(parts) >= OPEN_TARGET and statistics.median(growth) <= OPEN_GROWTH_TARGET
    )


def _drain_key(url: str, is_open: bool) -> dict[str, float]:
    begin_round()
    with created_database(url) as database, psycopg.connect(database) as other:
        _load(database, OPEN_TASKS)
        if is_open:
            other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT count(*) FROM horsies_worker_states")
        with connect(database) as connection:
            parts = _part_seconds(Pipeline(connection))
    return {"rate": OPEN_TASKS / sum(parts), "first": parts[0], "last": parts[-1]}


def _part_seconds(pipeline: Pipeline) -> list[float]:
    """Take turns like a worker until all tasks of a key have ended; return the seconds of each part."""
    claimer = Claimer(WORKER, "host", ("default",), (None,))
    bookmarks, rings = Bookmarks(claimer.queues), KeyRings(claimer.queues)
    rings.note_keyed(claimer.queues)
    outcomes: list[Outcome] = []
    parts, done, started = list[float](), 0, time.perf_counter()
    while done < OPEN_TASKS:
        now, marks = time.monotonic(), rings.marks()
        positions = bookmarks.positions(now, has_lane_marks=bool(marks.lanes))
        wanted = TurnRequest(
            pids=list(range(BATCH)),
            positions=positions,
            cursors=rings.cursors(),
            lane_marks=NO_MARKS if positions is EVERYWHERE else marks,
        )
        turned = take_turn(pipeline, claimer, outcomes, wanted)
        span = (now, time.monotonic())
        was_short = len(turned.claimed) < BATCH
        bookmarks.note_claim(positions, turned.claimed, was_short=was_short, span=span)
        rings.note_claim(turned.lanes, claimer.queues, span[1])
        rings.note_taken(turned.claimed)
        done += len(outcomes)
        outcomes = [Outcome.completed(task, RESULT) for task in turned.claimed]
        if done // OPEN_PART > len(parts):
            parts.append(time.perf_counter() - started)
            started = time.perf_counter()
    return parts


def _hot(url: str) -> bool:
    """Let many workers with free children compete for the tasks of a key at its cap."""
    here = Checkout(url)
    runs = [here.measure("hot_key", workers=WORKERS, count=HOT_TASKS) for _ in range(ROUNDS)]
    places, seconds = runs[0]["places"], runs[0]["seconds"]
    parts = [run["rate"] * seconds / places for run in runs]
    heading(
        f"keys: one key with {places:.0f} places, {WORKERS} workers, {HOT_TASKS:,} tasks of "
        f"{seconds * 1000:.0f} ms, tasks/s, median (min-max) of {ROUNDS}"
    )
    print(
        f"  {spread([run['rate'] for run in runs], 1)} of {places / seconds:.0f} possible, "
        f"ratio {spread(parts, 2)}, target {HOT_TARGET}"
    )
    return statistics.median(parts) >= HOT_TARGET


BENCHMARKS = {"keys": keys}
