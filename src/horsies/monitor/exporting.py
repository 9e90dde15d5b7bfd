"""The export of everything about one person: tasks, whole runs, schedules, limits of the key and manual
changes, as documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from horsies.db.statement import Script, Step
from horsies.db.statements.erasing import (
    Definition,
    Document,
    ErasedId,
    export_changes,
    export_keys,
    export_runs,
    export_tasks,
    find_definitions,
    list_run_tasks,
)
from horsies.monitor.documents import stored_json
from horsies.monitor.personal_data import PersonalData

# Tasks with large payloads are read in small portions.
PORTION = 100

# Columns with JSON texts, which become values.
_JSON = {
    *(
        "args",
        "kwargs",
        "result",
        "task_options",
        "task_kwargs",
        "inputs",
        "workflow_inputs",
        "error",
    ),
    *("value", "sub_workflow_summary", "definition", "order_plan", "order_progress"),
}


def portions(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    """Divide ids into portions, each of which one script exports."""
    return (ids[start : start + PORTION] for start in range(0, len(ids), PORTION))


def run_tasks_script(runs: Sequence[str]) -> Script[list[str]]:
    """Find the tasks of whole runs."""
    rows: list[ErasedId] = yield list_run_tasks(runs)
    return [row.id for row in rows]


def tasks_export_script(ids: Sequence[str]) -> Script[list[dict[str, Any]]]:
    """Export tasks, each with its attempts, logs, steps, signals and manual changes."""
    return _export_script("task", export_tasks, ids)


def runs_export_script(ids: Sequence[str]) -> Script[list[dict[str, Any]]]:
    """Export runs with the runs below them, each with its nodes and signals."""
    return _export_script("run", export_runs, ids)


def others_export_script(found: PersonalData, key: str | None) -> Script[list[dict[str, Any]]]:
    """Export the schedules that were found, and the limits of a key."""
    definitions: list[Definition] = yield find_definitions()
    chosen = [row._asdict() for row in definitions if row.name in found.schedules]
    documents = [{"kind": "schedule", **_values(one)} for one in chosen]
    if key is not None:
        limits: list[Document] = yield export_keys(key)
        queues = [json.loads(row.document)["queue_name"] for row in limits]
        changes = yield export_changes([f"key {key} of queue {queue}" for queue in queues])
        documents += [*_documents("key", limits), *_documents("change", changes)]
    return documents


def _export_script(
    kind: str, statement: Callable[[Sequence[str]], Step], ids: Sequence[str]
) -> Script[list[dict[str, Any]]]:
    rows: list[Document] = yield statement(ids)
    documents = list(_documents(kind, rows))
    changes = yield export_changes([f"{kind} {one['id']}" for one in documents])
    return [*documents, *_documents("change", changes)]


def _documents(kind: str, rows: Iterable[Document]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {"kind": kind, **_values(json.loads(row.document))}


def _values(value: Any) -> Any:
    """Return a document in which JSON texts are values."""
    if isinstance(value, list):
        return [_values(one) for one in value]
    if isinstance(value, dict):
        return {name: _value_of(name, one) for name, one in value.items()}
    return value


def _value_of(name: str, value: Any) -> Any:
    return stored_json(value) if name in _JSON and isinstance(value, str) else _values(value)
