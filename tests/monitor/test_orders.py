"""Bulk orders: dry run, bounds, batches, stop, and exactly one change per row whatever happens."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from horsies import Horsies
from horsies.monitor import orders
from horsies.monitor.order_plan import (
    Order,
    OrderVerb,
    Preview,
    draft_order,
    order_text,
    read_order_text,
)
from horsies.monitor.orders import batch_script, carry_out, preview_script, store_script
from horsies.monitor.queries import RunFilters, TaskFilters
from horsies.states import TaskStatus
from horsies.tasks.broker import BrokerErrorCode, PostgresBroker
from horsies.tasks.recording import Actor
from tests.support.database import Database
from tests.support.rows import actions, add_failed, add_run, add_task, ago, resent, row_of
from tests.support.wait import wait_until

READING = BrokerErrorCode.MONITORING_QUERY_FAILED
ANNA = Actor("anna", "web")


@pytest.fixture
def broker(app: Horsies, connection: Database) -> PostgresBroker:
    return app.get_broker()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(orders, "PAUSE_SECONDS", 0)
    return iter(())


def preview(
    broker: PostgresBroker, verb: OrderVerb, filters: Any = None, **options: Any
) -> Preview:
    chosen = filters or (RunFilters() if verb.is_of_runs else TaskFilters())
    draft = draft_order(verb, chosen, **options).unwrap()
    return broker.perform(READING, preview_script(draft)).unwrap()


def step(broker: PostgresBroker, order: Order) -> Any:
    return broker.perform(READING, batch_script(order.id), atomic=True).unwrap().unwrap()


def start(broker: PostgresBroker, order: Order) -> Any:
    return broker.perform(READING, store_script(order, "running", ANNA), atomic=True).unwrap()


def test_a_dry_run_counts_and_changes_nothing(broker: PostgresBroker, connection: Database) -> None:
    add_failed(connection, 30)
    run = add_run(connection)
    add_task(connection, status="FAILED", error_code="CARD_REFUSED", workflow_id=run)
    add_task(connection, status="FAILED", error_code="OTHER")
    done = add_task(connection, status="FAILED", error_code="CARD_REFUSED")
    add_task(connection, retried_from_task_id=done)
    filters = TaskFilters(error_codes=["CARD_REFUSED"])
    found = preview(broker, OrderVerb.RETRY_TASKS, filters)
    assert (found.matching, found.eligible) == (32, 30)
    assert found.refused == {orders.IN_WORKFLOW: 1, orders.SENT_AGAIN: 1}
    assert found.order.subject == "tasks FAILED with CARD_REFUSED"
    assert actions(connection) == []
    assert connection.execute("SELECT count(*) FROM horsies_tasks").fetchone() == (34,)
    text = order_text(found.order)
    assert order_text(read_order_text(text)) == text


def test_three_hundred_tasks_are_sent_again_once_through_stops_and_repeats(
    broker: PostgresBroker, connection: Database, quick: None
) -> None:
    add_failed(connection, 300)
    order = preview(broker, OrderVerb.RETRY_TASKS).order
    start(broker, order)
    assert step(broker, order).progress.done == orders.BATCH
    assert broker.perform(READING, orders.stop_script(order.id)).unwrap().unwrap() is True
    stopped = step(broker, order)
    assert (stopped.outcome, stopped.progress.done) == ("stopped", 200)
    assert step(broker, order).outcome == "stopped"  # it stays so until it is started again
    assert resent(connection) == [0, 1]
    ended = carry_out(broker, order).unwrap()
    assert (ended.outcome, ended.progress.done, ended.progress.refused) == ("done", 300, {})
    assert carry_out(broker, order).unwrap() == ended
    assert resent(connection) == [1]
    subject = "tasks FAILED"
    assert actions(connection) == [("anna", "retry_tasks", subject, "done", "300 of 300 changed.")]
    new = connection.execute(
        "SELECT id::text, retried_from_task_id::text FROM horsies_tasks WHERE status = 'PENDING'"
    ).fetchall()
    assert {row[0] for row in new} == {orders.resent_id(order, row[1]) for row in new}


def test_tasks_that_fail_or_are_sent_after_the_dry_run_are_left_alone(
    broker: PostgresBroker, connection: Database, quick: None
) -> None:
    add_failed(connection, 5)
    older = add_task(connection, status="RUNNING", id="01900000-0000-7000-8000-000000000001")
    order = preview(broker, OrderVerb.RETRY_TASKS).order
    connection.execute(
        "UPDATE horsies_tasks SET status = 'FAILED', failed_at = clock_timestamp() WHERE id = %s",
        (older,),
    )
    newer = add_task(connection, status="FAILED", failed_at=ago(0))
    assert carry_out(broker, order).unwrap().progress.done == 5
    untouched = "SELECT count(*) FROM horsies_tasks WHERE retried_from_task_id = ANY(%s::uuid[])"
    assert connection.execute(untouched, ([older, newer],)).fetchone() == (0,)


def test_two_operators_with_the_same_filters_send_every_task_once(
    broker: PostgresBroker, connection: Database
) -> None:
    add_failed(connection, 300)
    first = preview(broker, OrderVerb.RETRY_TASKS).order
    second = preview(broker, OrderVerb.RETRY_TASKS).order
    for order in (first, second):
        start(broker, order)
    states = [step(broker, order) for _ in range(3) for order in (first, second)]
    assert [state.progress.done for state in states[-2:]] == [300, 0]
    assert states[-1].progress.refused == {orders.SENT_AGAIN: 300}
    assert resent(connection) == [1]


KILLED = """
import sys
from horsies.config.postgres import PostgresConfig
from horsies.monitor import orders
from horsies.monitor.order_plan import read_order_text
from horsies.tasks.broker import PostgresBroker
orders.BATCH, orders.PAUSE_SECONDS = 5, 0
broker = PostgresBroker(PostgresConfig(database_url=sys.argv[1]), role="operator", migrates=False)
print(orders.carry_out(broker, read_order_text(sys.argv[2])))
"""


def test_an_order_survives_a_killed_process(
    broker: PostgresBroker, connection: Database, process_url: str, quick: None
) -> None:
    add_failed(connection, 300)
    order = preview(broker, OrderVerb.RETRY_TASKS).order
    command = [sys.executable, "-c", KILLED, process_url, order_text(order)]
    pending = "SELECT count(*) FROM horsies_tasks WHERE status = 'PENDING'"

    def has_begun() -> bool:
        return connection.execute(pending).fetchone() != (0,)

    with subprocess.Popen(command) as process:
        try:
            wait_until(has_begun, 30)
        finally:
            process.send_signal(signal.SIGKILL)
    state = broker.perform(READING, orders.order_script(order.id)).unwrap()
    assert state is not None
    assert (state.outcome, 0 < state.progress.done < 300) == ("running", True)
    assert carry_out(broker, order).unwrap().progress.done == 300
    assert resent(connection) == [1]
    assert len(actions(connection)) == 1


def test_waiting_and_running_tasks_are_cancelled_and_purged(
    broker: PostgresBroker, connection: Database, quick: None
) -> None:
    waiting = [add_task(connection, queue_name="mail") for _ in range(3)]
    claimed = add_task(connection, queue_name="mail", status="CLAIMED")
    running = add_task(connection, queue_name="mail", status="RUNNING")
    other = add_task(connection, queue_name="reports")
    found = preview(broker, OrderVerb.PURGE_QUEUE, TaskFilters(queues=["mail"]))
    assert (found.matching, found.eligible, found.refused) == (4, 4, {})
    assert carry_out(broker, found.order).unwrap().progress.done == 4
    cancelled = {row_of(connection, one)["status"] for one in (*waiting, claimed)}
    assert cancelled == {"CANCELLED"}
    rest = preview(broker, OrderVerb.CANCEL_TASKS, include_running=False)
    assert (rest.matching, rest.refused) == (2, {orders.IS_RUNNING: 1})
    carry_out(broker, preview(broker, OrderVerb.CANCEL_TASKS).order).unwrap()
    assert row_of(connection, other)["status"] == "CANCELLED"
    assert row_of(connection, running)["cancel_requested_at"] is not None
    assert [row[1:4] for row in actions(connection)] == [
        ("purge_queue", "queue mail", "done"),
        ("cancel_tasks", "tasks PENDING/CLAIMED/RUNNING", "done"),
    ]


def test_named_tasks_are_changed_and_the_others_are_counted_as_refused(
    broker: PostgresBroker, connection: Database, quick: None
) -> None:
    failed, waiting = add_task(connection, status="FAILED"), add_task(connection)
    gone = "01a1dd00-0000-7000-8000-000000000000"
    ids = [failed, waiting, gone, "no id", failed.upper()]
    found = preview(broker, OrderVerb.RETRY_TASKS, ids=ids)
    expected = {orders.CHANGED: 1, orders.NOT_FOUND: 2}
    assert (found.matching, found.eligible, found.refused) == (4, 1, expected)
    state = carry_out(broker, found.order).unwrap()
    assert (state.progress.done, state.progress.refused) == (1, expected)


def test_runs_are_paused_resumed_and_cancelled(
    broker: PostgresBroker, connection: Database, quick: None
) -> None:
    runs = [add_run(connection, status="RUNNING", started_at=ago(5)) for _ in range(4)]
    states = "SELECT DISTINCT status FROM horsies_workflows"
    for verb, status in (
        (OrderVerb.PAUSE_RUNS, "PAUSED"),
        (OrderVerb.RESUME_RUNS, "RUNNING"),
        (OrderVerb.CANCEL_RUNS, "CANCELLED"),
    ):
        found = preview(broker, verb)
        assert (found.matching, found.eligible) == (len(runs), len(runs))
        assert carry_out(broker, found.order).unwrap().progress.done == len(runs)
        assert connection.execute(states).fetchall() == [(status,)]
    assert preview(broker, OrderVerb.RETRY_RUNS).matching == 0


def test_an_order_that_matches_nothing_is_done_at_once(
    broker: PostgresBroker, connection: Database, quick: None
) -> None:
    found = preview(broker, OrderVerb.RETRY_TASKS)
    assert (found.matching, found.newest_at, found.has_more) == (0, None, False)
    add_failed(connection, 3)
    state = carry_out(broker, found.order).unwrap()
    assert (state.outcome, state.progress.done) == ("done", 0)
    assert resent(connection) == [0]


def test_an_order_is_bounded(broker: PostgresBroker, connection: Database, quick: None) -> None:
    add_failed(connection, 300)
    found = preview(broker, OrderVerb.RETRY_TASKS, limit=250)
    assert (found.matching, found.has_more) == (250, True)
    assert carry_out(broker, found.order).unwrap().progress.done == 250
    assert resent(connection) == [0, 1]
    assert found.oldest_at is not None
    rest = preview(broker, OrderVerb.RETRY_TASKS, TaskFilters(until=found.oldest_at))
    assert rest.newest_at is not None
    assert rest.newest_at < found.oldest_at + timedelta(seconds=1)


def test_a_status_that_the_verb_does_not_take_is_refused() -> None:
    for verb, status in (
        (OrderVerb.RETRY_TASKS, TaskStatus.PENDING),
        (OrderVerb.CANCEL_TASKS, TaskStatus.FAILED),
    ):
        error = draft_order(verb, TaskFilters(statuses=[status])).unwrap_err()
        assert error.code is BrokerErrorCode.INVALID_QUERY
        assert f"not to {status.value}." in error.message
