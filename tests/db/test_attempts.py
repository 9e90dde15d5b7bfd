"""Attempts are deleted with their task, without a foreign key, and no attempt is without a task."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.statements.turn import CompleteTasks, complete_tasks
from horsies.db.statements.workers import delete_old_tasks
from horsies.db.statements.workflows import delete_old_workflows
from tests.support.database import lock_waiters
from tests.support.rows import add_attempt, add_run, add_task, ago, attempts_of
from tests.support.wait import wait_until

OWNER = "worker-1"


def running(connection: Connection[Any], **columns: Any) -> str:
    return add_task(connection, status="RUNNING", claimed_by_worker_id=OWNER, **columns)


def complete(connection: Connection[Any], *task_ids: str) -> int:
    ids = list(task_ids)
    done = CompleteTasks(OWNER, ids, [0] * len(ids), ['{"ok":1}'] * len(ids))
    return len(complete_tasks.run(connection, done))


def ended(connection: Connection[Any], **columns: Any) -> str:
    task_id = running(connection, **columns)
    assert complete(connection, task_id) == 1
    connection.execute(
        "UPDATE horsies_tasks SET completed_at = now() - interval '2 hours' WHERE id = %s",
        (task_id,),
    )
    return task_id


def delete(connection: Connection[Any], task_id: str) -> None:
    connection.execute("DELETE FROM horsies_tasks WHERE id = %s", (task_id,))


def test_a_task_deleted_by_hand_takes_its_attempts_along(connection: Connection[Any]) -> None:
    gone, kept = ended(connection), ended(connection)
    delete(connection, gone)
    assert attempts_of(connection, gone) == []
    assert len(attempts_of(connection, kept)) == 1


def test_retention_deletes_the_attempts_of_its_tasks(connection: Connection[Any]) -> None:
    old = ended(connection, id="01890000-0000-7000-8000-000000000001")
    young = running(connection)
    complete(connection, young)
    assert [row.id for row in delete_old_tasks.fetch(connection, 1, 10)] == [old]
    assert attempts_of(connection, old) == []
    assert len(attempts_of(connection, young)) == 1


def test_retention_deletes_the_attempts_of_workflows(connection: Connection[Any]) -> None:
    run_id = add_run(connection, status="COMPLETED", completed_at=ago(7200))
    task_id = add_task(connection, status="COMPLETED", workflow_id=run_id, workflow_node_index=0)
    add_attempt(connection, task_id)
    deleted = delete_old_workflows.fetch(connection, 1, 10)
    assert [row.id for row in deleted] == [run_id]
    assert attempts_of(connection, task_id) == []


def test_truncated_tasks_leave_no_attempts(connection: Connection[Any]) -> None:
    task_id = ended(connection)
    connection.execute("TRUNCATE horsies_tasks CASCADE")
    assert attempts_of(connection, task_id) == []


@contextmanager
def waiting_for_a_lock(
    url: str, observer: Connection[Any], act: Callable[[Connection[Any]], object]
) -> Iterator[None]:
    """Within the block another session waits for a lock to do this; afterwards it has done it."""
    with psycopg.connect(url, autocommit=True) as second:
        thread = threading.Thread(target=act, args=(second,))
        thread.start()
        try:
            wait_until(lambda: lock_waiters(observer, second.info.backend_pid))
            yield
        finally:
            thread.join()


@pytest.mark.parametrize("is_deleted_first", [True, False])
def test_an_end_and_a_delete_at_the_same_time_leave_no_attempt_behind(
    connection: Connection[Any], process_url: str, is_deleted_first: bool
) -> None:
    task_id = running(connection)

    def end(by: Connection[Any]) -> None:
        complete(by, task_id)

    def remove(by: Connection[Any]) -> None:
        delete(by, task_id)

    first, second = (remove, end) if is_deleted_first else (end, remove)
    with psycopg.connect(process_url) as open_transaction:
        first(open_transaction)
        with waiting_for_a_lock(process_url, connection, second):
            open_transaction.commit()
    assert attempts_of(connection, task_id) == []
    assert connection.execute("SELECT FROM horsies_tasks").fetchone() is None


def test_a_delete_from_an_old_snapshot_fails_rather_than_leave_an_attempt(
    connection: Connection[Any], process_url: str
) -> None:
    task_id = running(connection)
    with psycopg.connect(process_url) as strict:
        strict.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        strict.execute("SELECT FROM horsies_tasks")
        complete(connection, task_id)
        with pytest.raises(psycopg.errors.SerializationFailure):
            delete(strict, task_id)
    assert len(attempts_of(connection, task_id)) == 1
