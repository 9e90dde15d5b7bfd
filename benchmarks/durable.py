"""The cost of durable functions: a loop of recorded steps beside bare INSERTs, replays, and parked runs.

``HORSIES_BENCH_PARKED=100000`` is the number of parked runs beside an idle worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg

from benchmarks.rounds import alternate, begin_round, heading, spread
from horsies.app import Horsies
from horsies.db.database import Database, Pool
from horsies.db.statements.durable import load_steps
from horsies.db.task_transaction import open_pool
from horsies.durable.context import Durable
from horsies.durable.engine import Engine
from horsies.durable.past import Past
from horsies.durable.run import Fence, Run
from horsies.ids import new_id

STEPS, ROUNDS, REPLAYED = 300, 7, 5_000
PARKED = int(os.environ.get("HORSIES_BENCH_PARKED", "100000"))
IDLE_SECONDS = 20.0
# The least part of the rate of bare INSERTs, and the most microseconds for a replayed step.
RATE_TARGET, REPLAY_TARGET_US = 0.7, 10.0
RUNNING = """
INSERT INTO horsies_tasks (id, task_name, queue_name, args, kwargs, enqueue_sha, status, generation,
    claimed_by_worker_id)
VALUES (%s, 'steps', 'default', '[]', '{}', repeat('a', 64), 'RUNNING', 1, 'bench')
"""
BARE = "CREATE TABLE IF NOT EXISTS benchmark_steps (id uuid, name text, result text, PRIMARY KEY (id, name))"
SLEEPERS = """
INSERT INTO horsies_tasks (id, task_name, queue_name, args, kwargs, enqueue_sha, generation, enqueued_at)
SELECT gen_random_uuid(), 'steps', 'default', '[]', '{}', repeat('a', 64), 1, now() + interval '30 days'
FROM generate_series(1, %s)
"""


class _Sessions:
    """The connections of a child."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def pool(self) -> Pool:
        return open_pool(self.database, 1)


def one(number: int) -> int:
    """The function of a step that does nothing."""
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
    """Measure steps, replays and an idle worker beside parked runs."""
    app = Horsies(url)
    with psycopg.connect(url, autocommit=True, prepare_threshold=1) as connection:
        connection.execute(BARE)
        checks = [_steps(app, connection), _replays(app, connection), _parked(url, connection)]
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
    _loop(_context(app, task_id), REPLAYED)
    loads, replays = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        with app.get_broker().database.connection() as own:
            past = Past(load_steps.fetch(own, task_id, 1))
        loads.append((time.perf_counter() - started) * 1e3)
        replays.append(1e6 / _loop(_context(app, task_id, past), REPLAYED))
    heading(f"durable functions: a replay of {REPLAYED:,} recorded steps")
    print(f"  one SELECT, ms {spread(loads, 1)}; a replayed step, µs {spread(replays, 1)}")
    print(f"  target {REPLAY_TARGET_US} µs")
    return sorted(replays)[len(replays) // 2] <= REPLAY_TARGET_US


@contextmanager
def _idle_worker(url: str) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "horsies", "worker", "benchmarks.noop_app:app"]
    environment = {**os.environ, "HORSIES_DATABASE_URL": url}
    folder = Path(__file__).parents[1]
    with subprocess.Popen(
        [*command, "--processes", "2"],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as started:
        try:
            time.sleep(5)
            yield psutil.Process(started.pid)
        finally:
            started.terminate()


def _parked(url: str, connection: psycopg.Connection[Any]) -> bool:
    found: dict[str, float] = {}
    with _idle_worker(url) as worker:
        for name, rows in (("none", 0), ("parked", PARKED)):
            connection.execute(SLEEPERS, (rows,))
            connection.execute("ANALYZE horsies_tasks")
            time.sleep(2)
            begin_round()
            before = _used(worker)
            time.sleep(IDLE_SECONDS)
            found[name] = (_used(worker) - before) / IDLE_SECONDS * 1e3
    connection.execute("DELETE FROM horsies_tasks")
    heading(f"durable functions: an idle worker beside {PARKED:,} parked runs, {IDLE_SECONDS:g} s")
    print(
        f"  processor time of the worker, ms per second: {found['none']:.2f} without, "
        f"{found['parked']:.2f} beside them"
    )
    return found["parked"] < found["none"] + 2.0


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


BENCHMARKS = {"durable": durable}
