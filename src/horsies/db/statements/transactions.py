"""Statements inside a task's transaction."""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile

TRANSACTIONS = StatementFile("transactions.sql")


class Mark(NamedTuple):
    """The attempt for which the library began this transaction; None or another attempt in a later
    transaction.

    ``replication_role`` is "origin" in a session whose triggers fire.
    """

    mark: str | None
    replication_role: str


class Setting(NamedTuple):
    setting: str


@TRANSACTIONS.statement
def read_mark() -> Mark: ...


@TRANSACTIONS.statement
def limit_idle(milliseconds: int) -> Setting: ...


TRANSACTIONS.complete()
