"""Batches: several tasks of a batched function that a child runs in one call.

A batched task is claimed for a child like any other task. Before the task is given to the child, the tasks
behind it in its lane are claimed for the same child. A worker has a ``Batches`` object only if its
application has batched tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import ClaimBatch, ClaimedTask, claim_batch
from horsies.tasks.blocked import Blocked
from horsies.tasks.definition import TaskDefinition
from horsies.worker.turn import Claimer

# A task with this mark was stored for an async child before its function became batched; it runs alone.
_ASYNC_MARK = '{"async":true'


class _Group(NamedTuple):
    """The fields that all tasks of one call have in common."""

    queue_name: str
    lane: int
    task_name: str


class Batches:
    """Fills calls of an application's batched tasks; ``sizes`` has the batch size of each task name."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    @classmethod
    def of(cls, definitions: Mapping[str, TaskDefinition]) -> Batches | None:
        sizes = {name: one.batch.size for name, one in definitions.items() if one.batch is not None}
        return cls(sizes) if sizes else None

    def takes(self, task: ClaimedTask) -> bool:
        """Return whether the task may run in one call with other tasks."""
        return task.lane is not None and _is_batched(task, self._sizes)

    def filled(
        self,
        pipeline: Pipeline,
        claimer: Claimer,
        tasks: Sequence[ClaimedTask],
        blocked: Blocked,
        refused_by: Sequence[str] = (),
        room: int | None = None,
    ) -> Sequence[ClaimedTask]:
        """Return the tasks and the tasks that join them, each with the child that runs it. At most `room`
        tasks join, and at most as many per queue as one turn may claim.
        """
        groups = self._groups(tasks)
        if not groups:
            return tasks
        found = [task for task in tasks if not (task.worker_pid and self.takes(task))]
        taken = Counter(task.queue_name for task in tasks)
        for group, heads in groups.items():
            size = self._sizes[group.task_name]
            wanted = len(heads) * (size - 1)
            if claimer.max_claim_batch:
                wanted = min(wanted, claimer.max_claim_batch - taken[group.queue_name])
            claim = _claim(
                claimer, group, heads, size, wanted if room is None else min(wanted, room)
            )
            batch = _joined(pipeline, claim, heads, blocked, refused_by)
            joined = len(batch) - len(heads)
            taken[group.queue_name] += joined
            if room is not None:
                room -= joined
            found += batch
        return found

    def _groups(self, tasks: Iterable[ClaimedTask]) -> dict[_Group, list[ClaimedTask]]:
        """Group the batched tasks that were claimed for children, so that tasks of a group may share a
        call.
        """
        groups: dict[_Group, list[ClaimedTask]] = {}
        for task in tasks:
            if task.worker_pid and task.lane is not None and _is_batched(task, self._sizes):
                group = _Group(task.queue_name, task.lane, task.task_name)
                groups.setdefault(group, []).append(task)
        for heads in groups.values():
            heads.sort(key=lambda one: (one.priority, one.enqueued_at, one.id))
        return groups


def _is_batched(task: ClaimedTask, sizes: Mapping[str, int]) -> bool:
    return task.task_name in sizes and not (task.task_options or "").startswith(_ASYNC_MARK)


def _claim(
    claimer: Claimer, group: _Group, heads: Sequence[ClaimedTask], size: int, wanted: int
) -> ClaimBatch:
    place, last = claimer.queues.index(group.queue_name), heads[-1]
    return ClaimBatch(
        worker_id=claimer.worker_id,
        hostname=claimer.hostname,
        heads=[one.id for one in heads],
        pids=[one.worker_pid or 0 for one in heads],
        size=size,
        queue=group.queue_name,
        lane=group.lane,
        task_name=group.task_name,
        wanted=max(0, wanted),
        after_priority=last.priority,
        after_at=last.enqueued_at,
        queue_cap=claimer.queue_caps[place],
        cluster_cap=claimer.cluster_cap,
        counts_claimed=claimer.counts_claimed,
        rate_seconds=claimer.rate_seconds[place] if claimer.rates else None,
        rate_burst=claimer.rate_bursts[place] if claimer.rates else None,
    )


def _joined(
    pipeline: Pipeline,
    claim: ClaimBatch,
    heads: Sequence[ClaimedTask],
    blocked: Blocked,
    refused_by: Sequence[str],
) -> list[ClaimedTask]:
    """Return the heads, which are already claimed, together with the tasks that join them. If the database
    refuses one of the joining tasks, the heads run alone, and the next claim finds the refused task.
    """
    if not claim.wanted and len(heads) < 2:
        return [*heads]
    excluded = blocked.excluded() if blocked.delays else ()
    claim = claim._replace(refused_ids=excluded, refused_by=refused_by)

    def claim_all() -> list[ClaimedTask]:
        (joining,) = pipeline.run([(claim_batch, claim)])
        return [*_moved(heads, claim.size), *joining]

    return blocked.isolated(pipeline, "claim", claim_all, lambda: [*heads], "batch")


def _moved(heads: Sequence[ClaimedTask], size: int) -> list[ClaimedTask]:
    """Return the heads with their children: each child gets a full batch before the next child gets any
    task.
    """
    pids = [one.worker_pid for one in heads]
    return [one._replace(worker_pid=pids[place // size]) for place, one in enumerate(heads)]
