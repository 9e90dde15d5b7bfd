"""Catalogue of the statements for tasks and runs whose next change the database refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile

BLOCKED = StatementFile("blocked.sql")


class Setting(NamedTuple):
    setting: str


class ChangedId(NamedTuple):
    id: str


class NotedBlocked(NamedTuple):
    id: str
    task_options: str | None


@dataclass(frozen=True, slots=True)
class BlockedRow:
    """A task or run whose next change the database refuses."""

    id: str
    # "task" or "run".
    kind: str
    workflow_id: str | None
    # Which change was refused: record, recover, expire, release, start, renew or claim.
    action: str
    error: str
    worker_id: str | None
    since: datetime
    blocked_seconds: float
    # The total number of blocked tasks and runs, even beyond the limit of the list.
    total: int


class FoundTask(NamedTuple):
    id: str
    workflow_id: str | None


class UnheldTask(NamedTuple):
    id: str
    workflow_id: str | None
    generation: int


class DueTask(NamedTuple):
    """A task to claim, with its position in its queue and, if the task has a key, its lane."""

    id: str
    workflow_id: str | None
    queue_name: str
    priority: int
    enqueued_at: str
    lane: int | None = None


@BLOCKED.statement
def note_blocked(
    id: str, is_run: bool, action: str, error: str, worker_id: str | None
) -> NotedBlocked: ...
@BLOCKED.statement
def limit_lock_wait(milliseconds: int) -> Setting: ...
@BLOCKED.statement
def list_blocked(limit: int) -> BlockedRow: ...
@BLOCKED.statement
def delete_unblocked() -> ChangedId: ...
@BLOCKED.statement
def find_late(excluded: Sequence[str], limit: int) -> FoundTask: ...
@BLOCKED.statement
def find_late_runs(excluded: Sequence[str], limit: int) -> FoundTask: ...
@BLOCKED.statement
def find_lapsed(excluded: Sequence[str], limit: int) -> FoundTask: ...
@BLOCKED.statement
def find_unheld(
    worker_id: str, held_ids: Sequence[str], held_generations: Sequence[int]
) -> UnheldTask: ...
@BLOCKED.statement
def find_due(
    queues: Sequence[str],
    excluded: Sequence[str],
    unknown_names: Sequence[str],
    limit: int,
    refused_by: Sequence[str],
    names: Sequence[str] | None = None,
    grace_seconds: float = 0.0,
) -> DueTask: ...


BLOCKED.complete()
