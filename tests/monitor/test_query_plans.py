"""Plans on a full table: what an operator looks at does not read history, and a look costs little.

Generic plans, as a long-lived connection ends up with, and what the statements really read.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.statement import Nothing, Statement, field_names
from horsies.db.statements.measures import MEASURES, ReadMeasures, read_measures
from horsies.db.statements.metrics import METRICS, ReadGauges, read_gauges
from horsies.db.statements.monitor import (
    MONITOR,
    CountUpTo,
    ListNewestTasks,
    ListTasks,
    ListWorkers,
    Sample,
    StaleThreshold,
    Window,
    count_in_flight,
    count_recent_attempts,
    count_waiting_up_to,
    end_of_window,
    find_stale_tasks,
    list_known_queues,
    list_live_tasks,
    list_newest_tasks,
    list_tasks_by_error,
    list_workers,
    newest_worker_states,
    queue_heads,
)
from horsies.db.statements.queues import QUEUES
from tests.support.query_plans import nodes, reads

FIRST, LAST = f"{uuid.UUID(int=0)}", f"{uuid.UUID(int=2**128 - 1)}"
BIG_TABLES = (
    "horsies_tasks",
    "horsies_task_attempts",
    "horsies_heartbeats",
    "horsies_worker_states",
    "horsies_measures",
)
STATEMENTS = [
    pytest.param(statement, id=name)
    for catalogue in (MONITOR, QUEUES, MEASURES, METRICS)
    for name, statement in catalogue.statements.items()
]

# 50,000 finished tasks under ids in the order of time, 500 that wait, 50 that run; 50,000 attempts, of
# which the last 300 ended within a minute; 20,000 snapshots of 20 workers; two weeks of measures.
FILL = """
ALTER TABLE horsies_tasks DISABLE TRIGGER USER;
CREATE FUNCTION numbered(number integer) RETURNS uuid LANGUAGE sql AS $$
    SELECT (lpad(to_hex(1700000000000 + number), 12, '0') || '7' || substr(md5(number::text), 1, 3)
            || '8' || substr(md5(number::text), 4, 15))::uuid $$;
INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, completed_at, result, error_code)
SELECT numbered(n), CASE WHEN n = 10 THEN 'rare' ELSE 'work' END, 'mail',
       CASE WHEN n % 20 = 0 THEN 'FAILED' ELSE 'COMPLETED' END, 'sha', now(), '{"ok":1}',
       CASE WHEN n % 5000 = 0 THEN 'RARE' WHEN n % 20 = 0 THEN 'BROKE' END
FROM generate_series(1, 50000) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha)
SELECT numbered(n * 90), 'work', 'reports', 'sha' FROM generate_series(1, 500) AS n
ON CONFLICT DO NOTHING;
INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha)
SELECT numbered(60000 + n), 'work', 'reports', 'sha' FROM generate_series(1, 500) AS n;
INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, claimed_by_worker_id, started_at)
SELECT numbered(-n), 'work', 'mail', 'RUNNING', 'sha', 'worker-' || n % 20, now() - interval '1 hour'
FROM generate_series(1, 50) AS n;
INSERT INTO horsies_task_attempts (task_id, attempt, outcome, finished_at)
SELECT numbered(n), 1, 'COMPLETED', now() - CASE WHEN n > 49700 THEN interval '5 seconds'
                                                 ELSE interval '1 day' END
FROM generate_series(1, 50000) AS n ORDER BY n;
INSERT INTO horsies_heartbeats (task_id, sender_id, role, sent_at)
SELECT numbered(n), 'w', 'runner', now() FROM generate_series(1, 20000) AS n;
INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues)
SELECT 'worker-' || n, n, 'host', n, 4, '{mail,reports}' FROM generate_series(0, 19) AS n;
INSERT INTO horsies_worker_states (worker_id, snapshot_at, hostname, pid, processes, queues, tasks_running,
    tasks_claimed, max_claim_batch, max_claim_per_worker, worker_started_at)
SELECT 'worker-' || n % 20, now() - n * interval '1 second', 'host', n, 4, '{mail}', 1, 1, 0, 0, now()
FROM generate_series(1, 20000) AS n;
INSERT INTO horsies_measures
SELECT date_bin('10 minutes', now(), 'epoch') - slot * interval '10 minutes', 10, 'mail', 'task' || name,
    5, 0, 0, 0, 0, 100, 100, array_fill(1, ARRAY[16]), array_fill(1, ARRAY[16])
FROM generate_series(36, 2016) AS slot, generate_series(1, 20) AS name;
INSERT INTO horsies_measures
SELECT date_trunc('minute', now()) - slot * interval '1 minute', 1, 'mail', 'task' || name,
    5, 0, 0, 0, 0, 100, 100, array_fill(1, ARRAY[16]), array_fill(1, ARRAY[16])
FROM generate_series(0, 359) AS slot, generate_series(1, 20) AS name;
ALTER TABLE horsies_tasks ENABLE TRIGGER USER;
"""


@pytest.fixture(params=["force_generic_plan", "force_custom_plan"])
def full(full_url: str, request: pytest.FixtureRequest) -> Iterator[Connection[Any]]:
    """A transaction on the full database, rolled back in the end."""
    with psycopg.connect(full_url, prepare_threshold=0) as connection:
        connection.execute("SELECT set_config('plan_cache_mode', %s, false)", (request.param,))
        yield connection
        connection.rollback()


@pytest.mark.parametrize("full", ["force_generic_plan"], indirect=True)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_no_look_reads_a_big_table_from_end_to_end(
    full: Connection[Any], statement: Statement[Any, Any]
) -> None:
    full.execute(b"PREPARE under_test AS " + statement.numbered())
    names = field_names(statement.params_type)
    given = f" ({', '.join('NULL' for _ in names)})" if names else ""
    found = full.execute(f"EXPLAIN (FORMAT JSON) EXECUTE under_test{given}".encode()).fetchone()
    assert found is not None
    scanned = [
        node["Relation Name"]
        for node in nodes(found[0])
        if node["Node Type"] == "Seq Scan" and node["Relation Name"] in BIG_TABLES
    ]
    assert scanned == [], json.dumps(found[0], indent=1)


def bounded(window: int, **filters: Any) -> ListNewestTasks:
    return ListNewestTasks(**{**everything(20), **filters}, window=window)


def asked(**filters: Any) -> ListTasks:
    return ListTasks(**{**everything(20), **filters})


def everything(limit: int) -> dict[str, Any]:
    return {
        "before": LAST,
        "since": FIRST,
        "statuses": [],
        "queues": [],
        "names": [],
        "error_codes": [],
        "limit": limit,
    }


def test_the_newest_tasks_cost_what_is_shown(full: Connection[Any]) -> None:
    rows, cost = reads(full, list_newest_tasks, bounded(50_000))
    assert len(rows) == 20
    assert cost < 100


def test_a_filter_that_matches_often_ends_early(full: Connection[Any]) -> None:
    rows, cost = reads(full, list_newest_tasks, bounded(50_000, statuses=["FAILED"]))
    assert len(rows) == 20
    assert cost < 5_000


def test_a_filter_that_matches_nothing_costs_the_window_and_no_more(full: Connection[Any]) -> None:
    rows, cost = reads(full, list_newest_tasks, bounded(1_000, names=["nothing"]))
    assert rows == []
    assert cost < 2_100
    edge, cost = reads(full, end_of_window, Window(LAST, FIRST, 1_000))
    assert len(edge) == 2
    assert cost < 2_100


def test_what_waits_and_runs_is_found_without_history(full: Connection[Any]) -> None:
    rows, cost = reads(full, list_live_tasks, asked(statuses=["RUNNING"]))
    assert {row.status for row in rows} == {"RUNNING"}
    assert len(rows) == 20
    assert cost < 300
    rows, cost = reads(full, list_live_tasks, asked(statuses=["PENDING", "RUNNING"]))
    assert len(rows) == 20
    assert cost < 2_000


def test_a_rare_error_is_found_by_its_index(full: Connection[Any]) -> None:
    rows, cost = reads(full, list_tasks_by_error, asked(error_codes=["RARE"]))
    assert len(rows) == 10
    assert cost < 100


def test_counting_what_lives_reads_what_lives(full: Connection[Any]) -> None:
    heads, cost = reads(full, queue_heads, Nothing())
    assert [head.queue_name for head in heads] == ["reports"]
    assert cost < 20
    waiting, cost = reads(full, count_waiting_up_to, CountUpTo(["mail", "reports"], 10_000))
    assert [(row.queue_name, row.due) for row in waiting] == [("mail", 0), ("reports", 500)]
    assert cost < 1_500
    waiting, cost = reads(full, count_waiting_up_to, CountUpTo(["reports"], 20))
    assert [(row.queue_name, row.due) for row in waiting] == [("reports", 21)]
    assert cost < 50
    in_flight, cost = reads(full, count_in_flight, Nothing())
    assert [(row.queue_name, row.running) for row in in_flight] == [("mail", 50)]
    assert cost < 300
    known, cost = reads(full, list_known_queues, Nothing())
    assert [row.name for row in known] == ["mail", "reports"]
    assert cost < 300


def test_rates_read_the_sample_and_the_tasks_of_the_last_minute(full: Connection[Any]) -> None:
    (mail,), cost = reads(full, count_recent_attempts, Sample(1_000))
    assert (mail.queue_name, mail.done, mail.covered_seconds) == ("mail", 300, 60.0)
    assert cost < 3_000


def test_a_chart_reads_the_slots_that_it_shows(full: Connection[Any]) -> None:
    rows, cost = reads(full, read_measures, ReadMeasures(3_600, 60, "queue", [], []))
    assert len(rows) == 61
    assert {(row.subject, row.done) for row in rows[1:]} == {("mail", 100)}
    assert cost < 3_000


def test_the_gauges_read_what_is_open(full: Connection[Any]) -> None:
    (gauges,), cost = reads(full, read_gauges, ReadGauges("public", 10_000, 30.0))
    assert gauges.tasks_stored > 40_000
    assert (gauges.running, gauges.paused, gauges.overdue) == (0, 0, 0)
    assert cost < 200


def test_workers_are_listed_without_reading_their_history(full: Connection[Any]) -> None:
    rows, cost = reads(full, list_workers, ListWorkers(False))
    assert len(rows) == 20
    assert sum(row.tasks_running for row in rows) == 50
    assert cost < 500
    rows, cost = reads(full, newest_worker_states, Nothing())
    assert len(rows) == 20
    assert cost < 500


def test_stale_tasks_are_sought_among_those_that_run(full: Connection[Any]) -> None:
    rows, cost = reads(full, find_stale_tasks, StaleThreshold(120.0))
    assert len(rows) == 50
    assert cost < 500
