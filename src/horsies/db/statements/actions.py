"""Catalogue of the statements on the history of changes made by people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.workers import Deleted

ACTIONS = StatementFile("actions.sql")


class ActionRow(NamedTuple):
    """A change that a person made or tried to make. ``outcome`` is ``done``, ``refused``, or
    ``unchanged`` if nothing had to be changed. ``detail`` is the reason that the person gave, or the
    sentence that explains a refusal.
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


class Candidate(NamedTuple):
    """A task or run that an order may change."""

    id: str
    status: str
    created_at: datetime
    finished_at: datetime | None


class Refusals(NamedTuple):
    in_workflow: int
    is_redacted: int
    was_resent: int


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


@ACTIONS.statement
def record_action(
    actor: str, source: str, verb: str, subject: str, detail: str | None, outcome: str
) -> None: ...
@ACTIONS.statement
def list_actions(subject: str | None, actor: str | None, before: int, limit: int) -> ActionRow: ...
@ACTIONS.statement
def last_actions(subjects: Sequence[str], verb: str) -> ActionRow: ...
@ACTIONS.statement
def delete_old_actions(hours: float, limit: int) -> Deleted: ...
@ACTIONS.statement
def read_clock() -> Clock: ...
@ACTIONS.statement
def judge_resends(ids: Sequence[str]) -> Refusals: ...
@ACTIONS.statement
def read_candidates(ids: Sequence[str]) -> Candidate: ...
@ACTIONS.statement
def delete_drafts(actor: str, kept: int) -> None: ...
@ACTIONS.statement
def discard_draft(order_id: str) -> None: ...
@ACTIONS.statement
def store_order(
    actor: str,
    source: str,
    verb: str,
    subject: str,
    detail: str | None,
    outcome: str,
    order_id: str,
    plan: str,
    progress: str,
) -> None: ...
@ACTIONS.statement
def stop_order(order_id: str) -> OrderId: ...
@ACTIONS.statement
def lock_orders() -> Locked: ...
@ACTIONS.statement
def read_order(order_id: str) -> OrderRow: ...
@ACTIONS.statement
def save_order(order_id: str, outcome: str, detail: str, progress: str) -> None: ...


ACTIONS.complete()
