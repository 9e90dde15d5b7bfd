"""The time limits of a connection: for locks, for statements, and for a server that does not respond. The
server ends a statement that waits or runs for too long, and reports the reason. But if the server is frozen
or cut off, the socket stays open and no response ever arrives, so the client closes the connection.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from psycopg import OperationalError
from psycopg.abc import PQGen

Value = TypeVar("Value")

# How long a worker's statement waits for a row or table that another session has locked. Without a limit,
# the worker would send no heartbeat during the wait.
LOCK_TIMEOUT_MS = 5_000


class Limits(NamedTuple):
    """How many milliseconds a statement may wait for a lock, and how many it may take in total. Without
    ``statement_ms``, the time limits of the database and the role apply. A connection without a response for
    ``silence_seconds`` is closed.
    """

    lock_ms: int = LOCK_TIMEOUT_MS
    statement_ms: int | None = None
    silence_seconds: float | None = None


NO_LIMITS = Limits()
# The limits for read-only commands and for checks, because a person waits for them.
READING = Limits(lock_ms=1_500, statement_ms=8_000, silence_seconds=10.0)


def answering(connection: Any, wait: PQGen[Value], seconds: float) -> PQGen[Value]:
    """Wait for the server like psycopg does, but close the connection after this time without a response.

    psycopg resumes a wait at least ten times per second, even if the server is silent.
    """
    deadline, is_late = time.monotonic() + seconds, False
    try:
        wanted = next(wait)
        while True:
            ready = yield wanted
            if not ready and not is_late and time.monotonic() >= deadline:
                is_late = True
                hang_up(connection)
            wanted = wait.send(ready)
    except StopIteration as finished:
        value: Value = finished.value
        return value
    except OperationalError as error:
        if not is_late:
            raise
        raise silent(seconds) from error


def silent(seconds: float) -> OperationalError:
    """The error of a connection that was closed because the server did not respond."""
    return OperationalError(
        f"The database did not answer for {seconds:g} s; the connection was closed"
    )


def hang_up(connection: Any) -> None:
    """Shut down a connection's socket, which ends every wait on it. Cancelling a psycopg call is not
    enough, because psycopg then waits for the server again.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as stream:
        stream.shutdown(socket.SHUT_RDWR)
