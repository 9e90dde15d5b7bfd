"""What the type checker knows about runs: starts, handles, results and answers.

Nothing here runs; see ``sending.py`` for how errors are proved.
"""

from __future__ import annotations

from typing import Any, assert_type

from horsies import (
    HandleResult,
    MapNode,
    NodeKey,
    SignalDelivery,
    TaskError,
    TaskResult,
    WorkflowHandle,
    WorkflowInfo,
    WorkflowStartError,
    WorkflowStartResult,
    WorkflowStatus,
    WorkflowTaskInfo,
    WorkflowTerminalResults,
    start_many,
    start_many_async,
    start_workflow,
    start_workflow_async,
)
from tests.typed.workflows import app, count, double, pages

first = count.node()(page="x")
mapped = MapNode(count, over=pages.node()())
spec = app.workflow("one", [first], output=first, definition_key="typed.one")
ends = app.workflow("ends", [first], definition_key="typed.ends")


def starting(error: WorkflowStartError) -> None:
    assert_type(spec.start(), WorkflowStartResult[WorkflowHandle[int]])
    assert_type(spec.start(workflow_key="k", transaction=object()).unwrap(), WorkflowHandle[int])
    assert_type(spec.retry_start(error).unwrap(), WorkflowHandle[int])
    assert_type(ends.start().unwrap(), WorkflowHandle[WorkflowTerminalResults])
    assert_type(start_workflow(spec, app.get_broker()).unwrap(), WorkflowHandle[int])
    assert_type(start_many([spec, spec]).unwrap(), list[WorkflowHandle[int]])
    assert_type(app.workflow_handle("id"), WorkflowHandle[Any])
    spec.start("id", "key")  # type: ignore[call-arg]


async def starting_async(error: WorkflowStartError) -> None:
    assert_type((await spec.start_async()).unwrap(), WorkflowHandle[int])
    assert_type((await spec.retry_start_async(error)).unwrap(), WorkflowHandle[int])
    assert_type((await start_many_async([spec])).unwrap(), list[WorkflowHandle[int]])
    started = await start_workflow_async(spec, app.get_broker())
    assert_type(started.unwrap(), WorkflowHandle[int])


def reading(handle: WorkflowHandle[int], key: NodeKey[str]) -> None:
    assert_type(handle.get(timeout_ms=5), TaskResult[int, TaskError])
    assert_type(handle.wait(until={WorkflowStatus.PAUSED}), HandleResult[WorkflowStatus])
    assert_type(handle.status(), HandleResult[WorkflowStatus])
    assert_type(handle.info(), HandleResult[WorkflowInfo])
    assert_type(handle.result_for(first), TaskResult[int, TaskError])
    handle.result_for(double.node())  # type: ignore[arg-type]
    assert_type(handle.result_for(key), TaskResult[str, TaskError])
    assert_type(handle.result_for(mapped), TaskResult[list[TaskResult[int, TaskError]], TaskError])
    assert_type(handle.results(), HandleResult[dict[str, TaskResult[Any, TaskError]]])
    assert_type(handle.tasks(), HandleResult[list[WorkflowTaskInfo]])
    handle.get().ok_value.upper()  # type: ignore[attr-defined]


async def steering(handle: WorkflowHandle[int]) -> None:
    assert_type(handle.pause(), HandleResult[bool])
    assert_type(await handle.resume_async(retry_failed=True), HandleResult[bool])
    assert_type(handle.retry(first), HandleResult[None])
    assert_type(await handle.cancel_async(interrupt=True, reason="why"), HandleResult[None])
    assert_type(handle.signal("go", {"any": "json"}), HandleResult[SignalDelivery])
    handle.retry(7)  # type: ignore[arg-type]
