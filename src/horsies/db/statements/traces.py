"""Statements on the spans of attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId

TRACES = StatementFile("traces.sql")


class StoreTraces(NamedTuple):
    """Attempts and their spans, as columns."""

    ids: Sequence[str]
    attempts: Sequence[int]
    traceparents: Sequence[str]


class ReadTraces(NamedTuple):
    """Attempts, as columns."""

    ids: Sequence[str]
    attempts: Sequence[int]


class AttemptTrace(NamedTuple):
    id: str
    traceparent: str


store_traces = TRACES.declare("store_traces", StoreTraces, TaskId)
read_traces = TRACES.declare("read_traces", ReadTraces, AttemptTrace)

TRACES.complete()
