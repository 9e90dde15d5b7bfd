"""The application of the schedulers: that of the workers, a task and a workflow that know their slot."""

from __future__ import annotations

from datetime import datetime

from horsies import Horsies, TaskError, TaskResult, WorkflowDefinition, WorkflowSpec, from_node
from tests.e2e.programs import app, write_down

__all__ = ["app"]


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
    """Notes its slot, then that it has ended."""

    name = "slot flow"
    definition_key = "e2e.slot-flow"

    @classmethod
    def build_with(cls, app: Horsies, *, label: str, scheduled_for: datetime) -> WorkflowSpec[str]:
        begin = note_slot.node(node_id="begin")(label=label, scheduled_for=scheduled_for)
        end = note_end.node(node_id="end")(
            before=from_node(begin), label=f"{label} {scheduled_for.isoformat()}"
        )
        return app.workflow(cls.name, [begin, end], output=end, definition_key=cls.definition_key)
