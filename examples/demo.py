"""A demonstration in one command: a private PostgreSQL, a worker, six tasks, a workflow, their
outcomes, and the dashboard.

Run it with ``make demo``. It leaves no process and no file behind, and exits with 1 if an outcome
is unexpected. With ``--keep`` (``make demo KEEP=1``) the dashboard and the worker go on until Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from horsies import Horsies, TaskError, TaskInfo, TaskResult, WorkflowHandle, WorkflowTaskStatus
from horsies.db.embedded import start_or_join

EXAMPLES = Path(__file__).parent
RESULT_TIMEOUT_MS = 30_000
STOP_TIMEOUT_SECONDS = 30
LABEL = "fragile, insured"
WEB_PORT = 8600


@dataclass(frozen=True)
class Case:
    """One task of the demonstration and its expected outcome."""

    task_name: str
    arguments: tuple[Any, ...]
    story: str
    outcome: str
    attempts: int = 1


@dataclass(frozen=True)
class Ending:
    """The actual outcome of a case."""

    case: Case
    outcome: str
    attempts: int
    seconds: float

    @property
    def is_expected(self) -> bool:
        """Whether the task ended as it should."""
        return (self.outcome, self.attempts) == (self.case.outcome, self.case.attempts)


def cases(directory: Path) -> Sequence[Case]:
    """Return the tasks to run; one of them leaves a marker in the directory for its next attempt."""
    marker = directory / "first-attempt-was-here"
    return [
        Case("add", (2, 3), "succeeds", "5"),
        Case("withdraw", (10, 50), "returns an error", "INSUFFICIENT_FUNDS"),
        Case("divide", (1, 0), "raises an exception", "NOT_A_NUMBER"),
        Case("fetch_rate", (marker,), "fails, then succeeds", "1.08", attempts=2),
        Case("crash", (), "kills its own process", "WORKER_CRASHED"),
        Case("oversleep", (60,), "takes too long", "TASK_TIMEOUT"),
    ]


def main() -> int:
    """Run the demonstration and return its exit status."""
    # A terminated demonstration stops its processes, too. Ctrl-C works even where it was ignored before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console()
    console.print("starting a private PostgreSQL and a worker ...")
    data = Path(tempfile.gettempdir()) / f"horsies-demo-{os.getpid()}"
    # The server stops, and its data is deleted, when this process ends.
    os.environ["HORSIES_DATABASE_URL"] = start_or_join(f"embedded://{data}", keep_data=False)
    # Imported only now, because the application reads its address when it is created.
    app: Horsies = importlib.import_module("demo_tasks").app
    with tempfile.TemporaryDirectory(prefix="horsies-demo-") as name:
        directory = Path(name)
        with (directory / "worker.log").open("w+") as log:
            with running_worker(log.fileno()) as worker:
                endings = run(app, cases(directory))
                show(console, endings)
                label = run_workflow(console, app)
                offer_dashboard(console, log.fileno())
            app.close()
            log.seek(0)
            is_expected = label == LABEL and all(ending.is_expected for ending in endings)
            return conclude(console, is_expected and worker.returncode == 0, log.read())


@contextmanager
def running_worker(log_fd: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker with two children."""
    with running("worker", "demo_tasks:app", "--processes", "2", log_fd=log_fd) as worker:
        yield worker


@contextmanager
def running(*arguments: str, log_fd: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of horsies; shut it down gracefully, or kill it after a timeout."""
    command = [sys.executable, "-m", "horsies", *arguments]
    # A group of its own: Ctrl-C is for the demonstration, which stops the others in order.
    process = subprocess.Popen(
        command, cwd=EXAMPLES, stderr=log_fd, stdout=log_fd, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def offer_dashboard(console: Console, log_fd: int) -> None:
    """Serve the dashboard with everything that ran; with ``--keep`` until Ctrl-C."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    options = ("--port", str(port), "--enable-actions", "--payload")
    with running("web", "demo_tasks:app", *options, log_fd=log_fd) as dashboard:
        wait_until_served(address, dashboard)
        console.print(f"the dashboard with all of this: {address}", highlight=False)
        if "--keep" not in sys.argv:
            console.print("it ends with this demonstration; make demo KEEP=1 leaves it up\n")
            return
        console.print("press Ctrl-C to stop it and the worker\n")
        try:
            dashboard.wait()
        except KeyboardInterrupt:
            console.print()


def free_port() -> int:
    """Return the usual port of the dashboard, or any other if that is taken."""
    for port in (WEB_PORT, 0):
        try:
            with socket.create_server(("127.0.0.1", port)) as listener:
                return int(listener.getsockname()[1])
        except OSError:
            continue
    raise RuntimeError("no port is free")


def wait_until_served(address: str, dashboard: subprocess.Popen[bytes]) -> None:
    """Wait until the dashboard answers or has ended."""
    deadline = time.monotonic() + RESULT_TIMEOUT_MS / 1000
    while time.monotonic() < deadline and dashboard.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/livez").close()
            return
        except urllib.error.URLError:
            time.sleep(0.05)
    raise RuntimeError("the dashboard did not start; is the extra `web` installed?")


def run(app: Horsies, wanted: Sequence[Case]) -> list[Ending]:
    """Send all tasks, then wait for each of them."""
    tasks = app.tasks()
    sent = [(case, tasks[case.task_name].send(*case.arguments).unwrap()) for case in wanted]
    endings = []
    for case, handle in sent:
        outcome = describe(handle.get(RESULT_TIMEOUT_MS))
        info = handle.info(include_attempts=True).unwrap()
        attempts = len(info.attempts or []) if info else 0
        endings.append(Ending(case, outcome, attempts, seconds_taken(info)))
    return endings


def describe(result: TaskResult[Any, TaskError]) -> str:
    """Return the value of a success or the code of a failure."""
    return str(result.ok) if result.is_ok() else str(result.err_value.error_code)


def seconds_taken(info: TaskInfo | None) -> float:
    """Return the time from the start of the first attempt to the end of the last."""
    attempts = info.attempts if info else None
    if not attempts:
        return 0.0
    first, last = attempts[-1], attempts[0]
    return (last.finished_at - (first.started_at or last.finished_at)).total_seconds()


def show(console: Console, endings: Sequence[Ending]) -> None:
    """Print a table of the outcomes."""
    table = Table("task", "behaviour", "outcome", "attempts", "seconds")
    for ending in endings:
        color = "green" if ending.is_expected else "red"
        shown = f"[{color}]{ending.outcome}[/]"
        seconds = f"{ending.seconds:.2f}"
        table.add_row(
            ending.case.task_name, ending.case.story, shown, str(ending.attempts), seconds
        )
    console.print(table)


def run_workflow(console: Console, app: Horsies) -> str:
    """Run a workflow to its end, with an approval on the way; return its result."""
    definition = importlib.import_module("demo_workflow").Fulfilment
    run: WorkflowHandle[str] = definition.build(app).start().unwrap()
    wait_for_signal_node(run)
    console.print("\na workflow: a map over three orders, then it waits for an approval")
    console.print(run.draw().unwrap(), markup=False, highlight=False)
    run.signal("approval", "Ada").unwrap()
    result = run.get(RESULT_TIMEOUT_MS)
    console.print("\napproved; a sub-workflow ships")
    console.print(run.draw().unwrap(), markup=False, highlight=False)
    console.print(f"its result: {describe(result)}\n", highlight=False)
    return describe(result)


def wait_for_signal_node(run: WorkflowHandle[str]) -> None:
    """Wait until the workflow has reached the node that waits for a signal."""
    deadline = time.monotonic() + RESULT_TIMEOUT_MS / 1000
    while time.monotonic() < deadline:
        statuses = {node.node_id: node.status for node in run.tasks().unwrap()}
        if statuses["approval"] is not WorkflowTaskStatus.PENDING:
            return
        time.sleep(0.05)


def conclude(console: Console, is_expected: bool, log: str) -> int:
    """Print whether all outcomes are as expected; return 0 if they are."""
    if is_expected:
        console.print("all outcomes are as expected; the worker shut down gracefully")
        console.print("now read examples/demo_tasks.py and examples/demo_workflow.py")
        return 0
    console.print("[red]not as expected[/]; the log of the worker:")
    console.print(log, markup=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
