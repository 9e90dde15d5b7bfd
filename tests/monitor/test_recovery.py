"""Manual recovery: abandoned tasks end as the reaper would end them, tasks with a heartbeat stay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from horsies import BrokerErrorCode, Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.ids import new_id
from tests.support.applications import Call
from tests.support.database import Database
from tests.support.rows import (
    add_heartbeat,
    add_task,
    add_worker,
    ago,
    attempts_of,
    picture,
    retried,
    row_of,
)
from tests.support.wait import wait_until

LOCK_KEY = 0x7ABC_DEF0_8765_4321
UNREACHABLE = "postgresql://app:hunter2@127.0.0.1:1/shop"
STALE_CALLS = ["mark_stale_tasks_as_failed", "requeue_stale_claimed"]


def add_running(connection: Database, worker_id: str, seconds: float, **columns: Any) -> str:
    values = {
        "status": "RUNNING",
        "generation": 1,
        "claimed_by_worker_id": worker_id,
        "claimed_at": ago(seconds),
        "started_at": ago(seconds),
        "worker_pid": 77,
    }
    return add_task(connection, **values | columns)


def add_claimed(connection: Database, worker_id: str, seconds: float) -> str:
    return add_task(
        connection,
        status="CLAIMED",
        claimed=True,
        generation=1,
        claimed_by_worker_id=worker_id,
        claimed_at=ago(seconds),
        claim_expires_at=sql.SQL("now() + interval '1 minute'"),
    )


@contextmanager
def holding_lock(url: str) -> Iterator[None]:
    """A connection that holds the lock a living worker holds."""
    with psycopg.connect(url, autocommit=True) as session:
        session.execute("SELECT pg_advisory_lock(%s)", (LOCK_KEY,))
        yield


def status_of(connection: Database, task_id: str) -> object:
    return row_of(connection, task_id)["status"]


def test_stale_running_tasks_end_by_their_policy_with_an_attempt(
    app: Horsies, connection: Database, call: Call
) -> None:
    worker_id = new_id()
    failed = add_running(connection, worker_id, 400)
    again = add_running(connection, worker_id, 400, **retried("WORKER_CRASHED"))
    fresh = add_running(connection, worker_id, 200)
    claimed = add_claimed(connection, worker_id, 400)
    before = [picture(connection, task_id) for task_id in (fresh, claimed)]
    assert call(app, app.get_broker(), "mark_stale_tasks_as_failed").unwrap() == 2
    row = row_of(connection, failed)
    assert (row["status"], row["error_code"]) == ("FAILED", "WORKER_CRASHED")
    assert worker_id in row["failed_reason"]
    (attempt,) = attempts_of(connection, failed)
    assert (attempt["outcome"], attempt["will_retry"]) == ("WORKER_FAILURE", False)
    row = row_of(connection, again)
    assert (row["status"], row["retry_count"]) == ("PENDING", 1)
    (attempt,) = attempts_of(connection, again)
    assert (attempt["outcome"], attempt["will_retry"]) == ("WORKER_FAILURE", True)
    assert [picture(connection, task_id) for task_id in (fresh, claimed)] == before
    assert call(app, app.get_broker(), "mark_stale_tasks_as_failed").unwrap() == 0


def test_stale_claimed_tasks_go_back_without_an_attempt(
    app: Horsies, connection: Database, call: Call
) -> None:
    worker_id = new_id()
    stale = add_claimed(connection, worker_id, 130)
    kept = [add_claimed(connection, worker_id, 110), add_running(connection, worker_id, 400)]
    before = [picture(connection, task_id) for task_id in kept]
    assert call(app, app.get_broker(), "requeue_stale_claimed").unwrap() == 1
    row = row_of(connection, stale)
    assert (row["status"], row["claimed_by_worker_id"], row["retry_count"]) == ("PENDING", None, 0)
    assert attempts_of(connection, stale) == []
    assert [picture(connection, task_id) for task_id in kept] == before


def test_tasks_past_their_deadline_expire(app: Horsies, connection: Database, call: Call) -> None:
    late = [add_task(connection, good_until=ago(seconds)) for seconds in (1, 30)]
    early = add_task(connection, good_until=ago(-600))
    running = add_running(connection, new_id(), 60, good_until=ago(30))
    assert call(app, app.get_broker(), "expire_pending_tasks").unwrap() == 2
    for task_id in late:
        row = row_of(connection, task_id)
        assert (row["status"], row["error_code"]) == ("EXPIRED", "TASK_EXPIRED")
        assert "good_until" in json.loads(row["result"])["err"]["message"]
    assert [status_of(connection, task_id) for task_id in (early, running)] == [
        "PENDING",
        "RUNNING",
    ]
    assert call(app, app.get_broker(), "expire_pending_tasks").unwrap() == 0


@pytest.mark.parametrize(
    ("seconds_ago", "handled"),
    [
        pytest.param(10, 0, id="alive"),
        pytest.param(350, 1, id="silent since"),
        pytest.param(900, 1, id="of an earlier attempt"),
    ],
)
def test_a_fresh_heartbeat_of_this_attempt_is_life(
    app: Horsies, connection: Database, seconds_ago: float, handled: int
) -> None:
    task_id = add_running(connection, new_id(), 400)
    add_heartbeat(connection, task_id, seconds_ago)
    assert app.get_broker().mark_stale_tasks_as_failed().unwrap() == handled


@pytest.mark.parametrize("method", STALE_CALLS)
def test_a_worker_seen_within_the_threshold_is_life(
    app: Horsies, connection: Database, method: str
) -> None:
    worker_id = add_worker(connection, lock_key=LOCK_KEY, seen_at=ago(1))
    add_running(connection, worker_id, 9_000)
    add_claimed(connection, worker_id, 9_000)
    assert getattr(app.get_broker(), method)(60_000).unwrap() == 0


@pytest.mark.parametrize("method", STALE_CALLS)
def test_a_session_lock_is_life_however_silent_its_worker(
    app: Horsies, connection: Database, process_url: str, method: str
) -> None:
    worker_id = add_worker(connection, lock_key=LOCK_KEY, seen_at=ago(9_000))
    add_running(connection, worker_id, 9_000)
    add_claimed(connection, worker_id, 9_000)
    with holding_lock(process_url):
        assert getattr(app.get_broker(), method)(1_000).unwrap() == 0
    wait_until(lambda: getattr(app.get_broker(), method)(1_000).unwrap() == 1)


def test_the_lock_of_a_worker_that_was_declared_lost_protects_nothing(
    app: Horsies, connection: Database, process_url: str
) -> None:
    worker_id = add_worker(
        connection, lock_key=LOCK_KEY, seen_at=ago(9_000), stopped_at=ago(8_000), was_lost=True
    )
    add_running(connection, worker_id, 9_000)
    with holding_lock(process_url):
        assert app.get_broker().mark_stale_tasks_as_failed().unwrap() == 1


def test_the_start_of_the_server_is_a_sign_of_life_of_the_workers_it_knows(
    app: Horsies, connection: Database
) -> None:
    (up_seconds,) = connection.execute(
        "SELECT extract(epoch FROM now() - pg_postmaster_start_time())::float8"
    ).fetchone() or (0.0,)
    assert isinstance(up_seconds, float)
    long = up_seconds + 3_600
    known = add_worker(connection, lock_key=LOCK_KEY, seen_at=ago(2 * long))
    kept = add_running(connection, known, 2 * long)
    recovered = add_running(connection, new_id(), 2 * long)
    assert app.get_broker().mark_stale_tasks_as_failed(int(long * 1_000)).unwrap() == 1
    assert [status_of(connection, task_id) for task_id in (kept, recovered)] == [
        "RUNNING",
        "FAILED",
    ]


def test_more_tasks_than_one_bite_are_all_handled(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.tasks.recovery.RECOVERY_BATCH", 2)
    monkeypatch.setattr("horsies.tasks.recovery.EXPIRY_BATCH", 2)
    for _ in range(5):
        add_running(connection, new_id(), 400)
        add_claimed(connection, new_id(), 400)
        add_task(connection, good_until=ago(1))
    broker = app.get_broker()
    assert broker.mark_stale_tasks_as_failed().unwrap() == 5
    assert broker.requeue_stale_claimed().unwrap() == 5
    assert broker.expire_pending_tasks().unwrap() == 5


@pytest.mark.parametrize("method", STALE_CALLS)
@pytest.mark.parametrize("threshold", [999, 0, -1, float("nan")])
def test_a_threshold_that_proves_nothing_is_refused(
    app: Horsies, connection: Database, call: Call, method: str, threshold: float
) -> None:
    add_running(connection, new_id(), 400)
    add_claimed(connection, new_id(), 400)
    error = call(app, app.get_broker(), method, threshold).unwrap_err()
    assert error.code is BrokerErrorCode.CLEANUP_FAILED
    assert "stale_threshold_ms" in error.message


@pytest.mark.parametrize("method", [*STALE_CALLS, "expire_pending_tasks"])
def test_a_database_that_is_away_is_a_value(call: Call, method: str) -> None:
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=UNREACHABLE)))
    error = call(app, app.get_broker(), method).unwrap_err()
    assert (error.code, error.retryable) == (BrokerErrorCode.CLEANUP_FAILED, True)
    assert "hunter2" not in error.message


def test_recovery_inside_an_event_loop_is_refused_before_it_changes_anything(
    app: Horsies, connection: Database
) -> None:
    task_id = add_claimed(connection, new_id(), 1_000)

    async def habit() -> Any:
        return await app.get_broker().requeue_stale_claimed()  # type: ignore[misc]

    with pytest.raises(RuntimeError, match=r"No task was changed.*requeue_stale_claimed_async"):
        asyncio.run(habit())
    assert row_of(connection, task_id)["status"] == "CLAIMED"

    async def twin() -> Any:
        return await app.get_broker().requeue_stale_claimed_async()

    assert asyncio.run(twin()).unwrap() == 1


def test_the_log_names_the_outcome_of_a_recovered_task(
    app: Horsies, connection: Database, caplog: pytest.LogCaptureFixture
) -> None:
    worker = add_worker(connection, seen_at=ago(9_000), stopped_at=ago(9_000))
    failed = add_running(connection, worker, 9_000, task_name="pay")
    again = add_running(connection, worker, 9_000, task_name="mail", **retried("WORKER_CRASHED"))
    claimed = add_claimed(connection, worker, 9_000)
    broker = app.get_broker()
    assert broker.mark_stale_tasks_as_failed().unwrap() == 2
    assert broker.requeue_stale_claimed().unwrap() == 1
    gone = f"whose worker {worker} is gone"
    assert set(caplog.messages) >= {
        f"recovered task pay {failed}, {gone}: it failed with WORKER_CRASHED",
        f"recovered task mail {again}, {gone}: it is retried",
        f"recovered task {row_of(connection, claimed)['task_name']} {claimed}, {gone}: it is back in its "
        "queue",
    }
