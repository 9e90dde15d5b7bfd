"""The statement that finds sessions that keep sessions of Horsies waiting."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile

LOCKS = StatementFile("locks.sql")


class Blocker(NamedTuple):
    """A session that keeps other sessions waiting. Details are None if this role may not see them.

    ``tables`` are the tables of Horsies on which the session holds or requests a lock. If ``waits`` is
    set, the session itself waits for another session.
    """

    pid: int | None
    user_name: str | None
    application_name: str | None
    state: str | None
    since: datetime | None
    statement: str | None
    waits: bool | None
    looked_at: datetime
    tables: list[str]


@LOCKS.statement
def find_blockers(schema: str, modes: Sequence[str], seconds: float) -> Blocker: ...


LOCKS.complete()
