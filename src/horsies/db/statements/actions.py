"""Catalogue of the record of changes made by people."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import Nothing, StatementFile
from horsies.db.statements.workers import Deleted, Retention

ACTIONS = StatementFile("actions.sql")


class RecordAction(NamedTuple):
    actor: str
    source: str
    verb: str
    subject: str
    outcome: str
    detail: str | None


class ListActions(NamedTuple):
    subject: str | None
    actor: str | None
    before: int
    limit: int


class LastAction(NamedTuple):
    subject: str
    verb: str


class ActionRow(NamedTuple):
    """A change that a person made or tried to make.

    ``outcome`` is ``done``, ``unchanged`` for a change that was already in effect, or ``refused``. ``detail``
    is the reason that the person gave, or the sentence of the refusal.
    """

    id: int
    at: datetime
    actor: str
    source: str
    verb: str
    subject: str
    outcome: str
    detail: str | None
    age_seconds: float


record_action = ACTIONS.declare("record_action", RecordAction, Nothing)
list_actions = ACTIONS.declare("list_actions", ListActions, ActionRow)
last_action = ACTIONS.declare("last_action", LastAction, ActionRow)
delete_old_actions = ACTIONS.declare("delete_old_actions", Retention, Deleted)

ACTIONS.complete()
