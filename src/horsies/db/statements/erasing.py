"""Catalogue of the statements that find and erase the tasks and runs about one person."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.encryption import Payload, SearchedPayload

ERASING = StatementFile("erasing.sql")


class Erasable(NamedTuple):
    """A task or run that an order may erase; ``is_part`` is set for a task that belongs to a run."""

    id: str
    status: str
    created_at: datetime
    finished_at: datetime | None
    is_run: bool
    is_part: bool
    is_awaited: bool
    is_redacted: bool


class ErasedId(NamedTuple):
    id: str


class ErasedPart(NamedTuple):
    """The root of an erased tree of runs, or a run or task below such a root."""

    id: str
    is_root: bool


class QueueKey(NamedTuple):
    queue: str
    key: str


class RunKey(NamedTuple):
    key: str


class CallPosition(NamedTuple):
    run_id: str
    task_index: int


class FoundCall(NamedTuple):
    """The arguments of a node that contain a searched text, and the root of the node's run."""

    run_id: str
    task_index: int
    task_name: str
    root_id: str
    kwargs: SearchedPayload


class RootOf(NamedTuple):
    id: str
    root_id: str


class Definition(NamedTuple):
    """A schedule that was added at run time, as JSON."""

    name: str
    definition: Payload


class Document(NamedTuple):
    """A row, together with the rows that belong to it, as JSON text."""

    document: str


@ERASING.statement
def meet_erasures(ids: Sequence[str]) -> Erasable: ...
@ERASING.statement
def read_erased_keys(ids: Sequence[str]) -> QueueKey: ...
@ERASING.statement
def delete_tasks(ids: Sequence[str]) -> ErasedId: ...
@ERASING.statement
def delete_runs(ids: Sequence[str]) -> ErasedPart: ...
@ERASING.statement
def redact_tasks(ids: Sequence[str]) -> ErasedId: ...
@ERASING.statement
def redact_runs(ids: Sequence[str]) -> ErasedPart: ...
@ERASING.statement
def forget_tasks(ids: Sequence[str]) -> None: ...
@ERASING.statement
def forget_keys(
    queues: Sequence[str], keys: Sequence[str], openings: Sequence[str]
) -> QueueKey: ...
@ERASING.statement
def find_key_queues(key: str) -> QueueKey: ...
@ERASING.statement
def read_run_keys(ids: Sequence[str]) -> RunKey: ...
@ERASING.statement
def forget_run_keys(keys: Sequence[str]) -> None: ...
@ERASING.statement
def find_tasks_by_key(key: str, opening: str, before: str, since: str, window: int) -> ErasedId: ...
@ERASING.statement
def find_runs_by_key(key: str, since: datetime | None, until: datetime | None) -> ErasedId: ...
@ERASING.statement
def find_calls(run_id: str, task_index: int, key: str, needle: str, window: int) -> FoundCall: ...
@ERASING.statement
def end_of_calls(run_id: str, task_index: int, window: int) -> CallPosition: ...
@ERASING.statement
def read_roots(ids: Sequence[str]) -> RootOf: ...
@ERASING.statement
def find_definitions() -> Definition: ...
@ERASING.statement
def export_tasks(ids: Sequence[str]) -> Document: ...
@ERASING.statement
def export_runs(ids: Sequence[str]) -> Document: ...
@ERASING.statement
def list_run_tasks(ids: Sequence[str]) -> ErasedId: ...
@ERASING.statement
def export_changes(subjects: Sequence[str]) -> Document: ...
@ERASING.statement
def export_keys(key: str) -> Document: ...


ERASING.complete()
