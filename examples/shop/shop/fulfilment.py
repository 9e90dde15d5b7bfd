"""The way of an order: reserve every line, wait for an approval, charge, ship."""

from __future__ import annotations

from horsies import MapNode, SignalNode, WorkflowSpec, from_node
from shop.app import app
from shop.models import Line
from shop.tasks import charge, read_lines, reserve, ship


@app.workflow_builder(cases=[{"order_id": 1, "lines": [Line(article="book", cents=1_000)]}])
def fulfil(order_id: int, lines: list[Line]) -> WorkflowSpec[str]:
    """Build the workflow of one order."""
    cents = sum(line.cents * line.quantity for line in lines)
    wanted = read_lines.node(node_id="lines")(lines=lines)
    reserved = MapNode(reserve, over=wanted, node_id="reserved")
    approval = SignalNode("approve", value_type=bool, waits_for=[reserved], node_id="approval")
    paid = charge.node(waits_for=[approval], node_id="paid")(order_id=order_id, cents=cents)
    shipped = ship.node(node_id="shipped")(
        order_id=order_id, reserved=from_node(reserved), receipt=from_node(paid)
    )
    return app.workflow(
        "fulfil",
        [wanted, reserved, approval, paid, shipped],
        output=shipped,
        definition_key="shop.fulfil.v1",
    )
