"""The first hour with the library: each test is one thing that a newcomer tried and that failed."""

from __future__ import annotations

import pytest

from horsies import AnyNode, Horsies, SignalNode, SleepNode
from tests.support.database import Database
from tests.support.turns import Hands


@pytest.mark.parametrize(
    "node", [SignalNode("approve", node_id="waiting"), SleepNode(3600, node_id="waiting")]
)
def test_the_drawing_shows_how_long_a_node_waited(
    app: Horsies, connection: Database, node: AnyNode
) -> None:
    handle = app.workflow("order", [node], definition_key="first_hour.order").start().unwrap()
    connection.execute(
        "UPDATE public.horsies_workflow_tasks SET enqueued_at = enqueued_at - interval '1 hour'"
    )
    assert handle.draw().unwrap().endswith("  1h00m")
    Hands(connection).complete(handle.workflow_id, "waiting", True)
    assert handle.draw().unwrap().endswith("  1h00m")
