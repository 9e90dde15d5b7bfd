"""The loop of a scheduler: steps, sleeps until the next slot or until somebody calls, and steps again.

It is the whole of ``horsies scheduler``, and a thread beside the loop of a worker. A thread, because the
workflows of schedules are built by code of the user, which may take its time: a worker that waited for
it would serve no child and show no sign of life.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from horsies.db.connect import Database
from horsies.db.listen import Listener
from horsies.db.migrate import apply_migrations
from horsies.db.together import Together
from horsies.schedule.service import Scheduler

logger = logging.getLogger("horsies.scheduler")

# How long the end of a thread is waited for; what it builds then is left unbuilt.
LAST_STEP_SECONDS = 5.0


def serve(service: Scheduler, called: socket.socket, listener: Listener | None = None) -> None:
    """Serve schedules until a byte comes in on ``called``.

    With a ``listener`` changes of schedules are served at once, else by the next look.
    """
    while True:
        service.step()
        heard = listener.receive() if listener is not None else None
        if heard is not None and (heard.gap or heard.notifications):
            service.wake()
        if _is_called(called, listener, _seconds_to_sleep(service, listener)):
            return


def _seconds_to_sleep(service: Scheduler, listener: Listener | None) -> float:
    seconds = service.next_at() - time.monotonic()
    retry_seconds = None if listener is None else listener.seconds_until_retry()
    return max(0.0, seconds if retry_seconds is None else min(seconds, retry_seconds))


def _is_called(called: socket.socket, listener: Listener | None, timeout_seconds: float) -> bool:
    """Sleep until the time is over or something comes in; tell whether it is time to leave."""
    sockets = [called.fileno()]
    if listener is not None and listener.fileno() >= 0:
        sockets.append(listener.fileno())
    ready, _, _ = select.select(sockets, [], [], timeout_seconds)
    return called.fileno() in ready


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


class SchedulerThread:
    """A scheduler beside another loop of the same process.

    ``on_failure`` hears why it ended by itself; it is called in the thread.
    """

    def __init__(self, service: Scheduler, on_failure: Callable[[Exception], None]) -> None:
        self._service = service
        self._on_failure = on_failure
        self._caller, self._called = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="horsies-scheduler", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Let the current step be the last one; may come from a signal handler."""
        with suppress(OSError):  # it has ended already
            self._caller.send(b"!")

    def stop(self) -> None:
        """End it, and wait for the end as long as that makes sense."""
        self.ask_to_stop()
        if self._thread.ident is not None:
            self._thread.join(LAST_STEP_SECONDS)
        if self._thread.is_alive():
            logger.warning("a workflow is still being built; its slot is left to others")
            return
        self._caller.close()
        self._called.close()

    def _run(self) -> None:
        try:
            serve(self._service, self._called)
        except Exception as error:
            self._on_failure(error)
        finally:
            self._service.close()
