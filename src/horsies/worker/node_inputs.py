"""Node inputs: the results that claimed workflow tasks take from other nodes, read once and cached.

A node's result is stored once, and the nodes that take it refer to it. Before a worker gives tasks to its
children, it fetches results with one statement for all tasks that it claimed in a turn, except results that
it has just recorded or read. So a chain of nodes needs no second round trip, and a large result is fetched
once for a thousand consumers. In the worker, results stay JSON text; only children decode them.

The statement sums the sizes before it fetches any result. It returns results up to the limit for one task,
and for all other results only the sizes. A task that takes more than the limit fails. For any other task with
missing results, the worker fetches them with a separate statement.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import psycopg
from pydantic_core import from_json

from horsies.app import Horsies
from horsies.db.errors import describe_refusal, is_of_data
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.turn import ClaimedTask
from horsies.db.statements.workflows import RunPlace, read_places, read_results
from horsies.states import TaskStatus
from horsies.tasks.outcome import Outcome, outcome_of_large_inputs, outcome_of_unread_inputs
from horsies.worker.protocol import NodeInput, NodePart
from horsies.worker.tally import End
from horsies.workflow.build.plan import EXPAND_TASK
from horsies.workflow.run.results import whole_results

logger = logging.getLogger("horsies.worker")

# The cache holds a few dozen large results, and is small compared with the children's memory.
KEPT_BYTES_MAX = 32 * 1024 * 1024
# The size of an entry apart from its text: key, object, links.
_ENTRY_BYTES = 500

Source = tuple[str, int]
# Tasks that are not given to a child, each with the outcome that records the reason.
Refused = list[tuple[ClaimedTask, Outcome]]


@dataclass(slots=True)
class KeptInputs:
    """A cache of completed nodes' results, which evicts the least recently used.

    Only completed nodes are cached, because their results never change; a failed or skipped node may run
    again.
    """

    bytes_max: int = KEPT_BYTES_MAX
    bytes_kept: int = 0
    _kept: OrderedDict[Source, NodeInput] = field(default_factory=OrderedDict)

    def get(self, source: Source) -> NodeInput | None:
        found = self._kept.get(source)
        if found is not None:
            self._kept.move_to_end(source)
        return found

    def keep(self, source: Source, result: NodeInput) -> None:
        """Keep a result, unless it alone would exceed the limit."""
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


class NodeInputs:
    """Reads the workflow data of a task: its node, and the results that it takes from other nodes.
    ``is_injected`` takes a task's name and returns whether its function takes the workflow's context or meta;
    ``size_max`` is the maximum number of bytes of results that one task may take.
    """

    def __init__(
        self, is_injected: Callable[[str], bool] = lambda _: True, size_max: int = 268_435_456
    ) -> None:
        self._is_injected = is_injected
        self._size_max = size_max
        self._kept = KeptInputs()

    def has_part(self, task: ClaimedTask) -> bool:
        """Return whether a node's task needs data of its workflow; if not, it runs like a task outside a
        workflow.
        """
        return task.workflow_inputs is not None or self._is_injected(task.task_name)

    def note_ends(self, ends: Iterable[End]) -> None:
        """Cache the results of nodes whose outcomes were recorded, for the nodes that depend on them."""
        for outcome, task, _ in ends:
            if task.workflow_id is not None and outcome.status is TaskStatus.COMPLETED:
                self.note_completed(task, outcome.result)

    def note_completed(self, task: ClaimedTask, result: str) -> None:
        """Cache the result of a node's task that this worker has recorded.

        Maps and sub-workflows are skipped, because their result is not the result of a single task.
        """
        if task.workflow_id is None or task.workflow_node_index is None:
            return
        if task.workflow_item_index is None and task.task_name != EXPAND_TASK:
            source = (task.workflow_id, task.workflow_node_index)
            kept = NodeInput(task.workflow_node_index, "task", task.task_name, result)
            self._kept.keep(source, kept)

    def read(
        self, pipeline: Pipeline, tasks: Sequence[ClaimedTask]
    ) -> tuple[dict[str, NodePart], Refused]:
        """Return the workflow data of these tasks by task id, and the tasks whose inputs cannot be read.
        Raises transient errors, after which no task is given to a child. After a permanent error, each task's
        inputs are read separately, so that the error does not affect other tasks.
        """
        try:
            return self._parts(pipeline, tasks)
        except psycopg.Error as error:
            if not is_of_data(error):
                raise
            reason = describe_refusal(error)
            logger.error("the inputs of %d node(s) cannot be read: %s", len(tasks), reason)
        if len(tasks) == 1:
            return {}, [(tasks[0], outcome_of_unread_inputs(tasks[0]))]
        found = [self.read(pipeline, [task]) for task in tasks]
        parts = {task_id: part for parts, _ in found for task_id, part in parts.items()}
        return parts, [one for _, refused in found for one in refused]

    def _parts(
        self, pipeline: Pipeline, tasks: Sequence[ClaimedTask]
    ) -> tuple[dict[str, NodePart], Refused]:
        wanted = {task.id: _sources(task) for task in tasks}
        sources = {source for sources in wanted.values() for source in sources}
        kept = ((source, self._kept.get(source)) for source in sources)
        found = {source: result for source, result in kept if result is not None}
        expansions = {
            task.workflow_id
            for task in tasks
            if task.task_name == EXPAND_TASK and task.workflow_id is not None
        }
        left_out: dict[Source, int] = {}
        places = self._read(pipeline, sources - found.keys(), expansions, found, left_out)
        parts: dict[str, NodePart] = {}
        refused: Refused = []
        for task in tasks:
            taken = set(wanted[task.id])
            # Texts in memory are counted in characters, which is close enough to their size in bytes.
            size = sum(len(found[source].result) for source in taken & found.keys())
            size += sum(left_out[source] for source in taken & left_out.keys() - found.keys())
            if size > self._size_max:
                refused.append((task, outcome_of_large_inputs(task, size, self._size_max)))
                continue
            if rest := taken & left_out.keys() - found.keys():
                self._read(pipeline, rest, set(), found, {})
            assert task.workflow_id is not None
            assert task.workflow_node_index is not None
            place = places.get(task.workflow_id)
            parts[task.id] = NodePart(
                task.workflow_id,
                task.workflow_node_index,
                task.workflow_inputs,
                tuple(found[source] for source in wanted[task.id] if source in found),
                None if place is None else place.root_workflow_id,
                0 if place is None else place.depth,
            )
        return parts, refused

    def _read(
        self,
        pipeline: Pipeline,
        missing: set[Source],
        expansions: set[str],
        found: dict[Source, NodeInput],
        left_out: dict[Source, int],
    ) -> dict[str, RunPlace]:
        """Read results and nodes in one round trip, or in none if every result is cached.

        ``left_out`` receives the sizes of results that exceeded the limit.
        """
        steps: list[Step] = []
        if missing:
            runs, indexes = zip(*sorted(missing), strict=True)
            steps.append(read_results(runs, indexes, self._size_max))
        if expansions:
            steps.append(read_places(sorted(expansions)))
        if not steps:
            return {}
        answers = pipeline.run(steps)
        for node, text in whole_results(answers[0] if missing else ()):
            source = (node.workflow_id, node.task_index)
            if text is None:
                left_out[source] = node.result_bytes
                continue
            found[source] = NodeInput(
                node.task_index,
                node.kind,
                node.task_name,
                text,
                node.sub_definition_key,
                node.sub_workflow_summary,
            )
            if node.status == "COMPLETED":
                self._kept.keep(source, found[source])
        return {place.id: place for place in answers[-1]} if expansions else {}


def tasks_with_injection(app: Horsies) -> Callable[[str], bool]:
    """Return a function that takes a task's name and returns whether the task has injected parameters.

    All of the library's own tasks have them.
    """

    def is_injected(task_name: str) -> bool:
        task = app.get_task(task_name)
        if task is None:
            return True
        signature = task.definition.signature
        return bool(signature.injected - {signature.transaction})

    return is_injected


def _sources(task: ClaimedTask) -> list[Source]:
    """Return the indexes of the nodes whose results a task takes; none if the stored list is unreadable,
    which the child reports.
    """
    if task.workflow_id is None or task.workflow_inputs is None:
        return []
    try:
        stored = from_json(task.workflow_inputs)
        indexes = {*stored["args"].values(), *stored["context"].values()}
        return [(task.workflow_id, int(index)) for index in sorted(indexes)]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return []
