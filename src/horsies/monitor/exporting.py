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
from horsies.encryption import Payloads, missing_key, store_of
from horsies.monitor.documents import stored_json
from horsies.monitor.personal_data import PersonalData

# Tasks with large payloads are read in small portions.
PORTION = 100

# The columns with JSON text, which is exported as values.
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
    """Divide ids into portions; one script exports one portion."""
    return (ids[start : start + PORTION] for start in range(0, len(ids), PORTION))


def run_tasks_script(runs: Sequence[str]) -> Script[list[str]]:
    """Find the tasks of whole runs."""
    rows: list[ErasedId] = yield list_run_tasks(runs)
    return [row.id for row in rows]


class Export:
    """Reads rows as documents, and decrypts them with the keys of an application.

    If the application lacks a key or a store, the affected texts are returned as stored, and
    ``missing_keys`` or ``missing_stores`` gets its id.
    """

    def __init__(self, payloads: Payloads | None) -> None:
        self._payloads = payloads
        self.missing_keys: set[str] = set()
        self.missing_stores: set[str] = set()

    def tasks(self, ids: Sequence[str]) -> Script[list[dict[str, Any]]]:
        """Export tasks, each with its attempts, logs, steps, signals and manual changes."""
        return self._subjects("task", export_tasks, ids)

    def runs(self, ids: Sequence[str]) -> Script[list[dict[str, Any]]]:
        """Export runs with the runs below them, each with its nodes and signals."""
        return self._subjects("run", export_runs, ids)

    def others(self, found: PersonalData, key: str | None) -> Script[list[dict[str, Any]]]:
        """Export the schedules and the key limits that the search found."""
        definitions: list[Definition] = yield find_definitions()
        chosen = [row._asdict() for row in definitions if row.name in found.schedules]
        documents = [{"kind": "schedule", **self._values(one)} for one in chosen]
        if key is not None:
            limits: list[Document] = yield export_keys(key)
            queues = [json.loads(row.document)["queue_name"] for row in limits]
            changes = yield export_changes([f"key {key} of queue {queue}" for queue in queues])
            documents += [*self._documents("key", limits), *self._documents("change", changes)]
        return documents

    def _subjects(
        self, kind: str, statement: Callable[[Sequence[str]], Step], ids: Sequence[str]
    ) -> Script[list[dict[str, Any]]]:
        rows: list[Document] = yield statement(ids)
        documents = list(self._documents(kind, rows))
        changes = yield export_changes([f"{kind} {one['id']}" for one in documents])
        return [*documents, *self._documents("change", changes)]

    def _documents(self, kind: str, rows: Iterable[Document]) -> Iterator[dict[str, Any]]:
        for row in rows:
            yield {"kind": kind, **self._values(json.loads(row.document))}

    def _values(self, value: Any) -> Any:
        """Return a document in which JSON texts are replaced by values."""
        if isinstance(value, list):
            return [self._values(one) for one in value]
        if isinstance(value, dict):
            return {name: self._value_of(name, one) for name, one in value.items()}
        return self._read(value) if isinstance(value, str) else value

    def _value_of(self, name: str, value: Any) -> Any:
        if name in _JSON and isinstance(value, str):
            return stored_json(self._read(value))
        return self._values(value)

    def _read(self, text: str) -> str:
        if self._payloads is not None:
            text = self._payloads.decrypt(text)
        if (key_id := missing_key(text)) is not None:
            store_id = store_of(key_id)
            if store_id is None:
                self.missing_keys.add(key_id)
            else:
                self.missing_stores.add(store_id)
        return text
