"""The processes of a soak run: workers and schedulers behind their own proxies, and the producer.

A process that is started again keeps its proxies and gets a new name: `worker-2.3` is the fourth
incarnation of the third worker.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import psutil

from tests.soak import journal
from tests.soak.limits import (
    ASYNC_CHILDREN,
    POOLED_WORKER,
    PROCESSES,
    SCHEDULERS,
    STOP_SECONDS,
    WORKERS,
)
from tests.support.pgbouncer import PgBouncer, find_pgbouncer
from tests.support.proxy import Proxy
from tests.support.replicated_server import ReplicatedServer, two_host_url
from tests.support.workers import DATABASE_VARIABLE, Fleet, RunningWorker

APPLICATION = "tests.soak.flows:app"
START_SECONDS = 60.0
Role = Literal["worker", "scheduler"]


class Sidecar:
    """The way of one process to both servers, which can break without harm to the other processes.

    A PgBouncer in transaction mode may be part of the way; only the session that listens goes past it.
    Faults may overlap: the way is open again when the last of them is over.
    """

    def __init__(self, servers: ReplicatedServer, pooler_log: Path | None = None) -> None:
        direct = [Proxy(server.url) for server in servers.servers]
        self._proxies = list(direct)
        self._direct_url = two_host_url(proxy.port for proxy in direct)
        self.pooler: PgBouncer | None = None
        self._settings: tempfile.TemporaryDirectory[str] | None = None
        if pooler_log is not None:
            # PgBouncer knows one address, so this proxy leads to whichever server is the primary.
            to_primary = Proxy(lambda: servers.primary.url)
            self._proxies.append(to_primary)
            self._settings = tempfile.TemporaryDirectory(prefix="horsies-pgbouncer-")
            self.pooler = PgBouncer(to_primary.url, Path(self._settings.name), log=pooler_log)
        self._is_over = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise)
        self._lock = threading.Lock()
        self._cuts = self._pauses = 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead a process this way."""
        if self.pooler is None:
            return {DATABASE_VARIABLE: self._direct_url}
        return {DATABASE_VARIABLE: self.pooler.url, journal.SESSION_VARIABLE: self._direct_url}

    def start(self) -> None:
        """Open the way for the first time."""
        self.open()
        if self.pooler is not None:
            self.pooler.start()
            self.pooler.wait_until_ready()
            self._supervisor.start()

    def _supervise(self) -> None:
        """Start the pooler again a second after its end, as a service manager does."""
        assert self.pooler is not None
        while not self._is_over.wait(0.1):
            if self.pooler.process.poll() is not None and not self._is_over.wait(1.0):
                self.pooler.start()

    def stop(self) -> None:
        """Close the connection permanently."""
        self._is_over.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        if self.pooler is not None:
            self.pooler.stop()
        if self._settings is not None:
            self._settings.cleanup()
        self.close()

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
    # One fault at a time: an orderly stop takes as long as the tasks do.
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

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
            command += ["--processes", str(PROCESSES), "--async-children", str(ASYNC_CHILDREN)]
        self.running = self.crew.launch(self.name, command, self.sidecar.environment)

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

    def stop(self) -> None:
        """Ask for an orderly end; fail when it does not come in time, or is not in order."""
        # A process that is starting does not handle signals yet.
        self.wait_until_ready()
        self.check_alive()
        try:
            exit_code = self.process.stop(STOP_SECONDS)
        except AssertionError:
            raise RuntimeError(f"{self.name} did not end within {STOP_SECONDS} s") from None
        # One that abandons tasks, as it may while it has no database, is to others like one that was killed.
        has_abandoned = exit_code == 3 and self._has_no_database()
        event = "killed" if has_abandoned else "stopped"
        journal.write("process", event=event, worker=self.name, exit_code=exit_code)
        has_given_up = exit_code == 3 and self.process.events("outcomes_lost")
        if exit_code != 0 and not has_given_up and not has_abandoned:
            raise RuntimeError(f"{self.name} stopped with exit code {exit_code}")

    def _has_no_database(self) -> bool:
        """Whether its last word about the database was that it is lost."""
        names = ("database_lost", "database_back")
        told = [one["event"] for one in self.process.events() if one["event"] in names]
        return told[-1:] == ["database_lost"]


class Crew:
    """All processes; use as a context manager that leaves none behind."""

    def __init__(self, servers: ReplicatedServer, directory: Path) -> None:
        self.run_id = uuid.uuid4().hex
        self.servers = servers
        self.fleet = Fleet(servers.url, directory)
        self.journal_path = directory / "journal"
        (directory / "locks").mkdir()
        self._directory = directory
        os.environ[journal.JOURNAL_VARIABLE] = str(self.journal_path)
        self.workers = self._members("worker", WORKERS)
        self.schedulers = self._members("scheduler", SCHEDULERS)
        self.producer: RunningWorker | None = None
        self._stack = ExitStack()

    def _members(self, role: Role, count: int) -> list[Member]:
        return [Member(role, number, self._sidecar(role, number), self) for number in range(count)]

    def _sidecar(self, role: Role, number: int) -> Sidecar:
        is_pooled = role == "worker" and number == POOLED_WORKER and find_pgbouncer() is not None
        return Sidecar(self.servers, self._directory / "pgbouncer.log" if is_pooled else None)

    @property
    def members(self) -> list[Member]:
        return [*self.workers, *self.schedulers]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.fleet.destroy)
            for member in self.members:
                stack.callback(member.sidecar.stop)
                member.sidecar.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def launch(self, name: str, command: list[str], way: Mapping[str, str]) -> RunningWorker:
        environment = {
            **os.environ,
            **way,
            journal.WORKER_VARIABLE: name,
            journal.RUN_VARIABLE: self.run_id,
        }
        running = self.fleet.launch(name, command, environment)
        journal.write("process", event="launched", worker=name, pid=running.pid)
        return running

    def launch_producer(self, seed: int) -> None:
        command = [sys.executable, "-m", "tests.soak.producer", str(seed)]
        self.producer = self.launch("producer", command, {DATABASE_VARIABLE: self.servers.url})

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
