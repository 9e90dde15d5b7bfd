"""What the worker reaches: throughput, recycling, latency; each against bare SQL in the same run."""

from __future__ import annotations

import os
import selectors
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import psycopg
from psycopg import Connection

from benchmarks import lifecycle
from benchmarks.spread import spread
from horsies.db.statements.turn import ClaimTasks, CompleteTasks, claim_tasks, complete_tasks
from horsies.ids import new_id
from horsies.worker.connection import TURN_SETTINGS

CHILDREN = (2, 4, 8)
TASKS = 10_000
ROUNDS = 3
LATENCY_SENDS = 300
TARGETS = {2: 0.30, 4: 0.45, 8: 0.65}
RECYCLING_TARGET = 0.95
LATENCY_TARGETS = (3.0, 6.0)


def connect(url: str) -> Connection[Any]:
    """Open a connection tuned like the worker's."""
    return psycopg.connect(url, autocommit=True, prepare_threshold=0, options=TURN_SETTINGS)


@contextmanager
def running_worker(url: str, children: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker until the block ends."""
    command = [sys.executable, "-m", "horsies", "worker", "benchmarks.noop_app:app"]
    environment = {**os.environ, "HORSIES_DATABASE_URL": url}
    process = subprocess.Popen(
        [*command, "--processes", str(children), "--loglevel", "ERROR", *flags], env=environment
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def drain(
    url: str, children: int, count: int, *flags: str, task_name: str = "noop"
) -> dict[str, float]:
    """Let a warm worker drain preloaded tasks; return tasks/s and what each task cost the server."""
    with connect(url) as connection:
        lifecycle.load(connection, 1)
        with running_worker(url, children, *flags) as worker:
            wait_for(connection, 1, worker)
            hold = "ALTER TABLE horsies_tasks DISABLE TRIGGER horsies_task_inserted"
            connection.execute(hold)
            lifecycle.insert(connection, [new_id() for _ in range(count)], task_name)
            connection.execute("VACUUM (ANALYZE) horsies_tasks")
            connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER horsies_task_inserted")
            before = _counters(connection) | _processor_seconds(connection, worker.pid)
            connection.execute("SELECT pg_notify('task_queue_default', '')")
            wait_for(connection, count + 1, worker)
            after = _counters(connection) | _processor_seconds(connection, worker.pid)
        seconds = _drain_seconds(connection, count)
    spent = {name: (after[name] - before[name]) / count for name in before}
    return {"rate": count / seconds, **spent}


def wait_for(connection: Connection[Any], finished: int, worker: subprocess.Popen[bytes]) -> None:
    """Wait until that many tasks are terminal, looking rarely so as not to be part of the load."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and worker.poll() is None:
        row = connection.execute(
            "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
        ).fetchone()
        done = connection.execute("SELECT count(*) FROM horsies_task_attempts").fetchone()
        if row and done and row[0] == 0 and done[0] >= finished:
            return
        time.sleep(0.25)
    raise TimeoutError("the worker did not finish the tasks")


def _drain_seconds(connection: Connection[Any], count: int) -> float:
    row = connection.execute(
        "SELECT extract(epoch FROM max(finished_at) - min(started_at)) FROM ("
        "SELECT started_at, finished_at FROM horsies_task_attempts ORDER BY started_at DESC "
        "LIMIT %s) AS drained",
        (count,),
    ).fetchone()
    assert row is not None
    return float(row[0])


def _counters(connection: Connection[Any]) -> dict[str, float]:
    # Transactions that wrote something. The server counts the reading of notifications as well.
    row = connection.execute(
        "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::float8, "
        "pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8"
    ).fetchone()
    assert row is not None
    return {"commits": row[0], "wal": row[1]}


def _processor_seconds(connection: Connection[Any], worker_pid: int) -> dict[str, float]:
    """Processor time of the worker's parent, of its children, and of the server's process for turns."""
    parent = psutil.Process(worker_pid)
    row = connection.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'horsies:turn' "
        "AND datname = current_database()"
    ).fetchone()
    assert row is not None
    return {
        "parent_cpu": _used(parent),
        "children_cpu": sum(_used(child) for child in parent.children(recursive=True)),
        "server_cpu": _used(psutil.Process(row[0])),
    }


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def throughput(url: str) -> bool:
    """Drain with 2, 4 and 8 children against bare SQL with the same batch sizes."""
    bare: dict[tuple[str, int], list[float]] = {}
    drained: dict[int, list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for children in CHILDREN:
            count = TASKS
            for name, run in (("apart", lifecycle.two_commits), ("turn", lifecycle.one_turn)):
                bare.setdefault((name, children), []).append(_bare(url, run, children, count))
            drained.setdefault(children, []).append(
                drain(url, children, count, "--max-tasks-per-child", "0")
            )
    yardstick = statistics.median(bare["apart", 8])
    print(
        f"\ndrain of no-op tasks, median (min-max) of {ROUNDS}; yardstick = bare SQL, batches of 8"
    )
    print(
        f"  {'':12}{'bare, 2 commits':>26}{'bare, 1 turn':>26}{'worker':>26}{'ratio':>8}{'target':>8}"
    )
    good = True
    for children in CHILDREN:
        rates = [one["rate"] for one in drained[children]]
        ratio = statistics.median(rates) / yardstick
        good &= ratio >= TARGETS[children]
        print(
            f"  {children} children{'':2}{spread(bare['apart', children]):>26}"
            f"{spread(bare['turn', children]):>26}{spread(rates):>26}{ratio:>8.2f}"
            f"{TARGETS[children]:>8.2f}"
        )
    for children in CHILDREN:
        print(f"  {children} children, per task: {_costs(drained[children])}")
    return good


def _costs(runs: Sequence[dict[str, float]]) -> str:
    def middle(name: str) -> float:
        return statistics.median(one[name] for one in runs)

    processor = ", ".join(
        f"{who} {middle(f'{who}_cpu') * 1e6:.0f}" for who in ("parent", "children", "server")
    )
    return (
        f"{middle('commits'):.3f} commits and round trips, {middle('wal'):,.0f} B of WAL, "
        f"processor µs: {processor}"
    )


def _bare(
    url: str, run: Callable[[Connection[Any], int, int], float], batch: int, count: int
) -> float:
    with connect(url) as connection:
        lifecycle.load(connection, count)
        return run(connection, batch, count)


def recycling(url: str) -> bool:
    """Drain with children replaced every 100 tasks against never; and with spawn, for comparison."""
    children, never = 4, ("--max-tasks-per-child", "0")
    always = ("--max-tasks-per-child", "100")
    rates: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, flags in (("never", never), ("every 100", always)):
            rate = drain(url, children, 12_000, *flags)["rate"]
            rates.setdefault(name, []).append(rate)
            rate = drain(url, children, 3_000, *flags, task_name="nap")["rate"]
            rates.setdefault(f"{name}, tasks of 5 ms", []).append(rate)
    rate = drain(url, children, 3_000, *always, "--start-method", "spawn")["rate"]
    rates["every 100, spawn"] = [rate]
    print(f"\nrecycling, {children} children, tasks/s")
    for name, values in rates.items():
        print(f"  {name:28}{spread(values):>26}")
    ratio, with_naps = (
        statistics.median(rates[f"every 100{what}"]) / statistics.median(rates[f"never{what}"])
        for what in ("", ", tasks of 5 ms")
    )
    print(
        f"  ratio every 100 / never: {ratio:.2f} (target {RECYCLING_TARGET}), 5 ms: {with_naps:.2f}"
    )
    return ratio >= RECYCLING_TARGET


def latency(url: str) -> bool:
    """Send one task and wait for its result, 300 times, against the bare sequence."""
    bare = _bare_latency(url)
    with running_worker(url, 4):
        ours = _send_and_get(url)
    print(f"\nlatency of {LATENCY_SENDS} sends on an idle worker, ms")
    good = True
    for name, quantile, target in zip(("p50", "p99"), (50, 99), LATENCY_TARGETS, strict=True):
        ratio = _percentile(ours, quantile) / _percentile(bare, quantile)
        good &= ratio <= target
        print(
            f"  {name}  bare {_percentile(bare, quantile):.2f}  worker {_percentile(ours, quantile):.2f}"
            f"  ratio {ratio:.2f} (target {target:.0f})"
        )
    return good


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000


def _send_and_get(url: str) -> list[float]:
    script = (
        "import json, sys, time\n"
        "from benchmarks.noop_app import app, noop\n"
        "assert noop.send().unwrap().get(timeout_ms=20_000).is_ok()\n"
        "taken = []\n"
        f"for _ in range({LATENCY_SENDS}):\n"
        "    started = time.perf_counter()\n"
        "    assert noop.send().unwrap().get(timeout_ms=20_000).is_ok()\n"
        "    taken.append(time.perf_counter() - started)\n"
        "app.close()\n"
        "print(json.dumps(taken))\n"
    )
    environment = {**os.environ, "HORSIES_DATABASE_URL": url}
    answer = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True
    )
    return [float(text) for text in answer.stdout.strip().strip("[]").split(",")]


def _bare_latency(url: str) -> list[float]:
    taken = []
    with connect(url) as sender, connect(url) as receiver:
        lifecycle.load(sender, 0)
        receiver.execute("LISTEN bare_done")
        with selectors.DefaultSelector() as selector:
            selector.register(receiver.pgconn.socket, selectors.EVENT_READ)
            for _ in range(LATENCY_SENDS):
                started = time.perf_counter()
                _bare_sequence(sender)
                selector.select(10)
                assert any(receiver.notifies(timeout=10, stop_after=1))
                taken.append(time.perf_counter() - started)
    return taken


def _bare_sequence(connection: Connection[Any]) -> None:
    lifecycle.insert(connection, [new_id()])
    (task,) = claim_tasks.run(connection, ClaimTasks("bare", "host", [1], ["default"], [1]))
    complete_tasks.run(
        connection, CompleteTasks("bare", [task.id], [task.generation], [lifecycle.RESULT])
    )
    connection.execute("SELECT pg_notify('bare_done', '')")


BENCHMARKS = {"throughput": throughput, "recycling": recycling, "latency": latency}
