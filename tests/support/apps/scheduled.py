"""The schedulers' application: the workers' application, plus a task and a workflow that record their
slot.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import datetime
from pathlib import Path

from horsies import Horsies, TaskError, TaskResult, WorkflowDefinition, WorkflowSpec, from_node
from tests.support.apps.programs import app, write_down
from tests.support.schedulers import GATE_VARIABLE

__all__ = ["app"]

logger = logging.getLogger("programs")


@app.task("note_slot")
def note_slot(label: str, scheduled_for: datetime | None = None) -> TaskResult[None, TaskError]:
    shown = "" if scheduled_for is None else scheduled_for.isoformat()
    write_down("slot", f"{label} {shown}")
    return TaskResult(ok=None)


@app.task("note_end")
def note_end(before: TaskResult[None, TaskError], label: str) -> TaskResult[str, TaskError]:
    write_down("end", label)
    return TaskResult(ok=label)


class SlotFlow(WorkflowDefinition[str]):
    """A run that records its slot, then its finish."""

    name = "slot flow"
    definition_key = "e2e.slot-flow"

    @classmethod
    def build_with(cls, app: Horsies, *, label: str, scheduled_for: datetime) -> WorkflowSpec[str]:
        begin = note_slot.node(node_id="begin")(label=label, scheduled_for=scheduled_for)
        end = note_end.node(node_id="end")(
            before=from_node(begin), label=f"{label} {scheduled_for.isoformat()}"
        )
        return app.workflow(cls.name, [begin, end], output=end, definition_key=cls.definition_key)


class SlowFlow(WorkflowDefinition[None]):
    """A workflow whose build takes a long time."""

    name = "slow flow"
    definition_key = "e2e.slow-flow"

    @classmethod
    def build_with(cls, app: Horsies) -> WorkflowSpec[None]:
        logger.warning("building")
        gate = os.environ.get(GATE_VARIABLE)
        while gate is not None and Path(gate).exists():
            time.sleep(0.01)
        only = note_slot.node(node_id="only")(label="slow")
        return app.workflow(cls.name, [only], output=only, definition_key=cls.definition_key)
