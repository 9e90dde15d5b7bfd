"""The first hour with the library: each test is one thing that a newcomer tried and that failed."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from horsies import AnyNode, ErrorCode, Horsies, SignalNode, SleepNode
from tests.support.database import Database
from tests.support.turns import Hands


@pytest.mark.parametrize("where", ["made here", "made by a function"])
def test_a_builder_in_the_module_of_the_application_must_be_registered(
    module: Callable[[str], Horsies], where: str
) -> None:
    app = module("""
        def make() -> Horsies:
            return Horsies("postgresql://shop@127.0.0.1:1/shop")

        made = make()

        def forgotten() -> WorkflowSpec[Any]:
            return app.workflow("w", [work.node()()], definition_key="first_hour.w")
    """)
    home = importlib.import_module(app.definitions()["work"].function.__module__)
    (error,) = (app if where == "made here" else home.made).check()
    assert error.code is ErrorCode.WORKFLOW_CHECK_UNDECORATED_BUILDER
    assert "'forgotten'" in error.message
    home.forgotten.__horsies_no_check__ = True
    assert app.check() == []


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
