"""The limits of one server: a thousand sessions that listen, send heartbeats, claim and finish like
workers, from one process and by the statements of workers.

``HORSIES_BENCH_SESSIONS=200,1000,5000`` measures other numbers, and ``HORSIES_BENCH_SEND_SECONDS=1``
sends once a second. A session takes two to three megabytes of the server's memory. The program that
simulates the workers shares the processors with the server, and its share is printed too. It runs one
statement at a time, so sessions never wait for each other's locks; "late" is the delay of its
heartbeats. ``HORSIES_BENCH_SAVE`` keeps the results.
"""

from __future__ import annotations

import heapq
import os
import random
import resource
import selectors
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import psycopg
from psycopg import Connection

from benchmarks.fleet import COMMITS, parent_of, used_seconds
from benchmarks.rounds import begin_round, heading
from benchmarks.saved import save_result
from benchmarks.worker import connect
from horsies.db.statements.turn import ClaimTasks, CompleteTasks, claim_tasks, complete_tasks
from horsies.db.statements.workers import register_worker, see_worker, watch_workers
from horsies.ids import new_id
from horsies.worker.liveness import lock_key
from horsies.worker.notifications import ECHO_CHANNEL, WAKE_CHANNEL_PREFIX

SIZES = tuple(map(int, os.environ.get("HORSIES_BENCH_SESSIONS", "200,1000").split(",")))
IDLE_SECONDS = 15.0
SENDS = int(os.environ.get("HORSIES_BENCH_SENDS", "100"))
SEND_SECONDS = float(os.environ.get("HORSIES_BENCH_SEND_SECONDS", "0.1"))
HEARTBEAT_SECONDS = 2.5
LATE_SECONDS = 3.125
RESULT = '{"ok": null}'
SEND = """
INSERT INTO horsies_tasks (id, task_name, queue_name, args, kwargs, sent_at, enqueue_sha)
VALUES (%s, 'noop', 'default', '[]', '{}', now(), repeat('a', 64))
"""
DELAYS = """
SELECT extract(epoch FROM started_at - enqueued_at)::float8 * 1000 FROM horsies_tasks
WHERE status = 'COMPLETED'
"""


class Session:
    """One session that behaves like the only session of a worker."""

    def __init__(self, url: str) -> None:
        self.worker_id = new_id()
        self.connection = connect(url)
        key = lock_key(self.worker_id)
        self.connection.execute("SELECT pg_advisory_lock(%s)", (key,))
        channels = ("task_queue_default", ECHO_CHANNEL, f"{WAKE_CHANNEL_PREFIX}{self.worker_id}")
        for channel in channels:
            self.connection.execute(f'LISTEN "{channel}"')
        values = (self.worker_id, key, self.worker_id, 1, 1, ["default"], None, None)
        register_worker.fetch(self.connection, *values)
        self.was_notified = False

    def beat(self) -> None:
        """Send a heartbeat and watch other workers, in one transaction."""
        calls, self.was_notified = not self.was_notified, False
        with self.connection.transaction():
            see_worker.fetch(self.connection, self.worker_id, True, True, calls)
            watch_workers.fetch(self.connection, self.worker_id, None, LATE_SECONDS)

    def serve(self) -> int:
        """Read notifications; claim and finish tasks if one announces them. Return the number of tasks."""
        notes = list(self.connection.notifies(timeout=0))
        self.was_notified |= bool(notes)
        if all(note.channel == ECHO_CHANNEL for note in notes):
            return 0
        claim = ClaimTasks(self.worker_id, "host", [1], ["default"], [1])
        done = 0
        while claimed := claim_tasks.run(self.connection, claim):
            (task,) = claimed
            complete_tasks.run(
                self.connection,
                CompleteTasks(self.worker_id, [task.id], [task.generation], [RESULT]),
            )
            done += 1
        return done


class Crowd:
    """Several sessions served by one loop, each with its own heartbeat times."""

    def __init__(self, url: str, size: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._beats: list[tuple[float, int]] = []
        self.late_seconds = 0.0
        self.sessions: list[Session] = []
        for number in range(size):
            session = Session(url)
            self.sessions.append(session)
            self._selector.register(session.connection.pgconn.socket, selectors.EVENT_READ, session)
            heapq.heappush(
                self._beats, (time.monotonic() + random.uniform(0, HEARTBEAT_SECONDS), number)
            )

    def run(self, until: float) -> int:
        """Serve the sessions until this time; return the number of finished tasks."""
        done = 0
        while (now := time.monotonic()) < until:
            at, number = self._beats[0]
            if now >= at:
                self.late_seconds = max(self.late_seconds, now - at)
                self.sessions[number].beat()
                heapq.heapreplace(self._beats, (now + HEARTBEAT_SECONDS, number))
            for key, _ in self._selector.select(max(0.0, min(at, until) - time.monotonic())):
                done += key.data.serve()
        return done

    def close(self) -> None:
        """End all sessions."""
        self._selector.close()
        for session in self.sessions:
            session.connection.close()


def sessions(url: str) -> bool:
    """Measure idle sessions, then single sends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = {}
    for size in SIZES:
        begin_round()
        found[size] = _measure(url, size)
        save_result(str(size), found[size])
    heading(f"sessions like those of workers; {SENDS} single sends, {1 / SEND_SECONDS:g} a second")
    titles = (
        "commits/s",
        "server %",
        "program %",
        "server ms/task",
        "p50 ms",
        "p99 ms",
        "late s",
        "MB each",
    )
    print(f"  {'sessions':>8}" + "".join(f"{title:>16}" for title in titles))
    for size, figures in found.items():
        print(f"  {size:>8}" + "".join(f"{figures[title]:>16.2f}" for title in titles))
    return True


def _measure(url: str, size: int) -> dict[str, float]:
    with psycopg.connect(url, autocommit=True) as sender:
        sender.execute("TRUNCATE horsies_tasks, horsies_workers CASCADE")
        row = sender.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        server = parent_of(row[0])
        before = _memory(server)
        crowd = Crowd(url, size)
        try:
            crowd.run(time.monotonic() + 2 * HEARTBEAT_SECONDS)
            idle = _spent(sender, server, lambda: crowd.run(time.monotonic() + IDLE_SECONDS))
            busy = _spent(sender, server, lambda: _send(sender, crowd))
            delays = [one for (one,) in sender.execute(DELAYS).fetchall()]
            memory = (_memory(server) - before) / size
        finally:
            crowd.close()
    quantiles = statistics.quantiles(delays, n=100, method="inclusive")
    extra = busy["server"] - idle["server"] * busy["seconds"] / idle["seconds"]
    return {
        "commits/s": idle["commits"] / idle["seconds"],
        "server %": idle["server"] / idle["seconds"] * 100,
        "program %": idle["program"] / idle["seconds"] * 100,
        "server ms/task": extra / SENDS * 1000,
        "p50 ms": quantiles[49],
        "p99 ms": quantiles[98],
        "late s": crowd.late_seconds,
        "MB each": memory,
    }


def _send(sender: Connection[Any], crowd: Crowd) -> None:
    done = 0
    for _ in range(SENDS):
        sender.execute(SEND, (new_id(),))
        done += crowd.run(time.monotonic() + SEND_SECONDS)
    deadline = time.monotonic() + 30
    while done < SENDS and time.monotonic() < deadline:
        done += crowd.run(time.monotonic() + SEND_SECONDS)
    assert done == SENDS, f"only {done} of {SENDS} tasks were finished"


def _spent(sender: Connection[Any], server: psutil.Process, run: Any) -> Mapping[str, float]:
    def now() -> Sequence[float]:
        row = sender.execute(COMMITS).fetchone()
        assert row is not None
        return float(row[0]), used_seconds(server), time.process_time(), time.monotonic()

    before = now()
    run()
    names = ("commits", "server", "program", "seconds")
    pairs = zip(names, before, now(), strict=True)
    return {name: later - earlier for name, earlier, later in pairs}


def _memory(server: psutil.Process) -> float:
    """Return the private memory of the server's processes in megabytes."""
    total = 0.0
    for one in server.children():
        try:
            total += one.memory_full_info().uss / 1024**2
        except psutil.NoSuchProcess:
            continue
    return total


BENCHMARKS = {"sessions": sessions}
