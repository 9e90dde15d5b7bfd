"""Find the session that made a statement wait too long, and the command that ends that session. The search
uses a second connection, because the first one has given up or is still waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg
from psycopg.errors import LockNotAvailable, QueryCanceled

from horsies.database_url import mask_url
from horsies.db.database import Database
from horsies.db.errors import describe_refusal
from horsies.db.statements.locks import Blocker, find_blockers
from horsies.findings import between

# The lock mode that makes readers wait. A session that only requests it makes later requests wait too.
READERS_WAIT = ["AccessExclusiveLock"]
# Lock modes of transactions that may have locked rows that a statement changes.
WRITERS_WAIT = [
    *("AccessExclusiveLock", "ExclusiveLock", "ShareRowExclusiveLock", "ShareLock"),
    *("RowExclusiveLock", "RowShareLock"),
]
STATEMENT_SHOWN = 120


class LockedError(LockNotAvailable):
    """Another session did not release a lock in time; ``blockers`` are the sessions that hold or request
    it.
    """

    def __init__(self, blockers: Sequence[Blocker]) -> None:
        self.blockers = tuple(blockers)
        end = remedy_of(blockers[0])
        super().__init__(f"{blocker_sentence(blockers[0]).removesuffix('.')}; to end it: {end}")


class SlowError(QueryCanceled):
    """A statement exceeded its time limit."""


def named(database: Database, error: Exception) -> Exception:
    """Return the error for a statement that exceeded its time limit, with the cause if it is found."""
    if database.limits is None or isinstance(error, LockedError | SlowError):
        return error
    if isinstance(error, LockNotAvailable):
        blockers = _ask(database, READERS_WAIT, 0.0) or _ask(
            database, WRITERS_WAIT, database.limits.lock_ms / 1000
        )
        return LockedError(blockers) if blockers else error
    if isinstance(error, QueryCanceled) and database.limits.statement_ms is not None:
        seconds = database.limits.statement_ms / 1000
        return SlowError(
            f"The database did not finish a statement within {seconds:g} s: it is overloaded, or the "
            f"request reads too many rows ({describe_refusal(error)})"
        )
    return error


def _ask(database: Database, modes: Sequence[str], seconds: float) -> list[Blocker]:
    try:
        with database.connect(database.role, session=True) as connection:
            return find_blockers.fetch(connection, database.config.schema_name, modes, seconds)
    except psycopg.OperationalError:  # report the statement's error, not the failure of the search
        return []


def blocker_sentence(blocker: Blocker) -> str:
    """Describe a session that keeps Horsies waiting, with the details that this role may see."""
    tables = ", ".join(blocker.tables) or "rows that Horsies needs"
    if blocker.pid is None:
        return f"A prepared transaction locks {tables}."
    verb = "waits for a lock on" if blocker.waits else "locks"
    statement = "" if blocker.statement is None else " ".join(blocker.statement.split())
    if len(statement) > STATEMENT_SHOWN:
        statement = statement[:STATEMENT_SHOWN] + "…"
    last = f"; its last statement is: {mask_url(statement)}" if statement else ""
    return f"Another session {verb} {tables}: pid {blocker.pid}{_details(blocker)}{last}."


def _details(blocker: Blocker) -> str:
    found = ", ".join(_known_details(blocker))
    return f" ({found})" if found else ""


def _known_details(blocker: Blocker) -> Iterator[str]:
    if blocker.user_name:
        yield f"user {blocker.user_name}"
    if blocker.application_name:
        yield f"application {blocker.application_name}"
    if blocker.state:
        yield blocker.state
    if blocker.since is not None:
        yield f"transaction open for {between(blocker.since, blocker.looked_at)}"


def remedy_of(blocker: Blocker) -> str:
    """Return the SQL statement that ends a blocking session."""
    if blocker.pid is None:
        return "SELECT gid, prepared, owner FROM pg_prepared_xacts; -- then ROLLBACK PREPARED 'gid'"
    return f"SELECT pg_terminate_backend({blocker.pid})"
