"""``horsies scheduler``: the loop of a scheduler, and its way to an exit code.

A producer of its own on the line producer -> SQL -> turn -> child -> report -> result. One is enough;
several serve the same schedules without sending anything twice. The loop is in ``schedule/loop.py``.
"""

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
)
from horsies.db.database import Database
from horsies.db.listen import Listener
from horsies.db.migrate import SchemaTooNewError
from horsies.db.statements.schedules import SCHEDULES_CHANNEL
from horsies.errors import ValidationReport
from horsies.events import as_event, attach_event_handler
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.scheduler.service import Scheduler, SchedulerGaveUpError, migrating_connector, serve

logger = logging.getLogger("horsies.scheduler")


def scheduler(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    loglevel: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Send the tasks and start the workflows of schedules when they are due.

    One scheduler is enough. Several on one database share the work, and no slot is sent twice.

    SIGTERM or Ctrl-C stops it after the current look at what is due. Exit codes: 0 clean, 1 error.
    """
    attach_handler(loglevel, log_format)
    attach_event_handler()
    named = module or locator
    app = open_app("scheduler", named)
    app.set_role("scheduler")
    if errors := app.check(live=False):
        typer.echo(ValidationReport("check", errors).format(), err=True)
        raise typer.Exit(1)
    raise typer.Exit(run_scheduler(app, named or ""))


def run_scheduler(app: Horsies, owner: str) -> int:
    """Serve the schedules of an application until a signal asks for the end; returns the exit code."""
    database = Database(app.config.broker, "scheduler")
    connect = migrating_connector(database)
    service = Scheduler(app.config, app.definitions(), owner, connect, app)
    listener = Listener(lambda: database.connect("listener", session=True), [SCHEDULES_CHANNEL])
    try:
        with _signals() as wakened:
            serve(service, wakened, listener)
    except (SchemaTooNewError, SchedulerGaveUpError) as error:
        logger.critical("%s", error)
        return 1
    finally:
        listener.close()
        service.close()
    logger.info("scheduler stopped", extra=as_event("scheduler_stopped"))
    return 0


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Make SIGTERM and SIGINT readable on a socket; a second one ends the process as usual."""
    waker, wakened = socket.socketpair()

    def stop(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        waker.send(b"!")

    before: dict[int, Any] = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield wakened
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        waker.close()
        wakened.close()
