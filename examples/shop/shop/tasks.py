"""The tasks of the shop: plain functions."""

from __future__ import annotations

import os

import httpx

from horsies import RetryLater, RetryPolicy, TaskFailed, current_task
from shop.app import app
from shop.models import Line, connect

GATEWAY = os.environ.get("SHOP_GATEWAY", "http://127.0.0.1:8001")

# A heavy dependency: loaded once in each child process, before its first task.
recommendations: dict[str, list[str]] = {}


@app.on_child_process_start
def load_recommendations() -> None:
    """Load the model; here it is a small one."""
    recommendations.update(book=["lamp", "tea"], lamp=["bulb"])


@app.task(queue_name="orders")
def confirm(order_id: int, lines: list[Line]) -> int:
    """Confirm an order and return its sum; the row names the task that did it."""
    task = current_task()
    with connect() as connection:
        changed = connection.execute(
            "UPDATE shop_orders SET confirmed_by = %s WHERE id = %s", (task.id, order_id)
        )
    if changed.rowcount == 0:
        raise TaskFailed("NO_SUCH_ORDER", f"There is no order {order_id}.")
    task.logger.info("confirmed order %s with %s lines", order_id, len(lines))
    return sum(line.cents * line.quantity for line in lines)


@app.task(
    queue_name="payments",
    timeout_ms=30_000,
    retry_policy=RetryPolicy.exponential(
        0.2, max_retries=8, max_delay_seconds=5, auto_retry_for=[httpx.TransportError]
    ),
)
async def charge(order_id: int, cents: int) -> str:
    """Charge an order at the gateway and return the receipt."""
    async with httpx.AsyncClient(base_url=GATEWAY) as client:
        answer = await client.post("/charges", json={"order": order_id, "cents": cents})
    if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
        raise RetryLater(float(answer.headers["Retry-After"]), "the gateway is busy")
    if answer.status_code == httpx.codes.PAYMENT_REQUIRED:
        raise TaskFailed("CARD_REFUSED", answer.text, data={"order": order_id})
    return str(answer.raise_for_status().json()["receipt"])


@app.task(queue_name="invoices", key="customer")
def invoice(customer: str, number: int) -> str:
    """Write an invoice; never more than two at a time for one customer."""
    return f"{customer}-{number}"


@app.task(queue_name="orders")
def read_lines(lines: list[Line]) -> list[Line]:
    """Return the lines to reserve, without those that are sold out."""
    return [line for line in lines if line.article != "sold out"]


@app.task(queue_name="orders")
def reserve(line: Line) -> int:
    """Reserve the articles of one line and return how many."""
    return line.quantity


@app.task(queue_name="orders")
def ship(order_id: int, reserved: list[int], receipt: str) -> str:
    """Ship an order; in the workflow the results of other tasks arrive as plain values."""
    return f"order {order_id}: {sum(reserved)} pieces, receipt {receipt}"


@app.task(queue_name="orders")
def recommend(article: str) -> list[str]:
    """Recommend articles with the model that this child has loaded."""
    return recommendations.get(article, [])


@app.task(queue_name="reports", on_stop="requeue")
def import_catalogue(articles: int) -> int:
    """Import a catalogue, report its progress, and end cleanly when the worker stops."""
    task = current_task()
    for done in range(1, articles + 1):
        if task.should_stop():
            raise RetryLater(0, "the worker stops")
        task.progress(done, articles, f"article {done}")
    return articles


@app.task(queue_name="reports")
def report() -> int:
    """Count the orders."""
    with connect() as connection:
        (orders,) = connection.execute("SELECT count(*) FROM shop_orders").fetchone() or (0,)
    return int(orders)
