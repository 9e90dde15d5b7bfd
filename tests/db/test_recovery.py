"""The reaper: detection of dead workers, recovery of their tasks, and retention."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import Connection, sql

from horsies import AppConfig, PostgresConfig, RecoveryConfig
from horsies.db.pipeline import Pipeline
from horsies.db.statements.workers import (
    WatchedWorker,
    find_abandoned,
    watch_workers,
)
from horsies.ids import new_id
from horsies.tasks.blocked import Blocked
from horsies.tasks.recovery import recover_tasks
from horsies.worker import reaper
from horsies.worker.liveness import lock_key
from horsies.worker.reaper import Recovered, recover_lost_workers, recover_ownerless, sweep
from horsies.worker.watch import Verdict
from tests.support.poison import poisoned
from tests.support.rows import add_task, ago, attempts_of, picture, retried, row_of
from tests.support.wait import wait_until

BOTH = ["CLAIMED", "RUNNING"]
LATE_SECONDS = 10.0


def application(**recovery: Any) -> AppConfig:
    broker = PostgresConfig(database_url="postgresql://localhost/unused")
    return AppConfig(broker=broker, recovery=RecoveryConfig(**recovery))


@pytest.fixture
def pipeline(connection: Connection[Any], process_url: str) -> Iterator[Pipeline]:
    """A reaper's connection."""
    with psycopg.connect(process_url, autocommit=True) as mine:
        yield Pipeline(mine)


def add_worker(
    connection: Connection[Any],
    seen: sql.SQL,
    stopped: sql.SQL | None = None,
    space: str | None = None,
) -> str:
    worker_id = new_id()
    connection.execute(
        sql.SQL(
            "INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues, "
            "seen_at, stopped_at, process_space) VALUES ({}, {}, 'host', 1, 1, '{{default}}', {}, {}, {})"
        ).format(worker_id, lock_key(worker_id), seen, stopped, space)
    )
    return worker_id


def add_running(connection: Connection[Any], worker_id: str, **columns: Any) -> str:
    values = {
        "status": "RUNNING",
        "generation": 1,
        "claimed_by_worker_id": worker_id,
        "claimed_at": ago(60),
        "started_at": ago(60),
        "worker_pid": 77,
        "worker_process_name": "worker-77",
        "worker_hostname": "host",
        **columns,
    }
    return add_task(connection, **values)


def add_claimed(connection: Connection[Any], worker_id: str, **columns: Any) -> str:
    values = {
        "status": "CLAIMED",
        "claimed": True,
        "generation": 1,
        "claimed_by_worker_id": worker_id,
        "claimed_at": ago(60),
        "claim_expires_at": sql.SQL("now() + interval '1 minute'"),
        **columns,
    }
    return add_task(connection, **values)


def look(
    connection: Connection[Any], observer: str = "observer", space: str | None = None
) -> dict[str, WatchedWorker]:
    found = watch_workers.fetch(connection, observer, space, LATE_SECONDS)
    return {row.worker_id: row for row in found}


def verdict_on(worker: WatchedWorker, *, needs_tasks: bool = False) -> Verdict:
    return Verdict(worker.worker_id, worker.sign, worker.lock_is_free, needs_tasks, "silent")


def recover(pipeline: Pipeline, config: AppConfig) -> Recovered:
    """Take every worker whose lock is free for lost and recover its tasks."""
    found = look(pipeline.connection).values()
    verdicts = [verdict_on(worker) for worker in found if worker.lock_is_free]
    return recover_lost_workers(pipeline, verdicts, config, Blocked())


@contextmanager
def session_of(worker_id: str, url: str) -> Iterator[Connection[Any]]:
    """A session that holds the lock of this worker."""
    with psycopg.connect(url, autocommit=True) as session:
        session.execute("SELECT pg_advisory_lock(%s)", (lock_key(worker_id),))
        yield session


# Observation of workers


def test_a_look_shows_whether_the_lock_of_a_worker_is_free(
    connection: Connection[Any], process_url: str
) -> None:
    worker_id = add_worker(connection, ago(200))
    with session_of(worker_id, process_url):
        assert not look(connection)[worker_id].lock_is_free
    wait_until(lambda: look(connection)[worker_id].lock_is_free)


def test_a_look_leaves_out_the_observer_and_closed_rows(connection: Connection[Any]) -> None:
    worker_id = add_worker(connection, ago(60))
    add_worker(connection, ago(60), stopped=ago(50))
    assert list(look(connection, worker_id)) == []


def test_an_observer_looks_at_its_next_two_neighbours_and_at_late_workers(
    connection: Connection[Any],
) -> None:
    workers = [add_worker(connection, ago(0.1)) for _ in range(30)]
    silent, future = add_worker(connection, ago(30)), add_worker(connection, ago(-3_600))
    ring = [*workers, silent, future]
    assert set(look(connection, workers[0])) == {*workers[1:3], silent, future}
    assert set(look(connection, workers[-1])) == {silent, future}
    assert set(look(connection, silent)) == {future, workers[0]}, "the ring is closed"
    assert set(look(connection, future)) == {*workers[:2], silent}
    watched = Counter(one for observer in ring for one in look(connection, observer))
    assert {watched[worker] for worker in workers} == {2}


def test_an_observer_looks_at_neighbours_of_its_own_process_space_too(
    connection: Connection[Any],
) -> None:
    here, there = [], []
    for _ in range(10):
        here.append(add_worker(connection, ago(0.1), space="here"))
        there += [add_worker(connection, ago(0.1), space="there") for _ in range(3)]
    assert set(look(connection, here[0], "here")) == {*there[:2], *here[1:3]}
    assert set(look(connection, here[-1], "here")) == {*there[-3:-1], *here[:2]}


def test_a_look_reads_a_bounded_number_of_rows_however_many_workers_there_are(
    connection: Connection[Any],
) -> None:
    silent = [add_worker(connection, ago(30)) for _ in range(150)]
    assert set(look(connection, silent[0])) == set(silent[1:101])
    assert set(look(connection, silent[-1])) == set(silent[:100])


def test_two_observers_do_not_hide_a_free_lock_from_each_other(
    connection: Connection[Any], process_url: str
) -> None:
    worker_id = add_worker(connection, ago(60))
    with psycopg.connect(process_url) as other:
        assert look(other)[worker_id].lock_is_free
        assert look(connection)[worker_id].lock_is_free


def test_a_look_keeps_no_lock(connection: Connection[Any], process_url: str) -> None:
    worker_id = add_worker(connection, ago(60))
    assert look(connection)[worker_id].lock_is_free
    with psycopg.connect(process_url, autocommit=True) as session:
        row = session.execute("SELECT pg_try_advisory_lock(%s)", (lock_key(worker_id),)).fetchone()
        assert row == (True,)


# Closing the row of a lost worker


def test_a_worker_that_shows_life_after_the_look_is_not_lost(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    worker_id = add_worker(connection, ago(60))
    verdict = verdict_on(look(connection)[worker_id])
    connection.execute("UPDATE horsies_workers SET seen_at = clock_timestamp()")
    assert recover_lost_workers(pipeline, [verdict], application(), Blocked()) == Recovered()


def test_a_row_that_cannot_be_closed_does_not_keep_other_workers_from_recovery(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    bad, good = add_worker(connection, ago(60)), add_worker(connection, ago(60))
    add_running(connection, bad)
    task_id = add_running(connection, good)
    with poisoned(connection, "NEW.worker_id = {}", bad, table="horsies_workers"):
        with pytest.raises(psycopg.Error, match="poisonous"):
            recover(pipeline, application())
        assert row_of(connection, task_id)["status"] == "FAILED"
    assert recover(pipeline, application()) == Recovered(1, 1)


def test_a_worker_that_takes_its_lock_after_the_look_is_not_lost(
    pipeline: Pipeline, connection: Connection[Any], process_url: str
) -> None:
    worker_id = add_worker(connection, ago(60))
    verdict = verdict_on(look(connection)[worker_id])
    with session_of(worker_id, process_url):
        assert recover_lost_workers(pipeline, [verdict], application(), Blocked()) == Recovered()
    wait_until(
        lambda: (
            recover_lost_workers(pipeline, [verdict], application(), Blocked()) == Recovered(1, 0)
        )
    )


def test_a_silent_worker_without_tasks_needs_no_recovery(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    worker_id = add_worker(connection, ago(60))
    verdict = verdict_on(look(connection)[worker_id], needs_tasks=True)
    assert recover_lost_workers(pipeline, [verdict], application(), Blocked()) == Recovered()
    add_claimed(connection, worker_id)
    assert recover_lost_workers(pipeline, [verdict], application(), Blocked()) == Recovered(1, 1)


def test_a_held_lock_saves_a_worker_whose_session_is_active(
    pipeline: Pipeline, connection: Connection[Any], process_url: str
) -> None:
    worker_id = add_worker(connection, ago(400))
    quick = application(
        running_stale_threshold_ms=2_000,
        runner_heartbeat_interval_ms=1_000,
        claimed_stale_threshold_ms=2_000,
        claimer_heartbeat_interval_ms=1_000,
    )
    with session_of(worker_id, process_url) as session:
        verdict = verdict_on(look(connection)[worker_id])
        assert not verdict.needs_free_lock
        session.execute("SELECT 'a turn'")
        assert recover_lost_workers(pipeline, [verdict], quick, Blocked()) == Recovered()
        wait_until(
            lambda: recover_lost_workers(pipeline, [verdict], quick, Blocked()) == Recovered(1, 0)
        )


def test_tasks_that_a_transaction_has_locked_are_recovered_when_it_ends(
    pipeline: Pipeline, connection: Connection[Any], process_url: str
) -> None:
    worker_id = add_worker(connection, ago(60))
    locked, free = add_running(connection, worker_id), add_running(connection, worker_id)
    with psycopg.connect(process_url) as holder:
        holder.execute("SELECT 1 FROM horsies_tasks WHERE id = %s FOR UPDATE", (locked,))
        assert recover(pipeline, application()) == Recovered(1, 1)
        assert row_of(connection, free)["status"] == "FAILED"
        assert recover_ownerless(pipeline, RecoveryConfig(), Blocked()) == 0
    assert recover_ownerless(pipeline, RecoveryConfig(), Blocked()) == 1
    assert row_of(connection, locked)["status"] == "FAILED"


# Recovery of their tasks


def test_tasks_of_a_living_worker_are_left_alone(
    pipeline: Pipeline, connection: Connection[Any], process_url: str
) -> None:
    worker_id = add_worker(connection, ago(60))
    task_ids = [add_running(connection, worker_id), add_claimed(connection, worker_id)]
    before = [picture(connection, task_id) for task_id in task_ids]
    with psycopg.connect(process_url, autocommit=True) as session:
        session.execute("SELECT pg_advisory_lock(%s)", (lock_key(worker_id),))
        assert recover(pipeline, application()) == Recovered()
        assert recover_ownerless(pipeline, RecoveryConfig(), Blocked()) == 0
    assert [picture(connection, task_id) for task_id in task_ids] == before


def test_a_dead_workers_tasks_end_by_their_policy(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    worker_id = add_worker(connection, ago(60))
    failed = add_running(connection, worker_id)
    other_policy = add_running(connection, worker_id, **retried("FLAKY"))
    again = add_running(connection, worker_id, **retried("WORKER_CRASHED"))
    spent = add_running(connection, worker_id, **retried("WORKER_CRASHED") | {"retry_count": 1})
    claimed = add_claimed(connection, worker_id)
    assert recover(pipeline, application()) == Recovered(1, 5)
    for task_id, attempt in ((failed, 1), (other_policy, 1), (spent, 2)):
        row = row_of(connection, task_id)
        assert (row["status"], row["error_code"]) == ("FAILED", "WORKER_CRASHED")
        assert worker_id in row["failed_reason"]
        (made,) = attempts_of(connection, task_id)
        assert (made["attempt"], made["outcome"]) == (attempt, "WORKER_FAILURE")
        assert (made["will_retry"], made["worker_id"], made["worker_pid"]) == (False, worker_id, 77)
    row = row_of(connection, again)
    assert (row["status"], row["retry_count"], row["claimed_by_worker_id"]) == ("PENDING", 1, None)
    (made,) = attempts_of(connection, again)
    assert (made["outcome"], made["will_retry"]) == ("WORKER_FAILURE", True)
    row = row_of(connection, claimed)
    assert (row["status"], row["retry_count"], row["claim_expires_at"]) == ("PENDING", 0, None)
    assert attempts_of(connection, claimed) == []


def test_a_dead_worker_is_signed_off_as_lost_and_found_once(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    worker_id = add_worker(connection, ago(60))
    assert recover(pipeline, application()) == Recovered(1, 0)
    found = connection.execute(
        "SELECT stopped_at IS NOT NULL, was_lost FROM horsies_workers WHERE worker_id = %s",
        (worker_id,),
    ).fetchone()
    assert found == (True, True)
    assert recover(pipeline, application()) == Recovered()


def test_a_retry_of_a_cancelled_task_of_the_dead_does_not_happen(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    worker_id = add_worker(connection, ago(60))
    task_id = add_running(
        connection, worker_id, cancel_requested_at=ago(1), **retried("WORKER_CRASHED")
    )
    recover(pipeline, application())
    assert row_of(connection, task_id)["status"] == "FAILED"


@pytest.mark.parametrize(
    ("switch", "changed", "kept"),
    [
        ("auto_requeue_stale_claimed", "RUNNING", "CLAIMED"),
        ("auto_fail_stale_running", "CLAIMED", "RUNNING"),
    ],
)
def test_a_switch_that_is_off_leaves_its_tasks_alone(
    pipeline: Pipeline,
    connection: Connection[Any],
    switch: str,
    changed: str,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaper, "RECOVERY_BATCH", 2)
    worker_id = add_worker(connection, ago(60))
    tasks = {
        "CLAIMED": [add_claimed(connection, worker_id) for _ in range(3)],
        "RUNNING": [add_running(connection, worker_id) for _ in range(3)],
    }
    before = [picture(connection, task_id) for task_id in tasks[kept]]
    assert recover(pipeline, application(**{switch: False})) == Recovered(1, 3)
    assert (
        recover_ownerless(pipeline, RecoveryConfig.model_validate({switch: False}), Blocked()) == 0
    )
    assert [picture(connection, task_id) for task_id in tasks[kept]] == before
    assert all(row_of(connection, task_id)["status"] != changed for task_id in tasks[changed])


def test_with_both_switches_off_a_dead_workers_tasks_stay_as_they_are(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    worker_id = add_worker(connection, ago(60))
    task_ids = [add_claimed(connection, worker_id), add_running(connection, worker_id)]
    before = [picture(connection, task_id) for task_id in task_ids]
    off = {"auto_requeue_stale_claimed": False, "auto_fail_stale_running": False}
    assert recover(pipeline, application(**off)) == Recovered(1, 0)
    assert [picture(connection, task_id) for task_id in task_ids] == before


def test_more_tasks_than_one_bite_are_all_recovered(
    pipeline: Pipeline, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "RECOVERY_BATCH", 2)
    worker_ids = [add_worker(connection, ago(60)) for _ in range(2)]
    for worker_id in worker_ids * 3:
        add_running(connection, worker_id)
    assert recover(pipeline, application()) == Recovered(2, 6)


def test_a_task_that_was_claimed_anew_is_not_touched_by_a_late_reaper(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    worker_id = add_worker(connection, ago(60))
    task_id = add_running(connection, worker_id)
    found = find_abandoned.fetch(connection, [worker_id], BOTH, 10)
    connection.execute(
        "UPDATE horsies_tasks SET generation = 2, claimed_by_worker_id = 'new' WHERE id = %s",
        (task_id,),
    )
    before = picture(connection, task_id)
    assert recover_tasks(pipeline, found, Blocked()) == 0
    assert picture(connection, task_id) == before
    assert attempts_of(connection, task_id) == []


def test_many_reapers_at_once_have_the_effect_of_one(
    pipeline: Pipeline, connection: Connection[Any], process_url: str
) -> None:
    worker_id = add_worker(connection, ago(60))
    task_ids = [add_running(connection, worker_id, **retried("WORKER_CRASHED")) for _ in range(20)]
    claimed = add_claimed(connection, worker_id)
    found = find_abandoned.fetch(connection, [worker_id], BOTH, 100)
    changed: list[int] = []
    start = threading.Barrier(4)

    def reap() -> None:
        with psycopg.connect(process_url, autocommit=True) as mine:
            start.wait()
            changed.append(recover_tasks(Pipeline(mine), found, Blocked()))

    threads = [threading.Thread(target=reap) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(changed) == 21
    for task_id in task_ids:
        assert row_of(connection, task_id)["retry_count"] == 1
        assert len(attempts_of(connection, task_id)) == 1
    assert row_of(connection, claimed)["status"] == "PENDING"


@pytest.mark.parametrize("status", ["CLAIMED", "RUNNING"])
def test_a_recovery_wakes_the_queues_of_its_tasks(
    pipeline: Pipeline, connection: Connection[Any], process_url: str, status: str
) -> None:
    worker_id = add_worker(connection, ago(60))
    add = add_claimed if status == "CLAIMED" else add_running
    for queue in ("narrow", "wide", "wide"):
        add(connection, worker_id, queue_name=queue)
    with psycopg.connect(process_url, autocommit=True) as blocked:
        for queue in ("narrow", "wide", "other"):
            blocked.execute(sql.SQL("LISTEN {}").format(sql.Identifier(f"task_queue_{queue}")))
        assert recover(pipeline, application()) == Recovered(1, 3)
        connection.execute("NOTIFY task_queue_other")
        heard: list[str] = []
        for note in blocked.notifies(timeout=30):
            heard.append(note.channel)
            if note.channel == "task_queue_other":
                break
    assert heard[:-1] == ["task_queue_narrow", "task_queue_wide"]


# Tasks whose worker has no row


def test_tasks_without_a_worker_row_are_recovered_after_the_threshold_of_their_state(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    gone = new_id()
    stopped = add_worker(connection, ago(9_000), stopped=ago(9_000))
    old = {"claimed_at": ago(400), "started_at": ago(400)}
    fresh = {"claimed_at": ago(200), "started_at": ago(200)}
    recovered = [
        add_running(connection, gone, **old),
        add_running(connection, stopped, **fresh),
        add_claimed(connection, gone, claimed_at=ago(200)),
    ]
    kept = [
        add_running(connection, gone, **fresh),
        add_claimed(connection, gone, claimed_at=ago(100)),
        add_running(connection, add_worker(connection, ago(1)), **old),
    ]
    before = [picture(connection, task_id) for task_id in kept]
    assert recover_ownerless(pipeline, RecoveryConfig(), Blocked()) == 3
    assert [row_of(connection, task_id)["status"] for task_id in recovered] == [
        "FAILED",
        "FAILED",
        "PENDING",
    ]
    assert [picture(connection, task_id) for task_id in kept] == before


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        pytest.param(ago(100), 0, id="alive"),
        pytest.param(ago(350), 1, id="silent since"),
        pytest.param(ago(5_000), 1, id="of an earlier attempt"),
    ],
)
def test_a_heartbeat_of_this_attempt_keeps_a_stray_alive(
    pipeline: Pipeline, connection: Connection[Any], sent: sql.SQL, expected: int
) -> None:
    task_id = add_running(connection, new_id(), claimed_at=ago(400), started_at=ago(400))
    connection.execute(
        sql.SQL(
            "INSERT INTO horsies_heartbeats (task_id, sender_id, role, sent_at) "
            "VALUES ({}, 'gone', 'runner', {})"
        ).format(task_id, sent)
    )
    assert recover_ownerless(pipeline, RecoveryConfig(), Blocked()) == expected


# Retention


def old_id(hours: float) -> str:
    """An id as it was made that long ago."""
    moment = int(new_id().replace("-", "")[:12], 16) - int(hours * 3_600_000)
    return str(UUID(f"{moment:012x}" + new_id().replace("-", "")[12:]))


def add_finished(connection: Connection[Any], hours: float, **columns: Any) -> str:
    moment = sql.SQL(f"now() - interval '{hours} hours'")
    values = {"id": old_id(hours), "status": "COMPLETED", "completed_at": moment, **columns}
    return add_task(connection, **values)


def exists(connection: Connection[Any], task_id: str) -> bool:
    found = connection.execute("SELECT 1 FROM horsies_tasks WHERE id = %s", (task_id,)).fetchone()
    return found is not None


def test_retention_keeps_what_is_young_unfinished_or_part_of_a_workflow(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    old = sql.SQL("now() - interval '50 hours'")
    kept = [
        add_finished(connection, 23),
        add_finished(connection, 50, completed_at=sql.SQL("now()")),
        add_finished(connection, 50, workflow_id=new_id()),
        add_finished(connection, 50, status="PENDING", completed_at=None, updated_at=old),
        add_finished(connection, 50, status="RUNNING", completed_at=None, updated_at=old),
        add_finished(connection, 50, status="CLAIMED", completed_at=None, updated_at=old),
    ]
    gone = [
        add_finished(connection, 25),
        add_finished(connection, 50, status="FAILED", completed_at=None, failed_at=old),
        add_finished(connection, 50, status="CANCELLED", completed_at=None, failed_at=old),
        add_finished(connection, 50, status="EXPIRED", completed_at=None, updated_at=old),
    ]
    connection.execute(
        "INSERT INTO horsies_task_attempts (task_id, attempt, outcome, started_at, finished_at, "
        "worker_id) SELECT id, 1, 'COMPLETED', now(), now(), 'gone' FROM horsies_tasks"
    )
    sweep(pipeline, RecoveryConfig(terminal_record_retention_hours=24))
    assert [exists(connection, task_id) for task_id in kept] == [True] * len(kept)
    assert [exists(connection, task_id) for task_id in gone] == [False] * len(gone)
    left = connection.execute("SELECT count(*) FROM horsies_task_attempts").fetchone()
    assert left == (len(kept),)


def test_retention_goes_in_bounded_bites_and_says_when_there_is_more(
    pipeline: Pipeline, connection: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "RETENTION_BATCH", 2)
    for _ in range(5):
        add_finished(connection, 50)
    recovery = RecoveryConfig(terminal_record_retention_hours=24)
    left = []
    for _ in range(3):
        more = sweep(pipeline, recovery)
        row = connection.execute("SELECT count(*) FROM horsies_tasks").fetchone()
        assert row is not None
        left.append((more, row[0]))
    assert left == [(True, 3), (True, 1), (False, 0)]


def test_heartbeats_snapshots_and_closed_workers_go_after_their_time(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    for age, hours in (("old", 200), ("young", 1)):
        moment = sql.SQL(f"now() - interval '{hours} hours'")
        connection.execute(
            sql.SQL(
                "INSERT INTO horsies_heartbeats (task_id, sender_id, role, sent_at) "
                "VALUES ({}, {}, 'runner', {})"
            ).format(new_id(), age, moment)
        )
        connection.execute(
            sql.SQL(
                "INSERT INTO horsies_worker_states (worker_id, snapshot_at, hostname, pid, "
                "processes, queues, tasks_running, tasks_claimed, max_claim_batch, "
                "max_claim_per_worker, worker_started_at) "
                "VALUES ({}, {}, 'host', 1, 1, '{{default}}', 0, 0, 0, 1, now())"
            ).format(age, moment)
        )
        add_worker(connection, moment, stopped=moment)
    living = add_worker(connection, ago(3_600 * 300))
    sweep(pipeline, RecoveryConfig())
    for table, column in (
        ("horsies_heartbeats", "sender_id"),
        ("horsies_worker_states", "worker_id"),
    ):
        rows = connection.execute(
            sql.SQL("SELECT {} FROM {}").format(*map(sql.Identifier, (column, table)))
        )
        assert [row[0] for row in rows] == ["young"]
    rows = connection.execute("SELECT worker_id FROM horsies_workers ORDER BY stopped_at")
    assert len(rows.fetchall()) == 2
    assert connection.execute(
        "SELECT 1 FROM horsies_workers WHERE worker_id = %s", (living,)
    ).fetchone()


def test_without_retention_nothing_is_ever_deleted(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    task_id = add_finished(connection, 50_000)
    for_ever = RecoveryConfig(
        heartbeat_retention_hours=None,
        worker_state_retention_hours=None,
        terminal_record_retention_hours=None,
    )
    assert sweep(pipeline, for_ever) is False
    assert exists(connection, task_id)
