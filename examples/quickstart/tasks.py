"""The first application: one task, on the database that HORSIES_DATABASE_URL names."""

from horsies import Horsies

app = Horsies()


@app.task
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
