"""The cost of years of history: turns, sends and the overview behind millions of ended tasks, compared with
an empty table, and the price of forgetting them.

Two databases on one server differ only in their history, and every round measures both. The history is
inserted, not run: tasks with attempts, whose ids and times are spread over the last thirty days.
HORSIES_GROWTH_MILLIONS is the number of ended tasks, by default 5; a million takes about 0.6 GB.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import Connection, sql

from benchmarks import lifecycle
from benchmarks.rounds import alternate, begin_round, heading, spread
from benchmarks.worker import connect
from horsies import Horsies
from horsies.db.migrate import apply_migrations
from horsies.db.pipeline import Pipeline
from horsies.db.statements.workers import delete_old_tasks
from horsies.ids import new_id
from horsies.monitor.overview import read_overview
from horsies.testing.database import created_database
from horsies.worker.reaper import RETENTION_BATCH

MILLION = 1_000_000
MILLIONS = int(os.environ.get("HORSIES_GROWTH_MILLIONS", "5"))
DAYS = 30
ROUNDS = 5
DRAINED = 10_000
BATCH = 8
SENDS = 1_000
OVERVIEWS = 20
TARGET = 1.1
# The maximum duration of a turn while another session deletes old tasks.
TURN_MS_MAX = 50.0
# The number of tasks that pass through a table, to check whether dead rows slow later claims down.
SUSTAINED = 100_000
SUSTAINED_STEP = 20_000
DELETED = 100_000

# The id of a task contains its time; the number distinguishes ids of the same millisecond.
_HISTORY = """
WITH ended AS (
    SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7'
        || lpad(to_hex(number %% 4096), 3, '0') || '8' || lpad(to_hex(number), 15, '0'))::uuid AS id, at
    FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS number
    CROSS JOIN LATERAL (
        SELECT now() - %(days)s * interval '1 day' * (1 - number / %(total)s::float8)
            - interval '1 hour' AS at) AS time
), stored AS (
    INSERT INTO horsies_tasks (
        id, task_name, queue_name, args, kwargs, status, sent_at, enqueued_at, claimed_at,
        started_at, completed_at, result, claimed_by_worker_id, task_options, worker_pid, worker_hostname,
        enqueue_sha, created_at, updated_at, generation)
    SELECT id, 'noop', 'default', '[]', '{}', 'COMPLETED', at, at, at, at, at, '{"ok":null}', 'bare-sql',
        '{"retry_policy":null,"good_until":null}', 1, 'host', repeat('a', 64), at, at, 1
    FROM ended
)
INSERT INTO horsies_task_attempts (task_id, attempt, outcome, started_at, finished_at, worker_id,
    worker_hostname, worker_pid)
SELECT id, 1, 'COMPLETED', at, at, 'bare-sql', 'host', 1 FROM ended
"""
_SIZES = """
SELECT relname, pg_table_size(oid), pg_indexes_size(oid) FROM pg_class
WHERE relname IN ('horsies_tasks', 'horsies_task_attempts') ORDER BY relname DESC
"""


def growth(url: str) -> bool:
    """Compare both databases, then delete the oldest tasks while another session claims."""
    with created_database(url) as empty, created_database(url) as full:
        for one in (empty, full):
            with psycopg.connect(one, autocommit=True) as connection:
                apply_migrations(connection)
        with psycopg.connect(full, autocommit=True) as connection:
            _fill(connection)
            _print_sizes(connection)
        good = _compare({"empty": empty, "full": full})
        good &= _sustain({"empty": empty, "full": full})
        return _forget(full) and good


def _fill(connection: Connection[Any]) -> None:
    """Insert the history without triggers, which would notify and count every row."""
    connection.execute("SET session_replication_role = replica")
    connection.execute("SET synchronous_commit = off")
    total, started = MILLIONS * MILLION, time.perf_counter()
    for first in range(1, total, MILLION):
        span = {"first": first, "last": first + MILLION - 1, "total": total, "days": DAYS}
        connection.execute(_HISTORY, span)
    for table in ("horsies_tasks", "horsies_task_attempts"):
        connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(sql.Identifier(table)))
    connection.execute("CHECKPOINT")
    connection.execute("SET session_replication_role = origin")
    print(f"\n{MILLIONS} million ended tasks inserted in {time.perf_counter() - started:,.0f} s")


def _print_sizes(connection: Connection[Any]) -> None:
    heading("bytes per ended task")
    for name, table, indexes in connection.execute(_SIZES):
        rows = MILLIONS * MILLION
        print(f"  {name:24}{table / rows:>8,.0f} table {indexes / rows:>8,.0f} indexes")


def _compare(urls: Mapping[str, str]) -> bool:
    figures: dict[str, Callable[[str], float]] = {
        "turn, µs per task": _turns,
        "send, µs": _sends,
        "overview, ms": _overviews,
    }
    good = True
    for title, measure in figures.items():
        found = alternate({name: _bind(measure, one) for name, one in urls.items()}, ROUNDS)
        heading(f"{title}, median (min-max) of {ROUNDS}")
        ratio = statistics.median(found["full"]) / statistics.median(found["empty"])
        good &= ratio <= TARGET
        for name, values in found.items():
            print(f"  {name:8}{spread(values, 1):>28}")
        print(f"  ratio {ratio:.2f} (at most {TARGET})")
    return good


def _bind(measure: Callable[[str], float], url: str) -> Callable[[], float]:
    def run() -> float:
        begin_round()
        return measure(url)

    return run


def _turns(url: str) -> float:
    with connect(url) as connection:
        lifecycle.insert(connection, [new_id() for _ in range(DRAINED)])
        connection.execute("CHECKPOINT")
        return 1e6 / lifecycle.worker_turns(connection, BATCH, DRAINED)


def _sends(url: str) -> float:
    app = Horsies(url)

    @app.task("held")
    def held(number: int) -> None:
        """This task never runs, because the queue is emptied below."""

    try:
        held.enqueue(0)
        started = time.perf_counter()
        for number in range(SENDS):
            held.enqueue(number)
        taken = time.perf_counter() - started
    finally:
        app.close()
    with connect(url) as connection:
        lifecycle.worker_turns(connection, BATCH, SENDS + 1)
    return taken / SENDS * 1e6


def _overviews(url: str) -> float:
    app = Horsies(url)
    try:
        broker = app.get_broker()
        read_overview(broker).unwrap()
        started = time.perf_counter()
        for _ in range(OVERVIEWS):
            read_overview(broker).unwrap()
        return (time.perf_counter() - started) / OVERVIEWS * 1e3
    finally:
        app.close()


def _sustain(urls: Mapping[str, str]) -> bool:
    """Send and drain many tasks without a pause, so that dead rows accumulate faster than in hours of
    work.
    """
    heading(
        f"{SUSTAINED:,} tasks without a pause, autovacuum on: tasks/s of each {SUSTAINED_STEP:,}"
    )
    rates: dict[str, list[float]] = {}
    for name, url in urls.items():
        begin_round()
        with connect(url) as connection:
            pipeline, rates[name] = Pipeline(connection), []
            for _ in range(SUSTAINED // SUSTAINED_STEP):
                lifecycle.insert(connection, [new_id() for _ in range(SUSTAINED_STEP)])
                rate = lifecycle.worker_turns(connection, BATCH, SUSTAINED_STEP, pipeline)
                rates[name].append(rate)
            (dead,) = connection.execute(
                "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'horsies_tasks'"
            ).fetchone() or (0,)
        print(f"  {name:8}" + " ".join(f"{rate:,.0f}" for rate in rates[name]) + f"  dead {dead:,}")
    ratio = statistics.median(rates["empty"]) / statistics.median(rates["full"])
    print(f"  ratio {ratio:.2f} (at most {TARGET})")
    return ratio <= TARGET


def _forget(url: str) -> bool:
    """Delete old tasks as a worker's maintenance does, while another session takes turns."""
    with connect(url) as connection, _turning(url) as turns:
        pipeline, seconds, deleted = Pipeline(connection), [], 0
        begin = len(turns)
        while deleted < DELETED:
            started = time.perf_counter()
            (gone,) = pipeline.run([(delete_old_tasks, ((DAYS - 10) * 24.0, RETENTION_BATCH))])
            seconds.append(time.perf_counter() - started)
            deleted += len(gone)
            if not gone:
                break
        during = turns[begin:]
    heading(
        f"deleting {deleted:,} ended tasks, {RETENTION_BATCH:,} per statement, beside a claimer"
    )
    print(
        f"  {deleted / sum(seconds):,.0f} tasks/s; a statement {spread([1e3 * one for one in seconds], 1)} ms"
    )
    print(
        f"  turns of the claimer: p50 {_percentile(during, 0.5):.1f} ms, longest {max(during):.1f} ms"
    )
    with connect(url) as connection:
        started = time.perf_counter()
        connection.execute("VACUUM horsies_tasks")
        connection.execute("VACUUM horsies_task_attempts")
        print(f"  vacuum afterwards {time.perf_counter() - started:,.1f} s")
    return max(during) <= TURN_MS_MAX


@contextmanager
def _turning(url: str) -> Iterator[list[float]]:
    """Send and drain one batch at a time in another thread; yield the milliseconds of each turn."""
    turns: list[float] = []
    stopping = threading.Event()

    def turn() -> None:
        with connect(url) as connection:
            pipeline = Pipeline(connection)
            while not stopping.is_set():
                lifecycle.insert(connection, [new_id() for _ in range(BATCH)])
                started = time.perf_counter()
                lifecycle.worker_turns(connection, BATCH, BATCH, pipeline)
                turns.append((time.perf_counter() - started) * 1e3)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        while len(turns) < 20:
            time.sleep(0.01)
        yield turns
    finally:
        stopping.set()
        thread.join()


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


BENCHMARKS = {"growth": growth}
