"""Recorded steps of durable functions compared with steps of DBOS: ``python -m
benchmarks.peers.durable_steps``.

Both record no-op steps on one server in alternating rounds: one run at a time, and four runs
concurrently, in children of a worker or in threads. The time of Horsies includes its sends and its
outcomes; DBOS calls its workflows directly, which is faster than its queue. ``--python`` names an
interpreter that has DBOS.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from benchmarks.machine import MACHINE
from benchmarks.rounds import REPOSITORY, alternate, begin_round, heading, spread
from benchmarks.server import server
from horsies import Horsies
from horsies.db.migrate import apply_migrations

STEPS = 50
# The number of concurrent runs, and the number of runs per round.
SIZES = {1: 20, 4: 60}
TARGET = 5.0
OPEN = "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
_DBOS = "benchmarks.peers.adapters.dbos_steps"


def main(arguments: Sequence[str]) -> int:
    """Measure and print; return 1 if a ratio misses its target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--busy", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--python", default=sys.executable, metavar="PATH")
    options = parser.parse_args(arguments)
    MACHINE.accepts_busy = options.busy
    with server() as url:
        own, other = _database(url, "steps"), _database(url, "dbos_steps")
        with psycopg.connect(own, autocommit=True) as connection:
            apply_migrations(connection)
        met = [_compared(own, other, places, options) for places in SIZES]
    return 0 if all(met) else 1


def _database(url: str, name: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return urlsplit(url)._replace(path=f"/{name}").geturl()


def _compared(own: str, other: str, places: int, options: argparse.Namespace) -> bool:
    runs = SIZES[places]
    recorded = runs * STEPS
    with _worker(own, places), psycopg.connect(own, autocommit=True) as connection:
        app = Horsies(own)
        _drained(app, connection, places, 3)

        def horsies() -> float:
            begin_round()
            return recorded / _drained(app, connection, runs, STEPS)

        def dbos() -> float:
            begin_round()
            return recorded / _seconds_of_dbos(options.python, other, runs, places)

        before = [_commits(url) for url in (own, other)]
        found = alternate({"horsies": horsies, "dbos": dbos}, options.rounds)
        commits = [_commits(url) - was for url, was in zip((own, other), before, strict=True)]
        app.close()
    parts = [a / b for a, b in zip(found["horsies"], found["dbos"], strict=True)]
    heading(f"{runs} runs of {STEPS} steps, {places} at a time, {options.rounds} rounds")
    print(f"  steps/s: horsies {spread(found['horsies'])}, dbos {spread(found['dbos'])}")
    per_step = [one / (recorded * options.rounds) for one in commits]
    print(f"  commits per step: horsies {per_step[0]:.2f}, dbos {per_step[1]:.2f}")
    print(f"  ratio {spread(parts, 1)}, target {TARGET}")
    return sorted(parts)[len(parts) // 2] >= TARGET


def _drained(app: Horsies, connection: psycopg.Connection[Any], runs: int, steps: int) -> float:
    """Return the seconds from the first send to the last outcome."""
    started = time.perf_counter()
    for _ in range(runs):
        app.send_by_name("steps", {"count": steps}).unwrap()
    while connection.execute(OPEN).fetchone() != (0,):
        time.sleep(0.01)
    took = time.perf_counter() - started
    rows = connection.execute("SELECT status, count(*) FROM horsies_tasks GROUP BY 1").fetchall()
    assert rows == [("COMPLETED", runs)], rows
    assert connection.execute("SELECT count(*) FROM horsies_steps").fetchone() == (runs * steps,)
    connection.execute("DELETE FROM horsies_tasks")
    return took


def _seconds_of_dbos(python: str, url: str, runs: int, threads: int) -> float:
    numbers = [str(one) for one in (runs, STEPS, threads)]
    address = url.replace("postgresql://", "postgresql+psycopg://", 1)
    answer = subprocess.run(
        [python, "-m", _DBOS, address, *numbers],
        cwd=REPOSITORY,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(answer.stdout.splitlines()[-1])


def _commits(url: str) -> int:
    """Return the number of commits of a database; its sessions report them with a delay of up to a
    second.
    """
    time.sleep(1.2)
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    return 0 if row is None else int(row[0])


@contextmanager
def _worker(url: str, processes: int) -> Iterator[None]:
    command = [sys.executable, "-m", "horsies", "worker", "benchmarks.steps_app:app"]
    environment = {**os.environ, "HORSIES_DATABASE_URL": url}
    with (
        Path(os.devnull).open("w") as nowhere,
        subprocess.Popen(
            [*command, "--processes", str(processes), "--loglevel", "WARNING"],
            cwd=REPOSITORY,
            env=environment,
            stdout=nowhere,
        ) as started,
    ):
        try:
            yield
        finally:
            started.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
