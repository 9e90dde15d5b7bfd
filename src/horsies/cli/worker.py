"""``horsies worker``: from flags to a running worker and back to an exit code.

Children are started and warm before the parent opens its first socket. Signals only count up
requests; the worker's loop obeys them.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated

import psycopg
import typer

from horsies._version import __version__
from horsies.app import Horsies
from horsies.cli.options import (
    LocatorArgument,
    LogFormatOption,
    LogLevelOption,
    ModuleOption,
    open_app,
)
from horsies.database_url import mask_url
from horsies.db.database import Database
from horsies.db.errors import describe
from horsies.db.migrate import SchemaTooNewError
from horsies.errors import ValidationReport
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.scheduler.service import Scheduler, SchedulerThread, migrating_connector
from horsies.worker.config import (
    DEFAULT_MAX_TASKS_PER_CHILD,
    WorkerConfig,
    describe_concurrency,
    refuse_bad_limits,
    served_queues,
)
from horsies.worker.connection import DatabaseGivenUpError, NotificationsLostError
from horsies.worker.loop import ExitCode, Worker
from horsies.worker.pool.children import PoolSettings
from horsies.worker.pool.launcher import StartMethod, default_start_method
from horsies.worker.pool.pool import ChildBootError, ChildPool
from horsies.worker.protocol import ChildBoot

logger = logging.getLogger("horsies.worker")

WithSchedulerOption = Annotated[
    bool, typer.Option("--with-scheduler", help="Also send the tasks of schedules.")
]


def worker(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", "-c", help="Child processes; default: the number of CPUs."),
    ] = None,
    max_tasks_per_child: Annotated[
        int, typer.Option(help="Replace a child after this many tasks; 0 never.")
    ] = DEFAULT_MAX_TASKS_PER_CHILD,
    max_memory_per_child_mb: Annotated[
        int | None, typer.Option(help="Replace a child that has grown to this size.")
    ] = None,
    max_claim_batch: Annotated[
        int, typer.Option(help="Claim at most this many per queue and turn; 0 fills all children.")
    ] = 0,
    max_claim_per_worker: Annotated[
        int, typer.Option(help="Hold at most this many tasks; 0 means one per child.")
    ] = 0,
    start_method: Annotated[
        StartMethod | None,
        typer.Option(help="Where children come from; default: forkserver on Linux, else spawn."),
    ] = None,
    shutdown_grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="After a stop signal, interrupt running tasks when this is over; default: wait.",
        ),
    ] = None,
    with_scheduler: WithSchedulerOption = False,
    loglevel: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run tasks: claim them, give each to a child process, record what comes of it.

    SIGTERM or Ctrl-C stops in order: no new tasks, running ones finish. A second signal interrupts
    them, a third leaves at once. Exit codes: 0 clean, 1 error, 3 running tasks were interrupted.
    """
    attach_handler(loglevel, log_format)
    named = module or locator
    app = open_app("worker", named)
    app.set_role("worker")
    config = WorkerConfig(
        app_locator=named or "",
        processes=os.cpu_count() or 1 if processes is None else processes,
        queues=served_queues(app),
        imports=app.get_discovered_task_modules(),
        max_claim_batch=max_claim_batch,
        max_claim_per_worker=max_claim_per_worker,
        max_tasks_per_child=max_tasks_per_child,
        max_memory_per_child_mb=max_memory_per_child_mb,
        start_method=start_method or default_start_method(),
        shutdown_grace_seconds=shutdown_grace,
        loglevel=loglevel.value,
        log_format=log_format.value,
        prefetch_buffer=app.config.prefetch_buffer,
    )
    raise typer.Exit(int(_checked_run(app, config, with_scheduler=with_scheduler)))


def _checked_run(app: Horsies, config: WorkerConfig, *, with_scheduler: bool) -> ExitCode:
    refuse_bad_limits(config)
    _refuse_broken_app(app)
    return run_worker(app, config, _scheduler(app, config.app_locator) if with_scheduler else None)


def _scheduler(app: Horsies, owner: str) -> Scheduler:
    connect = migrating_connector(Database(app.config.broker, "scheduler"))
    return Scheduler(app.config, app.definitions(), owner, connect, app)


def run_worker(app: Horsies, config: WorkerConfig, scheduler: Scheduler | None = None) -> ExitCode:
    """Start the children, then the loop; what cannot be mended ends in one line and FAILED."""
    _announce(app, config)
    with selectors.DefaultSelector() as selector:
        pool = ChildPool(_pool_settings(config), _boot(config), selector)
        worker = Worker(app, config, pool, selector)
        stops: list[None] = []
        worker.on_stop = lambda: stops.append(None)
        try:
            with _signals_to(worker, selector) as wake:
                code = ExitCode.CLEAN  # stopped before it could have claimed anything
                if pool.start(should_stop=lambda: bool(stops)):
                    method = config.start_method.value
                    logger.info("%d children ready (%s)", config.processes, method)
                    with _beside(worker, wake, scheduler):
                        code = worker.run()
        except (ChildBootError, NotificationsLostError, SchemaTooNewError) as error:
            logger.critical("%s", error)
            return ExitCode.FAILED
        except (DatabaseGivenUpError, psycopg.Error) as error:
            logger.critical("the database cannot be used: %s", describe(error))
            return ExitCode.FAILED
    logger.info("worker stopped (%s)", code.name.lower())
    return code


@contextmanager
def _beside(
    worker: Worker, wake: Callable[[], None], scheduler: Scheduler | None
) -> Iterator[None]:
    """Serve schedules meanwhile, until the worker is asked to stop; if that fails, so does the worker."""
    if scheduler is None:
        yield
        return

    def fail(error: Exception) -> None:
        worker.fail(f"Nothing can be scheduled: {describe(error).rstrip('.')}.")
        wake()

    thread = SchedulerThread(scheduler, fail)
    worker.on_stop = thread.ask_to_stop
    thread.start()
    try:
        yield
    finally:
        thread.stop()


def _announce(app: Horsies, config: WorkerConfig) -> None:
    if sys.stderr.isatty() and config.log_format == LogFormat.TEXT:
        sys.stderr.write(_banner(app, config))
    if not app.list_tasks():
        logger.warning(
            "this application has no tasks: call app.discover_tasks([...]) or define tasks beside the app"
        )
    logger.info("%s", describe_concurrency(app, config))


def _banner(app: Horsies, config: WorkerConfig) -> str:
    tasks = ", ".join(sorted(app.list_tasks())) or "none"
    return (
        f"\n  horsies {__version__} worker\n"
        f"  database   {mask_url(app.config.broker.database_url)}\n"
        f"  queues     {', '.join(config.queues)}\n"
        f"  children   {config.processes} ({config.start_method.value})\n"
        f"  tasks      {tasks}\n\n"
    )


def _refuse_broken_app(app: Horsies) -> None:
    errors = app.check(live=False)
    if errors:
        typer.echo(ValidationReport("check", errors).format(), err=True)
        raise typer.Exit(int(ExitCode.FAILED))
    logger.info("%d task(s) registered", len(app.list_tasks()))


def _pool_settings(config: WorkerConfig) -> PoolSettings:
    return PoolSettings(
        processes=config.processes,
        start_method=config.start_method,
        max_tasks_per_child=config.max_tasks_per_child,
        max_memory_per_child_mb=config.max_memory_per_child_mb,
    )


def _boot(config: WorkerConfig) -> ChildBoot:
    return ChildBoot(
        app_locator=config.app_locator,
        modules=tuple(config.imports),
        sys_path_roots=tuple(sys.path),
        log_level=config.loglevel,
        log_format=config.log_format,
    )


@contextmanager
def _signals_to(worker: Worker, selector: selectors.BaseSelector) -> Iterator[Callable[[], None]]:
    """Count SIGTERM and SIGINT as stop requests and wake the loop for them; lend what wakes it.

    Afterwards they are ignored: one more of them must not replace the exit code by a signal.
    """
    waker, wakened = socket.socketpair()
    waker.setblocking(False)
    wakened.setblocking(False)
    selector.register(wakened, selectors.EVENT_READ, lambda: wakened.recv(4096))
    _handle_stop_signals(lambda *_: worker.request_stop())
    previous_wakeup = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    try:
        yield lambda: _call(waker)
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        _handle_stop_signals(signal.SIG_IGN)
        selector.unregister(wakened)
        waker.close()
        wakened.close()


def _handle_stop_signals(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _call(waker: socket.socket) -> None:
    with suppress(OSError):  # a full buffer wakes just as well
        waker.send(b"!")
