"""The figures by which two checkouts can be compared: ``python -m benchmarks.figures NAME ARGUMENTS``.

A figure is measured in a process of the measured code, using only the public interface and the tables,
so that older code can be measured too. The database is that of HORSIES_DATABASE_URL. The last line of
the output is a JSON object.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
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

from benchmarks.fleet import idle, recovery_seconds, running_fleet, single_sends

DRAIN_SECONDS = """
SELECT extract(epoch FROM max(finished_at) - min(started_at))::float8 FROM (
    SELECT started_at, finished_at FROM horsies_task_attempts ORDER BY started_at DESC LIMIT %s) AS drained
"""
# The first number counts the transactions that wrote something.
COUNTERS = """
SELECT pg_snapshot_xmax(pg_current_snapshot())::text::float8,
    pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8
"""
TURN_PID = """
SELECT pid FROM pg_stat_activity WHERE application_name = 'horsies:turn' AND datname = current_database()
"""
OPEN_TASKS = """
SELECT count(*) FROM horsies_tasks
WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING') AND NOT held AND enqueued_at <= now()
"""
# Each nap returns its start time. It is comparable with claimed_at, because everything runs on one machine.
NAP_DELAYS = """
SELECT (result::jsonb ->> 'ok')::float8 - extract(epoch FROM claimed_at)::float8
FROM horsies_tasks WHERE task_name = 'burst_nap_50'
"""


def drain(
    children: int = 4,
    task: str = "noop",
    count: int = 10_000,
    flags: Sequence[str] = (),
    application: str = "benchmarks.noop_app",
) -> dict[str, float]:
    """Let a warm worker drain preloaded tasks: tasks/s, and the cost of each task."""
    app = _application(application)
    with (
        _connection() as connection,
        running_worker(children, *flags, application=f"{application}:app") as worker,
    ):
        _warm_up(connection, getattr(app, "noop" if task == "chain" else task), 4 * children)
        with _preloading(connection):
            _load(app, task, count)
        return _drained(connection, worker, count)


def mixed(children: int = 8, count: int = 10_000, flags: Sequence[str] = ()) -> dict[str, float]:
    """Drain no-op tasks with one task of 50 ms per hundred, and measure the delay between claim and
    start of the 50 ms tasks.
    """
    app = _application()
    with _connection() as connection, running_worker(children, *flags) as worker:
        _warm_up(connection, app.burst, 4 * children)
        with _preloading(connection):
            for _ in range(count // 100):
                app.burst.send_many([app.burst.bind() for _ in range(99)]).unwrap()
                app.burst_nap_50.send().unwrap()
        drained = _drained(connection, worker, count)
        delays = [row[0] for row in connection.execute(NAP_DELAYS).fetchall()]
    return {
        "rate": drained["rate"],
        "nap_delay_p50_ms": percentile(delays, 50) * 1000,
        "nap_delay_p99_ms": percentile(delays, 99) * 1000,
    }


def queues(
    situation: str, children: int = 4, count: int = 10_000, flags: Sequence[str] = ()
) -> dict[str, float]:
    """Drain very short tasks of the last of five queues, while the first queue is in the given
    situation. In ``"one queue"`` the worker serves only the last queue; in ``"five queues"`` the tasks
    are spread over all queues.
    """
    app = _application("benchmarks.queues_app")
    served = ("--queues", "last") if situation == "one queue" else ()
    worker = running_worker(children, *served, *flags, application="benchmarks.queues_app:app")
    names = app.QUEUES if situation == "five queues" else ("last",)
    with _connection() as connection, worker as process:
        _warm_up(connection, app.burst, 4 * children)
        if situation in ("a task has run", "five queues"):
            for name in app.QUEUES:
                assert app.plain.with_options(queue_name=name).send().unwrap().get(20_000).is_ok()
            time.sleep(0.3)
        with _preloading(connection):
            if situation == "a delayed task":
                app.plain.schedule(3_600).unwrap()
            elif situation == "a run that waits":
                app.start_waiting_run()
            for name in names:
                calls = [app.burst.bind() for _ in range(count // len(names))]
                app.burst.with_options(queue_name=name).send_many(calls).unwrap()
        return _drained(connection, process, count, "last")


def keys(
    task: str,
    keys: int = 0,
    children: int = 4,
    count: int = 10_000,
    flags: Sequence[str] = (),
) -> dict[str, float]:
    """Run this many tasks of a queue while ten times more wait, with this number of keys or without
    keys.
    """
    app = _application("benchmarks.keys_app")
    function = getattr(app, task)
    worker = running_worker(children, *flags, application="benchmarks.keys_app:app")
    with _connection() as connection, worker as process:
        _warm_up(connection, function, 4 * children)
        with _preloading(connection):
            calls = [
                function.bind(f"tenant {number % max(keys, 1)}") for number in range(10 * count)
            ]
            (function if keys else function.with_options(key=None)).send_many(calls).unwrap()
        # The hint in a notification shows whether the tasks have keys.
        hint, queue = "@" if keys else "", function.definition.queue_name
        return _drained(connection, process, count, queue, hint, waits=_wait_for_attempts)


def hot_key(workers: int = 8, count: int = 500) -> dict[str, float]:
    """Drain the tasks of one key whose cap is far below the number of children: tasks/s, and their
    limits.
    """
    app = _application("benchmarks.keys_app")
    with (
        _connection() as connection,
        running_fleet(connection, workers, 1, application="benchmarks.keys_app:app") as running,
    ):
        for _ in range(2 * workers):
            assert app.noop.send().unwrap().get(timeout_ms=20_000).is_ok()
        connection.execute("TRUNCATE horsies_tasks CASCADE")
        app.hot.send_many([app.hot.bind("one") for _ in range(count)]).unwrap()
        _wait_for_attempts(connection, count, running.processes[0])
        rate = count / _number(connection, DRAIN_SECONDS, count)
    app.app.close()
    return {"rate": rate, "places": app.HOT_PLACES, "seconds": app.HOT_SECONDS}


def latency(
    children: int = 4, sends: int = 500, pause_seconds: float = 0.0, flags: Sequence[str] = ()
) -> dict[str, float]:
    """Send one task to an idle worker and wait for its result, repeatedly."""
    app, taken = _application(), list[float]()
    with _connection() as connection, running_worker(children, *flags):
        _warm_up(connection, app.burst, 100)
        for _ in range(sends):
            time.sleep(pause_seconds)
            started = time.perf_counter()
            assert app.burst.send().unwrap().get(timeout_ms=20_000).is_ok()
            taken.append(time.perf_counter() - started)
    app.app.close()
    return {"p50_ms": percentile(taken, 50) * 1000, "p99_ms": percentile(taken, 99) * 1000}


def fleet(
    workers: int = 2,
    children: int = 1,
    sends: int = 200,
    count: int = 4_000,
    kills: int = 3,
    idle_seconds: float = 10.0,
    drained: Sequence[str] = ("noop", "burst"),
) -> dict[str, float]:
    """Run many workers: their cost while idle and per single task, the rate of a drain, and the time
    until a killed worker's task is recovered.
    """
    app = _application("benchmarks.newer_app")
    found: dict[str, float] = {}
    with _connection() as connection, running_fleet(connection, workers, children) as running:
        if idle_seconds:
            found |= idle(running, idle_seconds)
        if sends:
            found |= single_sends(running, app.noop, sends)
        if kills:
            taken = recovery_seconds(running, app.burst_for, kills)
            found |= {"recovery_s": statistics.median(taken), "recovery_max_s": max(taken)}
        for task in drained if count else ():
            with _preloading(connection):
                _load(app, task, count)
            connection.execute("SELECT pg_notify('task_queue_default', '')")
            wait_for(connection, count, running.processes[0])
            found[f"{task}_rate"] = count / _number(connection, DRAIN_SECONDS, count)
    app.app.close()
    return found


def send(count: int = 3_000) -> dict[str, float]:
    """Send tasks one by one: the producer's wall and processor time per send."""
    noop = _application().noop
    with _connection() as connection:
        connection.execute("TRUNCATE horsies_tasks CASCADE")
        for _ in range(200):
            noop.send().unwrap()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(count):
            noop.send().unwrap()
        return {
            "wall_us": (time.perf_counter() - wall) / count * 1e6,
            "processor_us": (time.process_time() - processor) / count * 1e6,
        }


def send_async(count: int = 3_000) -> dict[str, float]:
    """Send tasks one by one from an event loop: wall and processor time per send."""
    noop = _application().noop

    async def run() -> dict[str, float]:
        for _ in range(200):
            (await noop.send_async()).unwrap()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(count):
            (await noop.send_async()).unwrap()
        return {
            "wall_us": (time.perf_counter() - wall) / count * 1e6,
            "processor_us": (time.process_time() - processor) / count * 1e6,
        }

    with _connection() as connection:
        connection.execute("TRUNCATE horsies_tasks CASCADE")
        return asyncio.run(run())


def send_stream(count: int = 1_000_000) -> dict[str, float]:
    """Send the calls of a generator: tasks/s, and the producer's peak memory."""
    noop = _application().noop
    with _connection() as connection:
        connection.execute("TRUNCATE horsies_tasks CASCADE")
        noop.send_many([noop.bind() for _ in range(1_000)]).unwrap()
        started = time.perf_counter()
        handles = noop.send_many(noop.bind() for _ in range(count)).unwrap()
        seconds = time.perf_counter() - started
        assert len(handles) == count
        connection.execute("TRUNCATE horsies_tasks CASCADE")
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rate": count / seconds, "peak_mb": peak_kb / 1024}


def send_many(count: int = 50_000) -> dict[str, float]:
    """Send many tasks in one call: tasks/s, and the producer's peak memory."""
    noop = _application().noop
    with _connection() as connection:
        connection.execute("TRUNCATE horsies_tasks CASCADE")
        noop.send_many([noop.bind() for _ in range(1_000)]).unwrap()
        started = time.perf_counter()
        noop.send_many([noop.bind() for _ in range(count)]).unwrap()
        seconds = time.perf_counter() - started
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rate": count / seconds, "peak_mb": peak_kb / 1024}


def start_up() -> dict[str, float]:
    """Start interpreters that import the package or run a command: processor time, median of 7, in ms."""
    url = os.environ["HORSIES_DATABASE_URL"]
    codes = {
        "import_ms": ["-c", "import horsies"],
        "app_ms": ["-c", f"from horsies import Horsies; Horsies({url!r})"],
        "status_ms": ["-m", "horsies", "status", "--database-url", url],
        "help_ms": ["-m", "horsies", "worker", "--help"],
        "overview_ms": ["-m", "horsies", "--help"],
    }
    _processor_ms(["-m", "horsies", "migrate", "--database-url", url])
    return {name: _processor_ms(code) for name, code in codes.items()}


def memory(children: int = 4) -> dict[str, float]:
    """Measure the memory of an idle worker's processes after a few tasks; shared pages are divided
    between processes.
    """
    app = _application()
    with _connection() as connection, running_worker(children) as worker:
        _warm_up(connection, app.noop, 10 * children)
        root = psutil.Process(worker.pid)
        processes = [root, *root.children(recursive=True)]
        held = [process.memory_full_info() for process in processes]
    return {
        "pss_mb": sum(one.pss for one in held) / 1e6,
        "private_mb": sum(one.uss for one in held) / 1e6,
        "processes": len(processes),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that this many percent of the values do not exceed."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@contextmanager
def running_worker(
    children: int, *flags: str, application: str = "benchmarks.noop_app:app"
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker of the benchmarks' application until the block ends."""
    command = [sys.executable, "-m", "horsies", "worker", application]
    process = subprocess.Popen(
        [*command, "--processes", str(children), "--loglevel", "ERROR", *flags]
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def wait_for(connection: Connection[Any], finished: int, worker: subprocess.Popen[bytes]) -> None:
    """Wait until this many tasks are terminal; poll rarely, so that the polls add little load."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and worker.poll() is None:
        row = connection.execute(OPEN_TASKS).fetchone()
        done = connection.execute("SELECT count(*) FROM horsies_task_attempts").fetchone()
        if row and done and row[0] == 0 and done[0] >= finished:
            return
        time.sleep(0.25)
    raise TimeoutError("the worker did not finish the tasks")


def _wait_for_attempts(
    connection: Connection[Any], finished: int, worker: subprocess.Popen[bytes]
) -> None:
    """Wait until this many attempts have ended, even if other tasks still wait."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and worker.poll() is None:
        if _number(connection, "SELECT count(*) FROM horsies_task_attempts") >= finished:
            return
        time.sleep(0.1)
    raise TimeoutError("the workers did not finish the tasks")


def _application(name: str = "benchmarks.noop_app") -> Any:
    """Imported here, because the module reads the database's URL from the environment."""
    module = importlib.import_module(name)
    module.app.get_broker().ensure_schema_initialized().unwrap()
    return module


def _connection() -> Connection[Any]:
    return psycopg.connect(os.environ["HORSIES_DATABASE_URL"], autocommit=True)


def _warm_up(connection: Connection[Any], function: Any, count: int) -> None:
    connection.execute("TRUNCATE horsies_tasks CASCADE")
    for _ in range(count):
        assert function.send().unwrap().get(timeout_ms=20_000).is_ok()
    time.sleep(0.3)  # The worker searches for due tasks again, up to a tenth of a second later.


def _load(app: Any, task: str, count: int) -> None:
    """Send this many tasks with this name in one call, or start the same number of nodes in chains."""
    if task == "chain":
        importlib.import_module("horsies").start_many([app.chain()] * (count // app.STEPS)).unwrap()
    else:
        function = getattr(app, task)
        function.send_many([function.bind() for _ in range(count)]).unwrap()


@contextmanager
def _preloading(connection: Connection[Any]) -> Iterator[None]:
    """Empty the tables, and prevent the worker from noticing tasks that are sent in this block."""
    connection.execute("TRUNCATE horsies_tasks CASCADE")
    connection.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER horsies_task_inserted")
    yield
    connection.execute("VACUUM (ANALYZE) horsies_tasks")
    connection.execute("CHECKPOINT")
    connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER horsies_task_inserted")


def _drained(
    connection: Connection[Any],
    worker: subprocess.Popen[bytes],
    count: int,
    queue: str = "default",
    hint: str = "",
    waits: Callable[[Connection[Any], int, subprocess.Popen[bytes]], None] = wait_for,
) -> dict[str, float]:
    before = counters(connection) | processor_us_of_worker(connection, worker.pid)
    connection.execute("SELECT pg_notify(%s, %s)", (f"task_queue_{queue}", hint))
    waits(connection, count, worker)
    after = counters(connection) | processor_us_of_worker(connection, worker.pid)
    ended = _number(connection, "SELECT count(*) FROM horsies_task_attempts")
    spent = {name: (after[name] - before[name]) / ended for name in before}
    return {"rate": count / _number(connection, DRAIN_SECONDS, count), **spent}


def counters(connection: Connection[Any]) -> dict[str, float]:
    """Return how many transactions the server has begun and how many bytes of WAL it has written."""
    row = connection.execute(COUNTERS).fetchone()
    assert row is not None
    return {"commits": row[0], "wal_bytes": row[1]}


def processor_us_of_worker(connection: Connection[Any], worker_pid: int) -> dict[str, float]:
    """Return the microseconds of the worker's parent, its children, and the server process for its
    turns.
    """
    parent = psutil.Process(worker_pid)
    reaped = parent.cpu_times()
    return {
        "parent_us": processor_us(parent),
        "children_us": sum(processor_us(child) for child in parent.children(recursive=True))
        + (reaped.children_user + reaped.children_system) * 1e6,
        "server_us": processor_us(psutil.Process(int(_number(connection, TURN_PID)))),
    }


def processor_us(process: psutil.Process) -> float:
    """Return the processor time of a process in microseconds."""
    times = process.cpu_times()
    return (times.user + times.system) * 1e6


def _number(connection: Connection[Any], query: Any, *values: Any) -> float:
    row = connection.execute(query, values).fetchone()
    assert row is not None
    return float(row[0])


def _processor_ms(arguments: Sequence[str]) -> float:
    taken = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(taken) * 1000


FIGURES: dict[str, Callable[..., dict[str, float]]] = {
    figure.__name__: figure
    for figure in (
        drain,
        mixed,
        queues,
        keys,
        hot_key,
        latency,
        fleet,
        send,
        send_async,
        send_many,
        send_stream,
        start_up,
        memory,
    )
}

if __name__ == "__main__":
    print(json.dumps(FIGURES[sys.argv[1]](**json.loads(sys.argv[2]))))
