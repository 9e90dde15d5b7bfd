"""Send a task and start the workflow: `python -m project_name`, while a worker is running."""

from project_name.app import app
from project_name.tasks import fetch_price
from project_name.workflows import stock_value

WAIT_MS = 30_000

price = fetch_price.enqueue("saddle")
print("price of a saddle:", price.result(WAIT_MS))

run = stock_value().start().unwrap()
print("value of the stock:", run.result(WAIT_MS))

app.close()
