"""An order and its task in one transaction."""

import psycopg

from horsies import Horsies

app = Horsies()  # on the database that HORSIES_DATABASE_URL names


@app.task
def confirm(order_id: int) -> str:
    """Your background work: a plain function with annotations."""
    return f"order {order_id} is confirmed"


def place_order(order_id: int) -> None:
    """Store an order and send its task: both, or neither."""
    with psycopg.connect(app.database_url) as connection:
        connection.execute("INSERT INTO orders VALUES (%s)", (order_id,))
        confirm.with_options(transaction=connection).enqueue(order_id)
