"""Catalogue of the clock of tests: shift the stored times of waiting tasks, nodes and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId

CLOCK = StatementFile("clock.sql")


class Advance(NamedTuple):
    """How many seconds pass; with ``only``, for these tasks and runs alone."""

    seconds: float
    only: Sequence[str] | None = None


class AdvanceSchedules(NamedTuple):
    slots: float
    pauses: float = 0.0


advance_tasks = CLOCK.declare("advance_tasks", Advance, TaskId)
advance_nodes = CLOCK.declare("advance_nodes", Advance, TaskId)
advance_schedules = CLOCK.declare("advance_schedules", AdvanceSchedules, TaskId)

CLOCK.complete()
