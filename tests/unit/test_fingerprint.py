"""Equal workflows have equal fingerprints, in whatever order they were written, and no others do."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from horsies import (
    AppConfig,
    Horsies,
    MapNode,
    SubWorkflowNode,
    SuccessCase,
    SuccessPolicy,
    TaskError,
    TaskResult,
    WorkflowContext,
    WorkflowDefinition,
    WorkflowSpec,
    from_node,
)
from horsies.workflow.build.plan import fingerprints
from tests.support.apps.shop import BROKER
from tests.support.examples import examples
from tests.support.orders import printed_under_hash_seeds, reordered

app = Horsies(AppConfig(broker=BROKER))


@app.task("number")
def number() -> TaskResult[int, TaskError]:
    return TaskResult(ok=1)


@app.task("numbers")
def numbers() -> TaskResult[list[int], TaskError]:
    return TaskResult(ok=[1])


@app.task("label")
def label(
    words: frozenset[str],
    value: Any = None,
    first: TaskResult[int, TaskError] | None = None,
    second: TaskResult[int, TaskError] | None = None,
    workflow_ctx: WorkflowContext | None = None,
    **named: Any,
) -> TaskResult[int, TaskError]:
    return TaskResult(ok=len(words))


@app.task("each")
def each(item: int, words: frozenset[str], value: Any) -> TaskResult[int, TaskError]:
    return TaskResult(ok=item)


class Parts(WorkflowDefinition[int]):
    name = "parts"
    definition_key = "fingerprint.parts"

    @classmethod
    def build_with(cls, app: Any, *, value: Any, words: frozenset[str]) -> WorkflowSpec[int]:
        node = label.node(node_id="only")(words=words, value=value)
        return WorkflowSpec(cls.name, [node], output=node)


class Author:
    """Writes a workflow, with a source of chance in another order every time."""

    def __init__(self, random: Random | None = None) -> None:
        self.random = random

    def nodes(self, *nodes: Any) -> list[Any]:
        return list(nodes) if self.random is None else self.random.sample(nodes, len(nodes))

    def named(self, **values: Any) -> dict[str, Any]:
        return {name: values[name] for name in self.nodes(*values)}

    def value(self, value: Any) -> Any:
        return value if self.random is None else reordered(value, self.random)

    def workflow(
        self, value: Any = 1, words: Sequence[str] = (), **named: Any
    ) -> WorkflowSpec[Any]:
        """Write a bit of everything that has no order of its own."""
        one, two, three = (number.node(node_id=name)() for name in ("one", "two", "three"))
        source = numbers.node(node_id="source")()
        values = {"value": self.value(value), "words": self.value(frozenset(words))}
        inputs = self.named(first=from_node(two), second=from_node(one))
        context = self.nodes(one, two)
        last = label.node(
            node_id="last", waits_for=self.nodes(one, two, three), workflow_ctx_from=context
        )(**self.named(**values, **inputs, **self.value(named)))
        child = SubWorkflowNode(
            Parts, node_id="child", kwargs=self.named(**values), waits_for=self.nodes(one, three)
        )
        mapped = MapNode(
            each,
            over=source,
            node_id="mapped",
            kwargs=self.named(**values),
            waits_for=self.nodes(three, source),
        )
        cases = [SuccessCase(self.nodes(one, last)), SuccessCase([child])]
        return app.workflow(
            "everything",
            [one, two, three, source, last, child, mapped],
            definition_key="fingerprint.everything",
            success_policy=SuccessPolicy(cases, optional=self.nodes(two, three)),
        )


text = st.text('abc"\\:{}[],é', max_size=3)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | text
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=4),
    max_leaves=8,
)
SETTINGS = settings(max_examples=examples(40), deadline=None, database=None)


@SETTINGS
@given(values, st.lists(text), st.dictionaries(st.sampled_from("abcdef"), values), st.randoms())
def test_a_workflow_written_in_another_order_has_the_same_fingerprint(
    value: Any, words: list[str], named: dict[str, Any], random: Random
) -> None:
    again = Author(random).workflow(value, words, **named)
    assert fingerprints(again) == fingerprints(Author().workflow(value, words, **named))


@SETTINGS
@given(leaves, leaves)
def test_a_workflow_with_another_leaf_has_another_fingerprint(one: Any, two: Any) -> None:
    assume(repr(one) != repr(two))
    specs = [Author().workflow({"z": [one], "a": 0}), Author().workflow({"z": [two], "a": 0})]
    assert fingerprints(specs[0]) != fingerprints(specs[1])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([1, 2], [2, 1]),
        ([{"a": 1}, {"b": 1}], [{"b": 1}, {"a": 1}]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (1, 1.0),
        (1, True),
    ],
)
def test_differences_that_matter_make_another_fingerprint(one: Any, two: Any) -> None:
    assert fingerprints(Author().workflow(one)) != fingerprints(Author().workflow(two))


def test_another_edge_or_input_makes_another_fingerprint() -> None:
    def build(waits_for: tuple[int, ...], first: int, second: int) -> tuple[str, ...]:
        nodes = [number.node(node_id=name)() for name in ("zero", "one", "two")]
        last = label.node(node_id="last", waits_for=[nodes[index] for index in waits_for])(
            words=frozenset(), first=from_node(nodes[first]), second=from_node(nodes[second])
        )
        return fingerprints(
            app.workflow("edges", [*nodes, last], definition_key="fingerprint.edges")
        )

    assert build((0, 1), 0, 1) == build((1, 0), 0, 1)
    assert len({build((0, 1), 0, 1), build((0, 1), 1, 0), build((0, 1, 2), 0, 1)}) == 3


def test_arguments_nested_as_deeply_as_possible_have_a_fingerprint() -> None:
    value: Any = []
    for _ in range(198):
        value = [value]
    (found,) = fingerprints(Author().workflow({"b": value, "a": 1}))
    assert len(found) == 64


SCRIPT = """
from horsies.workflow.build.plan import fingerprints
from tests.unit.test_fingerprint import Author

words = {"alpha", "beta", "gamma", "delta", "epsilon"}
print(*fingerprints(Author().workflow(dict.fromkeys(words), words, **dict.fromkeys(words, 1))))
"""


@pytest.mark.slow
def test_every_interpreter_makes_the_same_fingerprint() -> None:
    (printed,) = printed_under_hash_seeds(SCRIPT)
    assert len(printed.strip()) == 64
