"""The application whose steps are compared with DBOS steps."""

from __future__ import annotations

from horsies import Durable, Horsies

app = Horsies()


def one(number: int) -> int:
    """Do nothing, recorded."""
    return number


@app.durable("steps")
def steps(ctx: Durable, count: int) -> int:
    """Record this many steps."""
    return sum(ctx.step(one, number) for number in range(count))
