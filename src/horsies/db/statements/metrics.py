"""Catalogue of the statements behind the Prometheus gauges."""

from __future__ import annotations

from typing import NamedTuple

from horsies.db.statement import StatementFile

METRICS = StatementFile("metrics.sql")


class Gauges(NamedTuple):
    running: int
    paused: int
    oldest_paused_seconds: float
    overdue: int
    lag_seconds: float
    tasks_stored: float | None
    oldest_transaction_seconds: float
    notify_queue_ratio: float
    parked: int = 0
    held: int = 0


class TableSize(NamedTuple):
    name: str
    bytes: float
    dead_rows: float


@METRICS.statement
def read_gauges(
    schema: str,
    most: int,
    grace_seconds: float,
    # The name of the tasks table; a literal in the SQL text would not be qualified with the schema.
    tasks: str = "horsies_tasks",
) -> Gauges: ...
@METRICS.statement
def read_table_sizes(schema: str) -> TableSize: ...


METRICS.complete()
