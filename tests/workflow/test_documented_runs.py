"""The output of the commands for workflows matches the documentation."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from horsies import (
    AnyNode,
    Horsies,
    MapNode,
    OnError,
    SignalNode,
    SubWorkflowNode,
    TaskError,
    TaskResult,
    WorkflowDefinition,
    WorkflowSpec,
)
from horsies.task import TaskFunction
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.doc_pages import documented, plain
from tests.support.turns import Hands

RUN_ID = "01a1ddbc-f575-75f6-b24d-ef96532c26a4"
CHILD_ID = "01a1ddbd-20db-7aa3-901d-4bbc948dad18"
SECONDS = {"orders": 0.074, "prices": 1.3, "stock": 0.515, "carrier": 0.206, "label": 0.009}


class Shipping(WorkflowDefinition[int]):
    """A child that pauses when it fails."""

    name = "shipping"
    definition_key = "day.shipping"

    @classmethod
    def build_with(cls, app: Any) -> WorkflowSpec[int]:
        carrier = app.get_task("book_carrier").node(node_id="carrier")()
        label = app.get_task("print_label").node(node_id="label", waits_for=[carrier])()
        return WorkflowSpec(cls.name, [carrier, label], output=label, on_error=OnError.PAUSE)


def simple_task(app: Horsies, name: str) -> TaskFunction[[], int]:
    @app.task(name)
    def run() -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    return run


def trading_day(app: Horsies) -> WorkflowSpec[Any]:
    @app.task("list_orders")
    def list_orders() -> TaskResult[list[int], TaskError]:
        return TaskResult(ok=[1])

    @app.task("price")
    def price(order: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=order)

    names = ("check_stock", "close_day", "book_carrier", "print_label")
    check_stock, close_day, *_ = [simple_task(app, name) for name in names]
    orders = list_orders.node(node_id="orders")()
    prices = MapNode(price, over=orders, node_id="prices")
    approval: SignalNode[Any] = SignalNode(
        "approve", node_id="approval", waits_for=[prices], timeout=timedelta(days=2)
    )
    stock = check_stock.node(node_id="stock", waits_for=[orders])()
    shipping = SubWorkflowNode(Shipping, node_id="shipping", waits_for=[stock])
    close = close_day.node(node_id="close", waits_for=[approval, shipping])()
    nodes: list[AnyNode] = [orders, prices, approval, stock, shipping, close]
    return app.workflow("trading day", nodes, definition_key="day.v1")


@pytest.fixture
def run(app: Horsies, hands: Hands, connection: Database) -> None:
    """A run that waits for a signal, above a paused one."""
    trading_day(app).start(RUN_ID, workflow_key="day-2026-11-15").unwrap()
    hands.complete(RUN_ID, "orders", [1, 2, 3, 4, 5])
    for item in range(5):
        hands.complete(RUN_ID, "prices", item=item)
    hands.complete(RUN_ID, "stock")
    hands.expand(RUN_ID, "shipping", Shipping.build_with(app), CHILD_ID)
    hands.complete(CHILD_ID, "carrier")
    hands.fail(CHILD_ID, "label", "NO_PAPER")
    connection.execute(
        "UPDATE horsies_workflows SET created_at = now() - interval '23 s', "
        "started_at = now() - interval '28 s'"
    )
    connection.execute(
        "UPDATE horsies_workflow_tasks SET started_at = now() - interval '19 s', "
        "enqueued_at = now() - interval '19 s' WHERE node_id IN ('approval', 'shipping')"
    )
    for node_id, seconds in SECONDS.items():
        connection.execute(
            "UPDATE horsies_workflow_tasks SET started_at = completed_at - %s WHERE node_id = %s",
            (timedelta(seconds=seconds), node_id),
        )


def timeless(text: str) -> str:
    return re.sub(r"\d{4}-\d\d-\d\d [\d:.]+ UTC", "TIME UTC", plain(text))


@pytest.mark.usefixtures("run")
def test_commands_of_runs_print_what_the_documentation_shows(horsies: Run) -> None:
    for command in (
        ["workflows", "--status", "running"],
        ["workflow", "show", RUN_ID],
        ["workflow", "signal", RUN_ID, "approve", "true"],
        ["workflow", "retry", CHILD_ID],
        ["workflow", "cancel", RUN_ID, "--reason", "the printer is broken"],
    ):
        words = " ".join(f'"{word}"' if " " in word else word for word in command)
        shown = documented("workflows-steering.md", f"horsies {words}")
        finished = horsies(*command)
        assert timeless(finished.out + finished.err) == timeless(shown)
