"""The cost of progress: a task that reports ten thousand times a second, and the rows that it
writes.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from psycopg import Connection

from benchmarks import lifecycle
from benchmarks.figures import wait_for
from benchmarks.rounds import begin_round, heading, spread
from benchmarks.worker import connect, running_worker
from horsies.ids import new_id

SECONDS = 5.0
ROUNDS = 3
ROWS_TARGET = 4.0
MICROSECONDS_TARGET = 2.0


def progress(url: str) -> bool:
    """Run a task that reports progress continuously; count the rows and time its calls."""
    rows, calls, costs = [], [], []
    with connect(url) as connection:
        lifecycle.load(connection, 1)
        with running_worker(url, 2, application="benchmarks.newer_app:app") as worker:
            wait_for(connection, 1, worker)
            for done in range(ROUNDS):
                begin_round()
                before = _rows_written(connection)
                task_id = new_id()
                lifecycle.insert(connection, [task_id], "report")
                wait_for(connection, done + 2, worker)
                rows.append((_rows_written(connection) - before) / SECONDS)
                seconds_per_call, count = _result(connection, task_id)
                costs.append(seconds_per_call * 1e6)
                calls.append(count / SECONDS)
    heading(f"progress, a task of {SECONDS:.0f} s, median (min-max) of {ROUNDS}")
    print(f"  calls per second  {spread(calls)}")
    print(f"  rows per second   {spread(rows, 1)}  (target at most {ROWS_TARGET:.0f})")
    print(f"  µs per call       {spread(costs, 2)}  (target below {MICROSECONDS_TARGET:.0f})")
    is_cheap = statistics.median(costs) < MICROSECONDS_TARGET
    return max(rows) <= ROWS_TARGET and is_cheap


def _rows_written(connection: Connection[Any]) -> int:
    connection.execute("SELECT pg_stat_clear_snapshot()")
    row = connection.execute(
        "SELECT n_tup_ins + n_tup_upd FROM pg_stat_user_tables "
        "WHERE relname = 'horsies_task_progress'"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _result(connection: Connection[Any], task_id: str) -> tuple[float, int]:
    """Return the seconds per call and the number of calls."""
    query = "SELECT result FROM horsies_tasks WHERE id = %s"
    row = connection.execute(query, (task_id,)).fetchone()
    assert row is not None
    seconds_per_call, count = json.loads(row[0])["ok"]
    return float(seconds_per_call), int(count)


BENCHMARKS = {"progress": progress}
