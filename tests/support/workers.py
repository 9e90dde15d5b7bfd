"""Real workers for the tests: processes started from the command line, watched through their events.

A worker is `python -m horsies worker ...` in its own session. Its descendants are found in the process
table, and end with the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from horsies.testing import WorkerProcess
from tests.support.prepared import DATABASE_VARIABLE as DATABASE_VARIABLE
from tests.support.prepared import REPOSITORY as REPOSITORY
from tests.support.prepared import can_fork, fork

APPLICATION = "tests.support.apps.programs:app"
JOURNAL_VARIABLE = "HORSIES_E2E_JOURNAL"
CONFIG_VARIABLE = "HORSIES_E2E_CONFIG"

# The template process is a new interpreter that imports the application itself.
FORKSERVER = ("--start-method", "forkserver")
# Polls are rare, so that only notifications and due times start this worker's tasks in time.
HARDLY_POLLS = {"resilience": {"notify_poll_interval_ms": 300_000}}
# Frequent heartbeats, so that tests of silence take seconds.
QUICK_RECOVERY = {
    "recovery": {
        "runner_heartbeat_interval_ms": 1_000,
        "running_stale_threshold_ms": 2_000,
        "worker_lost_after_ms": 4_000,
    }
}


def broker_settings() -> dict[str, Any]:
    """Read the database settings of a test application from the environment."""
    config = json.loads(os.environ.get(CONFIG_VARIABLE) or "{}")
    return {"database_url": os.environ[DATABASE_VARIABLE], **config.get("broker", {})}


def is_gone(pid: int) -> bool:
    """Return whether the process has ended; a zombie counts as ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def is_guard(pid: int) -> bool:
    """Return whether the process is a worker's guard, which runs no tasks; return False if the process
    is gone.
    """
    try:
        return any(part.endswith("child/guard.py") for part in psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the journal, in which tasks record their work."""

    what: str
    task_id: str
    attempt: int
    pid: int
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Journal:
    """The file in which tasks record their starts and ends; every line is synced to disk."""

    path: Path
    # The number of lines of earlier tests, which are ignored.
    skipped: int = 0

    def length(self) -> int:
        """Return the number of lines so far."""
        return self.path.read_bytes().count(b"\n") if self.path.exists() else 0

    def release(self, label: str) -> None:
        """Let the tasks `rest_until_released` with this label finish."""
        Path(f"{self.path}.{label}").touch()

    def lines(self, what: str | None = None, task_id: str | None = None) -> list[Line]:
        """Return the lines so far, in order."""
        if not self.path.exists():
            return []
        # The text after the last line feed is incomplete.
        written, _, _ = self.path.read_text().rpartition("\n")
        lines = [Line(**json.loads(text)) for text in written.splitlines()[self.skipped :]]
        return [
            line
            for line in lines
            if (what is None or line.what == what) and (task_id is None or line.task_id == task_id)
        ]


@dataclass
class RunningWorker(WorkerProcess):
    """A worker process with all processes that it started."""

    seen_pids: set[int] = field(default_factory=set)

    @classmethod
    def fork(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        cwd: Path | None = None,
    ) -> Self:
        """Start the worker as `launch` does, as a fork of an interpreter with all imports."""
        assert cwd == REPOSITORY
        events_path = log_path.with_suffix(".events")
        with log_path.open("wb") as log, events_path.open("ab") as events:
            process = fork(command, environment, log.fileno(), events.fileno())
        return cls(process, log_path, events_path)

    def family(self) -> list[int]:
        """Return the pids of all live processes that the worker started."""
        try:
            found = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        pids = [one.pid for one in found if not is_gone(one.pid)]
        self.seen_pids.update(pids)
        return pids

    def guards(self) -> list[int]:
        """Return the pid of the worker's guard, once the guard has started."""
        return [pid for pid in self.family() if is_guard(pid)]

    def signal(self, number: int) -> None:
        """Send a signal to the parent process alone."""
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker's process group, as a terminal does."""
        os.killpg(self.pid, number)

    def cpu_seconds(self) -> float:
        """Return the processor time of the worker's parent process."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def destroy(self) -> None:
        """Kill the worker and all processes that it started, in any state."""
        family = set(self.family()) | self.seen_pids
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for pid in family:
            _kill_ours(pid)


def _kill_ours(pid: int) -> None:
    """Kill a process of one of our workers, unless its pid has been reused."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.environ().get(DATABASE_VARIABLE):
            process.kill()


@dataclass(frozen=True, slots=True)
class Route:
    """A route to the database, with the broker and producer settings that it needs."""

    url: str
    broker: Mapping[str, Any] = field(default_factory=dict)
    producer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Fleet:
    """Starts and tracks workers on one database with one journal. `database_url` is the direct URL of
    the database; workers connect through `route` if it is given.
    """

    database_url: str
    directory: Path
    workers: list[RunningWorker] = field(default_factory=list)
    route: Route | None = None

    @property
    def journal(self) -> Journal:
        """The file in which the tasks of these workers record their work."""
        return Journal(self.directory / "journal")

    def start(
        self,
        *options: str,
        processes: int = 2,
        application: str = APPLICATION,
        config: Mapping[str, Any] | None = None,
        database_url: str | None = None,
        environment: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
        ready: bool = True,
    ) -> RunningWorker:
        """Start a worker with these command line options and wait until it is ready.

        `through` is a program that becomes the worker, such as `ip netns exec`. Children are started by
        a plain fork unless the test chooses otherwise, because that is twice as fast.
        """
        if "--start-method" not in options:
            options = ("--start-method", "fork", *options)
        command = [*through, sys.executable, "-m", "horsies", "worker", application]
        command += ["--processes", str(processes), *options]
        worker = self.launch(
            "worker", command, self.environment(database_url, config) | dict(environment or {})
        )
        if ready:
            worker.wait_until_ready()
            worker.family()
        return worker

    def launch(
        self, kind: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> RunningWorker:
        """Start a process with a log and a file for its events."""
        name = f"{kind}-{len(self.workers)}"
        log_path = self.directory / f"{name}.log"
        launch = RunningWorker.fork if can_fork(command, environment) else RunningWorker.launch
        worker = launch(command, environment, log_path, REPOSITORY)
        self.workers.append(worker)
        return worker

    def environment(
        self, database_url: str | None = None, config: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """Return the environment in which a process of the tests' application takes the workers' route."""
        route = Route(database_url) if database_url else self.way
        config = dict(config or {})
        config["broker"] = {**route.broker, **config.get("broker", {})}
        return dict(os.environ) | {
            DATABASE_VARIABLE: route.url,
            JOURNAL_VARIABLE: str(self.directory / "journal"),
            CONFIG_VARIABLE: json.dumps(config),
        }

    @property
    def way(self) -> Route:
        """The workers' route to the database."""
        return self.route or Route(self.database_url)

    @property
    def is_pooled(self) -> bool:
        """Whether workers connect through a pooler, which keeps its own server connections."""
        return bool(self.way.broker)

    def sessions(self, count: int) -> dict[str, Any]:
        """Return the configuration of a worker with one or two sessions; with a pooler, there are always
        two.
        """
        return {} if count == 1 else {"broker": {"session_database_url": self.database_url}}

    def listening(self, count: int = 1) -> str:
        """Return the name of the listening session of a worker with this many sessions."""
        return "horsies:turn" if count == 1 and not self.is_pooled else "horsies:listener"

    def logs(self) -> Iterable[tuple[str, str]]:
        """Return the title and the text of every worker's log, for the report of a failed test."""
        return [(f"log of worker {one.pid}", one.log()) for one in self.workers]

    def destroy(self) -> None:
        """End all running workers, and all processes that they started."""
        for worker in self.workers:
            worker.destroy()


AHEAD, BEHIND = "+600s", "-600s"


# libfaketime does not support the call that time.sleep makes since Python 3.11.
SLEEP_OTHERWISE = """
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""


def faketime_library() -> Path:
    """Return the path of the library that gives a process a wrong clock."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        # Imported here, because the workers' applications load this module too, and the import
        # would take a tenth of their start.
        import pytest

        pytest.skip("faketime is not installed: apt-get install faketime")
    return found[0]


def skew(fleet: Fleet, offset: str | Path) -> dict[str, str]:
    """Return the environment of a process whose clock is wrong by this amount, or by the amount in a
    file.
    """
    library = faketime_library()
    (fleet.directory / "sitecustomize.py").write_text(SLEEP_OTHERWISE)
    wrong = {"FAKETIME": str(offset)}
    if isinstance(offset, Path):
        wrong = {"FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1"}
    return {
        "LD_PRELOAD": str(library),
        **wrong,
        # A wrong clock still runs at the right speed, because the monotonic clock is unchanged.
        "DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": os.pathsep.join([str(fleet.directory), os.environ.get("PYTHONPATH", "")]),
    }


# For 45 s after a server has started (default settings), free locks do not prove that a worker is lost;
# behind a pooler, for 3 s longer (pooled_workers.PATIENCE_MS).
