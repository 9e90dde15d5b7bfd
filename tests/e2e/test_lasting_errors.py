"""Errors that usually pass and do not: of one task, or of the whole database."""

from __future__ import annotations

from contextlib import ExitStack
from types import ModuleType

import pytest

from tests.support.database import Database, new_sessions_with, terminate_others
from tests.support.poison import poisoned, slowed
from tests.support.tables import task, wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import Fleet, RunningWorker

FORCED = 3
ENDS = "NEW.id = {} AND NEW.status IN ('COMPLETED', 'FAILED')"
QUICK = {"resilience": {"db_retry_initial_ms": 100, "db_retry_max_ms": 500}}
SHORT = {"resilience": {**QUICK["resilience"], "statement_timeout_ms": 1_000}}


def lines(worker: RunningWorker, words: str) -> list[str]:
    return [line for line in worker.log().splitlines() if words in line]


def serves_others(programs: ModuleType) -> None:
    others = [programs.add.send(n, 1).unwrap() for n in range(10)]
    assert [sent.get(30_000).unwrap() for sent in others] == list(range(1, 11))


@pytest.mark.parametrize("state", ["57014", "53200", "53400", "25P04"])
def test_a_lasting_error_of_one_task_blocks_that_task_alone(
    fleet: Fleet, programs: ModuleType, connection: Database, state: str
) -> None:
    poison = programs.noop.send().unwrap()
    with poisoned(connection, ENDS, poison.task_id, state=state):
        worker = fleet.start(config=QUICK)
        assert worker.wait_for("blocked")["id"] == poison.task_id
        serves_others(programs)
        assert worker.stop() == FORCED
    (line,) = lines(worker, "is blocked")
    assert poison.task_id in line
    assert not lines(worker, "database unavailable")
    (event,) = worker.events("outcomes_lost")
    assert event["task_ids"] == [poison.task_id]


@pytest.mark.parametrize("deferred", [False, True])
def test_a_task_whose_end_takes_for_ever_is_blocked_alone(
    fleet: Fleet, programs: ModuleType, connection: Database, deferred: bool
) -> None:
    poison = programs.noop.send().unwrap()
    with slowed(connection, ENDS, poison.task_id, seconds=600, deferred=deferred):
        worker = fleet.start(config=SHORT)
        assert worker.wait_for("blocked")["id"] == poison.task_id
        serves_others(programs)
        assert worker.stop() == FORCED
    assert worker.events("outcomes_lost")
    assert not lines(worker, "database unavailable")


def test_a_task_that_lastingly_cannot_expire_holds_up_no_other(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    late = [programs.add.send(n, 1).unwrap().task_id for n in range(3)]
    connection.execute("UPDATE horsies_tasks SET good_until = now() - interval '1 minute'")
    with poisoned(connection, "NEW.id = {}", late[0], state="53200"):
        worker = fleet.start(config=QUICK)
        for task_id in late[1:]:
            wait_for_status(connection, task_id, "EXPIRED")
        serves_others(programs)
    wait_for_status(connection, late[0], "EXPIRED")
    assert worker.stop() == 0


def test_a_full_disk_blocks_no_task(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    first = programs.noop.send().unwrap()
    with poisoned(connection, ENDS, first.task_id, state="53100"):
        worker = fleet.start(config=QUICK)
        wait_until(lambda: len(lines(worker, "database unavailable")) >= 5, 30, worker.log)
        assert task(connection, first.task_id).status == "RUNNING"
    assert first.get(30_000).is_ok()
    serves_others(programs)
    assert not worker.events("blocked")
    assert worker.stop() == 0


@pytest.mark.pooled
def test_a_time_limit_of_the_database_does_not_apply_to_workers(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    limits = ["statement_timeout", "idle_in_transaction_session_timeout"]
    if connection.info.server_version >= 170_000:
        limits.append("transaction_timeout")
    # Sent before the limits, which apply to senders: on a busy machine a send may take so long.
    sent = programs.make_text.send(15 * 1024 * 1024).unwrap()
    with ExitStack() as stack:
        for limit in limits:
            stack.enter_context(new_sessions_with(connection, limit, "200ms"))
        terminate_others(connection)  # a pooler keeps sessions from before
        with slowed(connection, "NEW.status = 'COMPLETED'", seconds=0.5):
            worker = fleet.start(config=QUICK)
            wait_for_status(connection, sent.task_id, "COMPLETED")
        assert not worker.events("database_lost")
        assert worker.stop() == 0


def test_a_database_that_refuses_every_task_is_named_and_the_tasks_are_recorded_later(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    with poisoned(connection, "NEW.status = 'COMPLETED'"):
        worker = fleet.start(config=QUICK)
        sent = [programs.add.send(n, 1).unwrap() for n in range(8)]
        event = worker.wait_for("database_refuses")
        assert event["action"] == "record"
        assert "54000" in event["error"]
    assert [one.get(30_000).unwrap() for one in sent] == list(range(1, 9))
    assert len(worker.events("database_refuses")) == 1
    assert len(worker.events("blocked")) < 3
    assert worker.stop() == 0
