"""Statements inside a task's transaction."""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile

TRANSACTIONS = StatementFile("transactions.sql")


class Requirement(NamedTuple):
    """A check that must be met before the COMMIT; a check that is not met is an error."""

    met: int


class Role(NamedTuple):
    """The settings for the rest of the transaction: the role of the session, and generic plans."""

    role: str
    plan_mode: str


class Setting(NamedTuple):
    setting: str
    check_setting: str


class Mark(NamedTuple):
    """Checks that the transaction is still the one that the library began. From then on, the transaction
    uses generic plans and the role of the session.
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
