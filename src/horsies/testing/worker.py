"""A worker in its own process: a test starts it, waits until it is ready, and stops it cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from horsies.logs import DESCRIPTOR_VARIABLE, EventName

# Environment variables that ``worker_app`` reads.
APP_VARIABLE = "HORSIES_TESTING_APP"
DATABASE_VARIABLE = "HORSIES_TESTING_DATABASE_URL"
# The maximum time of a wait; a successful wait ends earlier.
WAIT_SECONDS = 30.0
_LOOK_SECONDS = 0.02

Found = TypeVar("Found")


@dataclass
class WorkerProcess:
    """A worker or scheduler process with its log and its lifecycle events."""

    process: subprocess.Popen[bytes]
    """The process of the worker itself, which is the parent of its child processes."""
    log_path: Path
    """The file with the log of the worker and its children."""
    events_path: Path
    """The file with the lifecycle events, one JSON object per line."""

    @classmethod
    def launch(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        cwd: Path | None = None,
    ) -> Self:
        """Start a process that writes its events to a file next to its log file."""
        events_path = log_path.with_suffix(".events")
        with log_path.open("wb") as log, events_path.open("ab") as events:
            process = subprocess.Popen(  # noqa: S603 - the command of the test
                command,
                cwd=cwd,
                env={**environment, DESCRIPTOR_VARIABLE: str(events.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[events.fileno()],
            )
        return cls(process, log_path, events_path)

    @property
    def pid(self) -> int:
        """The process id of the worker itself, which is the parent of its child processes."""
        return self.process.pid

    def log(self) -> str:
        """Return all output of the worker and its children so far."""
        return self.log_path.read_text(errors="replace")

    def events(self, name: EventName | None = None) -> list[dict[str, Any]]:
        """Return the lifecycle events so far, in order; with a name, only the events of this name."""
        # The text after the last line feed is incomplete.
        written, _, _ = self.events_path.read_text().rpartition("\n")
        events = [json.loads(line) for line in written.splitlines()]
        return [event for event in events if name is None or event["event"] == name]

    def wait_for(
        self, name: EventName, seconds: float = WAIT_SECONDS, *, times: int = 1
    ) -> dict[str, Any]:
        """Wait until the event has happened this many times; return the latest occurrence."""
        events = self._wait_until(
            lambda: found if len(found := self.events(name)) >= times else [],
            f"the event {name}",
            seconds,
        )
        return events[-1]

    def wait_until_ready(
        self, name: EventName = "worker_ready", seconds: float = WAIT_SECONDS
    ) -> None:
        """Wait until the worker claims tasks; if it exits instead, raise an error with its log."""
        self._wait_until(
            lambda: self.events(name) or self._has_ended(), f"the event {name}", seconds
        )
        if self._has_ended():
            raise AssertionError(f"The worker ended before it was ready; its log:\n{self.log()}")

    def stop(self, seconds: float = WAIT_SECONDS) -> int:
        """Request a graceful shutdown and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        """Wait for the worker to exit and return its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            message = f"The worker did not end within {seconds:g} s; its log:\n{self.log()}"
            raise AssertionError(message) from None

    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    def _wait_until(self, look: Callable[[], Found], what: str, seconds: float) -> Found:
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                message = f"No sign of {what} within {seconds:g} s; the log:\n{self.log()}"
                raise AssertionError(message)
            time.sleep(_LOOK_SECONDS)
        return found


@contextmanager
def running_worker(
    locator: str, database_url: str, directory: Path, options: Sequence[str] = ()
) -> Iterator[WorkerProcess]:
    """Run a worker for this application on this database; ``options`` are command-line options of
    `horsies worker`.
    """
    command = [
        sys.executable,
        "-m",
        "horsies",
        "worker",
        "horsies.testing.worker_app:app",
        *options,
    ]
    environment = {
        **os.environ,
        # With this path, the worker can import the same modules as the tests.
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        APP_VARIABLE: locator,
        DATABASE_VARIABLE: database_url,
    }
    worker = WorkerProcess.launch(command, environment, directory / "worker.log")
    try:
        worker.wait_until_ready()
        yield worker
        if worker.process.poll() is None:
            worker.stop()
    finally:
        worker.process.kill()
        worker.process.wait()
