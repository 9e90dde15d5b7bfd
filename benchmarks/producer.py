"""The cost of sending: batches and single sends, each compared with a bare insert of the same rows by
the same driver in the same run. The rows of the bare insert are prepared in advance; creating
identifiers, JSON texts and fingerprints counts only for Horsies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg import Connection

from benchmarks.rounds import begin_round, heading, spread
from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskFunction, TaskResult
from horsies.ids import new_id

ROUNDS = 5
BATCH = 20_000
SINGLES = 2_000
BATCH_TARGET = 2.0
SINGLE_TARGET = 1.5

OPTIONS = '{"retry_policy":null,"good_until":null}'
SHA = "a" * 64

INSERT_BATCH = """
INSERT INTO horsies_tasks (
    id, task_name, queue_name, priority, args, kwargs, sent_at, max_retries, task_options, enqueue_sha)
SELECT sent.id, 'add', 'default', 100, sent.args, sent.kwargs, now(), 0, %s, sent.sha
FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::text[]) AS sent (id, args, kwargs, sha)
"""
INSERT_ONE = """
INSERT INTO horsies_tasks (
    id, task_name, queue_name, priority, args, kwargs, sent_at, max_retries, task_options, enqueue_sha)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""

AddTask = TaskFunction[[int, int], int]


def send_many(url: str) -> bool:
    """Compare sending 20,000 tasks in one call with one INSERT ... SELECT unnest of the same rows."""
    app, add = _application(url)
    with psycopg.connect(url) as connection:
        bare, ours = _interleaved(url, lambda: _bare_batch(connection), lambda: _send_batch(add))
    app.close()
    return _report(f"send_many of {BATCH:,} tasks", bare, ours, BATCH, BATCH_TARGET)


def send(url: str) -> bool:
    """Compare sending 2,000 tasks one by one with INSERT and commit on one connection."""
    app, add = _application(url)
    with psycopg.connect(url) as connection:
        bare, ours = _interleaved(
            url, lambda: _bare_singles(connection), lambda: _send_singles(add)
        )
    app.close()
    return _report(f"{SINGLES:,} single sends", bare, ours, SINGLES, SINGLE_TARGET)


def _application(url: str) -> tuple[Horsies, AddTask]:
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=url)))

    @app.task("add")
    def add(a: int, b: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    app.get_broker().ensure_schema_initialized().unwrap()
    return app, add


def _bare_batch(connection: Connection[Any]) -> float:
    ids = [new_id() for _ in range(BATCH)]
    args = [f"[{number},2]" for number in range(BATCH)]
    columns = (OPTIONS, ids, args, ["{}"] * BATCH, [SHA] * BATCH)
    started = time.perf_counter()
    connection.execute(INSERT_BATCH, columns)
    connection.commit()
    return time.perf_counter() - started


def _send_batch(add: AddTask) -> float:
    calls = [add.bind(number, 2) for number in range(BATCH)]
    started = time.perf_counter()
    handles = add.send_many(calls).unwrap()
    taken = time.perf_counter() - started
    assert len(handles) == BATCH
    return taken


def _bare_singles(connection: Connection[Any]) -> float:
    moment = datetime.now(UTC)
    rows = [
        (new_id(), "add", "default", 100, f"[{number},2]", "{}", moment, 0, OPTIONS, SHA)
        for number in range(SINGLES)
    ]
    started = time.perf_counter()
    for row in rows:
        connection.execute(INSERT_ONE, row)
        connection.commit()
    return time.perf_counter() - started


def _send_singles(add: AddTask) -> float:
    started = time.perf_counter()
    for number in range(SINGLES):
        assert add.send(number, 2).is_ok()
    return time.perf_counter() - started


def _interleaved(
    url: str, bare: Callable[[], float], ours: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Run both variants alternately, so that other load affects both equally; the first round only warms
    up.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for run, taken in zip((bare, ours), times, strict=True):
            _empty_table(url)
            begin_round()
            taken.append(run())
    return times[0][1:], times[1][1:]


def _empty_table(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE horsies_tasks CASCADE")
        connection.execute("CHECKPOINT")


def _report(
    title: str, bare: Sequence[float], ours: Sequence[float], count: int, target: float
) -> bool:
    ratio = statistics.median(ours) / statistics.median(bare)
    heading(f"{title}, µs per task, median (min-max) of {ROUNDS}")
    for name, times in (("bare", bare), ("horsies", ours)):
        print(f"  {name:10}{spread([one / count * 1e6 for one in times], 1):>28}")
    print(f"  ratio {ratio:.2f} (at most {target})")
    return ratio <= target


BENCHMARKS = {"send_many": send_many, "send": send}
