"""Statements inside a task's transaction."""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile

TRANSACTIONS = StatementFile("transactions.sql")


class Requirement(NamedTuple):
    """A check before the COMMIT; if it fails, the statement raises an error."""

    met: int


class Role(NamedTuple):
    """Settings for the rest of the transaction: the role of the session, and generic plans."""

    role: str
    plan_mode: str


class Setting(NamedTuple):
    setting: str
    check_setting: str


class Mark(NamedTuple):
    """Checks that this is still the transaction that the library began, and restores generic plans and the
    role of the session for the rest of it.
    """

    met: int
    plan_mode: str
    role: str


@TRANSACTIONS.statement
def require_mark(mark: str) -> Mark: ...
@TRANSACTIONS.statement
def use_session_role() -> Role: ...
@TRANSACTIONS.statement
def complete_own(
    worker_id: str, id: str, generation: int, mark: str, result: str
) -> Requirement: ...
@TRANSACTIONS.statement
def limit_idle(milliseconds: int, check_milliseconds: int) -> Setting: ...


TRANSACTIONS.complete()
