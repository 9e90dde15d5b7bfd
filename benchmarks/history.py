"""The cost of history: the same drain on an empty table, behind a million finished tasks, before a
large backlog, and while another session holds a transaction open.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import Connection

from benchmarks import lifecycle
from benchmarks.rounds import begin_round, heading, spread
from benchmarks.worker import connect
from horsies.ids import new_id

FINISHED = 1_000_000
PENDING = 200_000
DRAINED = 20_000
BATCH = 8
ROUNDS = 3
TARGETS = {"finished rows": 0.9, "pending rows": 0.9, "open transaction": 0.8}

FINISH = """
INSERT INTO horsies_tasks (
    id, task_name, queue_name, args, kwargs, status, sent_at, completed_at, result, enqueue_sha)
SELECT gen_random_uuid(), 'noop', 'default', '[]', '{}', 'COMPLETED', now(), now(), '{"ok":null}',
    repeat('a', 64)
FROM generate_series(1, %s)
"""


def history(url: str) -> bool:
    """Drain with a worker's turns but without children, to measure only the server's part."""
    rates: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        rates.setdefault("empty table", []).append(_drain(url, _nothing))
        rates.setdefault("finished rows", []).append(_drain(url, _finished))
        rates.setdefault("pending rows", []).append(_drain(url, _backlog))
        with _open_transaction(url):
            rates.setdefault("open transaction", []).append(_drain(url, _nothing))
    base = statistics.median(rates["empty table"])
    heading(f"history, batches of {BATCH}, tasks/s, median (min-max) of {ROUNDS}")
    good = True
    for name, values in rates.items():
        ratio = statistics.median(values) / base
        target = TARGETS.get(name)
        good &= target is None or ratio >= target
        wanted = "" if target is None else f"  (target {target})"
        print(f"  {name:18}{spread(values):>26}  ratio {ratio:.2f}{wanted}")
    return good


def _drain(url: str, prepare: Callable[[Connection[Any]], None]) -> float:
    with connect(url) as connection:
        lifecycle.load(connection, DRAINED)
        prepare(connection)
        begin_round()
        return lifecycle.worker_turns(connection, BATCH, DRAINED)


def _nothing(_connection: Connection[Any]) -> None:
    """Leave the table as it is."""


def _finished(connection: Connection[Any]) -> None:
    connection.execute(FINISH, (FINISHED,))
    connection.execute("VACUUM (ANALYZE) horsies_tasks")
    connection.execute("CHECKPOINT")


def _backlog(connection: Connection[Any]) -> None:
    lifecycle.insert(connection, [new_id() for _ in range(PENDING)])
    connection.execute("VACUUM (ANALYZE) horsies_tasks")
    connection.execute("CHECKPOINT")


@contextmanager
def _open_transaction(url: str) -> Iterator[None]:
    with psycopg.connect(url) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM horsies_worker_states")
        yield
        connection.rollback()


BENCHMARKS = {"history": history}
