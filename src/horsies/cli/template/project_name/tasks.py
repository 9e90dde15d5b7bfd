"""The tasks: plain functions that a worker runs in separate processes."""

from horsies import RetryPolicy, TaskFailed, current_task

from project_name.app import app

PRICES = {"oats": 5, "saddle": 90, "brush": 7}


@app.task(
    retry_policy=RetryPolicy.exponential(1, max_retries=5, auto_retry_for=[ConnectionError]),
    timeout_ms=30_000,
)
def fetch_price(article: str) -> int:
    """Return the price of an article. A lost connection is retried; an unknown article fails."""
    if article not in PRICES:
        raise TaskFailed("UNKNOWN_ARTICLE", f"There is no article {article}.")
    return PRICES[article]


@app.task
def list_articles() -> list[str]:
    """Return all articles."""
    return list(PRICES)


@app.task
def add_up(prices: list[int]) -> int:
    """Return the sum of the prices."""
    return sum(prices)


@app.task
def report() -> int:
    """Count the articles. The schedule in app.py sends this task every night."""
    current_task().logger.info("%d articles", len(PRICES))
    return len(PRICES)
