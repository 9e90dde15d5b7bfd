"""Options of a send, carried out by a real worker."""

from __future__ import annotations

import json
from ctypes.util import find_library
from datetime import timedelta
from types import ModuleType

from horsies import RetryPolicy
from tests.support.database import Database
from tests.support.rows import row_of
from tests.support.tables import attempts, wait_for_status
from tests.support.workers import Fleet

# psycopg in pure Python needs the system's libpq; every other test has psycopg with its own.
PURE_PYTHON = {"PSYCOPG_IMPL": "python"} if find_library("pq") else {}


def test_a_worker_with_psycopg_in_pure_python_carries_out_the_options_of_a_send(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    quick_grace = {"recovery": {"unknown_task_grace_ms": 1_000}}
    fleet.start(environment=PURE_PYTHON, config=quick_grace)
    by_name = programs.app.send_by_name
    assert by_name("add", {"a": 1, "b": 2}).unwrap().get(30_000).ok_value == 3
    refused = by_name("add", {"a": "one", "b": 2}).unwrap().get(30_000).err_value
    assert "a was stored in a form that does not fit int" in refused.message
    sender = programs.send_another.with_options(headers={"tenant": "blue"}).send(1, 2).unwrap()
    sent = row_of(connection, sender.get(30_000).ok_value)
    assert json.loads(sent["task_options"])["headers"] == {"tenant": "blue"}
    policy = RetryPolicy.fixed([1], auto_retry_for=["TASK_TIMEOUT"], jitter=False)
    slow = programs.sleep.with_options(
        timeout_ms=300, retry_policy=policy, delay=timedelta(milliseconds=200)
    )
    handle = slow.send(60).unwrap()
    assert handle.get(30_000).err_value.error_code == "TASK_TIMEOUT"
    assert [one.will_retry for one in attempts(connection, handle.task_id)] == [True, False]


def test_a_key_is_free_again_when_the_task_is_claimed_or_has_ended(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    while_open = programs.sleep.with_options(idempotency_key="sync", unique="while_open")
    waiting = programs.sleep.with_options(idempotency_key="again", unique="while_waiting")
    first, earlier = while_open.send(60).unwrap(), waiting.send(60).unwrap()
    assert waiting.send(60).unwrap().task_id == earlier.task_id
    fleet.start()
    for handle in (first, earlier):
        wait_for_status(connection, handle.task_id, "RUNNING")
    assert while_open.send(60).unwrap().task_id == first.task_id
    assert waiting.send(60).unwrap().task_id != earlier.task_id
    first.cancel().unwrap()
    assert first.get(30_000).err_value.error_code == "TASK_CANCELLED"
    assert while_open.send(60).unwrap().task_id != first.task_id
