"""WorkflowHandle: waits for a run, reads its results and controls it. Operational errors are raised only
by ``result``; other methods return a ``TaskResult`` or a ``HandleResult``. The sync and async forms of a
method run the same script.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from horsies.db.statement import Script, Step, one_or_none
from horsies.db.statements.workflows import (
    ItemRow,
    NodeOutcome,
    NodeRow,
    ResultNode,
    ResultPart,
    RunOutcome,
    read_items,
    read_node,
    read_nodes,
    read_result_nodes,
    read_results,
)
from horsies.error_codes import ContractCode
from horsies.result import Err, Ok
from horsies.states import WORKFLOW_TERMINAL_STATES, WorkflowStatus
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.broker import PostgresBroker
from horsies.tasks.handle import error_result, value_or_raise
from horsies.tasks.waiters import SMALL_RESULT_BYTES
from horsies.workflow.nodes.nodes import (
    NODE_KINDS,
    NODE_WITHOUT_ID,
    AnyNode,
    NodeKey,
    ValueNode,
    codec_for,
    node_id_of,
    result_codec,
)
from horsies.workflow.nodes.type_compat import UNKNOWN_TYPE
from horsies.workflow.run import control
from horsies.workflow.run.control import RunScript, wait_for_run, wait_for_run_async
from horsies.workflow.run.draw import draw
from horsies.workflow.run.info import HandleResult, SignalDelivery, WorkflowInfo, WorkflowTaskInfo
from horsies.workflow.run.listing import report_script
from horsies.workflow.run.results import (
    NO_TYPES,
    READ_BYTES_MAX,
    FindTypes,
    ResultTypes,
    as_error_result,
    item_info,
    node_info,
    node_result,
    node_results,
    run_result,
    too_large,
    whole_results,
)

T = TypeVar("T")
V = TypeVar("V")

_ENDED = frozenset({"COMPLETED", "FAILED", "SKIPPED"})
# The statuses in which get returns: the run has ended, or will not continue on its own.
_READABLE = WORKFLOW_TERMINAL_STATES | {WorkflowStatus.PAUSED}


class _RunTypes:
    """A run's result types: passed in, or derived from its nodes when first needed."""

    __slots__ = ("_find", "known")

    def __init__(self, given: ResultTypes | None, find: FindTypes | None) -> None:
        self.known = given or NO_TYPES
        self._find = find if given is None else None

    @property
    def are_unread(self) -> bool:
        return self._find is not None

    def of(self, rows: list[NodeRow]) -> ResultTypes:
        """Return the known types, or types derived from the run's nodes."""
        if self._find is not None:
            self.known, self._find = self._find(rows), None
        return self.known

    def script(self, run_id: str) -> Script[ResultTypes]:
        """Return the types; read the run's nodes first if necessary."""
        return self.of((yield read_nodes(run_id))) if self.are_unread else self.known


class WorkflowHandle(Generic[T]):
    """A workflow run; every method has an async form, named ``..._async``.

    Example:
        handle = spec.start().unwrap()
        result = handle.get(timeout_ms=60_000)
        if result.is_ok():
            print(result.ok_value)

    A handle created from an id decodes values as plain JSON, and the result as ``output_type`` if it is
    given; ``app.workflow_handle(workflow_id)`` finds the types itself.
    """

    __slots__ = ("_cached", "_output", "_types", "broker", "workflow_id")

    def __init__(
        self,
        workflow_id: str,
        broker: PostgresBroker | None,
        output_type: Any = UNKNOWN_TYPE,
        *,
        types: ResultTypes | None = None,
        find_types: FindTypes | None = None,
    ) -> None:
        self.workflow_id = workflow_id
        self.broker = broker
        self._output = None if output_type is UNKNOWN_TYPE else codec_for(output_type)
        self._types = _RunTypes(types, find_types)
        self._cached: TaskResult[T, TaskError] | None = None

    def __repr__(self) -> str:
        return f"WorkflowHandle({self.workflow_id!r})"

    # Waiting

    def get(self, timeout_ms: int | None = None) -> TaskResult[T, TaskError]:
        """Wait for the result and return it; 0 checks once without waiting, None waits forever.

        Never raises. A failed, cancelled or expired run returns its error; a paused run returns
        WORKFLOW_PAUSED immediately. Other errors: WAIT_TIMEOUT, RESULT_NOT_READY (with 0),
        RESULT_TOO_LARGE (above 1 GiB), WORKFLOW_NOT_FOUND, BROKER_ERROR, EVENT_LOOP_RUNNING.
        """
        if self._cached is not None:
            return self._cached
        found = wait_for_run(self.broker, self.workflow_id, _until(timeout_ms), timeout_ms)
        if isinstance(found, Ok) and self._needs_more(found.value):
            done = self._perform(partial(self._outcome_script, run=found.value))
        else:
            done = found.map(self._outcome)
        return done.unwrap_or_else(as_error_result)

    async def get_async(self, timeout_ms: int | None = None) -> TaskResult[T, TaskError]:
        """Run ``get`` without blocking the event loop."""
        if self._cached is not None:
            return self._cached
        until = _until(timeout_ms)
        found = await wait_for_run_async(self.broker, self.workflow_id, until, timeout_ms)
        if isinstance(found, Ok) and self._needs_more(found.value):
            done = await self._perform_async(partial(self._outcome_script, run=found.value))
        else:
            done = found.map(self._outcome)
        return done.unwrap_or_else(as_error_result)

    def result(self, timeout_ms: int | None = None) -> T:
        """Wait for the run and return its output's value; raise errors as ``TaskHandle.result`` does."""
        return value_or_raise(self.workflow_id, self.get(timeout_ms))

    async def result_async(self, timeout_ms: int | None = None) -> T:
        """Run ``result`` without blocking the event loop."""
        return value_or_raise(self.workflow_id, await self.get_async(timeout_ms))

    def wait(
        self,
        until: Collection[WorkflowStatus] = WORKFLOW_TERMINAL_STATES,
        timeout_ms: int | None = None,
    ) -> HandleResult[WorkflowStatus]:
        """Wait for one of these statuses and return it; PAUSED ends the wait only if listed.

        A terminal status ends the wait even if it is not listed. Returns WAIT_TIMEOUT after the timeout;
        0 checks once.

        Example:
            handle.wait(until={WorkflowStatus.PAUSED}, timeout_ms=60_000)
        """
        found = wait_for_run(self.broker, self.workflow_id, _set_of(until), timeout_ms)
        return found.map(lambda run: WorkflowStatus(run.status))

    async def wait_async(
        self,
        until: Collection[WorkflowStatus] = WORKFLOW_TERMINAL_STATES,
        timeout_ms: int | None = None,
    ) -> HandleResult[WorkflowStatus]:
        """Run ``wait`` without blocking the event loop."""
        found = await wait_for_run_async(self.broker, self.workflow_id, _set_of(until), timeout_ms)
        return found.map(lambda run: WorkflowStatus(run.status))

    # Reading

    def status(self) -> HandleResult[WorkflowStatus]:
        """Return the status of the run."""
        return self._perform(control.status_script)

    async def status_async(self) -> HandleResult[WorkflowStatus]:
        """Run ``status`` without blocking the event loop."""
        return await self._perform_async(control.status_script)

    def info(self) -> HandleResult[WorkflowInfo]:
        """Describe the run, and list the paused runs below it."""
        return self._perform(control.info_script)

    async def info_async(self) -> HandleResult[WorkflowInfo]:
        """Run ``info`` without blocking the event loop."""
        return await self._perform_async(control.info_script)

    def result_for(self, node: ValueNode[V] | NodeKey[V]) -> TaskResult[V, TaskError]:
        """Return the result of one node without waiting. A large result takes a second query. Errors:
        RESULT_NOT_READY while there is no result, UPSTREAM_SKIPPED for a skipped node, RESULT_TOO_LARGE
        above 1 GiB, NODE_NOT_FOUND, WORKFLOW_NOT_FOUND, and WORKFLOW_CTX_MISSING_ID for a node that was
        not built into a workflow.
        """
        script = partial(self._result_script, node=node, node_id=_id_of(node))
        return self._perform(script).unwrap_or_else(as_error_result)

    async def result_for_async(self, node: ValueNode[V] | NodeKey[V]) -> TaskResult[V, TaskError]:
        """Run ``result_for`` without blocking the event loop."""
        script = partial(self._result_script, node=node, node_id=_id_of(node))
        return (await self._perform_async(script)).unwrap_or_else(as_error_result)

    def results(self) -> HandleResult[dict[str, TaskResult[Any, TaskError]]]:
        """Return the available results of all nodes, by node id.

        RESULT_TOO_LARGE replaces each result above 1 GiB, and all results beyond the first 1 GiB in
        total.
        """
        return self._perform(self._results_script)

    async def results_async(self) -> HandleResult[dict[str, TaskResult[Any, TaskError]]]:
        """Run ``results`` without blocking the event loop."""
        return await self._perform_async(self._results_script)

    def tasks(self, *, include_results: bool = True) -> HandleResult[list[WorkflowTaskInfo]]:
        """Describe the nodes in index order, each map node followed by its items."""
        return self._perform(partial(self._tasks_script, results=include_results))

    async def tasks_async(
        self, *, include_results: bool = True
    ) -> HandleResult[list[WorkflowTaskInfo]]:
        """Run ``tasks`` without blocking the event loop."""
        return await self._perform_async(partial(self._tasks_script, results=include_results))

    def draw(self) -> HandleResult[str]:
        """Return the graph of the run and the runs below it as text for a terminal.

        Example:
            print(handle.draw().unwrap())
        """
        return self._perform(_drawing_script)

    async def draw_async(self) -> HandleResult[str]:
        """Run ``draw`` without blocking the event loop."""
        return await self._perform_async(_drawing_script)

    # Control

    def pause(self, *, reason: str | None = None) -> HandleResult[bool]:
        """Pause the run and the runs below it; return True if the run was RUNNING. Running tasks
        continue and their results are kept; no other task or retry starts.
        """
        return self._change("pause_run", control.pause_script, reason)

    async def pause_async(self, *, reason: str | None = None) -> HandleResult[bool]:
        """Run ``pause`` without blocking the event loop."""
        return await self._change_async("pause_run", control.pause_script, reason)

    def resume(self, *, retry_failed: bool = False) -> HandleResult[bool]:
        """Resume a paused run and the paused runs below it; return True if the run was paused. Failed
        nodes stay failed. With ``retry_failed``, failed nodes are retried, and a FAILED run restarts
        from its failures.
        """
        script = partial(control.resume_script, retry_failed=retry_failed)
        return self._change("resume_run", script)

    async def resume_async(self, *, retry_failed: bool = False) -> HandleResult[bool]:
        """Run ``resume`` without blocking the event loop."""
        script = partial(control.resume_script, retry_failed=retry_failed)
        return await self._change_async("resume_run", script)

    def retry(self, node: AnyNode | NodeKey[Any] | str | None = None) -> HandleResult[None]:
        """Retry one failed node, or all failed nodes; nodes skipped because of the failure wait again.

        A FAILED or PAUSED run continues. Successful nodes keep their results. Errors: NODE_NOT_FOUND,
        NOTHING_TO_RETRY, or WORKFLOW_NOT_RETRYABLE.
        """
        script = partial(control.retry_script, node_ids=_nodes_named(node))
        return self._change("retry_run", script)

    async def retry_async(
        self, node: AnyNode | NodeKey[Any] | str | None = None
    ) -> HandleResult[None]:
        """Run ``retry`` without blocking the event loop."""
        script = partial(control.retry_script, node_ids=_nodes_named(node))
        return await self._change_async("retry_run", script)

    def cancel(self, *, interrupt: bool = False, reason: str | None = None) -> HandleResult[None]:
        """Cancel the run and the runs below it; waiting tasks never start.

        Running tasks are left to finish, or stopped if ``interrupt`` is set. Cancelling a run that has
        ended has no effect and is not an error.
        """
        script = partial(control.cancel_script, interrupt=interrupt, reason=reason)
        return self._change("cancel_run", script, reason).map(_nothing)

    async def cancel_async(
        self, *, interrupt: bool = False, reason: str | None = None
    ) -> HandleResult[None]:
        """Run ``cancel`` without blocking the event loop."""
        script = partial(control.cancel_script, interrupt=interrupt, reason=reason)
        return (await self._change_async("cancel_run", script, reason)).map(_nothing)

    def signal(self, name: str, value: object = None) -> HandleResult[SignalDelivery]:
        """Send a value to the ``SignalNode`` that waits for this signal, or store it for the next such
        node; each signal is delivered once. Errors: SIGNAL_NOT_FOUND if no node of the run has this
        name, WORKFLOW_ENDED if the run has ended, VALIDATION_FAILED if the value is not of the declared
        type or the name is not text.
        """
        script = partial(self._signal_script, name=name, value=value)
        return self._change("signal_run", script, f"signal {name}")

    async def signal_async(self, name: str, value: object = None) -> HandleResult[SignalDelivery]:
        """Run ``signal`` without blocking the event loop."""
        script = partial(self._signal_script, name=name, value=value)
        return await self._change_async("signal_run", script, f"signal {name}")

    # Scripts

    def _perform(self, make_script: RunScript[V]) -> HandleResult[V]:
        return control.perform(self.broker, self.workflow_id, make_script)

    async def _perform_async(self, make_script: RunScript[V]) -> HandleResult[V]:
        return await control.perform_async(self.broker, self.workflow_id, make_script)

    def _change(
        self, verb: str, make_script: RunScript[V], reason: str | None = None
    ) -> HandleResult[V]:
        return control.change(self.broker, self.workflow_id, verb, make_script, reason)

    async def _change_async(
        self, verb: str, make_script: RunScript[V], reason: str | None = None
    ) -> HandleResult[V]:
        return await control.change_async(self.broker, self.workflow_id, verb, make_script, reason)

    def _needs_more(self, run: RunOutcome) -> bool:
        """Return whether a run's result needs more than its row: types, or a result omitted because of
        its size.
        """
        has_more = self._types.are_unread or _is_left_out(run)
        return run.status == WorkflowStatus.COMPLETED and has_more

    def _outcome_script(
        self, run_id: str, *, run: RunOutcome
    ) -> Script[HandleResult[TaskResult[T, TaskError]]]:
        yield from self._types.script(run_id)
        if not _is_left_out(run):
            return Ok(self._outcome(run))
        if run.result_bytes is not None and run.result_bytes > READ_BYTES_MAX:
            return Ok(too_large(f"workflow {run_id}", run.result_bytes))
        nodes: list[ResultNode] = yield read_result_nodes(run_id)
        parts = yield _reading(run_id, [node.task_index for node in nodes])
        texts = {part.task_index: text for part, text in whole_results(parts)}
        ends = {node.node_id: texts.get(node.task_index) for node in nodes}
        return Ok(
            self._outcome(run, {name: text for name, text in ends.items() if text is not None})
        )

    def _outcome(
        self, run: RunOutcome, ends: Mapping[str, str] | None = None
    ) -> TaskResult[T, TaskError]:
        result = run_result(run, self._types.known, self._output, ends)
        # Any other final status can be undone by a retry.
        if run.status == WorkflowStatus.COMPLETED:
            self._cached = result
        return result

    def _result_script(
        self, run_id: str, *, node: object, node_id: str | None
    ) -> Script[HandleResult[TaskResult[Any, TaskError]]]:
        if node_id is None:
            return Ok(error_result(ContractCode.WORKFLOW_CTX_MISSING_ID, NODE_WITHOUT_ID))
        found: list[NodeOutcome] = yield read_node(run_id, node_id, SMALL_RESULT_BYTES)
        row = one_or_none(found)
        if row is None:
            return control.no_such_run(run_id)
        if isinstance(node, NODE_KINDS):
            codec = result_codec(node)
        else:
            codec = (yield from self._types.script(run_id)).codec(node_id)
        text = row.result
        if row.task_index is not None and _is_left_out(row):
            ((_, text),) = whole_results((yield _reading(run_id, [row.task_index])))
        return Ok(node_result(run_id, node_id, row, text, codec))

    def _results_script(
        self, run_id: str
    ) -> Script[HandleResult[dict[str, TaskResult[Any, TaskError]]]]:
        found = yield from control.nodes_script(run_id)
        if isinstance(found, Err):
            return found
        rows = [row for row in found.value if row.status in _ENDED - {"SKIPPED"}]
        parts = yield _reading(run_id, [row.task_index for row in rows])
        return Ok(node_results(rows, parts, self._types.of(found.value)))

    def _tasks_script(
        self, run_id: str, *, results: bool
    ) -> Script[HandleResult[list[WorkflowTaskInfo]]]:
        found = yield from control.nodes_script(run_id)
        if isinstance(found, Err):
            return found
        rows, types = found.value, self._types.of(found.value)
        ended = [row.task_index for row in rows if results and row.status in _ENDED]
        parts: list[ResultPart] = (yield _reading(run_id, ended)) if ended else []
        of_nodes = node_results(rows, parts, types)
        infos = {row.task_index: [node_info(row, of_nodes.get(row.node_id))] for row in rows}
        maps = {row.task_index: row for row in rows if row.kind == "map"}
        if maps:
            items: list[ItemRow] = yield read_items(run_id, READ_BYTES_MAX if results else 0)
            for item in items:
                info = item_info(item, maps[item.task_index], types, with_result=results)
                infos[item.task_index].append(info)
        return Ok([info for group in infos.values() for info in group])

    def _signal_script(
        self, run_id: str, *, name: str, value: object
    ) -> Script[HandleResult[SignalDelivery]]:
        types = yield from self._types.script(run_id)
        declared = types.signal_type(name)
        return (yield from control.signal_script(run_id, name, value, declared))


def _drawing_script(run_id: str) -> Script[HandleResult[str]]:
    report = yield from report_script(run_id)
    if report is None:
        return control.no_such_run(run_id)
    lines = draw(report)
    return Ok("\n".join("".join(piece.text for piece in line) for line in lines))


def _nothing(_: object) -> None:
    return None


def _is_left_out(row: RunOutcome | NodeOutcome) -> bool:
    """Return whether a result was omitted from the row because of its size."""
    return row.result is None and row.result_bytes is not None


def _reading(run_id: str, indexes: Sequence[int]) -> Step:
    """Return the statement that reads these nodes' results, up to the size limit of one call."""
    return read_results([run_id] * len(indexes), list(indexes), READ_BYTES_MAX)


def _id_of(node: object) -> str | None:
    return node if isinstance(node, str) else node_id_of(node)


def _nodes_named(node: object) -> list[str] | None:
    """Return a list with the id of the node to retry; return None to retry all failed nodes."""
    return None if node is None else [_id_of(node) or ""]


def _until(timeout_ms: int | None) -> frozenset[WorkflowStatus]:
    # A single check accepts any status.
    return frozenset(WorkflowStatus) if timeout_ms == 0 else _READABLE


def _set_of(until: Collection[WorkflowStatus]) -> frozenset[WorkflowStatus]:
    # Wrap a single status, because a string would be read as a set of letters.
    return frozenset([until]) if isinstance(until, str) else frozenset(until)  # type: ignore[list-item]
