"""Statements inside a task's transaction."""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile

TRANSACTIONS = StatementFile("transactions.sql")


class Requirement(NamedTuple):
    """A requirement of the COMMIT; one that is not met is an error."""

    met: int


class Setting(NamedTuple):
    setting: str
    check_setting: str


class Mark(NamedTuple):
    """The transaction is still the one that the library began; its plans are general ones from now on,
    and its role is that of the session.
    """

    met: int
    plan_mode: str
    role: str


@TRANSACTIONS.statement
def require_mark(mark: str) -> Mark: ...
@TRANSACTIONS.statement
def require_completed(id: str, generation: int) -> Requirement: ...
@TRANSACTIONS.statement
def limit_idle(milliseconds: int, check_milliseconds: int) -> Setting: ...


TRANSACTIONS.complete()
