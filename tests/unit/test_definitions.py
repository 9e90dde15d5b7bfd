from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

import pytest

from horsies import (
    ErrorCode,
    MapNode,
    NodeKey,
    OnError,
    SubWorkflowNode,
    SuccessCase,
    SuccessPolicy,
    TaskError,
    TaskResult,
    WorkflowDefinition,
    WorkflowSpec,
    WorkflowValidationError,
    from_node,
)
from horsies.workflow.definition import definition_by_key
from horsies.workflow.nodes.type_compat import UNKNOWN_TYPE
from tests.support.apps.shop import app, codes_of, double, number, numbers, square, total, word

T = TypeVar("T")


class Doubling(WorkflowDefinition[int]):
    name = "doubling"
    definition_key = "definitions.doubling"
    first = number.node()(n=2)
    second = double.node()(value=from_node(first))
    last = double.node(node_id="finish")(value=from_node(second))

    class Meta:
        output = "finish"
        on_error = OnError.PAUSE
        success_policy = SuccessPolicy([SuccessCase(["finish"])], optional=["first"])


class Repeating(WorkflowDefinition[int]):
    name = "repeating"
    definition_key = "definitions.repeating"

    @classmethod
    def build_with(cls, app: Any, *, times: int, start: int = 1) -> WorkflowSpec[int]:
        nodes = [number.node(node_id="start")(n=start)]
        for index in range(times):
            nodes.append(double.node(node_id=f"double{index}")(value=from_node(nodes[-1])))
        return WorkflowSpec(cls.name, nodes, output=nodes[-1])


def test_a_definition_builds_a_specification_of_its_nodes() -> None:
    spec = Doubling.build(app)
    assert (spec.name, spec.definition_key) == ("doubling", "definitions.doubling")
    assert [node.node_id for node in spec.tasks] == ["first", "second", "finish"]
    assert spec.on_error is OnError.PAUSE
    assert spec.output is spec.tasks[2]
    assert spec.success_policy is not None
    assert spec.success_policy.cases[0].required == (spec.tasks[2],)


def test_nodes_get_their_attribute_names_as_ids_before_any_build() -> None:
    assert [(name, node.node_id) for name, node in Doubling.get_workflow_nodes()] == [
        ("first", "first"),
        ("second", "second"),
        ("last", "finish"),
    ]


def test_building_twice_gives_independent_specifications() -> None:
    one, two = Doubling.build(app), Doubling.build_with(app)
    assert one.tasks[0] is not two.tasks[0]
    assert Doubling.first.queue is None


def test_a_definition_is_found_by_its_key() -> None:
    assert definition_by_key("definitions.doubling") is Doubling
    assert definition_by_key("definitions.nowhere") is None


def test_a_key_belongs_to_one_class() -> None:
    class First(WorkflowDefinition[None]):
        definition_key = "definitions.taken"

    with pytest.raises(WorkflowValidationError) as caught:

        class Second(WorkflowDefinition[None]):
            definition_key = "definitions.taken"

    assert caught.value.code is ErrorCode.WORKFLOW_DUPLICATE_DEFINITION_KEY
    assert definition_by_key("definitions.taken") is First


def test_a_class_made_again_takes_its_own_place() -> None:
    def make() -> type[WorkflowDefinition[None]]:
        class Again(WorkflowDefinition[None]):
            definition_key = "definitions.again"

        return Again

    make()
    second = make()
    assert definition_by_key("definitions.again") is second


def test_a_class_without_a_key_of_its_own_is_abstract_and_shares_its_nodes() -> None:
    class Shared(WorkflowDefinition[int]):
        name = "shared"
        first = number.node()(n=2)

    class One(Shared):
        definition_key = "definitions.one"
        second = double.node()(value=from_node(Shared.first))

        class Meta:
            output = "second"

    class Two(One):
        definition_key = "definitions.two"

    assert codes_of(lambda: Shared.build(app)) == ["HRS-016"]
    assert [node.node_id for node in One.build(app).tasks] == ["first", "second"]
    assert Two.build(app).definition_key == "definitions.two"
    assert Shared.own_key() is None


def test_a_definition_needs_a_name_nodes_and_a_key() -> None:
    class Nameless(WorkflowDefinition[Any]):
        definition_key = "definitions.nameless"
        first = number.node()()

    class Empty(WorkflowDefinition[Any]):
        name = "empty"
        definition_key = "definitions.empty"

    class Blank(WorkflowDefinition[Any]):
        name = "blank"
        definition_key = "  "
        first = number.node()()

    assert codes_of(lambda: Nameless.build(app)) == ["HRS-001"]
    assert codes_of(lambda: Empty.build(app)) == ["HRS-002"]
    assert codes_of(lambda: Blank.build(app)) == ["HRS-016"]


def test_the_declared_type_must_be_that_of_the_output() -> None:
    class Wrong(WorkflowDefinition[str]):
        name = "wrong"
        definition_key = "definitions.wrong"
        first = number.node()()

        class Meta:
            output = "first"

    class Nothing(WorkflowDefinition[int]):
        name = "nothing"
        definition_key = "definitions.nothing"
        first = number.node()()

    assert codes_of(lambda: Wrong.build(app)) == ["HRS-025"]
    assert codes_of(lambda: Nothing.build(app)) == ["HRS-025"]


def test_without_output_the_type_is_none_any_or_not_declared() -> None:
    class Closed(WorkflowDefinition[None]):
        name = "closed"
        definition_key = "definitions.closed"
        first = number.node()()

    class Open(WorkflowDefinition[Any]):
        name = "open"
        definition_key = "definitions.open"
        first = number.node()()

    class Bare(WorkflowDefinition):  # type: ignore[type-arg]
        name = "bare"
        definition_key = "definitions.bare"
        first = number.node()()

    assert Closed.output_type() is type(None)
    assert Open.output_type() is Any
    assert Bare.output_type() is UNKNOWN_TYPE
    for definition in (Closed, Open, Bare):
        assert cast(Any, definition).build(app).output is None


def test_a_list_of_results_is_the_output_of_a_map() -> None:
    class Squares(WorkflowDefinition[list[TaskResult[int, TaskError]]]):
        name = "squares"
        definition_key = "definitions.squares"
        source = numbers.node()()
        squares = MapNode(square, over=source)
        sum = total.node()(results=from_node(squares))

        class Meta:
            output = NodeKey("squares")

    assert Squares.build(app).output is not None


def test_the_type_is_found_through_generic_bases() -> None:
    class Generic_(WorkflowDefinition[T], Generic[T]):
        name = "generic"

    class Concrete(Generic_[int]):
        definition_key = "definitions.concrete"
        first = number.node()()

        class Meta:
            output = "first"

    class Below(Concrete):
        definition_key = "definitions.below"

    assert Concrete.output_type() is int
    assert Below.output_type() is int
    assert Generic_.output_type() is UNKNOWN_TYPE
    assert Concrete.build(app).output is not None


def test_an_undeclared_type_is_that_of_the_output_node() -> None:
    class Undeclared(WorkflowDefinition):  # type: ignore[type-arg]
        name = "undeclared"
        definition_key = "definitions.undeclared"
        first = word.node()()

        class Meta:
            output = "first"

    assert Undeclared.output_type() is str


def test_parameters_shape_the_workflow() -> None:
    spec = Repeating.build_with(app, times=3)
    assert len(spec.tasks) == 4
    assert spec.definition_key == "definitions.repeating"
    assert spec.tasks[0].queue == "default"  # type: ignore[union-attr]


def test_a_specification_made_without_the_application_is_adopted() -> None:
    spec = Repeating.build_with(app, times=1)
    assert spec.broker is app.get_broker()


def test_build_with_must_make_a_new_specification_in_every_call() -> None:
    class Cached(WorkflowDefinition[int]):
        name = "cached"
        definition_key = "definitions.cached"
        kept: WorkflowSpec[int] | None = None

        @classmethod
        def build_with(cls, app: Any, *, fresh: bool) -> WorkflowSpec[int]:
            if fresh or cls.kept is None:
                node = number.node(node_id="n")()
                cls.kept = WorkflowSpec(cls.name, [node], output=node)
            return cls.kept

    Cached.build_with(app, fresh=True)
    assert codes_of(lambda: Cached.build_with(app, fresh=False)) == ["HRS-023"]


def test_build_with_must_not_return_anything_else() -> None:
    class Lost(WorkflowDefinition[int]):
        name = "lost"
        definition_key = "definitions.lost"

        @classmethod
        def build_with(cls, app: Any, *, kind: str) -> WorkflowSpec[int]:
            return cast(Any, None) if kind == "none" else Repeating.build_with(app, times=1)

    assert codes_of(lambda: Lost.build_with(app, kind="none")) == ["HRS-023"]
    assert codes_of(lambda: Lost.build_with(app, kind="foreign")) == ["HRS-023"]


def test_an_override_may_lean_on_the_class_it_extends() -> None:
    class Longer(Repeating):
        definition_key = "definitions.longer"

        @classmethod
        def build_with(cls, app: Any, *, times: int, start: int = 1) -> WorkflowSpec[int]:
            spec = super().build_with(app, times=times + 1, start=start)
            return WorkflowSpec(cls.name, spec.tasks, output=spec.tasks[-1])

    assert len(Longer.build_with(app, times=1).tasks) == 3


def test_build_with_of_another_type_of_output_is_refused() -> None:
    class Worded(WorkflowDefinition[int]):
        name = "worded"
        definition_key = "definitions.worded"

        @classmethod
        def build_with(cls, app: Any, *, text: str) -> WorkflowSpec[int]:
            node: Any = word.node(node_id="w")(text=text)
            return WorkflowSpec(cls.name, [node], output=node)

    assert codes_of(lambda: Worded.build_with(app, text="x")) == ["HRS-025"]


def test_build_with_must_be_a_classmethod() -> None:
    with pytest.raises(TypeError, match="classmethod"):

        class Plain(WorkflowDefinition[int]):
            def build_with(cls, app: Any) -> WorkflowSpec[int]:  # type: ignore[override]
                raise NotImplementedError


def test_what_a_class_takes_is_known_by_its_own_build_with() -> None:
    assert Doubling.build_signature() is None
    signature = Repeating.build_signature()
    assert signature is not None
    assert signature.names.shown == "times, start"
    assert signature.encode_keywords({"times": 2}).unwrap() == '{"times":2}'


def test_nodes_set_later_belong_to_the_definition() -> None:
    class Growing(WorkflowDefinition[None]):
        name = "growing"
        definition_key = "definitions.growing"

    Growing.added = SubWorkflowNode(Doubling)  # type: ignore[attr-defined]
    assert [node.node_id for node in Growing.build(app).tasks] == ["added"]
