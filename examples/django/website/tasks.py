"""The tasks of the site."""

from __future__ import annotations

from website.background import app
from website.models import Order


@app.task
def confirm(order_id: int) -> str:
    """Confirm an order; its row was committed with this task, so it is always there."""
    order = Order.objects.get(pk=order_id)
    return f"confirmed: {order.pieces} x {order.article}"
