from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from horsies import (
    AnyNode,
    ErrorCode,
    MapNode,
    NodeKey,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    TaskNode,
    WorkflowDefinition,
    WorkflowValidationError,
    from_node,
    slugify,
)
from horsies.workflow.nodes.factory import FromNode
from tests.support.apps.shop import double, number, report, square, word, workflow


class Child(WorkflowDefinition[int]):
    name = "child"
    definition_key = "nodes.child"
    only = number.node()(n=1)

    class Meta:
        output = "only"


def test_a_factory_makes_nodes_that_hold_options_and_arguments() -> None:
    node = number.node(node_id="n", queue="q", priority=3)(n=7)
    assert (node.name, node.node_id, node.queue, node.priority) == ("number", "n", "q", 3)
    assert node.kwargs == {"n": 7}
    assert node.index is None


def test_a_result_handed_on_becomes_a_dependency() -> None:
    first, other = number.node()(n=1), number.node()()
    node = double.node(waits_for=[other])(value=from_node(first), factor=3)
    assert list(node.waits_for) == [other, first]
    assert node.args_from == {"value": first}
    assert node.kwargs == {"factor": 3}


def test_a_dependency_named_twice_by_a_factory_counts_once() -> None:
    first = number.node()()
    assert list(double.node(waits_for=[first])(value=from_node(first)).waits_for) == [first]


def test_nodes_of_one_factory_share_no_list() -> None:
    factory = number.node(waits_for=[number.node()()])
    one, two = factory(n=1), factory(n=2)
    assert one.waits_for is not two.waits_for


def test_positional_parameters_of_a_node_are_refused() -> None:
    with pytest.raises(WorkflowValidationError) as caught:
        number.node()(1)
    assert caught.value.code is ErrorCode.WORKFLOW_POSITIONAL_ARGS_NOT_SUPPORTED


def test_a_parameter_cannot_come_from_two_nodes() -> None:
    first = number.node()()
    with pytest.raises(WorkflowValidationError) as caught:
        double.node(args_from={"value": first}, waits_for=[first])(value=from_node(first))
    assert caught.value.code is ErrorCode.WORKFLOW_KWARGS_ARGS_FROM_OVERLAP


def test_only_results_of_nodes_can_be_handed_on() -> None:
    with pytest.raises(WorkflowValidationError) as caught:
        from_node(number)  # type: ignore[arg-type]
    assert caught.value.code is ErrorCode.WORKFLOW_INVALID_ARGS_FROM


def test_every_kind_of_node_can_be_handed_on() -> None:
    first = number.node()()
    nodes: list[AnyNode] = [
        first,
        SubWorkflowNode(Child),
        MapNode(square, over=first),
        SleepNode(1),
        SignalNode("go"),
    ]
    assert [cast(Any, from_node)(node) for node in nodes] == [FromNode(node) for node in nodes]


def test_nodes_are_named_after_what_they_run() -> None:
    first = number.node()()
    assert first.name == "number"
    assert SubWorkflowNode(Child).name == "child"
    assert MapNode(square, over=first).name == "square"
    assert SleepNode(1).name == "sleep"
    assert SignalNode("approve").name == "approve"


def test_a_key_is_the_id_of_a_node_and_may_be_written_by_hand() -> None:
    assert number.node(node_id="n")().key() == NodeKey("n")
    with pytest.raises(WorkflowValidationError) as caught:
        number.node()().key()
    assert caught.value.code is ErrorCode.WORKFLOW_INVALID_NODE_ID


def test_a_key_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        NodeKey("n").node_id = "m"  # type: ignore[misc]


def test_a_node_shows_no_arguments() -> None:
    assert repr(number.node(node_id="n")(n=41)) == "TaskNode('number', node_id='n')"


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("nightly report", "nightly_report"),
        ("a-b:c.d_e", "a-b:c.d_e"),
        ("Grüße (EU)", "Gre_EU"),
        ("☃", "_"),
        ("", "_"),
    ],
)
def test_a_name_becomes_an_identifier(text: str, slug: str) -> None:
    assert slugify(text) == slug


def test_a_node_given_no_id_gets_one_from_the_workflow_and_its_place() -> None:
    first, second = number.node()(), number.node()()
    workflow([first, second], name="my shop")
    assert [first.node_id, second.node_id] == ["my_shop:0", "my_shop:1"]
    assert [first.index, second.index] == [0, 1]


def test_a_derived_id_is_derived_anew_and_a_given_one_is_kept() -> None:
    derived, given = number.node()(), number.node(node_id="mine")()
    workflow([derived, given], name="first")
    again = workflow([given, derived], name="second")
    assert [node.node_id for node in again.tasks] == ["mine", "second:1"]
    assert derived.node_id == "second:1"


def test_an_id_set_by_hand_counts_as_given() -> None:
    node = number.node()()
    workflow([node], name="first")
    node.node_id = "mine"
    assert workflow([node], name="second").tasks[0].node_id == "mine"


def test_injected_parameters_need_not_be_given() -> None:
    node = report.node()(title="x")
    assert workflow([node]).tasks[0].kwargs == {"title": "x"}  # type: ignore[union-attr]


def test_task_nodes_can_be_written_out() -> None:
    first = TaskNode(number, kwargs={"n": 2})
    second = TaskNode(fn=double, args_from={"value": first}, waits_for=[first])
    assert workflow([first, second]).tasks[1].waits_for[0].name == "number"


def refused(build: Callable[[], object]) -> tuple[str, str | None]:
    with pytest.raises(WorkflowValidationError) as caught:
        build()
    return caught.value.message, caught.value.help_text


@pytest.mark.parametrize("option", ["timeout", "n"])
def test_an_unknown_option_of_a_node_is_refused_by_the_first_call(option: str) -> None:
    options: dict[str, Any] = {option: 3}
    message, help_text = refused(lambda: number.node(**options))
    assert message == f"A node of task 'number' has no option {option!r}."
    assert help_text is not None
    assert "timeout_ms, retry_policy; the parameters of the task belong in the second" in help_text


def test_a_node_without_from_node_is_refused_with_the_way_to_pass_its_result() -> None:
    first = number.node()()
    node = double.node()(value=cast(Any, first))
    message, help_text = refused(lambda: workflow([first, node], name="w"))
    assert message == "Node 'w:1' of workflow 'w' passes a node itself as 'value', not its result."
    assert help_text == "write value=from_node(...) in the call of task.node()"


@pytest.mark.parametrize("marked", [True, False])
def test_a_node_among_the_arguments_of_a_send_is_refused_with_its_place(marked: bool) -> None:
    node = number.node()()
    sent = number.send(cast(Any, from_node(node) if marked else node))
    assert "; nodes and from_node(...) belong in task.node()(...)" in sent.unwrap_err().message


def test_a_node_of_another_workflow_is_named_by_its_place_in_this_one() -> None:
    text = word.node()()
    workflow([text], name="earlier")
    node = square.node()(item=cast(Any, from_node(text)))
    message, help_text = refused(lambda: workflow([number.node()(), text, node], name="w"))
    assert "Node 'w:2' of workflow 'w' passes the result of 'w:1' to task" in message
    assert "earlier" not in message
    assert help_text == "annotate it str, or pass another node"


def test_a_whole_result_of_another_type_is_refused_with_the_annotation_that_fits() -> None:
    text = word.node()()
    node = double.node()(value=cast(Any, from_node(text)))
    _, help_text = refused(lambda: workflow([text, node]))
    assert help_text == "annotate it TaskResult[str, TaskError], or pass another node"
