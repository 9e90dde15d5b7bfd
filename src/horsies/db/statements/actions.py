"""Catalogue of the record of changes made by people."""

from __future__ import annotations

from collections.abc import Sequence
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
    order_id: str | None = None


class Clock(NamedTuple):
    at: datetime


class Candidates(NamedTuple):
    ids: Sequence[str]


class Candidate(NamedTuple):
    """A task or run that an order may change."""

    id: str
    status: str
    created_at: datetime
    finished_at: datetime | None


class Refusals(NamedTuple):
    in_workflow: int
    was_resent: int


class StartOrder(NamedTuple):
    actor: str
    source: str
    verb: str
    subject: str
    detail: str | None
    order_id: str
    plan: str
    progress: str


class OrderId(NamedTuple):
    order_id: str


class Locked(NamedTuple):
    locked: bool


class OrderRow(NamedTuple):
    id: int
    at: datetime
    actor: str
    outcome: str
    plan: str
    progress: str


class SaveOrder(NamedTuple):
    order_id: str
    outcome: str
    detail: str
    progress: str


record_action = ACTIONS.declare("record_action", RecordAction, Nothing)
list_actions = ACTIONS.declare("list_actions", ListActions, ActionRow)
last_action = ACTIONS.declare("last_action", LastAction, ActionRow)
delete_old_actions = ACTIONS.declare("delete_old_actions", Retention, Deleted)
read_clock = ACTIONS.declare("read_clock", Nothing, Clock)
judge_resends = ACTIONS.declare("judge_resends", Candidates, Refusals)
read_candidates = ACTIONS.declare("read_candidates", Candidates, Candidate)
start_order = ACTIONS.declare("start_order", StartOrder, Nothing)
stop_order = ACTIONS.declare("stop_order", OrderId, OrderId)
lock_orders = ACTIONS.declare("lock_orders", Nothing, Locked)
read_order = ACTIONS.declare("read_order", OrderId, OrderRow)
save_order = ACTIONS.declare("save_order", SaveOrder, Nothing)

ACTIONS.complete()
