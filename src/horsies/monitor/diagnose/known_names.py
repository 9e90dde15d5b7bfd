"""Names of due tasks that no worker of their queue has registered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from horsies.db.statement import Script
from horsies.db.statements.explain import DueName, TaskSet, list_due_names, list_task_sets
from horsies.db.statements.monitor import WorkerSummary
from horsies.monitor.facts import Facts


def unknown_names_script(
    queues: Sequence[str], workers: Sequence[WorkerSummary], facts: Facts | None = None
) -> Script[dict[str, list[str]]]:
    """Return, by queue, the names of due tasks that none of the queue's workers has registered."""
    read = (facts or Facts()).read
    due = yield from read(list_due_names(queues))
    sets = yield from read(list_task_sets())
    return unknown_names(due, workers, sets)


def names_by_worker(sets: Iterable[TaskSet]) -> dict[str, frozenset[str] | None]:
    """Return each worker's task names; workers with the same names share a set."""
    found: dict[str, frozenset[str] | None] = {}
    for one in sets:
        names = None if one.task_names is None else frozenset(one.task_names)
        found |= dict.fromkeys(one.worker_ids, names)
    return found


def unknown_names(
    due: Iterable[DueName], workers: Iterable[WorkerSummary], sets: Iterable[TaskSet]
) -> dict[str, list[str]]:
    """Return, for each queue, the due names that none of its workers registered; a worker without a list
    counts for all names.
    """
    by_worker = names_by_worker(sets)
    asked: dict[str, list[str]] = {}
    for one in due:
        asked.setdefault(one.queue_name, []).append(one.name)
    crews: dict[tuple[str, ...], set[frozenset[str] | None]] = {}
    for worker in workers:
        crews.setdefault(tuple(worker.queues), set()).add(by_worker.get(worker.worker_id))
    known: dict[str, set[frozenset[str] | None]] = {name: set() for name in asked}
    for queues, sets_of_crew in crews.items():
        for name in known.keys() & set(queues):
            known[name] |= sets_of_crew
    found = {
        queue: sorted(name for name in names if not any(name in one for one in known[queue] if one))
        for queue, names in asked.items()
        if None not in known[queue]
    }
    return {queue: names for queue, names in found.items() if names}
