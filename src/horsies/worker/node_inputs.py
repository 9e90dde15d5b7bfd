"""Inputs: the results of other nodes that claimed tasks take, read once and kept for a while.

Between the turn and the children, for tasks of workflows. Results are stored once and consumed by
reference, so a worker fetches them when it hands a task out: one statement for everything a turn
claimed, and nothing for what it has recorded or read itself a moment ago. A chain therefore needs no
second round trip, and a large result is fetched once for a thousand consumers. Texts only: nothing
is decoded here.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import psycopg
from pydantic_core import from_json

from horsies.app import Horsies
from horsies.db.errors import is_transient
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import ClaimedTask
from horsies.db.statements.workflows import (
    InputRow,
    ReadInputs,
    RunIds,
    RunPlace,
    read_inputs,
    read_places,
)
from horsies.worker.protocol import NodeInput, NodePart
from horsies.workflow.build.plan import EXPAND_TASK

logger = logging.getLogger("horsies.worker")

# Enough for a few dozen large results, little beside the children's own memory.
KEPT_BYTES_MAX = 32 * 1024 * 1024
# An entry beside its text: key, object, links.
_ENTRY_BYTES = 500

Source = tuple[str, int]


@dataclass(slots=True)
class KeptInputs:
    """Results of nodes that completed, the least recently used forgotten first.

    Only of those: a failed or skipped node may be tried again, a completed one stays what it is.
    """

    bytes_max: int = KEPT_BYTES_MAX
    bytes_kept: int = 0
    _kept: OrderedDict[Source, NodeInput] = field(default_factory=OrderedDict)

    def get(self, source: Source) -> NodeInput | None:
        """Return a result that is here."""
        found = self._kept.get(source)
        if found is not None:
            self._kept.move_to_end(source)
        return found

    def keep(self, source: Source, result: NodeInput) -> None:
        """Keep a result, unless it alone would fill the place."""
        size = _size(result)
        if size > self.bytes_max or source in self._kept:
            return
        self._kept[source] = result
        self.bytes_kept += size
        while self.bytes_kept > self.bytes_max:
            _, oldest = self._kept.popitem(last=False)
            self.bytes_kept -= _size(oldest)


def _size(result: NodeInput) -> int:
    return sys.getsizeof(result.result) + _ENTRY_BYTES


class Inputs:
    """Gives tasks of workflows their part: where they stand, and what they take from other nodes.

    ``asks`` tells by its name whether a task wants to know where it stands.
    """

    def __init__(
        self, asks: Callable[[str], bool] = lambda _: True, bytes_max: int = KEPT_BYTES_MAX
    ) -> None:
        self._asks = asks
        self._kept = KeptInputs(bytes_max)

    def has_part(self, task: ClaimedTask) -> bool:
        """Whether a node's task must know of its workflow; if not it runs like any other task."""
        return task.workflow_inputs is not None or self._asks(task.task_name)

    def note_completed(self, task: ClaimedTask, result: str) -> None:
        """A node's task succeeded and this worker recorded it: others may take the result from here.

        The result of a map or a sub-workflow is none of its tasks'.
        """
        if task.workflow_id is None or task.workflow_node_index is None:
            return
        if task.workflow_item_index is None and task.task_name != EXPAND_TASK:
            source = (task.workflow_id, task.workflow_node_index)
            kept = NodeInput(task.workflow_node_index, "task", task.task_name, result)
            self._kept.keep(source, kept)

    def read(
        self, pipeline: Pipeline, tasks: Sequence[ClaimedTask]
    ) -> tuple[dict[str, NodePart], list[ClaimedTask]]:
        """Return the parts of these tasks of workflows by task id, and the tasks that cannot have one.

        Raises what is transient: the tasks are not handed out then. A lasting error must not stand in
        the way of the others, so then each is read for alone.
        """
        try:
            return self._parts(pipeline, tasks), []
        except psycopg.Error as error:
            if is_transient(error):
                raise
            logger.exception("the inputs of %d node(s) cannot be read at once", len(tasks))
        if len(tasks) == 1:
            return {}, list(tasks)
        found = [self.read(pipeline, [task]) for task in tasks]
        parts = {task_id: part for parts, _ in found for task_id, part in parts.items()}
        return parts, [task for _, unreadable in found for task in unreadable]

    def _parts(self, pipeline: Pipeline, tasks: Sequence[ClaimedTask]) -> dict[str, NodePart]:
        wanted = {task.id: _sources(task) for task in tasks}
        found = self._at_hand(source for sources in wanted.values() for source in sources)
        missing = {source for sources in wanted.values() for source in sources} - found.keys()
        expansions = {task.workflow_id for task in tasks if task.task_name == EXPAND_TASK}
        places = self._read(pipeline, missing, expansions - {None}, found)
        return {task.id: _part(task, wanted[task.id], found, places) for task in tasks}

    def _at_hand(self, sources: Iterable[Source]) -> dict[Source, NodeInput]:
        at_hand = ((source, self._kept.get(source)) for source in sources)
        return {source: result for source, result in at_hand if result is not None}

    def _read(
        self,
        pipeline: Pipeline,
        missing: set[Source],
        expansions: set[str | None],
        found: dict[Source, NodeInput],
    ) -> dict[str, RunPlace]:
        """Read results and places in one round trip, or in none when everything is at hand."""
        steps: list[Step] = []
        if missing:
            runs, indexes = zip(*sorted(missing), strict=True)
            steps.append((read_inputs, ReadInputs(runs, indexes)))
        if expansions:
            steps.append((read_places, RunIds(sorted(filter(None, expansions)))))
        if not steps:
            return {}
        answers = pipeline.run(steps)
        for row in answers[0] if missing else ():
            found[row.workflow_id, row.task_index] = self._take(row)
        return {place.id: place for place in answers[-1]} if expansions else {}

    def _take(self, row: InputRow) -> NodeInput:
        result = NodeInput(
            row.task_index,
            row.kind,
            row.task_name,
            row.result,
            row.sub_definition_key,
            row.sub_workflow_summary,
        )
        if row.status == "COMPLETED":
            self._kept.keep((row.workflow_id, row.task_index), result)
        return result


def asking_tasks(app: Horsies) -> Callable[[str], bool]:
    """Return what tells by its name whether a task asks for its workflow; the library's own all do."""

    def asks(task_name: str) -> bool:
        task = app.get_task(task_name)
        return task is None or bool(task.definition.signature.injected)

    return asks


def _sources(task: ClaimedTask) -> list[Source]:
    """The nodes a task takes results of, each once; none when it is unreadable, as its child will say."""
    if task.workflow_id is None or task.workflow_inputs is None:
        return []
    try:
        stored = from_json(task.workflow_inputs)
        indexes = {*stored["args"].values(), *stored["context"].values()}
        return [(task.workflow_id, int(index)) for index in sorted(indexes)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _part(
    task: ClaimedTask,
    sources: Sequence[Source],
    found: Mapping[Source, NodeInput],
    places: Mapping[str, RunPlace],
) -> NodePart:
    assert task.workflow_id is not None
    assert task.workflow_node_index is not None
    place = places.get(task.workflow_id)
    return NodePart(
        task.workflow_id,
        task.workflow_node_index,
        task.workflow_inputs,
        tuple(found[source] for source in sources if source in found),
        None if place is None else place.root_workflow_id,
        0 if place is None else place.depth,
    )
