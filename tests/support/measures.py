"""Counts of attempts, as workers store them."""

from __future__ import annotations

from datetime import UTC, datetime

from horsies.db.statements.measures import AddMeasures, add_measures
from horsies.monitor.measures import BUCKETS
from tests.support.database import Database


def add(
    connection: Database,
    counts: list[tuple[int, str, str, int]],
    now: datetime | None = None,
) -> None:
    """Add attempts that ended in the past: (minutes ago, queue, task, count)."""
    minute = int((now or datetime.now(UTC)).timestamp()) // 60
    ages, queues, names, ended = (list(column) for column in zip(*counts, strict=True))
    buckets = [
        "{" + ",".join(str(count * (place == count % BUCKETS)) for place in range(BUCKETS)) + "}"
        for count in ended
    ]
    columns = AddMeasures(
        [minute - age for age in ages],
        queues,
        names,
        *(ended, ended, ended, ended, ended),
        [count * 1000 for count in ended],
        [count * 10 for count in ended],
        buckets,
        buckets,
    )
    add_measures.run(connection, columns)
