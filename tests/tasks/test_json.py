"""Tasks, results and errors as JSON: for web frameworks by their pydantic schema, for others by to_dict."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter, ValidationError

from horsies import (
    Horsies,
    OutcomeCode,
    RetrievalCode,
    SubWorkflowError,
    SubWorkflowSummary,
    TaskAttemptInfo,
    TaskError,
    TaskInfo,
    TaskResult,
    TaskStatus,
    WorkflowStatus,
)
from horsies.monitoring import TaskPage
from tests.support.applications import NOWHERE, Call, Task
from tests.support.database import Database
from tests.support.rows import add_attempt, finish

RESULT: TypeAdapter[TaskResult[Any, TaskError]] = TypeAdapter(TaskResult[Any, TaskError])
INFO: TypeAdapter[TaskInfo] = TypeAdapter(TaskInfo)


class Invoice(BaseModel):
    """A value of a task."""

    number: int
    sent_at: datetime


@dataclass
class Line:
    """Another one."""

    text: str


def failed() -> TaskResult[Any, TaskError]:
    try:
        raise ValueError("no answer")
    except ValueError as raised:
        error = TaskError(
            error_code=OutcomeCode.TASK_TIMEOUT, message="slow", data={"n": 1}, exception=raised
        )
    return TaskResult(err=error)


@pytest.mark.parametrize(
    ("result", "plain"),
    [
        (TaskResult(ok=None), {"ok": None}),
        (TaskResult(ok=[1, "x"]), {"ok": [1, "x"]}),
        (TaskResult(ok=Line("a")), {"ok": {"text": "a"}}),
        (
            TaskResult(ok=Invoice(number=7, sent_at=datetime(2026, 1, 1, tzinfo=UTC))),
            {"ok": {"number": 7, "sent_at": "2026-01-01T00:00:00Z"}},
        ),
        (TaskResult(ok=TaskResult(ok=b"\xff")), {"ok": {"ok": "_w=="}}),
        (
            TaskResult(err=TaskError(error_code="NO_MONEY", message="poor")),
            {"err": {"error_code": "NO_MONEY", "message": "poor", "data": None, "exception": None}},
        ),
        (TaskResult(err="custom"), {"err": "custom"}),
    ],
)
def test_a_result_is_plain_json(result: TaskResult[Any, Any], plain: dict[str, Any]) -> None:
    assert result.to_dict() == plain
    json.dumps(result.to_dict())


def test_an_error_has_its_code_as_text_and_its_exception_described() -> None:
    plain = failed().to_dict()["err"]
    assert (plain["error_code"], plain["message"], plain["data"]) == (
        "TASK_TIMEOUT",
        "slow",
        {"n": 1},
    )
    assert plain["exception"]["type"] == "ValueError"
    assert "no answer" in plain["exception"]["traceback"]


def test_the_error_of_a_sub_workflow_keeps_its_fields() -> None:
    summary = SubWorkflowSummary[Any](status=WorkflowStatus.FAILED, failed_tasks=1)
    error = SubWorkflowError(sub_workflow_id="x", sub_workflow_summary=summary)
    plain = error.to_dict()
    assert plain["sub_workflow_id"] == "x"
    assert plain["sub_workflow_summary"]["status"] == "FAILED"


@pytest.mark.parametrize(
    "result",
    [
        TaskResult(ok={"a": [1, 2]}),
        TaskResult(ok=None),
        TaskResult(err=TaskError(error_code="NO_MONEY", message="poor")),
        TaskResult(err=TaskError(error_code=RetrievalCode.WAIT_TIMEOUT, data={"n": 1})),
    ],
)
def test_pydantic_writes_a_result_and_reads_it_back(result: TaskResult[Any, TaskError]) -> None:
    written = RESULT.dump_json(result)
    assert RESULT.validate_json(written) == result
    # A web framework parses the text of a request by itself.
    assert RESULT.validate_python(json.loads(written)) == result
    assert RESULT.validate_python(result) == result


@pytest.mark.parametrize("text", ['{"ok":1,"err":{}}', "{}", '{"value":1}', '{"err":{"code":1}}'])
def test_pydantic_refuses_anything_else(text: str) -> None:
    strict: TypeAdapter[Any] = TypeAdapter(TaskResult[int, TaskError])
    for validate, value in (
        (strict.validate_json, text),
        (strict.validate_python, json.loads(text)),
    ):
        if text == '{"err":{"code":1}}':  # adopted: a stored error of an unknown type
            assert validate(value).err_value.data == {"code": 1}
            continue
        with pytest.raises(ValidationError):
            validate(value)


def test_a_dictionary_is_still_no_result_to_a_codec() -> None:
    strict: TypeAdapter[Any] = TypeAdapter(TaskResult[int, TaskError])
    with pytest.raises(ValidationError):
        strict.validate_python({"ok": 1}, strict=True)


def test_the_state_of_a_task_is_json(
    app: Horsies, add: Task, connection: Database, call: Call
) -> None:
    handle = add.send(1).unwrap()
    add_attempt(connection, handle.task_id, outcome="FAILED", error_code="BROKE")
    finish(connection, handle.task_id, '{"ok":3}')
    info = call(app, handle, "info", include_result=True, include_attempts=True).unwrap()
    assert isinstance(info, TaskInfo)
    plain = info.to_dict()
    assert (plain["task_id"], plain["status"], plain["result"]) == (
        handle.task_id,
        "COMPLETED",
        {"ok": 3},
    )
    assert info.attempts is not None
    assert plain["attempts"] == [info.attempts[0].to_dict()]
    assert plain["attempts"][0]["outcome"] == "FAILED"
    assert json.loads(INFO.dump_json(info)) == plain
    for again in (INFO.validate_json(INFO.dump_json(info)), INFO.validate_python(plain)):
        assert again == info
        assert again.status is TaskStatus.COMPLETED
        assert again.attempts is not None
        assert isinstance(again.attempts[0], TaskAttemptInfo)


@pytest.mark.parametrize("result", [TaskResult(ok=[1]), failed()])
def test_encoders_without_a_schema_take_a_result_for_a_dictionary(
    result: TaskResult[Any, TaskError],
) -> None:
    assert dict(result) == ({"ok": [1]} if result.is_ok() else {"err": result.err_value})


def test_a_run_and_its_nodes_are_json(app: Horsies, add: Task, connection: Database) -> None:
    nodes = [add.node(node_id="first")(a=1)]
    handle = app.workflow("sum", nodes, definition_key="test.sum").start().unwrap()
    connection.execute(
        "UPDATE horsies_workflows SET status = 'FAILED', "
        """error = '{"error_code":{"__builtin_task_code__":"WORKFLOW_FAILED"}}'"""
    )
    run, (node,) = handle.info().unwrap(), handle.tasks().unwrap()
    assert run.to_dict()["error"]["error_code"] == "WORKFLOW_FAILED"
    assert (run.to_dict()["workflow_id"], run.to_dict()["status"]) == (handle.workflow_id, "FAILED")
    assert node.to_dict()["node_id"] == "first"
    for info in (run, node):
        adapter: TypeAdapter[Any] = TypeAdapter(type(info))
        assert adapter.validate_json(adapter.dump_json(info)) == info


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("adapter", [RESULT, INFO], ids=["result", "info"])
def test_a_web_framework_can_describe_them(adapter: TypeAdapter[Any], mode: Any) -> None:
    schema = json.dumps(adapter.json_schema(mode=mode))
    assert '"ok"' in schema
    assert '"error_code"' in schema


def test_fastapi_returns_them_as_they_are(app: Horsies, add: Task, connection: Database) -> None:
    handle = add.send(1).unwrap()
    finish(connection, handle.task_id, '{"ok":3}')
    info = handle.info(include_result=True).unwrap()
    api = FastAPI()

    def serve(path: str, value: object, kind: Any) -> None:
        @api.get(path, response_model=kind)
        def endpoint() -> Any:
            return value

    serve("/task", info, TaskInfo)
    serve("/task-without-a-model", info, None)
    serve("/result", handle.get(0), TaskResult[int, TaskError])
    serve("/page", app.tasks_where().unwrap(), TaskPage)

    async def answers() -> list[Any]:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            paths = ("/task", "/task-without-a-model", "/result", "/page", "/openapi.json")
            return [(await client.get(path)).raise_for_status().json() for path in paths]

    task, plain, result, page, schema = asyncio.run(answers())
    assert (task["task_id"], task["status"], task["result"]) == (
        handle.task_id,
        "COMPLETED",
        {"ok": 3},
    )
    assert (plain["status"], plain["result"]) == ("COMPLETED", {"ok": 3})
    assert result == {"ok": 3}
    assert [row["id"] for row in page["rows"]] == [handle.task_id]
    assert "TaskInfo" in schema["components"]["schemas"]


class Parcel(BaseModel):
    content: Any


@pytest.mark.parametrize(
    ("value", "parcel"),
    [
        ((1, 2), None),
        ({"sizes": (1, 2)}, None),
        ({1, 2}, None),
        (None, Parcel(content=(1, 2))),
        (None, Parcel(content=[{1, 2}])),
    ],
)
def test_a_tuple_or_a_set_for_any_is_refused(value: Any, parcel: Parcel | None) -> None:
    app = Horsies(NOWHERE)

    @app.task("keep")
    def keep(value: Any, parcel: Parcel | None) -> TaskResult[Any, TaskError]:
        return TaskResult(ok=value)

    refused = keep.send(value, parcel).unwrap_err()
    assert refused.code == "VALIDATION_FAILED"
    assert "would come back as list; annotate it with its type." in refused.message
