"""Plans on a full table: operator queries do not read history and are cheap. The plans are generic,
as on a long-lived connection; the rows that the statements really read are counted.
"""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from psycopg import Connection

from horsies.db.statement import Statement, Step
from horsies.db.statements.actions import ACTIONS
from horsies.db.statements.dashboard import (
    DASHBOARD,
    count_open_runs,
    count_recent_arrivals,
    estimate_rows,
    next_in_queue,
    tasks_of_worker,
    thinned_worker_history,
)
from horsies.db.statements.doctor import (
    DOCTOR,
    count_abandoned,
    find_long_pauses,
    find_overdue_schedules,
    find_overlong_tasks,
)
from horsies.db.statements.explain import (
    EXPLAIN,
    count_ahead,
    count_due,
    explain_task,
    list_due_names,
    list_places,
)
from horsies.db.statements.keys import KEYS
from horsies.db.statements.lookup import (
    LOOKUP,
    end_of_attempts,
    group_failures,
    read_failure,
    search_tasks,
)
from horsies.db.statements.measures import (
    MEASURES,
    count_done_by_minute,
    find_failing_tasks,
    read_measures,
)
from horsies.db.statements.metrics import METRICS, read_gauges
from horsies.db.statements.monitor import (
    MONITOR,
    ListTasks,
    count_in_flight,
    count_recent_attempts,
    count_waiting,
    end_of_window,
    find_stale_tasks,
    list_known_queues,
    list_live_tasks,
    list_newest_tasks,
    list_tasks_by_error,
    list_tasks_by_fingerprint,
    list_workers,
    newest_worker_states,
)
from horsies.db.statements.queues import QUEUES
from horsies.db.statements.search import (
    find_by_prefix,
    search_errors,
    search_runs,
    search_schedules,
    search_task_names,
)
from horsies.db.statements.traces import TRACES
from tests.support.query_plans import full as full
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
    for catalogue in (
        *(ACTIONS, MONITOR, DASHBOARD, LOOKUP, QUEUES, MEASURES, METRICS, DOCTOR, EXPLAIN),
        *(TRACES, KEYS),
    )
    for name, statement in catalogue.statements.items()
]

# 50,000 finished tasks under ids in the order of time, 500 that wait, 200 delayed, 50 that run; 50,000
# attempts, of which the last 300 ended within a minute; 20,000 snapshots of 20 workers; 10,000 runs, of which
# 50 are paused and 100 run; 300 schedules, four of them overdue; two
# weeks of measures.
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
INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, priority, enqueued_at)
SELECT numbered(70000 + n), 'later', 'reports', 'sha', 1, now() + interval '1 day'
FROM generate_series(1, 200) AS n;
INSERT INTO horsies_workflows (id, root_workflow_id, name, status, on_error, definition_key, fingerprint,
    total_nodes, open_nodes, error, paused_at)
SELECT numbered(n), numbered(n), 'orders', CASE WHEN n <= 50 THEN 'PAUSED' WHEN n <= 150 THEN 'RUNNING'
    ELSE 'COMPLETED' END, 'pause', 'orders', 'f', 1, 1, CASE WHEN n % 2 = 0 THEN '{}' END, now()
FROM generate_series(1, 10000) AS n;
INSERT INTO horsies_schedule_state (schedule_name, next_run_at, updated_at)
SELECT 'schedule-' || n, now() - interval '108 hours' + n * interval '1 day', now() - interval '5 days'
FROM generate_series(1, 300) AS n;
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


@pytest.mark.parametrize("full", ["force_generic_plan"], indirect=True)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_no_look_reads_a_big_table_from_end_to_end(
    full: Connection[Any], statement: Statement[Any, Any]
) -> None:
    full.execute(b"PREPARE under_test AS " + statement.numbered())
    names = statement.parameters
    given = f" ({', '.join('NULL' for _ in names)})" if names else ""
    found = full.execute(f"EXPLAIN (FORMAT JSON) EXECUTE under_test{given}".encode()).fetchone()
    assert found is not None
    scanned = [
        node["Relation Name"]
        for node in nodes(found[0])
        if node["Node Type"] == "Seq Scan" and node["Relation Name"] in BIG_TABLES
    ]
    assert scanned == [], json.dumps(found[0], indent=1)


def bounded(window: int, **filters: Any) -> Step:
    return list_newest_tasks(**{**everything(20), **filters}, window=window)


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
        "workers": [],
        "retried_only": False,
        "limit": limit,
    }


def test_the_newest_tasks_cost_what_is_shown(full: Connection[Any]) -> None:
    rows, cost = reads(full, bounded(50_000))
    assert len(rows) == 20
    assert cost < 100


def test_a_filter_that_matches_often_ends_early(full: Connection[Any]) -> None:
    rows, cost = reads(full, bounded(50_000, statuses=["FAILED"]))
    assert len(rows) == 20
    assert cost < 5_000


def test_a_filter_that_matches_nothing_costs_the_window_and_no_more(full: Connection[Any]) -> None:
    rows, cost = reads(full, bounded(1_000, names=["nothing"]))
    assert rows == []
    assert cost < 2_100
    edge, cost = reads(full, end_of_window(LAST, FIRST, 1_000))
    assert len(edge) == 2
    assert cost < 2_100


def test_what_waits_and_runs_is_found_without_history(full: Connection[Any]) -> None:
    rows, cost = reads(full, (list_live_tasks, asked(statuses=["RUNNING"])))
    assert {row.status for row in rows} == {"RUNNING"}
    assert len(rows) == 20
    assert cost < 300
    rows, cost = reads(full, (list_live_tasks, asked(statuses=["PENDING", "RUNNING"])))
    assert len(rows) == 20
    assert cost < 2_000


def test_a_rare_error_is_found_by_its_index(full: Connection[Any]) -> None:
    rows, cost = reads(full, (list_tasks_by_error, asked(error_codes=["RARE"])))
    assert len(rows) == 10
    assert cost < 100


def test_counting_what_lives_reads_what_lives(full: Connection[Any]) -> None:
    (reports,), cost = reads(full, count_waiting(10_000))
    assert (reports.queue_name, reports.due, reports.delayed) == ("reports", 500, 200)
    assert cost < 1_900
    (reports,), cost = reads(full, count_waiting(20))
    assert (reports.due, reports.delayed) == (21, 21)
    assert cost < 150
    in_flight, cost = reads(full, count_in_flight())
    assert [(row.queue_name, row.running) for row in in_flight] == [("mail", 50)]
    assert cost < 300
    known, cost = reads(full, list_known_queues())
    assert [row.name for row in known] == ["mail", "reports"]
    assert cost < 300


def test_rates_read_the_sample_and_the_tasks_of_the_last_minute(full: Connection[Any]) -> None:
    full.execute(
        "UPDATE horsies_task_attempts SET finished_at = now() - interval '5 seconds' "
        "WHERE finished_at > now() - interval '12 hours'"
    )
    (mail,), cost = reads(full, count_recent_attempts(1_000))
    assert (mail.queue_name, mail.done, mail.covered_seconds) == ("mail", 300, 60.0)
    # A test that is rolled back leaves a dead version of every second attempt.
    assert cost < 4_000


def test_a_chart_reads_the_slots_that_it_shows(full: Connection[Any]) -> None:
    rows, cost = reads(full, read_measures(3_600, 60, 60, "queue", [], []))
    assert len(rows) == 61
    # The minutes since the rows were made are empty.
    assert {(row.subject, row.done) for row in rows[1:]} - {(None, 0)} == {("mail", 100)}
    assert cost < 3_000
    (mail,), cost = reads(full, count_done_by_minute(60, ["mail", "other"]))
    assert set(mail.done) == {100}
    assert cost < 3_000
    failing, cost = reads(full, find_failing_tasks())
    assert failing == []
    assert cost < 3_000


def test_the_gauges_read_what_is_open(full: Connection[Any]) -> None:
    (gauges,), cost = reads(full, read_gauges("public", 10_000, 30.0))
    assert gauges.tasks_stored > 40_000
    assert (gauges.running, gauges.paused, gauges.overdue) == (100, 50, 4)
    assert cost < 500


def test_workers_are_listed_without_reading_their_history(full: Connection[Any]) -> None:
    rows, cost = reads(full, list_workers(False))
    assert len(rows) == 20
    assert sum(row.tasks_running for row in rows) == 50
    assert cost < 500
    rows, cost = reads(full, newest_worker_states())
    assert len(rows) == 20
    assert cost < 500


def test_stale_tasks_are_sought_among_those_that_run(full: Connection[Any]) -> None:
    rows, cost = reads(full, find_stale_tasks(120.0))
    assert len(rows) == 50
    assert cost < 500


def test_panels_of_the_dashboard_read_what_they_show(full: Connection[Any]) -> None:
    front, cost = reads(full, next_in_queue("reports", 25))
    assert {row.task_name for row in front} == {"work"}
    assert len(front) == 25
    assert cost < 200
    mine, cost = reads(full, tasks_of_worker("worker-3", 200))
    assert len(mine) in (2, 3)
    assert cost < 50
    long, cost = reads(full, find_overlong_tasks(60.0, 13))
    assert len(long) == 13
    assert cost < 500
    arrived, cost = reads(full, count_recent_arrivals(FIRST, 1_000))
    assert sum(row.arrived for row in arrived) == 1_000
    assert cost < 2_100
    (estimate,), cost = reads(full, estimate_rows())
    assert estimate.tasks > 50_000
    assert cost < 10


def test_open_runs_and_schedules_are_found_by_their_indexes(full: Connection[Any]) -> None:
    counted, cost = reads(full, count_open_runs(60))
    assert dict(counted) == {"PENDING": 0, "RUNNING": 61, "PAUSED": 50}
    assert cost < 400
    paused, cost = reads(full, find_long_pauses(86_400.0, 13))
    assert len(paused) == 13
    assert cost < 200
    overdue, cost = reads(full, find_overdue_schedules(15.0, 13))
    assert len(overdue) == 4
    assert cost < 100


def test_the_history_of_a_worker_is_thinned(full: Connection[Any]) -> None:
    # The rows may be half an hour old: the test processes share them.
    newest = full.execute("SELECT max(snapshot_at) FROM horsies_worker_states").fetchone()
    assert newest is not None
    since = newest[0] - timedelta(hours=2)
    asked_for = thinned_worker_history("worker-3", since, timedelta(minutes=10))
    points, cost = reads(full, asked_for)
    assert 11 <= len(points) <= 13
    assert cost < 1_000


def test_a_search_by_argument_costs_its_window(full: Connection[Any]) -> None:
    searched = search_tasks(
        **{**everything(200), "names": ["work"]},
        window=1_000,
        max_bytes=65_536,
        key='"order_id"',
        needle="17",
        positional=[],
    )
    rows, cost = reads(full, searched)
    assert rows == []
    assert cost < 2_100


def test_failures_are_grouped_from_the_newest_attempts(full: Connection[Any]) -> None:
    full.execute(
        "UPDATE public.horsies_task_attempts SET outcome = 'FAILED', error_code = 'BROKE' "
        "WHERE task_id IN (SELECT public.numbered(n) FROM generate_series(1, 49999, 2) AS n)"
    )
    (first,), cost = reads(full, end_of_attempts(1_000))
    assert cost < 5_000
    groups, cost = reads(full, group_failures(first.id, 2_000, []))
    assert [(group.task_name, group.error_code) for group in groups] == [("work", "BROKE")]
    assert 0 < groups[0].total <= 1_000
    assert cost < 30_000


def test_a_reason_is_found_by_the_index_on_fingerprints(full: Connection[Any]) -> None:
    """25,000 failures of one task have two reasons, one of them rare and old."""
    full.execute(
        "UPDATE public.horsies_task_attempts SET outcome = 'FAILED', error_code = 'BROKE', "
        "fingerprint = CASE WHEN id < 1000 THEN 'aaaaaaaaaaaa' ELSE 'bbbbbbbbbbbb' END "
        "WHERE task_id IN (SELECT public.numbered(n) FROM generate_series(1, 49999, 2) AS n)"
    )
    full.execute(
        "UPDATE public.horsies_tasks SET fingerprint = 'aaaaaaaaaaaa' "
        "WHERE id IN (SELECT public.numbered(n) FROM generate_series(1, 999, 2) AS n)"
    )
    (first,), _ = reads(full, end_of_attempts(1_000))
    (group,), cost = reads(full, group_failures(first.id, 2_000, []))
    assert (group.fingerprint, group.first_at < group.last_at) == ("bbbbbbbbbbbb", True)
    assert cost < 30_000
    (found,), cost = reads(full, read_failure("aaaaaaaaaaaa", 2_000))
    assert (found.total, found.task_name) == (500, "work")
    assert cost < 5_000
    (found,), cost = reads(full, read_failure("bbbbbbbbbbbb", 2_000))
    assert (found.total, cost < 10_000) == (2_000, True)
    listed = list_tasks_by_fingerprint(**everything(20), fingerprint="aaaaaaaaaaaa")
    rows, cost = reads(full, listed)
    assert (len(rows), cost < 200) == (20, True)


@pytest.mark.parametrize("text", ["work", "nothing like this"])
def test_a_search_reads_a_bounded_part_of_the_history(full: Connection[Any], text: str) -> None:
    ids = ("00000000-0000-7000-8000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff")
    assert reads(full, find_by_prefix(*ids, 10))[1] < 100
    assert reads(full, search_errors(text, 1_000, 10))[1] < 3_000
    assert reads(full, search_runs(text, 100, 10))[1] < 500
    assert reads(full, search_schedules(text, 10))[1] < 500
    assert reads(full, search_task_names(text, 10))[1] < 25_000


def test_the_doctor_reads_tasks_in_flight(full: Connection[Any]) -> None:
    (counts,), cost = reads(full, count_abandoned(60.0))
    assert counts == (0, 0, 0)
    assert cost < 500


def test_an_explanation_reads_a_bounded_part_of_a_long_queue(full: Connection[Any]) -> None:
    (last,) = full.execute(
        "SELECT id::text, priority, enqueued_at FROM horsies_tasks WHERE status = 'PENDING' "
        "AND queue_name = 'reports' AND enqueued_at <= now() "
        "ORDER BY priority DESC, enqueued_at DESC, id DESC LIMIT 1"
    )
    task_id, priority, enqueued_at = last
    (facts,), cost = reads(full, explain_task(task_id))
    assert facts.queue_name == "reports"
    assert cost < 30
    place = count_ahead("reports", priority, enqueued_at, task_id, 101)
    (ahead,), cost = reads(full, place)
    assert ahead.due == 101
    assert cost < 300
    (due,), cost = reads(full, count_due(["reports"], 101))
    assert due.due == 101
    assert cost < 600
    names, cost = reads(full, list_due_names(["reports"]))
    assert names
    assert cost < 3_500
    places, cost = reads(full, list_places("mail"))
    assert (len(places), places[0].in_queue) == (5, 50)
    assert cost < 300
