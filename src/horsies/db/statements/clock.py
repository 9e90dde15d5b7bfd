"""Catalogue of the test clock's statements, which shift the stored times of waiting tasks, nodes and
schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId

CLOCK = StatementFile("clock.sql")


@CLOCK.statement
def advance_tasks(seconds: float, only: Sequence[str] | None = None) -> TaskId: ...
@CLOCK.statement
def advance_nodes(seconds: float, only: Sequence[str] | None = None) -> TaskId: ...
@CLOCK.statement
def advance_schedules(slots: float, pauses: float = 0.0) -> TaskId: ...
@CLOCK.statement
def advance_deadlines(seconds: float) -> TaskId: ...
@CLOCK.statement
def advance_steps(seconds: float) -> TaskId: ...


CLOCK.complete()
