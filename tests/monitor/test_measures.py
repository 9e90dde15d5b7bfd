"""The counts of attempts in the database: added, read as series, compacted, deleted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horsies import RecoveryConfig
from horsies.app import Horsies
from horsies.db.pipeline import Pipeline
from horsies.db.statement import run_script
from horsies.db.statements.measures import (
    compact_measures,
    find_failing_tasks,
)
from horsies.monitor.measures import (
    Series,
    done_by_minute_script,
    read_measures_script,
    read_split_measures_script,
)
from horsies.worker.reaper import sweep
from tests.support.database import Database
from tests.support.examples import examples
from tests.support.measures import add

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
BY_BUCKET = """SELECT queue_name, task_name, kind, place, sum(value) FROM horsies_measures,
    LATERAL (SELECT 'waited' AS kind, place, value FROM unnest(waited) WITH ORDINALITY AS a (value, place)
        UNION ALL SELECT 'ran', place, value FROM unnest(ran) WITH ORDINALITY AS b (value, place)) AS each
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4"""
BY_COLUMN = """SELECT queue_name, task_name, sum(done), sum(failed), sum(retried), sum(crashed),
    sum(stopped), sum(waited_ms), sum(ran_ms) FROM horsies_measures GROUP BY 1, 2 ORDER BY 1, 2"""


def read(app: Horsies, script: Any) -> Any:
    with app.get_broker().database.connection() as connection:
        return run_script(connection, script)


def test_counts_of_the_same_minute_add_up(app: Horsies, connection: Database) -> None:
    now = datetime.now(UTC)
    for _ in range(2):
        add(
            connection,
            [(1, "mail", "send", 3), (1, "mail", "render", 1), (5, "reports", "make", 2)],
            now,
        )
    series: Series = read(app, read_measures_script(10 * MINUTE, MINUTE))
    assert len(series.slots) == 11
    assert (series.total.done, series.total.stopped, series.total.attempts) == (12, 12, 60)
    assert [slot.done for slot in series.slots if slot.done] == [4, 8]
    assert series.total.waited.mean == 1.0
    assert series.total.ran.count == 12
    assert 0 < (series.until - series.slots[-1].at).total_seconds() < 60
    mail: Series = read(app, read_measures_script(10 * MINUTE, MINUTE, queues=["mail"]))
    assert mail.total.done == 8
    one: Series = read(app, read_measures_script(10 * MINUTE, MINUTE, names=["make"]))
    assert one.total.done == 4


def test_sums_are_apart_by_queue_or_task(app: Horsies, connection: Database) -> None:
    add(connection, [(1, "mail", "send", 3), (1, "mail", "", 1), (2, "reports", "make", 2)])
    add(connection, [(3, "mail", "send", 5), (59, "mail", "send", 50)])
    by_queue = read(app, read_split_measures_script("queue", 15 * MINUTE))
    assert {name: series.total.done for name, series in by_queue.items()} == {
        "mail": 9,
        "reports": 2,
    }
    assert by_queue["mail"].total.ran.count == 9
    assert 9 / 17 < by_queue["mail"].per_minute(9) <= 9 / 15
    by_task = read(app, read_split_measures_script("task", 15 * MINUTE, queues=["mail"]))
    assert {name: series.total.done for name, series in by_task.items()} == {"": 1, "send": 8}


def test_done_attempts_are_counted_by_whole_minutes(connection: Database) -> None:
    with connection.transaction():  # one time for all statements
        now = connection.execute("SELECT now()").fetchone()
        assert now is not None
        add(connection, [(0, "mail", "open minute", 9), (4, "mail", "too old", 9)], now[0])
        add(connection, [(3, "mail", "a", 1), (1, "mail", "a", 2), (1, "mail", "b", 3)], now[0])
        add(connection, [(2, "reports", "a", 4), (9, "quiet", "a", 1)], now[0])
        add(connection, [(1, "not asked for", "a", 4)], now[0])
        found = run_script(connection, done_by_minute_script(["mail", "reports", "quiet"], 3))
    assert found == {"mail": [1, 0, 5], "reports": [0, 4, 0]}


def test_failing_tasks_are_compared_with_the_hour_before(connection: Database) -> None:
    with connection.transaction():
        now = connection.execute("SELECT now()").fetchone()
        assert now is not None
        # Each counts as failed and as crashed.
        add(connection, [(1, "mail", "new", 6), (9, "other", "new", 1)], now[0])
        add(connection, [(1, "mail", "worse", 8), (40, "mail", "worse", 10)], now[0])
        add(connection, [(40, "mail", "over", 10), (90, "mail", "new", 50)], now[0])
        found = find_failing_tasks.fetch(connection)
    assert sorted(found) == [("new", 14, 0.0, 7, 7, 0.0), ("worse", 16, 4.0, 8, 8, 2.0)]


def test_a_series_without_attempts_has_empty_slots(app: Horsies) -> None:
    series: Series = read(app, read_measures_script(HOUR, 5 * MINUTE))
    assert len(series.slots) == 13
    assert series.total.attempts == 0
    assert series.total.waited.p95 is None
    assert read(app, read_split_measures_script("queue", HOUR)) == {}


ages = st.integers(0, 48 * 60)
names = st.sampled_from(("mail", "reports"))


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.dictionaries(st.tuples(ages, names, names), st.integers(1, 50), min_size=1, max_size=60),
    st.integers(1, 30),
)
def test_compaction_changes_no_sum(
    connection: Database, counts: dict[tuple[int, str, str], int], limit: int
) -> None:
    connection.execute("TRUNCATE horsies_measures")
    add(connection, [(*key, count) for key, count in counts.items()])
    before = [connection.execute(sums).fetchall() for sums in (BY_COLUMN, BY_BUCKET)]
    while compact_measures.fetch(connection, limit):
        pass
    assert [connection.execute(sums).fetchall() for sums in (BY_COLUMN, BY_BUCKET)] == before
    lengths = connection.execute(
        "SELECT count(*) FILTER (WHERE minutes = 1 AND minute < now() - interval '6 h 11 min'),"
        " count(*) FILTER (WHERE minutes = 10 AND minute > now() - interval '6 h') FROM horsies_measures"
    ).fetchone()
    assert lengths == (0, 0)


def test_the_sweep_compacts_and_deletes_measures(connection: Database) -> None:
    add(
        connection, [(1, "mail", "send", 1), (500, "mail", "send", 2), (31 * 60, "mail", "send", 4)]
    )
    pipeline = Pipeline(connection)
    sweep(pipeline, RecoveryConfig(measure_retention_hours=30))
    rows = connection.execute("SELECT minutes, done FROM horsies_measures ORDER BY minute DESC")
    assert rows.fetchall() == [(1, 1), (10, 2)]
    sweep(pipeline, RecoveryConfig(measure_retention_hours=None))
    assert connection.execute("SELECT count(*) FROM horsies_measures").fetchone() == (2,)
