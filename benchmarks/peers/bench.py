"""One peer with the servers: runs steps in their own processes, starts workers, and prepares queues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import adapter
from benchmarks.peers.environment import OVERLAYS
from benchmarks.peers.processes import last_line, running
from benchmarks.peers.servers import Servers

STEP_SECONDS = 120


@dataclass(frozen=True)
class Sizes:
    """The size of each workload, the same for all peers."""

    tasks: int = 10_000
    naps: int = 4_000
    seconds: float = 3.0
    sends: int = 1_000
    latencies: int = 200
    idle_seconds: float = 2.0
    crash_seconds: float = 15.0


QUICK = Sizes(
    tasks=300,
    naps=200,
    seconds=2.0,
    sends=50,
    latencies=20,
    idle_seconds=0.5,
    crash_seconds=5.0,
)


class PeerFailed(Exception):
    """A peer could not execute a step; the message is the reason in one line."""


@dataclass(frozen=True)
class Bench:
    """One peer, the servers, and a directory for files."""

    peer: str
    servers: Servers
    place: Path
    sizes: Sizes
    facts: dict[str, Any] = field(default_factory=dict)
    _commands: dict[tuple[int, int], list[str]] = field(default_factory=dict)

    def step(self, environment: dict[str, str], name: str, *arguments: object) -> Any:
        """Execute one step of the adapter in its own process, with a time limit."""
        command = [sys.executable, "-m", "benchmarks.peers.agent", self.peer, name]
        answer, log = self.place / f"{name}.answer", self.place / f"{name}.log"
        log.unlink(missing_ok=True)
        whole = environment | {adapter.ANSWER: str(answer)}
        try:
            with running([*command, *map(str, arguments)], whole, log) as process:
                process.wait(STEP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise PeerFailed(f"{name} took longer than {STEP_SECONDS} s") from error
        if process.returncode:
            raise PeerFailed(f"{name}: {last_line(log)}")
        return json.loads(answer.read_text("utf-8"))

    @contextmanager
    def fresh(self, workload: str, task: str = "", count: int = 0) -> Iterator[dict[str, str]]:
        """Yield servers with this many queued tasks, named in the environment. Tasks are sent once;
        later calls copy the servers' state, except for RabbitMQ, which cannot be copied.
        """
        state = f"{self.peer}_{task}_{count}"
        is_prepared = self.servers.has(state)
        with self.servers.lend(state) as database:
            environment = self.environment(database) | {adapter.WORKLOAD: workload}
            if not is_prepared:
                self.step(environment, "set_up")
                if count:
                    self.step(environment, "enqueue_many", task, count)
                if "RabbitMQ" not in self.facts["servers"]:
                    self.servers.keep(state)
            yield environment

    def environment(self, database: str) -> dict[str, str]:
        """Return the environment of the peer's processes."""
        overlay = Path(sys.prefix, OVERLAYS, self.peer)
        return {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": str(overlay) if overlay.exists() else "",
            adapter.DATABASE: database,
            adapter.REDIS: self.servers.redis,
            adapter.AMQP: self.servers.amqp,
            adapter.VARIANT: adapter.PEERS[self.peer][1],
            adapter.JOURNAL: str(self.place / "journal"),
        }

    @contextmanager
    def worker(
        self, environment: dict[str, str], slots: int, recycle: int = 0
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker until the block ends."""
        if (slots, recycle) not in self._commands:
            command = self.step(environment, "worker_command", slots, recycle)
            self._commands[slots, recycle] = command
        self.log.unlink(missing_ok=True)
        with running(self._commands[slots, recycle], environment, self.log) as process:
            yield process

    @contextmanager
    def watched(
        self,
        environment: dict[str, str],
        sent: int,
        count: int,
        seconds: float,
        slots: int,
        recycle: int = 0,
    ) -> Iterator[tuple[subprocess.Popen[bytes], list[list[float]]]]:
        """Run a worker and sample its progress from its start; yield the worker and the samples."""
        stop = self.place / "stop"
        stop.unlink(missing_ok=True)
        with ThreadPoolExecutor(1) as pool, self.worker(environment, slots, recycle) as worker:
            watching = pool.submit(self.step, environment, "watch", sent, count, seconds, stop)
            try:
                while not watching.done():
                    if worker.poll() is not None:
                        stop.touch()
                    time.sleep(0.05)
                yield worker, watching.result()
            finally:
                stop.touch()

    @property
    def log(self) -> Path:
        """The output of the peer's worker."""
        return self.place / "worker.log"
