"""Statements on the spans of attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId

TRACES = StatementFile("traces.sql")


class AttemptTrace(NamedTuple):
    id: str
    traceparent: str


@TRACES.statement
def store_traces(
    ids: Sequence[str], attempts: Sequence[int], traceparents: Sequence[str]
) -> TaskId: ...
@TRACES.statement
def read_traces(ids: Sequence[str], attempts: Sequence[int]) -> AttemptTrace: ...


TRACES.complete()
