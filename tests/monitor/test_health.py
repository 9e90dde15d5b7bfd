"""Pings and snapshots of workers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import psycopg
import pytest

from horsies import BrokerErrorCode, Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.monitor.health import read_pong
from tests.support.applications import Call
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_heartbeat, add_snapshot, add_task, add_worker, ago

UNREACHABLE = "postgresql://app:hunter2@127.0.0.1:1/shop"


def test_the_database_answers_with_its_version(app: Horsies, call: Call) -> None:
    ping = call(app, app, "ping_database").unwrap()
    assert ping.server_version[0].isdigit()
    assert 0 < ping.latency_ms < 10_000


def test_pinging_an_empty_database_creates_nothing(database_url: str, call: Call) -> None:
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=database_url)))
    call(app, app, "ping_database").unwrap()
    app.close()
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT to_regclass('horsies_tasks')").fetchone() == (None,)


@pytest.mark.parametrize("method", ["ping_database", "ping_workers", "list_worker_states"])
def test_a_database_that_is_away_is_a_value_without_its_password(call: Call, method: str) -> None:
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=UNREACHABLE)))
    error = call(app, app, method).unwrap_err()
    assert error.retryable
    assert "hunter2" not in error.message


Answer = Callable[[dict[str, Any]], list[dict[str, Any] | str]]


@contextmanager
def responder(url: str, answer: Answer) -> Iterator[list[dict[str, Any]]]:
    """A connection that answers pings the way workers do, until the block ends."""
    heard: list[dict[str, Any]] = []
    with (
        psycopg.connect(url, autocommit=True) as connection,
        psycopg.connect(url, autocommit=True) as replies,
    ):
        connection.execute("LISTEN horsies_worker_ping")
        connection.execute("LISTEN enough")

        def serve() -> None:
            for note in connection.notifies(timeout=30):
                if note.channel == "enough":
                    return
                question = json.loads(note.payload)
                heard.append(question)
                for reply in answer(question):
                    text = reply if isinstance(reply, str) else json.dumps(reply)
                    replies.execute("SELECT pg_notify(%s, %s)", (question["reply_channel"], text))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard
        finally:
            with psycopg.connect(url, autocommit=True) as other:
                other.execute("NOTIFY enough")
            thread.join()


def pong(question: dict[str, Any], worker_id: str) -> dict[str, Any]:
    return {
        "correlation_id": question["correlation_id"],
        "worker_id": worker_id,
        "hostname": "host-1",
        "pid": 7,
    }


def test_a_ping_ends_when_enough_workers_have_answered(
    app: Horsies, process_url: str, call: Call
) -> None:
    with responder(process_url, lambda asked: [pong(asked, "a"), pong(asked, "b")]) as heard:
        answered = call(app, app, "ping_workers", timeout_seconds=30, min_responses=2).unwrap()
    assert [(one.worker_id, one.hostname, one.pid) for one in answered] == [
        ("a", "host-1", 7),
        ("b", "host-1", 7),
    ]
    assert all(0 < one.latency_ms < 30_000 for one in answered)
    (question,) = heard
    assert question["reply_channel"].startswith("horsies_worker_pong_")
    assert "target_worker_id" not in question


def test_a_targeted_ping_ends_at_the_answer_of_its_target(
    app: Horsies, process_url: str, call: Call
) -> None:
    with responder(process_url, lambda asked: [pong(asked, "a"), pong(asked, "b")]) as heard:
        answered = call(app, app, "ping_workers", "b", timeout_seconds=30).unwrap()
    assert [one.worker_id for one in answered] == ["b"]
    assert heard[0]["target_worker_id"] == "b"


def test_health_waits_for_the_workers_it_asks(
    horsies: Run, connection: Database, process_url: str
) -> None:
    """A probe of one host asks two workers; those of other hosts answer first."""
    asked_ids = [add_worker(connection, hostname="pod-1") for _ in range(2)]

    def answer(asked: dict[str, Any]) -> list[dict[str, Any] | str]:
        return [pong(asked, one) for one in ("elsewhere-1", "elsewhere-2", *asked_ids)]

    with responder(process_url, answer):
        found = horsies("health", "--worker", "pod-1", "--timeout", "30")
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("2 of 2 worker(s) answered")


def test_foreign_and_malformed_answers_are_no_answers(app: Horsies, process_url: str) -> None:
    def answer(asked: dict[str, Any]) -> list[dict[str, Any] | str]:
        other = {**pong(asked, "a"), "correlation_id": "another"}
        incomplete = {"correlation_id": asked["correlation_id"], "worker_id": "a"}
        return ["", "{", "[]", other, incomplete, pong(asked, "b"), pong(asked, "b")]

    with responder(process_url, answer):
        answered = app.ping_workers(timeout_seconds=30, min_responses=1).unwrap()
    assert [one.worker_id for one in answered] == ["b"]


@pytest.mark.parametrize("payload", ["", "null", "[1]", "1", "{}", "[" * 100_000])
def test_any_text_can_be_read_as_an_answer(payload: str) -> None:
    assert read_pong(payload, "x", 1.0) is None


def test_nobody_answering_is_an_empty_list(app: Horsies, call: Call) -> None:
    assert call(app, app, "ping_workers", timeout_seconds=0.05).unwrap() == []


@pytest.mark.parametrize(
    "arguments", [{"timeout_seconds": 0}, {"timeout_seconds": float("nan")}, {"min_responses": 0}]
)
def test_a_ping_that_cannot_end_properly_is_refused(
    app: Horsies, call: Call, arguments: dict[str, Any]
) -> None:
    error = call(app, app, "ping_workers", **arguments).unwrap_err()
    assert error.code is BrokerErrorCode.WORKER_PING_FAILED
    assert next(iter(arguments)) in error.message


def test_the_newest_snapshot_of_every_worker_is_listed(
    app: Horsies, connection: Database, call: Call
) -> None:
    for worker in ("a", "b", "c"):
        for minutes in (30, 20, 10):
            add_snapshot(connection, worker, snapshot_at=ago(60 * minutes), tasks_running=minutes)
    add_snapshot(connection, "b", snapshot_at=ago(1), tasks_running=1)
    states = call(app, app, "list_worker_states").unwrap()
    assert [(state.worker_id, state.tasks_running) for state in states] == [
        ("b", 1),
        ("c", 10),
        ("a", 10),
    ]


def test_a_snapshot_has_every_column_in_python_types(app: Horsies, connection: Database) -> None:
    add_snapshot(
        connection,
        "a",
        queues=["mail", "reports"],
        memory_usage_mb=80.5,
        cpu_percent=12.5,
        memory_percent=1.5,
        children_memory_mb=300.25,
        cluster_wide_cap=9,
        queue_priorities='{"mail": 1}',
        queue_max_concurrency='{"mail": null}',
        recovery_config='{"auto_fail_stale_running": true}',
    )
    state = app.get_worker_state("a").unwrap()
    assert state is not None
    columns = connection.execute(
        "SELECT column_name FROM information_schema.columns "
        "WHERE table_name = 'horsies_worker_states'"
    ).fetchall()
    assert {str(name) for (name,) in columns} == set(asdict(state))
    assert state.queues == ["mail", "reports"]
    assert state.queue_priorities == {"mail": 1}
    assert state.queue_max_concurrency == {"mail": None}
    assert state.recovery_config == {"auto_fail_stale_running": True}
    assert (state.memory_usage_mb, state.children_memory_mb) == (80.5, 300.25)


def test_without_snapshots_there_is_nothing_to_show(app: Horsies, call: Call) -> None:
    assert call(app, app, "list_worker_states").unwrap() == []
    assert call(app, app, "get_worker_state", "nobody").unwrap() is None
    assert call(app, app, "get_worker_state_history", "nobody").unwrap() == []


def test_the_history_of_a_worker_is_newest_first_and_can_be_cut(
    app: Horsies, connection: Database, call: Call
) -> None:
    for number in range(5):
        add_snapshot(connection, "a", snapshot_at=ago(number), tasks_running=number)
    add_snapshot(connection, "b")
    everything = call(app, app, "get_worker_state_history", "a").unwrap()
    assert [state.tasks_running for state in everything] == [0, 1, 2, 3, 4]
    assert call(app, app, "get_worker_state_history", "a", limit=2).unwrap() == everything[:2]
    assert call(app, app, "get_worker_state", "a").unwrap() == everything[0]
    refused = call(app, app, "get_worker_state_history", "a", limit=0).unwrap_err()
    assert "limit" in refused.message


def test_stale_tasks_are_those_nothing_was_heard_of(
    app: Horsies, connection: Database, call: Call
) -> None:
    running = {"status": "RUNNING", "worker_hostname": "host-1", "worker_pid": 7}
    silent = add_task(connection, **running, started_at=ago(300))
    beating = add_task(connection, **running, started_at=ago(900))
    stopped_beating = add_task(connection, **running, started_at=ago(600))
    restarted = add_task(connection, **running, started_at=ago(5))
    add_task(connection, status="COMPLETED", started_at=ago(900))
    add_heartbeat(connection, beating, 200)
    add_heartbeat(connection, beating, 10)
    add_heartbeat(connection, stopped_beating, 500)
    add_heartbeat(connection, restarted, 800)
    stale = call(app, app.get_broker(), "get_stale_tasks").unwrap()
    assert [task.id for task in stale] == [stopped_beating, silent]
    assert stale[0].last_heartbeat is not None
    assert stale[1].last_heartbeat is None
    assert call(app, app.get_broker(), "get_stale_tasks", 6).unwrap()[0].id == stopped_beating
    assert call(app, app.get_broker(), "get_stale_tasks", 60).unwrap() == []


def test_worker_stats_count_what_every_process_runs(
    app: Horsies, connection: Database, call: Call
) -> None:
    for pid in (7, 7, 8):
        add_task(
            connection,
            status="RUNNING",
            worker_hostname="host-1",
            worker_pid=pid,
            worker_process_name=f"worker-{pid}",
            started_at=ago(60),
        )
    add_task(connection, status="CLAIMED", worker_hostname="host-1", worker_pid=7)
    stats = call(app, app.get_broker(), "get_worker_stats").unwrap()
    assert [(one.worker_process_name, one.active_tasks) for one in stats] == [
        ("worker-7", 2),
        ("worker-8", 1),
    ]
    assert stats[0].oldest_task_start is not None
    assert stats[0].latest_heartbeat is None


def test_expired_tasks_are_pending_past_their_deadline(
    app: Horsies, connection: Database, call: Call
) -> None:
    late = add_task(connection, good_until=ago(30))
    add_task(connection, good_until=ago(-30))
    add_task(connection, good_until=ago(30), status="EXPIRED")
    (found,) = call(app, app.get_broker(), "get_expired_tasks").unwrap()
    assert found.id == late
    assert 30 <= found.expired_for_seconds < 90
