"""Three tasks as one workflow: two side by side, then one that takes both results."""

from horsies import Horsies, from_node

app = Horsies()


@app.task
def reserve(order_id: int) -> int:
    """Reserve the pieces of an order."""
    return 3


@app.task
def charge(order_id: int) -> str:
    """Charge an order and return the receipt."""
    return f"R{order_id}"


@app.task
def ship(pieces: int, receipt: str) -> str:
    """Ship what was reserved and paid."""
    return f"{pieces} pieces, receipt {receipt}"


reserved = reserve.node()(order_id=17)
paid = charge.node()(order_id=17)
shipped = ship.node()(pieces=from_node(reserved), receipt=from_node(paid))
order = app.workflow("order", [reserved, paid, shipped], output=shipped, definition_key="order.v1")

if __name__ == "__main__":
    run = order.start().unwrap()
    print(run.result(timeout_ms=10_000))
