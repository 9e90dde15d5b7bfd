"""The bar chart of the README, drawn from the table that `make bench-peers DOCS=1` writes."""

from __future__ import annotations

import re
from pathlib import Path

from tools.drawings.canvas import Canvas

REPOSITORY = Path(__file__).parents[2]
TABLE = REPOSITORY / "docs" / "benchmarks.md"
# The six systems, each with the unit that executes a task.
SYSTEMS = {
    "pgqueuer": "PgQueuer: coroutines, no results",
    "horsies": "Horsies: a process per task",
    "oban": "Oban for Python: coroutines",
    "dramatiq": "Dramatiq, Redis: threads",
    "celery-rabbitmq": "Celery, RabbitMQ: processes",
    "rq": "RQ, Redis: a process per task",
}
COLUMN = "8 slots"
ROW = 44


def rates(text: str) -> dict[str, int]:
    """Return the tasks per second of each system from the table of figures."""
    part = text.split("<!-- measured: figures -->")[1].split("<!-- end measured")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    heads = [cell.strip() for cell in lines[0].split("|")]
    place = heads.index(COLUMN)
    found = {}
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.split("|")]
        name = cells[1].split()[0]
        figure = re.match(r"[\d,]+", cells[place])
        if name in SYSTEMS and figure:
            found[name] = int(figure[0].replace(",", ""))
    return found


def chart() -> Canvas:
    """Draw one bar per system, fastest first."""
    found = rates(TABLE.read_text("utf-8"))
    rows = sorted(found.items(), key=lambda one: -one[1])
    canvas = Canvas(
        900,
        60 + ROW * len(rows),
        "Tasks per second: " + ", ".join(f"{name} {rate:,}" for name, rate in rows),
    )
    canvas.words((12, 26), "No-op tasks per second, eight at a time, two cores", "title", "start")
    widest = rows[0][1]
    for number, (name, rate) in enumerate(rows):
        y = 46 + ROW * number
        width = max(rate / widest * 520, 2)
        colour = "accent" if name == "horsies" else "line"
        canvas.words((12, y + 20), SYSTEMS[name], "title" if name == "horsies" else "", "start")
        canvas.raw(
            f'<rect x="270" y="{y}" width="{width:.0f}" height="28" rx="4" style="fill:var(--{colour})"/>'
        )
        canvas.words((280 + width, y + 20), f"{rate:,}", "muted", "start")
    return canvas
