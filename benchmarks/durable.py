"""The cost of durable functions: a loop of recorded steps compared with bare INSERTs, replays, and
parked runs.

``HORSIES_BENCH_PARKED=100000`` sets the number of parked runs during which a worker idles.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import psutil
import psycopg

from benchmarks.against import two_databases
from benchmarks.fleet import Fleet, idle
from benchmarks.rounds import alternate, begin_round, heading, median, spread
from horsies.app import Horsies
from horsies.db.database import Database, Pool
from horsies.db.migrate import apply_migrations
from horsies.db.statements.durable import load_steps
from horsies.db.task_transaction import open_pool
from horsies.durable.context import Durable
from horsies.durable.engine import Engine
from horsies.durable.past import STEPS_MAX, Past
from horsies.durable.run import Fence, Run
from horsies.ids import new_id

# The number of steps of a replayed run: the maximum of a run.
STEPS, ROUNDS, REPLAYED = 300, 7, STEPS_MAX
PARKED = int(os.environ.get("HORSIES_BENCH_PARKED", "100000"))
IDLE_SECONDS, IDLE_ROUNDS = 20.0, 3
# The additional share of a core that an idle worker or its server may use while runs are parked.
IDLE_GROWTH_PERCENT = 0.2
# The minimum fraction of the rate of bare INSERTs, and the maximum microseconds per replayed step.
RATE_TARGET, REPLAY_TARGET_US = 0.7, 10.0
# The maximum growth of the process while it records and replays the longest run.
REPLAY_TARGET_MB = 40.0
RUNNING = """
INSERT INTO horsies_tasks (id, task_name, queue_name, args, kwargs, enqueue_sha, status, generation,
    claimed_by_worker_id)
VALUES (%s, 'steps', 'default', '[]', '{}', repeat('a', 64), 'RUNNING', 1, 'bench')
"""
BARE = "CREATE TABLE IF NOT EXISTS benchmark_steps (id uuid, name text, result text, PRIMARY KEY (id, name))"
# Half of the runs wait for a signal without a due time; the others wait for a child, for up to 30
# days.
SLEEPERS = """
WITH runs AS (
    INSERT INTO horsies_tasks (id, task_name, queue_name, args, kwargs, enqueue_sha, generation, enqueued_at)
    SELECT gen_random_uuid(), 'steps', 'default', '[]', '{}', repeat('a', 64), 1,
        CASE number %% 2 WHEN 0 THEN horsies_never_v1() ELSE now() + interval '30 days' END
    FROM generate_series(1, %s) AS number
    RETURNING id, enqueued_at),
children AS (
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, args, kwargs, enqueue_sha, enqueued_at, wakes_task_id)
    SELECT gen_random_uuid(), 'noop', 'default', '[]', '{}', repeat('a', 64), now() + interval '40 days', id
    FROM runs WHERE enqueued_at < horsies_never_v1()
    RETURNING id, wakes_task_id),
steps AS (
    INSERT INTO horsies_steps (task_id, name, position, kind, result, attempt, started_at, ended_at)
    SELECT runs.id, 'one#' || number, number, 'step', '1', 1, now(), now()
    FROM runs CROSS JOIN generate_series(1, 3) AS number)
INSERT INTO horsies_parked (task_id, generation, since, until, signals, children)
SELECT runs.id, 1, now(), CASE WHEN children.id IS NOT NULL THEN runs.enqueued_at END,
    CASE WHEN children.id IS NULL THEN '{go}' ELSE '{}' END::text[], array_remove(ARRAY[children.id], NULL)
FROM runs LEFT JOIN children ON children.wakes_task_id = runs.id
"""


class _Sessions:
    """Lends the database connections of a child."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def pool(self) -> Pool:
        return open_pool(self.database, 1)


def one(number: int) -> int:
    """Do nothing; this is the function of a step."""
    return number


def _context(app: Horsies, task_id: str, past: Past | None = None) -> Durable:
    fence = Fence("bench", task_id, 1, 1)
    run = Run(fence, past or Past(), lambda _: "UNHANDLED_EXCEPTION")
    return Durable(Engine(run, _Sessions(app.get_broker().database)))


def _loop(ctx: Durable, count: int) -> float:
    """Steps per second."""
    started = time.perf_counter()
    for number in range(count):
        ctx.step(one, number)
    return count / (time.perf_counter() - started)


def durable(url: str) -> bool:
    """Measure steps, replays, and an idle worker while runs are parked."""
    app = Horsies(url)
    with psycopg.connect(url, autocommit=True, prepare_threshold=1) as connection:
        connection.execute(BARE)
        checks = [_steps(app, connection), _replays(app, connection), _parked(url)]
    app.close()
    return all(checks)


def _steps(app: Horsies, connection: psycopg.Connection[Any]) -> bool:
    def recorded() -> float:
        begin_round()
        task_id = new_id()
        connection.execute(RUNNING, (task_id,))
        return _loop(_context(app, task_id), STEPS)

    def bare() -> float:
        begin_round()
        task_id = new_id()
        started = time.perf_counter()
        for number in range(STEPS):
            values = (task_id, f"one#{number}", str(number))
            connection.execute("INSERT INTO benchmark_steps VALUES (%s, %s, %s)", values)
        return STEPS / (time.perf_counter() - started)

    before = _commits(connection)
    found = alternate({"step": recorded, "insert": bare}, ROUNDS)
    commits = _commits(connection) - before
    parts = [a / b for a, b in zip(found["step"], found["insert"], strict=True)]
    heading(f"durable functions: {STEPS} steps of one run beside bare INSERTs, {ROUNDS} rounds")
    print(f"  steps/s {spread(found['step'])}, INSERTs/s {spread(found['insert'])}")
    print(f"  ratio {spread(parts, 2)}, target {RATE_TARGET}")
    print(f"  {commits:,} commits for {2 * STEPS * ROUNDS:,} steps and INSERTs")
    return sorted(parts)[len(parts) // 2] >= RATE_TARGET


def _commits(connection: psycopg.Connection[Any]) -> int:
    connection.execute("SELECT pg_stat_force_next_flush()")
    row = connection.execute(
        "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    ).fetchone()
    return 0 if row is None else int(row[0])


def _replays(app: Horsies, connection: psycopg.Connection[Any]) -> bool:
    task_id = new_id()
    connection.execute(RUNNING, (task_id,))
    before = psutil.Process().memory_info().rss
    _loop(_context(app, task_id), REPLAYED)
    loads, replays, sizes = [], [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        with app.get_broker().database.connection() as own:
            past = Past(load_steps.fetch(own, task_id, 1))
        loads.append((time.perf_counter() - started) * 1e3)
        replays.append(1e6 / _loop(_context(app, task_id, past), REPLAYED))
        sizes.append((psutil.Process().memory_info().rss - before) / 1e6)
    heading(f"durable functions: a replay of {REPLAYED:,} recorded steps")
    print(f"  one SELECT, ms {spread(loads, 1)}; a replayed step, µs {spread(replays, 1)}")
    print(
        f"  target {REPLAY_TARGET_US} µs; RSS before {before / 1e6:.1f} MB, more in the rounds "
        f"{spread(sizes, 1)} MB, target {REPLAY_TARGET_MB} MB"
    )
    is_quick = sorted(replays)[len(replays) // 2] <= REPLAY_TARGET_US
    return is_quick and max(sizes) <= REPLAY_TARGET_MB


def _parked(url: str) -> bool:
    """Measure alternately an idle worker on an empty database and one on a database with parked runs."""
    with two_databases(url) as (empty, full):
        for one_url in (empty, full):
            with psycopg.connect(one_url, autocommit=True) as connection:
                apply_migrations(connection)
        with psycopg.connect(full, autocommit=True) as connection:
            connection.execute(SLEEPERS, (PARKED,))
            connection.execute("VACUUM (ANALYZE)")
            connection.execute("CHECKPOINT")
        found = alternate(
            {"without": partial(_idle, empty), "beside them": partial(_idle, full)}, IDLE_ROUNDS
        )
    heading(
        f"durable functions: an idle worker beside {PARKED:,} parked runs, {IDLE_ROUNDS} rounds of "
        f"{IDLE_SECONDS:g} s; processor time in % of a core"
    )
    for name, runs in found.items():
        shown = {metric: spread([run[metric] for run in runs], 2) for metric in runs[0]}
        print(
            f"  {name}: worker {shown['idle_workers_percent']}, server "
            f"{shown['idle_server_percent']}, commits/s {shown['idle_commits']}"
        )
    growths = [
        median(found["beside them"], metric) - median(found["without"], metric)
        for metric in ("idle_workers_percent", "idle_server_percent")
    ]
    return max(growths) < IDLE_GROWTH_PERCENT


def _idle(url: str) -> dict[str, float]:
    begin_round()
    os.environ["HORSIES_DATABASE_URL"] = url
    with psycopg.connect(url, autocommit=True) as connection:
        fleet = Fleet(connection, 2, (), "benchmarks.noop_app:app")
        try:
            fleet.grow(1)
            return idle(fleet, IDLE_SECONDS)
        finally:
            fleet.stop()


BENCHMARKS = {"durable": durable}
