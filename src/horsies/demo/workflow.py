"""The demonstration's workflow: it prices orders in parallel, waits for an approval, and ships them in a
sub-workflow.

``price`` is a map: one task per order. ``approval`` waits for a signal without occupying a process.
``shipping`` is itself a workflow, built with the total as its parameter.
"""

from horsies import (
    Horsies,
    MapNode,
    SignalNode,
    SubWorkflowNode,
    WorkflowDefinition,
    WorkflowSpec,
    from_node,
)
from horsies.demo.tasks import app

PRICES = {"oats": 5, "saddle": 90, "brush": 7}


@app.task("list_orders")
def list_orders() -> list[str]:
    """List the orders to price."""
    return list(PRICES)


@app.task("price_order")
def price_order(order: str) -> int:
    """Price one order."""
    return PRICES[order]


@app.task("add_up")
def add_up(prices: list[int]) -> int:
    """Add up the values of the map, which are in the order of its list."""
    return sum(prices)


@app.task("book_carrier")
def book_carrier(total: int) -> str:
    """Choose a carrier by the value of the goods."""
    return "insured" if total > 100 else "by mail"


@app.task("print_label")
def print_label(carrier: str) -> str:
    """Print the parcel's label."""
    return f"fragile, {carrier}"


class Shipping(WorkflowDefinition[str]):
    """Book a carrier and print a label."""

    name = "shipping"
    definition_key = "demo.shipping"

    @classmethod
    def build_with(cls, app: Horsies, total: int) -> WorkflowSpec[str]:
        """Build the graph; the total is already known."""
        carrier = book_carrier.node(node_id="carrier")(total=total)
        label = print_label.node(node_id="label")(carrier=from_node(carrier))
        return app.workflow("shipping", [carrier, label], output=label)


class Fulfilment(WorkflowDefinition[str]):
    """The whole workflow: price a list of orders, wait for an approval, and ship them."""

    name = "fulfilment"
    definition_key = "demo.fulfilment"

    orders = list_orders.node()()
    price = MapNode(price_order, over=orders, max_parallel=2)
    total = add_up.node()(prices=from_node(price))
    approval = SignalNode("approval", value_type=str, waits_for=[total])
    shipping = SubWorkflowNode(Shipping, args_from={"total": total}, waits_for=[total, approval])

    class Meta:
        """Workflow options."""

        output = "shipping"
