"""Every mistake in a workflow has its code, its place and its fix, and all are reported together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from horsies import (
    AppConfig,
    ConfigurationError,
    CustomQueueConfig,
    ErrorCode,
    Horsies,
    MapNode,
    MultipleValidationErrors,
    NodeKey,
    OnError,
    PayloadConfig,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    SuccessCase,
    SuccessPolicy,
    TaskDefinitionError,
    TaskError,
    TaskNode,
    TaskResult,
    WorkflowContext,
    WorkflowDefinition,
    WorkflowSpec,
    WorkflowValidationError,
    from_node,
)
from horsies.ids import new_id
from horsies.workflow.build.plan import plan
from tests.support.apps.shop import (
    BROKER,
    anything,
    app,
    codes_of,
    double,
    errors_of,
    maybe_double,
    number,
    numbers,
    picky,
    queued_app,
    report,
    square,
    word,
    workflow,
)

NAIVE = datetime(2026, 1, 1)


class Plain(WorkflowDefinition[int]):
    name = "plain"
    definition_key = "validation.plain"
    only = number.node()(n=1)

    class Meta:
        output = "only"


class Parametric(WorkflowDefinition[int]):
    name = "parametric"
    definition_key = "validation.parametric"

    @classmethod
    def build_with(
        cls,
        app: Any,
        *,
        count: int,
        before: TaskResult[int, TaskError] | None = None,
    ) -> WorkflowSpec[int]:
        node = number.node(node_id="only")(n=count)
        return WorkflowSpec(cls.name, [node], output=node)


class Inherited(Parametric):
    definition_key = "validation.inherited"


class Keyless(WorkflowDefinition[int]):
    name = "keyless"
    only = number.node()(n=1)


class LongNamed(Plain):
    name = "x" * 300
    definition_key = "validation.long"


class TornNamed(Plain):
    name = "to\0rn"
    definition_key = "validation.torn"


class NumberNamed(Plain):
    name = cast(Any, 7)
    definition_key = "validation.number"


class Untyped(WorkflowDefinition):  # type: ignore[type-arg]
    name = "untyped"
    definition_key = "validation.untyped"

    @classmethod
    def build_with(cls, app: Any, *, count: int = 1) -> WorkflowSpec[Any]:
        raise NotImplementedError


def cycle(*, rooted: bool) -> list[TaskNode[Any]]:
    root = number.node(node_id="root")()
    one, two = number.node(node_id="one")(), number.node(node_id="two")()
    one.waits_for, two.waits_for = [two], [one]
    return [root, one, two] if rooted else [one, two]


def after(task: Any, *sources: Any, **options: Any) -> Any:
    """A node of the task that waits for the sources."""
    return task.node(waits_for=list(sources), **options)


def joined(**options: Any) -> list[TaskNode[Any]]:
    first, second = number.node()(), number.node()()
    return [first, second, number.node(waits_for=[first, second, first], **options)()]


def handed(source: Any, task: Any, **kwargs: Any) -> list[Any]:
    (name,) = (name for name, value in kwargs.items() if value is ...)
    del kwargs[name]
    node = TaskNode(task, kwargs=kwargs, args_from={name: source}, waits_for=[source])
    return [source, node]


NO_FIRST = {
    "no name": (lambda: workflow([number.node()()], name=" "), "HRS-001"),
    "name too long": (lambda: workflow([number.node()()], name="x" * 256), "HRS-001"),
    "no nodes": (lambda: workflow([]), "HRS-002"),
    "empty id": (lambda: workflow([number.node(node_id="")()]), "HRS-003"),
    "long id": (lambda: workflow([number.node(node_id="x" * 129)()]), "HRS-003"),
    "strange id": (lambda: workflow([number.node(node_id="a b")()]), "HRS-003"),
    "id that is no text": (lambda: workflow([number.node(node_id=cast(Any, 7))()]), "HRS-003"),
    "derived id too long": (lambda: workflow([number.node()()], name="x" * 130), "HRS-003"),
    "id used twice": (
        lambda: workflow([number.node(node_id="a")(), word.node(node_id="a")()]),
        "HRS-004",
    ),
    "node listed twice": (lambda: workflow([node := number.node(node_id="a")(), node]), "HRS-004"),
    "node without an id listed twice": (
        lambda: workflow([node := number.node()(), node, node]),
        "HRS-004",
    ),
    "foreign dependency": (
        lambda: workflow([number.node()(), after(number, word.node()())()]),
        "HRS-006",
    ),
    "not a node": (lambda: workflow([number, number.node()()]), "HRS-006"),  # type: ignore[list-item]
    "not a task": (lambda: workflow([TaskNode(cast(Any, len))]), "HRS-300"),
    "a task with send options": (
        lambda: workflow([TaskNode(cast(Any, number.with_options(priority=1)))]),
        "HRS-300",
    ),
    "cycle": (lambda: workflow(cycle(rooted=True)), "HRS-007"),
    "source not awaited": (
        lambda: workflow([first := number.node()(), TaskNode(double, args_from={"value": first})]),
        "HRS-008",
    ),
    "marker among the arguments": (
        lambda: workflow(
            [first := number.node()(), TaskNode(anything, kwargs={"x": from_node(first)})]
        ),
        "HRS-008",
    ),
    "marker inside an argument": (
        lambda: workflow(
            [
                first := number.node()(),
                TaskNode(anything, kwargs={"x": [from_node(first)]}),
            ]
        ),
        "HRS-008",
    ),
    "context not awaited": (
        lambda: workflow(
            [first := number.node()(), report.node(workflow_ctx_from=[first])(title="x")]
        ),
        "HRS-009",
    ),
    "no place for the context": (
        lambda: workflow(
            [first := number.node()(), after(number, first, workflow_ctx_from=[first])()]
        ),
        "HRS-010",
    ),
    "foreign output": (
        lambda: workflow([number.node()()], output=number.node(node_id="o")()),
        "HRS-011",
    ),
    "unknown output": (lambda: workflow([number.node()()], output="nowhere"), "HRS-011"),
    "no cases": (lambda: workflow([number.node()()], success_policy=SuccessPolicy([])), "HRS-012"),
    "empty case": (
        lambda: workflow([number.node()()], success_policy=SuccessPolicy([SuccessCase([])])),
        "HRS-012",
    ),
    "foreign node in a case": (
        lambda: workflow(
            [number.node()()], success_policy=SuccessPolicy([SuccessCase([word.node()()])])
        ),
        "HRS-012",
    ),
    "foreign optional node": (
        lambda: workflow(
            [one := number.node()()],
            success_policy=SuccessPolicy([SuccessCase([one])], optional=[NodeKey("nowhere")]),
        ),
        "HRS-012",
    ),
    "quorum without a number": (lambda: workflow(joined(join="quorum")), "HRS-013"),
    "quorum of none": (lambda: workflow(joined(join="quorum", min_success=0)), "HRS-013"),
    "quorum of more than there are": (
        lambda: workflow(joined(join="quorum", min_success=3)),
        "HRS-013",
    ),
    "number without quorum": (lambda: workflow(joined(join="any", min_success=1)), "HRS-013"),
    "unknown join": (lambda: workflow(joined(join="some")), "HRS-013"),
    "open source without a default": (
        lambda: workflow(
            [
                first := number.node()(),
                other := number.node()(),
                double.node(waits_for=[other], join="any")(value=from_node(first)),
            ]
        ),
        "HRS-013",
    ),
    "map that does not wait": (
        lambda: workflow([source := numbers.node()(), MapNode(square, over=source, join="any")]),
        "HRS-013",
    ),
    "blank key": (lambda: workflow([number.node()()], definition_key=" "), "HRS-016"),
    "key too long": (lambda: workflow([number.node()()], definition_key="k" * 256), "HRS-016"),
    "child without a key": (lambda: workflow([SubWorkflowNode(Keyless)]), "HRS-016"),
    "unknown parameter": (lambda: workflow([TaskNode(number, kwargs={"m": 1})]), "HRS-019"),
    "unknown source parameter": (
        lambda: workflow(handed(number.node()(), number, m=...)),
        "HRS-019",
    ),
    "injected parameter given": (
        lambda: workflow([TaskNode(report, kwargs={"title": "", "workflow_meta": None})]),
        "HRS-019",
    ),
    "unknown element parameter": (
        lambda: workflow(
            [one := numbers.node()(), MapNode(square, over=one, each="m", kwargs={"item": 1})]
        ),
        "HRS-019",
    ),
    "missing parameter": (lambda: workflow([TaskNode(square)]), "HRS-020"),
    "position-only parameter": (
        lambda: workflow([TaskNode(picky, kwargs={"c": 1})]),
        "HRS-020",
    ),
    "no parameter for the element": (
        lambda: workflow([one := numbers.node()(), MapNode(number, over=one)]),
        "HRS-020",
    ),
    "missing parameter of a child": (lambda: workflow([SubWorkflowNode(Parametric)]), "HRS-020"),
    "parameter given twice": (
        lambda: workflow(
            [
                first := number.node()(),
                TaskNode(
                    maybe_double,
                    kwargs={"value": None},
                    args_from={"value": first},
                    waits_for=[first],
                ),
            ]
        ),
        "HRS-021",
    ),
    "element given twice": (
        lambda: workflow(
            [one := numbers.node()(), MapNode(square, over=one, each="item", kwargs={"item": 1})]
        ),
        "HRS-021",
    ),
    "child without parameters": (
        lambda: workflow([SubWorkflowNode(Plain, kwargs={"count": 1})]),
        "HRS-022",
    ),
    "wrong value": (lambda: workflow(handed(word.node()(), number, n=...)), "HRS-024"),
    "wrong result": (lambda: workflow(handed(word.node()(), double, value=...)), "HRS-024"),
    "result of a sleep": (lambda: workflow(handed(SleepNode(1), double, value=...)), "HRS-024"),
    "result of unknown type": (
        lambda: workflow(handed(SubWorkflowNode(Untyped), double, value=...)),
        "HRS-024",
    ),
    "wrong result for a child": (
        lambda: workflow(
            [
                source := word.node()(),
                SubWorkflowNode(
                    Parametric,
                    kwargs={"count": 1},
                    args_from={"before": source},
                    waits_for=[source],
                ),
            ]
        ),
        "HRS-024",
    ),
    "map over no list": (
        lambda: workflow([source := number.node()(), MapNode(square, over=source)]),
        "HRS-024",
    ),
    "map with wrong elements": (
        lambda: workflow([source := numbers.node()(), MapNode(word, over=source, each="text")]),
        "HRS-024",
    ),
    "argument of the wrong type": (
        lambda: workflow([TaskNode(number, kwargs={"n": "one"})]),
        "HRS-031",
    ),
    "NaN": (lambda: workflow([TaskNode(anything, kwargs={"x": float("nan")})]), "HRS-031"),
    "unserialisable": (lambda: workflow([TaskNode(anything, kwargs={"x": object()})]), "HRS-031"),
    "wrong argument of a child": (
        lambda: workflow([SubWorkflowNode(Parametric, kwargs={"count": "1"})]),
        "HRS-031",
    ),
    "unknown queue": (lambda: workflow([number.node(queue="fast")()]), "HRS-200"),
}
OPTIONS: dict[str, Callable[[], object]] = {
    "priority": lambda: workflow([number.node(priority=101)()]),
    "no whole priority": lambda: workflow([number.node(priority=cast(Any, True))()]),
    "naive deadline": lambda: workflow([number.node(good_until=NAIVE)()]),
    "deadline that is no time": lambda: workflow([number.node(good_until=cast(Any, "soon"))()]),
    "negative span": lambda: workflow([number.node(expires_in=timedelta(seconds=-1))()]),
    "span that is none": lambda: workflow([number.node(expires_in=cast(Any, 5))()]),
    "time limit": lambda: workflow([number.node(timeout_ms=99)()]),
    "retry policy": lambda: workflow([number.node(retry_policy=cast(Any, 3))()]),
    "no sleep": lambda: workflow([SleepNode()]),
    "two sleeps": lambda: workflow([SleepNode(1, until=datetime.now(UTC))]),
    "negative sleep": lambda: workflow([SleepNode(-1)]),
    "endless sleep": lambda: workflow([SleepNode(float("inf"))]),
    "naive sleep": lambda: workflow([SleepNode(until=NAIVE)]),
    "nameless signal": lambda: workflow([SignalNode("")]),
    "unprintable signal": lambda: workflow([SignalNode("a\nb")]),
    "signal that cannot be stored": lambda: workflow([SignalNode("go", value_type=type(iter("")))]),
    "signal without time": lambda: workflow([SignalNode("go", timeout=timedelta(0))]),
    "no parallel items": lambda: workflow(
        [one := numbers.node()(), MapNode(square, over=one, max_parallel=0)]
    ),
    "on_error": lambda: workflow([number.node()()], on_error=cast(OnError, "panic")),
    "dependencies that may fail": lambda: workflow(
        [number.node(allow_failed_deps=cast(Any, "no"))()]
    ),
    "dependencies of a child": lambda: workflow(
        [SubWorkflowNode(Plain, allow_failed_deps=cast(Any, 1))]
    ),
    "dependencies of a sleep": lambda: workflow([SleepNode(1, allow_failed_deps=cast(Any, None))]),
    "dependencies of a signal": lambda: workflow(
        [SignalNode("go", allow_failed_deps=cast(Any, []))]
    ),
    "dependencies of a map": lambda: workflow(
        [one := numbers.node()(), MapNode(square, over=one, allow_failed_deps=cast(Any, 0))]
    ),
    "items that may fail": lambda: workflow(
        [one := numbers.node()(), MapNode(square, over=one, allow_failed_items=cast(Any, "no"))]
    ),
}


@pytest.mark.parametrize("mistake", NO_FIRST)
def test_a_mistake_has_its_code(mistake: str) -> None:
    build, code = NO_FIRST[mistake]
    assert codes_of(build) == [code]


@pytest.mark.parametrize("option", OPTIONS)
def test_options_out_of_range_are_refused(option: str) -> None:
    assert codes_of(OPTIONS[option]) == [ErrorCode.TASK_INVALID_OPTIONS]


@pytest.mark.parametrize("rooted", [True, False])
def test_a_cycle_is_shown_from_node_to_node(rooted: bool) -> None:
    (error,) = errors_of(lambda: workflow(cycle(rooted=rooted)))
    assert error.code is ErrorCode.WORKFLOW_CYCLE_DETECTED
    circle = "one (number) waits for two (number) waits for one (number)"
    assert error.message.endswith(f"wait for each other in a circle: {circle}.")


def test_a_foreign_node_is_one_mistake_however_many_nodes_wait_for_it() -> None:
    outside = number.node(node_id="outside")()
    nodes = [double.node(node_id=name)(value=from_node(outside)) for name in ("a", "b")]
    (error,) = errors_of(lambda: workflow(nodes))
    assert error.code is ErrorCode.WORKFLOW_INVALID_DEPENDENCY
    assert error.message == (
        "Nodes 'a', 'b' of workflow 'shop' wait for node 'outside', which is not in the workflow."
    )


def test_a_map_over_a_plain_list_names_the_way_out() -> None:
    mapped = MapNode(square, over=[1, 2], node_id="squares")  # type: ignore[arg-type]
    (error,) = errors_of(lambda: workflow([mapped]))
    assert error.code is ErrorCode.WORKFLOW_INVALID_DEPENDENCY
    assert (
        error.message == "Node 'squares' of workflow 'shop' waits for a list, which is not a node."
    )
    assert error.help_text is not None
    assert "one node per element" in error.help_text


def test_all_mistakes_are_told_together() -> None:
    def build() -> object:
        first = number.node(priority=0)()
        second = TaskNode(square, kwargs={"item": "x", "wrong": 1})
        third = TaskNode(double, args_from={"value": first})
        return workflow(
            [first, second, third], output=word.node()(), success_policy=SuccessPolicy([])
        )

    with pytest.raises(MultipleValidationErrors) as caught:
        build()
    found = {error.code.value for error in caught.value.report.errors}
    assert found == {"HRS-102", "HRS-019", "HRS-031", "HRS-008", "HRS-011", "HRS-012"}
    assert "workflow 'shop': 6 errors found" in str(caught.value)


def test_mistakes_in_ids_come_alone() -> None:
    def build() -> object:
        return workflow([TaskNode(square, node_id="a b"), number.node(node_id="")()])

    assert codes_of(build) == ["HRS-003", "HRS-003"]


def test_a_mistake_points_at_the_line_that_built_the_workflow() -> None:
    (error,) = errors_of(lambda: app.workflow("w", [TaskNode(square)], definition_key="k"))
    assert error.location is not None
    assert error.location.file == __file__
    assert isinstance(error, WorkflowValidationError)
    assert "Node 'w:0' of workflow 'w'" in error.message


def test_arguments_are_never_shown() -> None:
    for error in errors_of(lambda: workflow([TaskNode(number, kwargs={"n": "hunter2"})])):
        assert "hunter2" not in str(error)


def test_every_node_with_an_unknown_queue_is_named() -> None:
    other = queued_app(CustomQueueConfig(name="fast"))

    @other.task("work", queue_name="fast")
    def work() -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    nodes = [work.node(queue="slow")(), work.node(queue="none")(), number.node()()]
    errors = errors_of(lambda: other.workflow("w", nodes, definition_key="k"))
    assert [error.code for error in errors] == ["HRS-103"] * 3
    assert all(isinstance(error, ConfigurationError) for error in errors)
    assert [error.notes for error in errors] == [
        (f"at node 'w:{index}' of workflow 'w'",) for index in range(3)
    ]


def test_positional_arguments_put_into_a_node_are_refused() -> None:
    node: Any = TaskNode(number)
    node.args = (1,)
    assert codes_of(lambda: workflow([node])) == ["HRS-026"]


def test_a_context_without_default_must_be_asked_for() -> None:
    @app.task("needs_context")
    def needs_context(workflow_ctx: WorkflowContext) -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    first = number.node()()
    assert codes_of(lambda: workflow([TaskNode(needs_context)])) == ["HRS-020"]
    workflow([first, TaskNode(needs_context, waits_for=[first], workflow_ctx_from=[first])])


def test_definitions_that_contain_each_other_are_refused() -> None:
    class Outer(WorkflowDefinition[None]):
        name = "outer"
        definition_key = "validation.outer"

    class Inner(WorkflowDefinition[None]):
        name = "inner"
        definition_key = "validation.inner"
        outer = SubWorkflowNode(Outer)

    Outer.inner = SubWorkflowNode(Inner)  # type: ignore[attr-defined]
    (error,) = errors_of(lambda: workflow([SubWorkflowNode(Outer)]))
    assert error.code is ErrorCode.WORKFLOW_CYCLE_DETECTED
    assert error.notes == ("Outer contains Inner contains Outer",)


def test_definitions_nested_too_deeply_are_refused() -> None:
    definition: Any = Plain
    for level in range(32):
        attributes = {
            "name": f"level{level}",
            "definition_key": f"validation.level{level}",
            "inner": SubWorkflowNode(definition),
        }
        definition = type(f"Level{level}", (WorkflowDefinition,), attributes)
    assert codes_of(lambda: workflow([SubWorkflowNode(definition)])) == ["HRS-007"]


def test_a_child_may_inherit_the_build_with_that_takes_its_parameters() -> None:
    node = SubWorkflowNode(Inherited, kwargs={"count": 3})
    assert dict(workflow([node]).tasks[0].kwargs) == {"count": 3}  # type: ignore[union-attr]


def test_fitting_results_are_accepted() -> None:
    first, source = number.node()(), numbers.node()()
    mapped = MapNode(square, over=source, kwargs={"offset": 1})
    again = MapNode(double, over=mapped, each="value")
    approval = SignalNode("approve", value_type=int)
    open_signal = SignalNode("anything")
    nodes: list[Any] = [
        *(first, source, mapped, again, approval, open_signal),
        double.node()(value=from_node(first)),
        double.node()(value=from_node(approval)),
        double.node()(value=from_node(open_signal)),
        double.node()(value=from_node(SubWorkflowNode(Plain))),
    ]
    nodes.append(nodes[-1].args_from["value"])
    assert len(workflow(nodes).tasks) == len(nodes)


def test_an_any_join_hands_on_what_may_be_missing() -> None:
    first, second = number.node()(), number.node()()
    node = maybe_double.node(waits_for=[second], join="any")(value=from_node(first))
    assert workflow([first, second, node]).tasks[2].join == "any"


def test_unresolved_queues_are_told_when_a_run_is_planned() -> None:
    bare: WorkflowSpec[Any] = WorkflowSpec("bare", [number.node()()], definition_key="k")
    assert codes_of(lambda: plan(bare, new_id())) == ["HRS-014"]
    unranked: WorkflowSpec[Any] = WorkflowSpec(
        "bare", [number.node(queue="default")()], definition_key="k"
    )
    assert codes_of(lambda: plan(unranked, new_id())) == ["HRS-015"]
    placed: WorkflowSpec[Any] = WorkflowSpec(
        "bare", [number.node(queue="default", priority=1)()], definition_key="k"
    )
    assert '"queue_name":"default"' in plan(placed, new_id())


def test_an_id_that_is_no_uuid_and_a_missing_key_are_told_when_a_run_is_planned() -> None:
    spec = workflow([number.node()()])
    assert codes_of(lambda: plan(spec, "order-7")) == ["HRS-032"]
    keyless: WorkflowSpec[Any] = WorkflowSpec("bare", [number.node(queue="default", priority=1)()])
    assert codes_of(lambda: plan(keyless, new_id())) == ["HRS-016"]


def test_arguments_too_large_to_store_are_refused() -> None:
    limits = PayloadConfig(warn_bytes=50, reject_bytes=100)
    small = Horsies(AppConfig(broker=BROKER, payload=limits))
    nodes = [word.node()(text="x" * 200), word.node()(text="x")]
    errors = errors_of(lambda: small.workflow("w", nodes, definition_key="k"))
    assert [error.code for error in errors] == ["HRS-031"]


def test_a_name_that_cannot_be_stored_is_refused() -> None:
    assert codes_of(lambda: workflow([number.node()()], name="a\ud800")) == ["HRS-001"]
    assert codes_of(lambda: workflow([number.node()()], definition_key="a\0")) == ["HRS-016"]


JUNK: dict[str, tuple[Callable[[], object], str]] = {
    "dependency": (lambda: workflow([number.node()(), after(number, cast(Any, 5))()]), "HRS-006"),
    "source": (
        lambda: workflow([number.node()(), TaskNode(double, args_from={"value": cast(Any, 5)})]),
        "HRS-008",
    ),
    "context": (
        lambda: workflow([report.node(workflow_ctx_from=[cast(Any, 5)])(title="x")]),
        "HRS-009",
    ),
    "list": (
        lambda: workflow([number.node()(), MapNode(square, over=cast(Any, 5))]),
        "HRS-006",
    ),
    "output": (lambda: workflow([number.node()()], output=5), "HRS-011"),
    "optional": (
        lambda: workflow(
            [one := number.node()()],
            success_policy=SuccessPolicy([SuccessCase([one])], optional=[cast(Any, 5)]),
        ),
        "HRS-012",
    ),
}


@pytest.mark.parametrize("place", JUNK)
def test_what_is_no_node_at_all_is_a_mistake_like_others(place: str) -> None:
    build, code = JUNK[place]
    assert codes_of(build) == [code]


def node_of(**options: Any) -> TaskNode[Any]:
    return TaskNode(number, node_id="n", **options)


def second(**options: Any) -> list[Any]:
    """Two nodes; the options of the second may name the first by calling for it."""
    first = number.node(node_id="first")()
    return [first, node_of(**{name: make(first) for name, make in options.items()})]


def reported(**options: Any) -> list[Any]:
    first = number.node(node_id="first")()
    kwargs = {"title": ""}
    made = {name: make(first) for name, make in options.items()}
    return [first, TaskNode(report, kwargs=kwargs, waits_for=[first], node_id="n", **made)]


# The mistake, its code, and words of the sentence and of its help.
MISFITS: dict[str, tuple[Callable[[], object], str, tuple[str, ...]]] = {
    "a node as dependencies": (
        lambda: workflow(second(waits_for=lambda first: first)),
        "HRS-006",
        ("Node 'n' of workflow 'shop'", "waits_for of type TaskNode", "waits_for=[...]"),
    ),
    "a node as dependencies, by the task": (
        lambda: workflow([one := number.node()(), number.node(waits_for=cast(Any, one))()]),
        "HRS-006",
        ("Node 'shop:1'", "waits_for of type TaskNode"),
    ),
    "sources in a list, by the task": (
        lambda: workflow([number.node(args_from=cast(Any, [1]))()]),
        "HRS-008",
        ("Node 'shop:0'", "args_from of type list"),
    ),
    "text as dependencies": (
        lambda: workflow(second(waits_for=lambda _: "first")),
        "HRS-006",
        ("Node 'n'", "waits_for of type str"),
    ),
    "dependencies that run dry": (
        lambda: workflow(second(waits_for=lambda first: (one for one in [first]))),
        "HRS-006",
        ("Node 'n'", "waits_for of type generator"),
    ),
    "no dependencies of a map": (
        lambda: workflow(
            [one := numbers.node()(), MapNode(square, over=one, waits_for=cast(Any, None))]
        ),
        "HRS-006",
        ("Node 'shop:1'", "waits_for of type NoneType"),
    ),
    "sources in a list": (
        lambda: workflow([node_of(args_from=[1])]),
        "HRS-008",
        ("Node 'n'", "args_from of type list", 'args_from={"parameter": node}'),
    ),
    "no sources": (
        lambda: workflow([node_of(args_from=None)]),
        "HRS-008",
        ("Node 'n'", "args_from of type NoneType"),
    ),
    "a node as the context": (
        lambda: workflow(reported(workflow_ctx_from=lambda first: first)),
        "HRS-009",
        ("Node 'n'", "workflow_ctx_from of type TaskNode"),
    ),
    "a context that runs dry": (
        lambda: workflow(reported(workflow_ctx_from=lambda first: iter([first]))),
        "HRS-009",
        ("Node 'n'", "workflow_ctx_from of type list_iterator"),
    ),
    "no arguments": (
        lambda: workflow([node_of(kwargs=None)]),
        "HRS-019",
        ("Node 'n'", "kwargs of type NoneType", 'kwargs={"parameter": value}'),
    ),
    "arguments in a list": (
        lambda: workflow([SubWorkflowNode(Parametric, kwargs=cast(Any, [1]))]),
        "HRS-019",
        ("Node 'shop:0'", "kwargs of type list"),
    ),
    "an element of no name": (
        lambda: workflow([one := numbers.node()(), MapNode(square, over=one, each=cast(Any, []))]),
        "HRS-019",
        ("Node 'shop:1'", "each of type list", 'each="item"'),
    ),
    "text as a child": (
        lambda: workflow([SubWorkflowNode(cast(Any, "x"), node_id="n")]),
        "HRS-016",
        ("Node 'n'", "runs a str", "SubWorkflowNode(Report)"),
    ),
    "another class as a child": (
        lambda: workflow([SubWorkflowNode(cast(Any, int), node_id="n")]),
        "HRS-016",
        ("Node 'n'", "runs int", "not a WorkflowDefinition"),
    ),
    "no class as a child": (
        lambda: workflow([SubWorkflowNode(cast(Any, Plain()), node_id="n")]),
        "HRS-016",
        ("Node 'n'", "runs a Plain", "the class itself"),
    ),
    "a child of too long a name": (
        lambda: workflow([SubWorkflowNode(LongNamed, node_id="n")]),
        "HRS-001",
        ("Node 'n'", "LongNamed", "1 to 255 characters"),
    ),
    "a child of a torn name": (
        lambda: workflow([SubWorkflowNode(TornNamed, node_id="n")]),
        "HRS-001",
        ("Node 'n'", "TornNamed"),
    ),
    "a child named by a number": (
        lambda: workflow([SubWorkflowNode(NumberNamed, node_id="n")]),
        "HRS-001",
        ("Node 'n'", "NumberNamed"),
    ),
    "a node as all nodes": (
        lambda: workflow(cast(Any, node_of())),
        "HRS-006",
        ("Workflow 'shop'", "of type TaskNode", "[...]"),
    ),
    "no nodes at all": (
        lambda: workflow(cast(Any, None)),
        "HRS-006",
        ("Workflow 'shop'", "of type NoneType"),
    ),
    "text as the policy": (
        lambda: workflow([node_of()], success_policy="x"),
        "HRS-012",
        ("The success policy of workflow 'shop'", "of type str", "SuccessPolicy(cases="),
    ),
    "a case as all cases": (
        lambda: workflow(
            [node_of()], success_policy=SuccessPolicy(cases=cast(Any, SuccessCase(["n"])))
        ),
        "HRS-012",
        ("cases of type SuccessCase", "cases=[SuccessCase(...)]"),
    ),
    "a list as a case": (
        lambda: workflow([node_of()], success_policy=SuccessPolicy([cast(Any, ["n"])])),
        "HRS-012",
        ("a case (number 0) of type list", "SuccessCase(required=[...])"),
    ),
    "a node as all that is required": (
        lambda: workflow(
            [one := node_of()], success_policy=SuccessPolicy([SuccessCase(cast(Any, one))])
        ),
        "HRS-012",
        ("a case (number 0)", "required of type TaskNode", "required=[...]"),
    ),
    "an id as all that is required": (
        lambda: workflow([node_of()], success_policy=SuccessPolicy([SuccessCase("n")])),
        "HRS-012",
        ("a case (number 0)", "required of type str"),
    ),
    "a node as all that is optional": (
        lambda: workflow(
            [one := node_of()],
            success_policy=SuccessPolicy([SuccessCase([one])], optional=cast(Any, one)),
        ),
        "HRS-012",
        ("optional of type TaskNode", "optional=[...]"),
    ),
    "any of nothing": (
        lambda: workflow([node_of(join="any")]),
        "HRS-013",
        ("Node 'n'", "join='any'", "nothing to count", "leave join out"),
    ),
    "a quorum of nothing": (
        lambda: workflow([SleepNode(1, join="quorum", min_success=1, node_id="n")]),
        "HRS-013",
        ("Node 'n'", "join='quorum'", "nothing to count"),
    ),
    "a signal of two types": (
        lambda: workflow(
            [
                SignalNode("go", value_type=int, node_id="early"),
                SignalNode("stop", value_type=str),
                SignalNode("go", value_type=str, node_id="late"),
            ]
        ),
        "HRS-102",
        ("'early' and 'late'", "'go'", "int and str", "same value_type"),
    ),
    "a signal of a type here and any there": (
        lambda: workflow([SignalNode("go"), SignalNode("go", value_type=int)]),
        "HRS-102",
        ("'shop:0' and 'shop:1'", "'go'"),
    ),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_is_of_another_kind_is_refused_with_its_place_and_fix(misfit: str) -> None:
    build, code, words = MISFITS[misfit]
    (error,) = errors_of(build)
    said = f"{error.message} {error.help_text}"
    assert (error.code, [word for word in words if word not in said]) == (code, []), said


def test_all_that_is_of_another_kind_is_told_together() -> None:
    nodes: list[Any] = [node_of(kwargs=None, waits_for=5), SubWorkflowNode(cast(Any, int))]
    found = codes_of(lambda: workflow(nodes, success_policy=7))
    assert found == ["HRS-006", "HRS-019", "HRS-016", "HRS-012"]


def test_other_nodes_are_checked_beside_one_of_another_kind() -> None:
    broken = node_of(kwargs=None)
    taking = TaskNode(double, args_from={"value": broken}, waits_for=[broken])
    nodes: list[Any] = [broken, taking, TaskNode(square), number.node(priority=0)()]
    found = codes_of(lambda: workflow(nodes, output="nowhere"))
    assert found == ["HRS-019", "HRS-102", "HRS-011", "HRS-020"]


def test_lists_of_any_kind_and_nodes_from_a_generator_are_taken() -> None:
    first = number.node(node_id="first")()
    last = TaskNode(number, waits_for={first}, node_id="last")  # type: ignore[arg-type]
    policy = SuccessPolicy((SuccessCase(dict.fromkeys(["last"]).keys()),))  # type: ignore[arg-type]
    spec = workflow((node for node in (first, last)), success_policy=policy)
    assert spec.graph.dependencies == ((), (0,))


def test_nodes_may_share_a_signal_of_one_type() -> None:
    nodes = [SignalNode("go", value_type=list[int]), SignalNode("go", value_type=list[int])]
    assert len(workflow(nodes).tasks) == 2


def test_a_foreign_dependency_that_runs_nothing_is_named() -> None:
    strangers = (TaskNode(cast(Any, len)), SubWorkflowNode(cast(Any, "x")))
    for stranger, name in zip(strangers, ("len", "str"), strict=True):
        (error,) = errors_of(lambda: workflow([number.node()(), after(number, stranger)()]))  # noqa: B023
        assert error.code is ErrorCode.WORKFLOW_INVALID_DEPENDENCY
        assert name in error.message
        assert name in repr(stranger)


def test_names_of_the_library_s_own_tasks_cannot_be_taken() -> None:
    with pytest.raises(TaskDefinitionError) as caught:

        @app.task("horsies.expand")
        def expand() -> TaskResult[None, TaskError]:
            return TaskResult(ok=None)

    assert caught.value.code is ErrorCode.TASK_INVALID_OPTIONS
