"""What holds for any graph: both directions of its edges agree, and no circle goes unnoticed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from horsies import ErrorCode, TaskNode
from horsies.ids import new_id
from horsies.workflow.build.plan import plan
from tests.support.apps.shop import app, codes_of, number
from tests.support.examples import examples

Edges = list[list[int]]


@st.composite
def edges(draw: st.DrawFn, *, circular: bool = False) -> Edges:
    """For every node the nodes it waits for; in a graph without circles those before it."""
    size = draw(st.integers(1, 25))

    def sources(index: int) -> st.SearchStrategy[list[int]]:
        bound = size if circular else index
        return st.lists(st.integers(0, bound - 1), max_size=5) if bound else st.just([])

    return [draw(sources(index)) for index in range(size)]


def nodes_of(graph: Edges, order: list[int] | None = None) -> list[TaskNode[Any]]:
    nodes = [number.node(node_id=f"n{index}")() for index in range(len(graph))]
    for node, sources in zip(nodes, graph, strict=True):
        node.waits_for = [nodes[index] for index in sources]
    return nodes if order is None else [nodes[index] for index in order]


def has_circle(graph: Edges) -> bool:
    """Follow every path; a node met again on its own path closes a circle."""

    def circles(index: int, path: frozenset[int]) -> bool:
        if index in path:
            return True
        if index in sound:
            return False
        found = any(circles(source, path | {index}) for source in graph[index])
        sound.add(index)
        return found

    sound: set[int] = set()
    return any(circles(index, frozenset()) for index in range(len(graph)))


@settings(max_examples=examples(60), deadline=None)
@given(edges(), st.randoms(use_true_random=False))
def test_dependents_are_the_inverse_of_dependencies(graph: Edges, random: Any) -> None:
    order = list(range(len(graph)))
    random.shuffle(order)
    spec = app.workflow("random", nodes_of(graph, order), definition_key="random")
    nodes = json.loads(plan(spec, new_id()))["nodes"]
    forward = {(source, node["task_index"]) for node in nodes for source in node["dependencies"]}
    backward = {(node["task_index"], later) for node in nodes for later in node["dependents"]}
    assert forward == backward
    expected = {
        (order.index(source), order.index(index))
        for index, sources in enumerate(graph)
        for source in sources
    }
    assert forward == expected
    assert all(len(set(node["dependencies"])) == len(node["dependencies"]) for node in nodes)


@settings(max_examples=examples(120), deadline=None)
@given(edges(circular=True))
def test_a_circle_is_always_found_and_never_invented(graph: Edges) -> None:
    def build() -> object:
        return app.workflow("random", nodes_of(graph), definition_key="random")

    if not has_circle(graph):
        build()
        return
    assert codes_of(build) == [ErrorCode.WORKFLOW_CYCLE_DETECTED]
