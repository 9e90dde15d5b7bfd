"""`horsies worker`: start the children and run a worker until a signal stops it.

The children are started and warmed up before the parent opens its first socket. A signal handler only
counts stop requests; the worker's loop acts on them.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Annotated

import psycopg
import typer

from horsies._version import __version__
from horsies.app import Horsies
from horsies.captured_log import KEEP_NOTHING
from horsies.cli.options import (
    LocatorsArgument,
    LogFormatOption,
    LogLevelOption,
    ModuleOption,
    open_app,
    refuse_both,
    refuse_broken_app,
    refuse_missing_extra,
)
from horsies.cli.session import split_name
from horsies.cli.supervise import Group, Part, Supervisor, watched_folders
from horsies.database_url import mask_url
from horsies.db.database import Database
from horsies.db.errors import describe
from horsies.db.migrate import UnusableSchemaError
from horsies.logs import (
    LogFormat,
    LogLevel,
    as_event,
    attach_event_handler,
    attach_handler,
    event_descriptors,
    set_worker_name,
)
from horsies.modules import failure_at
from horsies.scheduler.service import Scheduler, SchedulerThread, migrating_connector
from horsies.worker import os_process
from horsies.worker.config import (
    DEFAULT_ASYNC_SLOTS,
    DEFAULT_HOST,
    DEFAULT_MAX_TASKS_PER_CHILD,
    WorkerConfig,
    describe_caps,
    describe_concurrency,
    refuse_bad_limits,
    served_queues,
    with_connections,
)
from horsies.worker.connection import DatabaseGivenUpError, NotificationsLostError
from horsies.worker.cpus import usable_cpus
from horsies.worker.loop import ExitCode, Worker
from horsies.worker.pool.children import PoolSettings
from horsies.worker.pool.launcher import StartMethod, default_start_method
from horsies.worker.pool.pool import ChildBootError, ChildPool
from horsies.worker.pool.window import WIDTH_MAX
from horsies.worker.probe import AddressError, serving, worker_routes
from horsies.worker.protocol import ChildBoot
from horsies.worker.tally import ends_logger

logger = logging.getLogger("horsies.worker")

# The time limit of hooks and imports in which a debugger may be waiting: one week.
DEBUG_SECONDS = 7 * 86_400.0
# `horsies dev` sets this variable, because its --with-scheduler must not fail without schedules.
OPTIONAL_SCHEDULER_VARIABLE = "HORSIES_DEV_SCHEDULER"
SCHEDULER_IS_OPTIONAL = os.environ.pop(OPTIONAL_SCHEDULER_VARIABLE, None) is not None

ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--processes",
        "-c",
        help="Number of child processes; default: the number of CPUs that the worker may use.",
    ),
]
QueuesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Serve only these queues, separated by commas; default: all queues of the application.",
    ),
]
ExcludeQueuesOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAMES", help="Do not serve these queues, separated by commas."),
]
NameOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="This worker's name in logs and `status`."),
]
AsyncChildrenOption = Annotated[
    int,
    typer.Option(metavar="NUMBER", help="Child processes that run all `async def` tasks."),
]
AsyncSlotsOption = Annotated[
    int | None,
    typer.Option(
        metavar="NUMBER",
        help=f"Concurrent tasks per async child; default: {DEFAULT_ASYNC_SLOTS}.",
        show_default=False,
    ),
]
MaxTasksOption = Annotated[
    int,
    typer.Option(
        help=(
            "Replace a child after this many tasks; an async child counts them per slot; 0: never."
        )
    ),
]
MaxMemoryOption = Annotated[
    int | None, typer.Option(help="Replace a child that uses this much memory.")
]
MaxClaimBatchOption = Annotated[
    int,
    typer.Option(help="Maximum tasks to claim per queue and turn; 0: one per free child."),
]
MaxClaimsOption = Annotated[
    int,
    typer.Option(
        help="Maximum tasks to hold; counts tasks in windows too; 0: one per child and async slot, "
        "plus prefetch_buffer and the tasks in windows."
    ),
]
WindowOption = Annotated[
    int,
    typer.Option(
        help="Very short tasks that a child may hold; applies to tasks with "
        "burst=True and tasks retried after a crash; 0: one at a time."
    ),
]
StartMethodOption = Annotated[
    StartMethod | None,
    typer.Option(
        help="How to start children; default: fork on Linux, or forkserver if importing the application "
        "started threads; elsewhere spawn."
    ),
]
ShutdownGraceOption = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Interrupt tasks this long after a stop signal; default: wait for them.",
    ),
]
QuietTasksOption = Annotated[
    bool, typer.Option("--quiet-tasks", help="Do not log a line at the end of every attempt.")
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65_535,
        metavar="PORT",
        help="The port for /metrics, /livez and /readyz; 0: any free port; with several "
        "applications, each worker uses the next port.",
    ),
]
MetricsHostOption = Annotated[
    str, typer.Option(metavar="ADDRESS", help="The address for --metrics-port.")
]
WithSchedulerOption = Annotated[
    bool, typer.Option("--with-scheduler", help="Also run a scheduler in this process.")
]
BurstOption = Annotated[
    bool,
    typer.Option(
        "--burst",
        help="Run all due tasks, then stop; unrelated to a task's burst=True.",
    ),
]
ReloadOption = Annotated[bool, typer.Option("--reload", help="Restart when a Python file changes.")]
DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Run one task at a time in this terminal: breakpoint() works, and no time limit applies.",
    ),
]


def worker(  # noqa: PLR0913, PLR0917 - typer makes a flag of every parameter
    locators: LocatorsArgument = None,
    module: ModuleOption = None,
    processes: ProcessesOption = None,
    async_children: AsyncChildrenOption = 0,
    async_slots: AsyncSlotsOption = None,
    queues: QueuesOption = None,
    exclude_queues: ExcludeQueuesOption = None,
    name: NameOption = None,
    max_tasks_per_child: MaxTasksOption = DEFAULT_MAX_TASKS_PER_CHILD,
    max_memory_per_child_mb: MaxMemoryOption = None,
    max_claim_batch: MaxClaimBatchOption = 0,
    max_claim_per_worker: MaxClaimsOption = 0,
    window: WindowOption = WIDTH_MAX,
    start_method: StartMethodOption = None,
    shutdown_grace: ShutdownGraceOption = None,
    with_scheduler: WithSchedulerOption = False,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = DEFAULT_HOST,
    loglevel: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
    quiet_tasks: QuietTasksOption = False,
    burst: BurstOption = False,
    reload: ReloadOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a worker: claim tasks, run each in a child process, store its result. SIGTERM or Ctrl-C lets
    running tasks finish; a second signal interrupts them, a third exits immediately. If you name several
    applications, each has its own worker. Exit codes: 0 clean shutdown, 1 error, 3 tasks interrupted.

    Example:
        horsies worker shop.background:app --queues mail,reports --processes 4
    """
    given = [module] if module else locators or []
    _start_logs(loglevel, log_format, quiet_tasks, supervises=reload or len(given) > 1)
    _refuse_all("--burst", burst, {"--with-scheduler": with_scheduler, "--reload": reload})
    _refuse_all("--debug", debug, {"--processes": processes, "--async-children": async_children})
    named = _alone(given, metrics_port, burst, (queues, exclude_queues, reload, debug))
    app = open_app("worker", named)
    config = WorkerConfig(
        app_locator=named or "",
        processes=processes if processes is not None else 1 if debug else usable_cpus(),
        queues=served_queues(app, queues, exclude_queues),
        max_claim_batch=max_claim_batch,
        max_claim_per_worker=max_claim_per_worker,
        window=window,
        max_tasks_per_child=max_tasks_per_child,
        max_memory_per_child_mb=max_memory_per_child_mb,
        shutdown_grace_seconds=shutdown_grace,
        loglevel=loglevel.value,
        log_format=log_format.value,
        name=name,
        metrics_host=metrics_host,
        metrics_port=metrics_port,
        async_children=async_children,
        async_slots=_slots(async_children, async_slots),
        burst=burst,
        debug=debug,
    )
    raise typer.Exit(int(_serve(app, config, start_method, with_scheduler=with_scheduler)))


def _slots(children: int, slots: int | None) -> int:
    """Return the number of slots of each async child; reject slots without async children."""
    if slots is not None and not children:
        raise failure_at(
            None,
            "--async-slots needs --async-children: without them no task runs in a slot.",
            help_text="add --async-children 1, or leave out --async-slots",
        )
    return DEFAULT_ASYNC_SLOTS if slots is None else slots


def _start_logs(
    loglevel: LogLevel, log_format: LogFormat, quiet_tasks: bool, *, supervises: bool
) -> None:
    """Attach the log handlers; a supervisor leaves the events descriptor to its worker."""
    attach_handler(loglevel, log_format)
    if not supervises:
        attach_event_handler()
    ends_logger.setLevel(logging.WARNING if quiet_tasks else logging.NOTSET)


def _refuse_all(flag: str, is_given: bool, others: Mapping[str, object]) -> None:
    for other, value in others.items():
        refuse_both(flag, is_given, other, value)


def _serve(
    app: Horsies, config: WorkerConfig, start_method: StartMethod | None, *, with_scheduler: bool
) -> ExitCode:
    app.set_role("worker")
    modules, prefetch = app.get_discovered_task_modules(), app.config.prefetch_buffer
    config = with_connections(
        replace(config, imports=modules, prefetch_buffer=prefetch), app.config.broker
    )
    _check(app, config)
    config = replace(config, start_method=start_method or _start_method())
    config = _for_debugger(config) if config.debug else config
    has_schedules = app.config.schedule is not None and app.config.schedule.enabled
    wants_scheduler = with_scheduler and (has_schedules or not SCHEDULER_IS_OPTIONAL)
    scheduler = _scheduler(app, config.app_locator) if wants_scheduler else None
    return run_worker(app, config, scheduler)


def _check(app: Horsies, config: WorkerConfig) -> None:
    """Reject contradictory flags and applications that cannot run."""
    refuse_bad_limits(config)
    if config.metrics_port is not None:
        refuse_missing_extra("--metrics-port")
    set_worker_name(config.name)
    refuse_broken_app(app)
    logger.info("%d task(s) registered", len(app.list_tasks()))


def _alone(
    given: Sequence[str],
    metrics_port: int | None,
    burst: bool,
    of_one: tuple[object, object, bool, bool],
) -> str | None:
    """Return the application if this process serves it; otherwise supervise worker processes, then exit.

    ``of_one`` holds --queues, --exclude-queues, --reload and --debug, which one worker can have.
    """
    if len(given) > 1:
        names = ("--queues", "--exclude-queues", "--reload", "--debug")
        _refuse_all("Several applications", True, dict(zip(names, of_one, strict=True)))
        _serve_several(given, metrics_port, restarts=not burst)
    named = split_name(given[0])[1] if given else None
    *_, reload, debug = of_one
    if reload and named is not None:
        _reload(named, debug=debug)
    return named


def _reload(locator: str, *, debug: bool) -> None:
    """Run this command without --reload in another process, restart it after every change, then exit."""
    arguments = [one for one in sys.argv[1:] if one != "--reload"]
    parts = [Part("worker", arguments, debug, event_descriptors())]
    raise typer.Exit(Supervisor(parts, locator, watched_folders(locator)).run())


def _serve_several(locators: Sequence[str], metrics_port: int | None, *, restarts: bool) -> None:
    """Run this command for every application in its own process, then exit.

    Each worker serves its metrics on its own port, counting up from the first.
    """
    os.environ[OPTIONAL_SCHEDULER_VARIABLE] = "1"  # Not every application has schedules.
    flags = sys.argv[2:]
    for locator in locators:
        flags.remove(locator)
    parts = []
    for number, locator in enumerate(locators):
        port = [f"--metrics-port={metrics_port + number}"] if metrics_port else []
        words = ["worker", split_name(locator)[1], *flags, *port]
        parts.append(Part(words[1], words, False, event_descriptors()))
    raise typer.Exit(Group(parts, restarts=restarts).run())


def _for_debugger(config: WorkerConfig) -> WorkerConfig:
    """Run one task at a time, in a child that inherits the terminal and is never replaced."""
    if not (sys.stdin and sys.stdin.isatty()):
        logger.warning(
            "breakpoint() reads from standard input, so start a debug worker in a terminal"
        )
    return replace(
        config,
        max_claim_per_worker=1,
        window=0,
        max_tasks_per_child=0,
        max_memory_per_child_mb=None,
        start_method=StartMethod.SPAWN,
    )


def _start_method() -> StartMethod:
    """Choose fork unless the worker has threads; forked children share the application's memory."""
    if os_process.IS_LINUX and len(os.listdir("/proc/self/task")) == 1:
        return StartMethod.FORK
    return default_start_method()


def _scheduler(app: Horsies, owner: str) -> Scheduler:
    database = Database(app.config.broker, "scheduler", migrates=app.migrates)
    connect = migrating_connector(database, app.config.resilience.statement_timeout_ms)
    return Scheduler(app.config, app.definitions(), owner, connect, app, is_in_worker=True)


def run_worker(app: Horsies, config: WorkerConfig, scheduler: Scheduler | None = None) -> ExitCode:
    """Start the children, then the loop. A fatal error is logged on one line, and the result is FAILED."""
    _announce(app, config)
    with selectors.DefaultSelector() as selector:
        pool = _child_pool(app, config, selector)
        worker = Worker(app, config, pool, selector)
        stops: list[None] = []
        worker.on_stop = lambda: stops.append(None)
        try:
            with _signals_to(worker, selector) as wake:
                code = ExitCode.CLEAN  # A stop may be requested before the first claim.
                if pool.start(should_stop=lambda: bool(stops)):
                    method = config.start_method.value
                    count = config.processes + config.async_children
                    event = as_event("children_ready", count=count)
                    logger.info("children ready: %d (%s)", count, method, extra=event)
                    probe = _probe_beside(worker, config, scheduler)
                    with _scheduler_beside(worker, wake, scheduler), probe:
                        code = worker.run()
        except (ChildBootError, AddressError, NotificationsLostError, UnusableSchemaError) as error:
            logger.critical("%s", error, extra=as_event("worker_failed", reason=str(error)))
            return ExitCode.FAILED
        except (DatabaseGivenUpError, psycopg.Error) as error:
            logger.critical(
                "the database cannot be used: %s",
                describe(error),
                extra=as_event("worker_failed", reason=describe(error)),
            )
            return ExitCode.FAILED
    logger.info(
        "worker stopped (%s)",
        code.name.lower(),
        extra=as_event("worker_stopped", exit_code=int(code)),
    )
    return code


def _probe_beside(
    worker: Worker, config: WorkerConfig, scheduler: Scheduler | None
) -> AbstractContextManager[object]:
    if config.metrics_port is None:
        return nullcontext()
    is_scheduling = (lambda: True) if scheduler is None else (lambda: scheduler.is_connected)
    routes = worker_routes(worker.vitals, worker.tally, is_scheduling)
    return serving(config.metrics_host, config.metrics_port, routes)


@contextmanager
def _scheduler_beside(
    worker: Worker, wake: Callable[[], None], scheduler: Scheduler | None
) -> Iterator[None]:
    """Run the scheduler in a thread until the worker stops; a failed scheduler ends the worker."""
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
    title = f"horsies {__version__} worker" + (f" {config.name}" if config.name else "")
    facts = {
        "database": mask_url(app.config.broker.database_url),
        "queues": ", ".join(config.queues),
        "not served": ", ".join(name for name in served_queues(app) if name not in config.queues),
        "caps": describe_caps(app),
        "children": f"{config.processes} ({config.start_method.value})",
        "async": f"{config.async_children} with {config.async_slots} slots each"
        if config.async_children
        else "",
        "tasks": ", ".join(sorted(app.list_tasks())) or "none",
    }
    lines = "".join(f"  {name:<10} {value}\n" for name, value in facts.items() if value)
    return f"\n  {title}\n{lines}\n"


def _child_pool(app: Horsies, config: WorkerConfig, selector: selectors.BaseSelector) -> ChildPool:
    hook_seconds = DEBUG_SECONDS if config.debug else app.config.hook_timeout_seconds
    capture = app.config.log_capture
    settings = PoolSettings(
        processes=config.processes,
        start_method=config.start_method,
        max_tasks_per_child=config.max_tasks_per_child,
        max_memory_per_child_mb=config.max_memory_per_child_mb,
        boot_seconds_of_hooks=hook_seconds * len(app.hooks.start),
        exit_seconds_of_hooks=hook_seconds * len(app.hooks.stop),
        has_windows=config.window_width > 1,
        has_time_limits=not config.debug,
        memory_limits={} if config.debug else _memory_limits(app),
        async_children=config.async_children,
        async_slots=config.async_slots,
        log_limits=KEEP_NOTHING if capture is None else capture.limits,
    )
    if config.debug:
        settings = replace(settings, boot_timeout_seconds=DEBUG_SECONDS)
    boot = ChildBoot(
        hook_budget_seconds=hook_seconds,
        app_locator=config.app_locator,
        modules=tuple(config.imports),
        sys_path_roots=tuple(sys.path),
        log_level=config.loglevel,
        log_format=config.log_format,
        worker_name=config.name,
        shares_terminal=config.debug,
        captured_level="INFO" if capture is None else capture.level,
    )
    return ChildPool(settings, boot, selector)


def _memory_limits(app: Horsies) -> dict[str, int]:
    limits = {name: task.memory_limit_mb for name, task in app.definitions().items()}
    return {name: limit_mb for name, limit_mb in limits.items() if limit_mb is not None}


@contextmanager
def _signals_to(worker: Worker, selector: selectors.BaseSelector) -> Iterator[Callable[[], None]]:
    """Count SIGTERM, SIGINT and the first SIGHUP as stop requests; yield a function that wakes the loop.

    After the block, signals are ignored, so that a late signal cannot change the exit code. A closed
    terminal may send SIGHUP twice, from the shell and from the kernel; under ``nohup`` it is ignored.
    """
    sender, receiver = socket.socketpair()
    sender.setblocking(False)
    receiver.setblocking(False)
    selector.register(receiver, selectors.EVENT_READ, lambda: receiver.recv(4096))

    def hang_up(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        worker.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.request_stop())
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)
    previous_wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def wake() -> None:
        with suppress(OSError):  # A full buffer wakes the loop too.
            sender.send(b"!")

    try:
        yield wake
    finally:
        signal.set_wakeup_fd(previous_wakeup)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        selector.unregister(receiver)
        sender.close()
        receiver.close()
