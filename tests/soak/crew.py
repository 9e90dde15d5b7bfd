"""The processes of a soak run: workers and schedulers behind proxies of their own, and the producer.

A process that is started again keeps its proxies and gets a new name: `worker-2.3` is the fourth
incarnation of the third worker.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import psutil

from tests.soak import journal
from tests.soak.limits import PROCESSES, SCHEDULERS, WORKERS
from tests.support.proxy import Proxy
from tests.support.replicated_server import ReplicatedServer, two_host_url
from tests.support.workers import DATABASE_VARIABLE, Fleet, RunningWorker

APPLICATION = "tests.soak.flows:app"
START_SECONDS = 60.0
Role = Literal["worker", "scheduler"]


class Sidecar:
    """The way of one process to both servers, which can break without harm to the other processes.

    Faults may overlap: the way is open again when the last of them is over.
    """

    def __init__(self, servers: ReplicatedServer) -> None:
        self._proxies = [Proxy(server.url) for server in servers.servers]
        self._lock = threading.Lock()
        self._cuts = self._pauses = 0

    @property
    def url(self) -> str:
        return two_host_url(proxy.port for proxy in self._proxies)

    def open(self) -> None:
        for proxy in self._proxies:
            proxy.start()

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.stop()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Break all connections and refuse new ones."""
        with self._lock:
            self._cuts += 1
            self.close()
        yield
        with self._lock:
            self._cuts -= 1
            if not self._cuts:
                self.open()

    @contextmanager
    def paused(self, *, is_lost: bool) -> Iterator[None]:
        """Hold all traffic back; afterwards deliver it, or lose it and break the connections."""
        with self._lock:
            self._pauses += 1
            for proxy in self._proxies:
                proxy.pause()
        yield
        with self._lock:
            self._pauses -= 1
            for proxy in self._proxies:
                if is_lost:
                    proxy.cut()
                if not self._pauses:
                    proxy.resume()


@dataclass(slots=True)
class Member:
    """A worker or a scheduler, through all of its incarnations."""

    role: Role
    number: int
    sidecar: Sidecar
    crew: Crew = field(repr=False)
    incarnation: int = -1
    running: RunningWorker | None = None

    @property
    def name(self) -> str:
        """The name of the current incarnation."""
        return f"{self.role}-{self.number}.{self.incarnation}"

    @property
    def process(self) -> RunningWorker:
        assert self.running is not None
        return self.running

    def launch(self) -> None:
        """Start the next incarnation."""
        self.incarnation += 1
        command = [sys.executable, "-m", "horsies", self.role, APPLICATION]
        if self.role == "worker":
            command += ["--processes", str(PROCESSES)]
        self.running = self.crew.launch(self.name, command, self.sidecar.url)

    def wait_until_ready(self) -> None:
        """Wait until the current incarnation serves."""
        self.process.wait_until_ready(f"{self.role}_ready", START_SECONDS)  # type: ignore[arg-type]

    def check_alive(self) -> None:
        """Fail when the current incarnation has ended by itself."""
        exit_code = self.process.process.poll()
        if exit_code is not None:
            raise RuntimeError(f"{self.name} had ended by itself with exit code {exit_code}")

    def kill(self) -> None:
        """Kill the parent process; its children are the kernel's and the worker's business."""
        self.check_alive()
        self.process.family()
        self.process.signal(signal.SIGKILL)
        journal.write("process", event="killed", worker=self.name)
        self.process.process.wait()


class Crew:
    """All processes; use as a context manager that leaves none behind."""

    def __init__(self, servers: ReplicatedServer, directory: Path) -> None:
        self.run_id = uuid.uuid4().hex
        self.servers = servers
        self.fleet = Fleet(servers.url, directory)
        self.journal_path = directory / "journal"
        (directory / "locks").mkdir()
        os.environ[journal.JOURNAL_VARIABLE] = str(self.journal_path)
        self.workers = self._members("worker", WORKERS)
        self.schedulers = self._members("scheduler", SCHEDULERS)
        self.producer: RunningWorker | None = None
        self._stack = ExitStack()

    def _members(self, role: Role, count: int) -> list[Member]:
        return [Member(role, number, Sidecar(self.servers), self) for number in range(count)]

    @property
    def members(self) -> list[Member]:
        return [*self.workers, *self.schedulers]

    def __enter__(self) -> Self:
        self._stack.callback(self.fleet.destroy)
        for member in self.members:
            member.sidecar.open()
            self._stack.callback(member.sidecar.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def launch(self, name: str, command: list[str], database_url: str) -> RunningWorker:
        environment = os.environ | {
            DATABASE_VARIABLE: database_url,
            journal.WORKER_VARIABLE: name,
            journal.RUN_VARIABLE: self.run_id,
        }
        running = self.fleet.launch(name, command, environment)
        journal.write("process", event="launched", worker=name, pid=running.pid)
        return running

    def launch_producer(self, seed: int) -> None:
        command = [sys.executable, "-m", "tests.soak.producer", str(seed)]
        self.producer = self.launch("producer", command, self.servers.url)

    def remains(self) -> list[str]:
        """Processes of this run that are still there."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(journal.RUN_VARIABLE) == self.run_id:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            except psutil.Error:
                continue
        return found
