"""Counts of attempts, as workers store them, and a last hour for the charts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from horsies.db.statements.measures import AddMeasures, add_measures
from horsies.monitor.measures import BUCKETS
from tests.support.database import Database

# Tasks of one queue for sixty minutes, with a swing, some noise, and durations around 50 ms and 250 ms.
LAST_HOUR = """
INSERT INTO public.horsies_measures
SELECT date_trunc('minute', now()) - ago * interval '1 minute', 1, 'default', task,
    done, done / 40, done / 25, 0, 0, done * 60, done * 90,
    ARRAY[done / 8, done / 6, done / 4, done / 3, done / 5, done / 9, done / 20, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ARRAY[0, done / 9, done / 5, done / 3, done / 4, done / 8, done / 30, 0, 0, 0, 0, 0, 0, 0, 0, 0]
FROM generate_series(1, 60) AS ago, unnest(%s::text[], %s::integer[]) AS example (task, usual),
    LATERAL (SELECT (usual * (1 + 0.5 * sin(ago / 9.0) + 0.2 * sin(ago * 2.7)))::integer AS done) AS counted
ON CONFLICT DO NOTHING
"""


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


def fill_last_hour(connection: Database, usual: Mapping[str, int]) -> None:
    """Store measures of tasks by name, each with the number of its attempts that usually end in a minute."""
    connection.execute(LAST_HOUR, [list(usual), list(usual.values())])
