"""Which nodes of a workflow may wait in a child behind other tasks."""

from __future__ import annotations

import pytest
from psycopg import Connection

from horsies import Horsies, MapNode, RetryPolicy
from horsies.workflow.nodes.nodes import AnyNode
from tests.support.turns import Hands

AGAIN = RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"])


def bursts(connection: Connection[tuple[object, ...]], run_id: str) -> dict[str, set[bool]]:
    """Per task name, what its rows say."""
    found: dict[str, set[bool]] = {}
    for name, burst in connection.execute(
        "SELECT task_name, burst FROM horsies_tasks WHERE workflow_id = %s", (run_id,)
    ):
        found.setdefault(str(name), set()).add(bool(burst))
    return found


@pytest.mark.parametrize(("max_parallel", "expected"), [(None, True), (2, False)])
def test_nodes_without_inputs_and_items_without_a_limit_may_wait_in_a_child(
    app: Horsies,
    connection: Connection[tuple[object, ...]],
    hands: Hands,
    max_parallel: int | None,
    expected: bool,
) -> None:
    @app.task("tick", retry_policy=AGAIN)
    def tick() -> int:
        return 1

    @app.task("strict")
    def strict() -> int:
        return 1

    @app.task("numbers")
    def numbers() -> list[int]:
        return [1, 2, 3]

    @app.task("square", burst=True)
    def square(value: int) -> int:
        return value * value

    source = numbers.node(node_id="numbers")()
    squares = MapNode(square, over=source, node_id="squares", max_parallel=max_parallel)
    nodes: list[AnyNode] = [tick.node()(), strict.node()(), source, squares]
    run = app.workflow("bursts", nodes, definition_key="bursts").start().unwrap()
    hands.complete(run.workflow_id, "numbers", [1, 2, 3])
    assert bursts(connection, run.workflow_id) == {
        "tick": {True},
        "strict": {False},
        "numbers": {False},
        "square": {expected},
    }
