from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from horsies import (
    ContractCode,
    MapNode,
    NodeKey,
    OperationalErrorCode,
    OutcomeCode,
    SignalNode,
    SubWorkflowError,
    SubWorkflowNode,
    SubWorkflowSummary,
    TaskError,
    TaskResult,
    WorkflowContext,
    WorkflowContextMissingIdError,
    WorkflowDefinition,
    WorkflowMeta,
    WorkflowStatus,
)
from horsies.codec.calls import CallSignature
from horsies.codec.results import ResultCodec, decode_untyped, encode_task_error
from horsies.workflow.nodes.context import UpstreamResult
from tests.support.apps.shop import app, number, square

SUMMARY = SubWorkflowSummary[Any](
    status=WorkflowStatus.FAILED,
    output={"a": [1]},
    total_tasks=3,
    failed_tasks=1,
    error_summary="no",
)
CHILD_ERROR = SubWorkflowError(
    error_code=OutcomeCode.SUBWORKFLOW_FAILED,
    message="the child failed",
    sub_workflow_id="01900000-0000-7000-8000-000000000001",
    sub_workflow_summary=SUMMARY,
)


@dataclass(frozen=True)
class Point:
    x: int
    y: int


class PaymentError(TaskError):
    gateway: str


@app.task("point")
def point() -> TaskResult[Point, TaskError]:
    return TaskResult(ok=Point(1, 2))


@app.task("pay")
def pay() -> TaskResult[int, PaymentError]:
    return TaskResult(err=PaymentError(error_code="DECLINED", gateway="north"))


class Child(WorkflowDefinition[Point]):
    name = "child"
    definition_key = "context.child"
    only = point.node()()

    class Meta:
        output = "only"


def context(**results: UpstreamResult | TaskResult[Any, TaskError]) -> WorkflowContext:
    return WorkflowContext("run", 2, "report", results)


def test_a_result_comes_back_with_the_type_of_its_node() -> None:
    ctx = context(p=UpstreamResult('{"ok":{"x":1,"y":2}}'))
    assert ctx.result_for(point.node(node_id="p")()) == TaskResult(ok=Point(1, 2))


def test_a_node_is_looked_up_by_its_id_not_by_its_identity() -> None:
    ctx = context(n=UpstreamResult('{"ok":7}'))
    assert ctx.result_for(number.node(node_id="n")(n=99)).ok_value == 7
    assert ctx.result_for(NodeKey("n")) == TaskResult(ok=7)


def test_a_key_reads_by_the_codec_that_came_with_the_result() -> None:
    typed = UpstreamResult('{"ok":{"x":1,"y":2}}', codec=ResultCodec.of(Point, TaskError))
    assert context(p=typed).result_for(NodeKey("p")).ok_value == Point(1, 2)
    untyped = UpstreamResult('{"ok":{"x":1,"y":2}}')
    assert context(p=untyped).result_for(NodeKey("p")).ok_value == {"x": 1, "y": 2}


def test_results_of_every_kind_of_node_are_typed() -> None:
    source = number.node(node_id="n")()
    ctx = context(
        m=UpstreamResult('{"ok":[{"ok":1},{"err":{"error_code":"BAD"}}]}'),
        s=UpstreamResult('{"ok":{"x":3,"y":4}}'),
        c=UpstreamResult('{"ok":{"x":5,"y":6}}'),
    )
    mapped = ctx.result_for(MapNode(square, over=source, node_id="m")).ok_value
    assert [result.is_ok() for result in mapped] == [True, False]
    assert mapped[1].err_value.error_code == "BAD"
    signal = SignalNode("go", value_type=Point, node_id="s")
    assert ctx.result_for(signal).ok_value == Point(3, 4)
    assert ctx.result_for(SubWorkflowNode(Child, node_id="c")).ok_value == Point(5, 6)


def test_a_result_made_by_hand_is_handed_out_as_it_is() -> None:
    result: TaskResult[Any, TaskError] = TaskResult(ok=object())
    assert context(n=result).result_for(NodeKey("n")) is result


def test_an_error_of_the_user_s_own_type_arrives_as_it_was() -> None:
    stored = pay.definition.results.encode(pay()).unwrap()
    error = context(p=UpstreamResult(stored)).result_for(pay.node(node_id="p")()).err_value
    assert isinstance(error, PaymentError)
    assert error.gateway == "north"


def test_an_unreadable_result_is_an_error_result() -> None:
    error = context(n=UpstreamResult('{"ok":"x"}')).result_for(number.node(node_id="n")()).err_value
    assert error.error_code is OperationalErrorCode.RESULT_DESERIALIZATION_ERROR


def test_a_context_without_a_node_raises_a_key_error() -> None:
    ctx = context()
    with pytest.raises(KeyError, match="not in workflow_ctx_from"):
        ctx.result_for(NodeKey("n"))
    with pytest.raises(KeyError):
        ctx.summary_for(NodeKey("n"))
    assert not ctx.has_result(NodeKey("n"))
    assert not ctx.has_summary(NodeKey("n"))


def test_a_node_without_an_id_is_a_mistake_of_its_own() -> None:
    ctx, node = context(), number.node()()
    with pytest.raises(WorkflowContextMissingIdError):
        ctx.result_for(node)
    with pytest.raises(WorkflowContextMissingIdError):
        ctx.summary_for(SubWorkflowNode(Child))
    assert not ctx.has_result(node)
    assert not ctx.has_summary(SubWorkflowNode(Child))


def test_a_task_that_lets_this_mistake_escape_fails_with_its_code() -> None:
    @app.task("forgetful")
    def forgetful(workflow_ctx: WorkflowContext | None = None) -> TaskResult[int, TaskError]:
        assert workflow_ctx is not None
        return workflow_ctx.result_for(number.node()())

    assert forgetful(context()).err_value.error_code is ContractCode.WORKFLOW_CTX_MISSING_ID


def test_something_that_is_no_node_is_refused() -> None:
    with pytest.raises(TypeError):
        context().result_for("n")  # type: ignore[arg-type]


def test_the_summary_of_a_child_run_is_read_from_what_is_stored() -> None:
    stored = UpstreamResult('{"ok":1}', summary_json=SUMMARY.model_dump_json())
    ctx = context(c=stored, n=UpstreamResult('{"ok":1}'))
    child = SubWorkflowNode(Child, node_id="c")
    assert ctx.has_summary(child)
    assert ctx.summary_for(child) == SUMMARY
    assert not ctx.has_summary(NodeKey("n"))
    with pytest.raises(KeyError):
        ctx.summary_for(NodeKey("n"))


def test_a_corrupt_summary_is_an_error_and_never_guessed() -> None:
    ctx = context(c=UpstreamResult('{"ok":1}', summary_json='{"status":"STRANGE"}'))
    with pytest.raises(ValueError, match="status"):
        ctx.summary_for(NodeKey("c"))


def test_summaries_may_be_given_by_hand() -> None:
    ctx = WorkflowContext("run", 0, "t", summaries={"c": SUMMARY})
    assert ctx.summary_for(NodeKey("c")) is SUMMARY
    assert ctx.has_summary(NodeKey("c"))


def test_results_are_not_shown() -> None:
    assert "hunter2" not in repr(context(n=UpstreamResult('{"ok":"hunter2"}')))
    assert "hunter2" not in repr(SUMMARY.model_copy(update={"output": "hunter2"}))


def test_meta_says_which_node_a_task_is() -> None:
    assert WorkflowMeta("run", 3, "report").task_index == 3


def test_the_error_of_a_child_run_survives_being_stored() -> None:
    codec = ResultCodec.of(int, TaskError)
    texts = [codec.encode(TaskResult(err=CHILD_ERROR)).unwrap(), encode_task_error(CHILD_ERROR)]
    for text in texts:
        assert codec.decode(text).unwrap().err_value == CHILD_ERROR
        assert decode_untyped(text).unwrap().err_value == CHILD_ERROR
        assert ResultCodec.of(int, PaymentError).decode(text).unwrap().err_value == CHILD_ERROR


def test_the_error_of_a_child_run_survives_inside_other_values() -> None:
    codec = ResultCodec.of(list[TaskResult[int, TaskError]], TaskError)
    results = [
        TaskResult(err=CHILD_ERROR),
        TaskResult(ok=1),
        TaskResult(err=TaskError(message="m")),
    ]
    text = codec.encode(TaskResult(ok=results)).unwrap()
    back = codec.decode(text).unwrap().ok_value
    assert back == results
    assert [type(result.err) for result in back] == [SubWorkflowError, type(None), TaskError]


def test_the_error_of_a_child_run_survives_as_a_parameter() -> None:
    def consume(result: TaskResult[int, TaskError]) -> None: ...

    signature = CallSignature.of(consume)
    text = signature.encode_keywords({"result": TaskResult(err=CHILD_ERROR)}).unwrap()
    assert signature.decode_keywords(text).unwrap()["result"].err_value == CHILD_ERROR


def test_an_error_of_a_foreign_type_is_adopted_by_a_parameter() -> None:
    def consume(result: TaskResult[int, TaskError]) -> None: ...

    stored = pay.definition.results.encode(pay()).unwrap()
    signature = CallSignature.of(consume)
    error = signature.decode_keywords(f'{{"result":{stored}}}').unwrap()["result"].err_value
    assert (error.error_code, error.data["gateway"]) == ("DECLINED", "north")


@pytest.mark.parametrize(
    "stored", ['{"ok":1,"err":null}', "{}", '{"ok":1,"more":2}', '{"ok":"one"}', "1"]
)
def test_what_is_no_result_is_not_read_as_one(stored: str) -> None:
    def consume(result: TaskResult[int, TaskError]) -> None: ...

    assert CallSignature.of(consume).decode_keywords(f'{{"result":{stored}}}').is_err()


def test_a_dictionary_is_not_a_result() -> None:
    def consume(result: TaskResult[int, TaskError]) -> None: ...

    assert CallSignature.of(consume).encode_keywords({"result": {"ok": 1}}).is_err()


def test_injected_parameters_are_not_asked_of_senders() -> None:
    def task(
        a: int, workflow_ctx: WorkflowContext, b: int = 2, *rest: int, workflow_meta: WorkflowMeta
    ) -> None: ...

    signature = CallSignature.of(task)
    assert signature.injected == {"workflow_ctx", "workflow_meta"}
    assert signature.names.shown == "a, b"
    assert signature.encode_call((1,), {"b": 3}).is_ok()
    assert signature.encode_call((1, 3), {}).is_err(), "the second position is not b"
    assert signature.encode_call((1,), {"workflow_ctx": None}).is_err()
    call = signature.decode_call("[1]", '{"b":3}').unwrap()
    assert call.kwargs == {"workflow_ctx": None, "workflow_meta": None, "b": 3}


def test_injected_parameters_with_defaults_keep_them_outside_of_workflows() -> None:
    def task(workflow_meta: WorkflowMeta | None = None) -> None: ...

    signature = CallSignature.of(task)
    assert signature.decode_call("[]", "{}").unwrap().kwargs == {}
    assert signature.required_injected == frozenset()
