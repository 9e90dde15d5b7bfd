"""``horsies scheduler``: a loop that sleeps until the next slot, and its way to an exit code.

A producer of its own on the line producer -> SQL -> turn -> child -> report -> result. One is enough;
several serve the same schedules without sending anything twice. The work is done in
``schedule/service.py``.
"""

from __future__ import annotations

import logging
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from horsies.app import Horsies
from horsies.arguments import (
    LocatorArgument,
    LogFormatOption,
    LogLevelOption,
    ModuleOption,
    open_app,
)
from horsies.db.connect import Database
from horsies.db.listen import Listener
from horsies.db.migrate import SchemaTooNewError, apply_migrations
from horsies.db.schedules import SCHEDULES_CHANNEL
from horsies.db.together import Together
from horsies.errors import ValidationReport
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.schedule.service import Scheduler, SchedulerGaveUpError

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
            _serve(service, listener, wakened)
    except (SchemaTooNewError, SchedulerGaveUpError) as error:
        logger.critical("%s", error)
        return 1
    finally:
        listener.close()
        service.close()
    logger.info("scheduler stopped")
    return 0


def migrating_connector(database: Database) -> Callable[[], Together]:
    """Return what opens the scheduler's connection, and before the first one brings the schema up to
    date.
    """
    is_current = False

    def connect() -> Together:
        nonlocal is_current
        if not is_current:
            with database.connect("schema", session=True) as connection:
                apply_migrations(connection)
            is_current = True
        return Together.open(database, "scheduler")

    return connect


def _serve(service: Scheduler, listener: Listener, wakened: socket.socket) -> None:
    while True:
        service.step()
        heard = listener.receive()
        if heard.gap or heard.notifications:
            service.wake()
        if _is_signalled(wakened, listener, _seconds_to_sleep(service, listener)):
            return


def _seconds_to_sleep(service: Scheduler, listener: Listener) -> float:
    seconds = service.next_at() - time.monotonic()
    retry_seconds = listener.seconds_until_retry()
    return max(0.0, seconds if retry_seconds is None else min(seconds, retry_seconds))


def _is_signalled(wakened: socket.socket, listener: Listener, timeout_seconds: float) -> bool:
    """Sleep until the time is over or somebody calls; tell whether it was a signal."""
    sockets = [wakened.fileno(), *([listener.fileno()] if listener.fileno() >= 0 else [])]
    ready, _, _ = select.select(sockets, [], [], timeout_seconds)
    return wakened.fileno() in ready


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
