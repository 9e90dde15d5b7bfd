"""Budgets of the pages on a million finished tasks, and on the same pages with a thousand.

`make test-web-scale` runs this, not `make test`. Blocks are counted by the server for twenty requests of a
page; times are medians of requests to both databases in turns, so that the machine does not matter, and the
95th percentile has a roof of its own.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from horsies import PostgresConfig
from horsies.monitor.diagnose.slow import VIEWED_SECONDS, SlowChecks
from horsies.tasks.broker import PostgresBroker
from tests.support.database import created_database, template_database
from tests.support.wait import wait_until
from tests.support.web_server import WebServer, served

pytestmark = [pytest.mark.scale, pytest.mark.timeout(1_800)]

REQUESTS = 20
# An idle session of PostgreSQL reports its counts after ten seconds at the latest.
REPORTED_AFTER_SECONDS = 10.5
SOAK_SECONDS = float(os.environ.get("HORSIES_TEST_SOAK_SECONDS", "600"))
SOAK_VIEWERS = 20
IDLE_SECONDS = 60
MEMORY_MB = 120
CONNECTIONS = 4
ROWS = (Path(__file__).parent / "scale_rows.sql").read_text("utf-8")
SMALL = ROWS.format(finished=1_000, waiting=200, workers=200, runs=50)
BIG = ROWS.format(finished=1_000_000, waiting=200_000, workers=200, runs=5_000)
# The slower checks, which run for all viewers together.
SLOW_BLOCKS, SLOW_SECONDS = 100_000, 5.0
RUN_300 = "00000000-0000-7000-8000-000000000300"
RUN_5000 = "00000000-0000-7000-8000-000000005000"


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one page: blocks for a request, time against the small database, and a roof."""

    path: str
    blocks: int
    ratio: float | None
    milliseconds: float


BUDGETS = {
    "overview": Budget("/", 5_000, 2.0, 250),
    "newest tasks": Budget("/tasks", 500, 1.5, 80),
    "tasks, nothing matches": Budget("/tasks?task_name=task_missing", 60_000, None, 300),
    "search by argument": Budget("/tasks?argument=order_id%3D17", 60_000, None, 800),
    "search by part": Budget("/search?q=task_1", 60_000, None, 600),
    "search by words of no error": Budget("/search?q=nothing+like+this", 60_000, None, 600),
    "search by words of an error": Budget("/search?q=it+broke", 60_000, None, 600),
    "suggestions": Budget("/api/search?q=task_1", 60_000, None, 600),
    "search by the beginning of an id": Budget("/api/search?q={prefix}", 60_000, None, 600),
    "queues": Budget("/queues", 5_000, 2.0, 250),
    "task name": Budget("/names/task_1", 30_000, None, 300),
    "task": Budget("/tasks/{task}", 200, 1.2, 40),
    "explain": Budget("/tasks/{waiting}/explain", 2_500, 2.0, 80),
    "failures": Budget("/failures", 30_000, None, 300),
    "one reason of failures": Budget("/failures/{fingerprint}", 10_000, None, 200),
    "tasks of one reason": Budget("/tasks?fingerprint={fingerprint}", 500, None, 80),
    "workers": Budget("/workers", 3_000, None, 150),
    "run of 300 nodes": Budget(f"/workflows/{RUN_300}", 2_500, 1.2, 200),
    "run of 5,000 nodes": Budget(f"/workflows/{RUN_5000}", 20_000, None, 2_000),
    "schedules": Budget("/schedules", 2_000, 1.2, 120),
    "metrics": Budget("/metrics", 5_000, 2.0, 150),
}


class Filled:
    """A dashboard on a filled database."""

    def __init__(self, url: str, server: WebServer, connection: psycopg.Connection[Any]) -> None:
        self.url = url
        self.server = server
        self._connection = connection
        self._names = {
            "task": self._one("SELECT max(id::text) FROM horsies_tasks WHERE status = 'FAILED'"),
            "prefix": self._one("SELECT left(max(id::text), 9) FROM horsies_tasks"),
            "fingerprint": self._one("SELECT max(fingerprint) FROM horsies_task_attempts"),
            "waiting": self._one(
                "SELECT min(id::text) FROM horsies_tasks WHERE status = 'PENDING'"
            ),
        }

    def _one(self, query: str) -> Any:
        row = self._connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]

    def milliseconds(self, path: str) -> float:
        started = time.perf_counter()
        response = self.server.get(path.format(**self._names))
        assert response.status_code == 200, response.text
        assert "took too long" not in response.text
        return (time.perf_counter() - started) * 1_000

    def processor_seconds(self) -> tuple[float, float]:
        """Processor time of the dashboard, and of the server's sessions and ended processes."""
        postmaster = psutil.Process(self._one("SELECT pg_backend_pid()")).parent()
        assert postmaster is not None
        ended = postmaster.cpu_times()
        used = ended.children_user + ended.children_system
        for (pid,) in self._connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend'"
        ):
            used += _own_seconds(psutil.Process(pid))
        return _own_seconds(psutil.Process(self.server.process.pid)), used

    def blocks(self, path: str) -> float:
        """Blocks that the server touches for one request, after the first has warmed the plans."""
        while True:
            started = time.monotonic()
            for _ in range(7):
                self.milliseconds(path)
            before = self.quiet_blocks()
            # The checks that run for all viewers once a minute have a budget of their own.
            if time.monotonic() - started < VIEWED_SECONDS / 2:
                break
        for _ in range(REQUESTS):
            self.milliseconds(path)
        return (self.quiet_blocks() - before) / REQUESTS

    def run_slow_checks(self) -> None:
        """Run the doctor's slower checks as the dashboard does."""
        broker = PostgresBroker(
            PostgresConfig(database_url=self.url), role="operator", migrates=False
        )
        with closing(broker):
            slow = SlowChecks()
            slow.refresh(broker)
        assert slow.ended_at is not None

    def quiet_blocks(self) -> int:
        """Read the counter when it has not moved for longer than an idle session keeps its counts."""
        last, since = self._blocks(), time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, since
            # Reading the counter touches a few blocks itself.
            if (now := self._blocks()) - last > 100:
                since = time.monotonic()
            last = now
            return time.monotonic() - since > REPORTED_AFTER_SECONDS

        wait_until(is_quiet, 60)
        return last

    def _blocks(self) -> int:
        self._connection.execute("SELECT pg_stat_clear_snapshot()")
        return int(
            self._one(
                "SELECT (blks_hit + blks_read)::bigint FROM pg_stat_database "
                "WHERE datname = current_database()"
            )
        )


def _own_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def filled(server_url: str, fill: str) -> Iterator[Filled]:
    with (
        created_database(server_url, template_database(server_url, fill)) as url,
        psycopg.connect(url, autocommit=True) as connection,
        served("--payload", "--database-url", url) as server,
    ):
        yield Filled(url, server, connection)


@pytest.fixture(scope="module")
def small(server_url: str) -> Iterator[Filled]:
    """A dashboard on a thousand finished tasks."""
    with filled(server_url, SMALL) as dashboard:
        yield dashboard


@pytest.fixture(scope="module")
def big(server_url: str) -> Iterator[Filled]:
    """A dashboard on a million finished tasks."""
    with filled(server_url, BIG) as dashboard:
        yield dashboard


def test_the_slow_checks_stay_within_their_budget(big: Filled) -> None:
    before = big.quiet_blocks()
    started = time.perf_counter()
    big.run_slow_checks()
    seconds = time.perf_counter() - started
    blocks = big.quiet_blocks() - before
    print(f"\nslow checks {blocks:,} blocks ({SLOW_BLOCKS:,})  {seconds:.1f} s ({SLOW_SECONDS})")
    assert blocks <= SLOW_BLOCKS
    assert seconds <= SLOW_SECONDS


@pytest.mark.parametrize("name", BUDGETS)
def test_a_page_stays_within_its_budget(small: Filled, big: Filled, name: str) -> None:
    budget = BUDGETS[name]
    blocks = big.blocks(budget.path)
    times: dict[str, list[float]] = {"small": [], "big": []}
    for _ in range(REQUESTS):
        times["small"].append(small.milliseconds(budget.path))
        times["big"].append(big.milliseconds(budget.path))
    ratio = statistics.median(times["big"]) / statistics.median(times["small"])
    slowest = statistics.quantiles(times["big"], n=20)[-1]
    print(
        f"\n{name:24} {blocks:8,.0f} blocks ({budget.blocks:,})  {ratio:5.2f} x ({budget.ratio})"
        f"  p95 {slowest:6.0f} ms ({budget.milliseconds:.0f})"
    )
    assert blocks <= budget.blocks
    assert budget.ratio is None or ratio <= budget.ratio
    assert slowest <= budget.milliseconds


# Pages of an installation with 3,000 queues, 10,000 task names and 3,000 schedules: bytes, and milliseconds
# of processor time of the dashboard and the server together, which other load does not change.
MANY = {
    "/": (300_000, 1_000),
    "/queues": (300_000, 1_000),
    "/queues?after=tenant-2": (300_000, 1_000),
    "/queues/tenant-17": (100_000, 1_000),
    "/failures": (300_000, 1_000),
    "/names/shop.task_17": (100_000, 1_000),
    "/tasks": (300_000, 1_000),
    "/tasks?queue=tenant-17": (300_000, 1_000),
    "/schedules": (300_000, 1_000),
    "/workflows": (300_000, 1_000),
    "/history": (100_000, 1_000),
    "/workers": (300_000, 1_000),
    "/workers?page=4": (300_000, 1_000),
    "/search?q=tenant-29": (100_000, 1_000),
    "/doctor": (300_000, 3_000),
    "/metrics": (600_000, 1_000),
    "/api/overview": (300_000, 1_000),
    "/api/overview?all=1": (3_000_000, 2_000),
    "/api/queues?limit=200": (100_000, 1_000),
}
# Milliseconds that a viewer waits, as the median, on a machine without other work.
WAITS = {"/": 1_000}
LOST = "UPDATE horsies_workers SET seen_at = now() - interval '10 minutes';"


@pytest.fixture(scope="module", params=["", LOST], ids=["alive", "lost"])
def many(server_url: str, request: pytest.FixtureRequest) -> Iterator[Filled]:
    """A dashboard on 3,000 queues and 10,000 task names, whose 400 workers are alive, or all lost."""
    fill = (Path(__file__).parent / "many_names_rows.sql").read_text("utf-8")
    with filled(server_url, fill + request.param) as dashboard:
        yield dashboard


@pytest.mark.parametrize("path", MANY)
def test_thousands_of_queues_and_names_keep_a_page_small_and_quick(many: Filled, path: str) -> None:
    size, most = MANY[path]
    many.milliseconds(path)
    before = many.processor_seconds()
    times = sorted(many.milliseconds(path) for _ in range(5))
    spent = [
        (now - then) / 5 * 1_000 for now, then in zip(many.processor_seconds(), before, strict=True)
    ]
    found = len(many.server.get(path).content)
    print(
        f"\n{path:28} {found:9,} bytes ({size:,})  median {times[2]:6.0f} ms; processor: dashboard "
        f"{spent[0]:4.0f} ms, server {spent[1]:4.0f} ms ({most})"
    )
    assert found <= size
    assert sum(spent) <= most
    assert times[2] <= WAITS.get(path, times[2])


def test_no_viewer_no_statement_for_a_minute(small: Filled) -> None:
    small.milliseconds("/")
    wait_until(lambda: _sessions_at_work(small) == 0)
    last = _last_statement(small)
    end = time.monotonic() + IDLE_SECONDS
    wait_until(lambda: time.monotonic() > end, IDLE_SECONDS + 10)
    assert _last_statement(small) == last


def test_twenty_viewers_for_ten_minutes(big: Filled) -> None:
    process = psutil.Process(big.server.process.pid)
    end = time.monotonic() + SOAK_SECONDS
    threads = [
        threading.Thread(target=_look, args=(big.server.url, index, end))
        for index in range(SOAK_VIEWERS)
    ]
    for thread in threads:
        thread.start()
    most_memory = 0.0
    while time.monotonic() < end:
        most_memory = max(most_memory, process.memory_info().rss / 2**20)
        threads[0].join(1)
    for thread in threads:
        thread.join()
    connections = _database_connections(big)
    print(f"\n{SOAK_VIEWERS} viewers: at most {most_memory:.0f} MB, {connections} connections")
    assert most_memory < MEMORY_MB
    assert connections <= CONNECTIONS


def _look(url: str, index: int, end: float) -> None:
    # A client may hold six streams, so every viewer has its own address.
    transport = httpx.HTTPTransport(local_address=f"127.0.0.{index + 2}")
    path = ("/live/", "/live/queues", "/live/workers", f"/live/workflows/{RUN_300}")[index % 4]
    with httpx.Client(transport=transport, timeout=30) as client:
        while time.monotonic() < end:
            with client.stream("GET", url + path) as response:
                response.raise_for_status()
                for _ in response.iter_lines():
                    if time.monotonic() > end:
                        break


OTHERS = (
    "FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)


def _sessions_at_work(dashboard: Filled) -> int:
    return int(dashboard._one(f"SELECT count(*) {OTHERS} AND state <> 'idle'"))


def _last_statement(dashboard: Filled) -> Any:
    """The time of the newest statement of the dashboard's sessions; None without any session."""
    return dashboard._one(f"SELECT max(query_start) {OTHERS}")


def _database_connections(dashboard: Filled) -> int:
    return int(dashboard._one(f"SELECT count(*) {OTHERS}"))
