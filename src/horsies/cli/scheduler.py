"""`horsies scheduler`: run a scheduler until a signal stops it."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from horsies.app import Horsies
from horsies.cli.options import (
    LocatorArgument,
    LogFormatOption,
    LogLevelOption,
    ModuleOption,
    open_app,
    refuse_broken_app,
)
from horsies.db.database import Database
from horsies.db.listen import Listener
from horsies.db.migrate import UnusableSchemaError
from horsies.db.statements.schedules import SCHEDULES_CHANNEL
from horsies.logs import LogFormat, LogLevel, as_event, attach_event_handler, attach_handler
from horsies.scheduler.service import Scheduler, SchedulerGaveUpError, migrating_connector, serve

logger = logging.getLogger("horsies.scheduler")


def scheduler(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    loglevel: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Send schedules' tasks and start their workflows when they are due.

    One scheduler is enough. Several on one database share the work, and no slot fires twice.

    SIGTERM, Ctrl-C or a closed terminal shuts it down after the current tick. Exit codes: 0 clean
    shutdown, 1 error.

    Example:
        horsies scheduler shop.background:app
    """
    attach_handler(loglevel, log_format)
    attach_event_handler()
    named = module or locator
    app = open_app("scheduler", named)
    app.set_role("scheduler")
    refuse_broken_app(app)
    raise typer.Exit(run_scheduler(app, named or ""))


def run_scheduler(app: Horsies, owner: str) -> int:
    """Serve an application's schedules until a stop signal; return the exit code."""
    database = Database(app.config.broker, "scheduler", migrates=app.migrates)
    connect = migrating_connector(database, app.config.resilience.statement_timeout_ms)
    service = Scheduler(app.config, app.definitions(), owner, connect, app)
    listener = Listener(lambda: database.connect("listener", session=True), [SCHEDULES_CHANNEL])
    try:
        with _stop_signals() as stop:
            serve(service, stop, listener)
    except (UnusableSchemaError, SchedulerGaveUpError) as error:
        logger.critical("%s", error)
        return 1
    finally:
        listener.close()
        service.close()
    logger.info("scheduler stopped", extra=as_event("scheduler_stopped"))
    return 0


@contextmanager
def _stop_signals() -> Iterator[socket.socket]:
    """Make SIGTERM, SIGINT and SIGHUP readable on a socket; the second signal has its default effect. A
    second SIGHUP is ignored, because a closed terminal may send two. Under ``nohup``, SIGHUP is ignored
    altogether.
    """
    sender, receiver = socket.socketpair()

    def stop(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, later[number])
        sender.send(b"!")

    later: dict[int, Any] = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        later[signal.SIGHUP] = signal.SIG_IGN
    for number in later:
        signal.signal(number, stop)
    try:
        yield receiver
    finally:
        for number, handler in later.items():
            signal.signal(number, handler)
        sender.close()
        receiver.close()
