"""A small busy system for the dashboard's pages: tasks of every status, a worker, a run and a schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from psycopg import sql

from horsies import from_node
from horsies.app import Horsies
from horsies.config.schedules import TaskSchedule
from horsies.monitor.order_plan import OrderVerb, draft_order
from horsies.monitor.orders import preview_script, store_script
from horsies.monitor.queries import TaskFilters
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.recording import Actor
from horsies.timetable.patterns import IntervalSchedule
from horsies.web.rendering import Route
from tests.support.database import Database
from tests.support.rows import add_attempt, add_snapshot, add_task, add_worker, ago

QUEUE = "default"
# Pages that need a query.
QUERIES = {"/orders/new": "?verb=cancel_task"}
_READING = BrokerErrorCode.MONITORING_QUERY_FAILED
FINGERPRINT = "ef96c64c5a97"
TRACEBACK = '{"err":{"error_code":"CARD_REFUSED","message":"the bank said no","data":null}}'


def fill(app: Horsies, connection: Database) -> dict[str, str]:
    """Insert the rows; return an example value for the path segment after each folder."""
    worker_id = add_worker(connection)
    add_snapshot(connection, worker_id)
    failed = _add_tasks(connection, worker_id)
    return {
        "queues": QUEUE,
        "tasks": failed,
        "workers": worker_id,
        "workflows": _start_run(app),
        "nodes": "check",
        "schedules": _add_schedule(app, connection),
        "failures": FINGERPRINT,
        "names": "charge_card",
        "orders": _store_order(app),
        "payload": "kwargs",
    }


def _add_tasks(connection: Database, worker_id: str) -> str:
    add_task(connection, task_name="send_mail")
    add_task(connection, task_name="send_mail", enqueued_at=ago(-600))
    flying = {"claimed_by_worker_id": worker_id, "claimed_at": ago(2), "generation": 1}
    add_task(connection, task_name="send_mail", status="RUNNING", started_at=ago(1), **flying)
    for status in ("COMPLETED", "CANCELLED", "EXPIRED"):
        add_task(connection, task_name="send_mail", status=status, completed_at=ago(1))
    failed = add_task(
        connection,
        task_name="charge_card",
        status="FAILED",
        error_code="CARD_REFUSED",
        fingerprint=FINGERPRINT,
        result=TRACEBACK,
        args="[]",
        kwargs='{"order_id":17,"card":"4111111111111111"}',
        started_at=ago(3),
        failed_at=ago(2),
    )
    ended = {"started_at": ago(3), "outcome": "FAILED", "error_code": "CARD_REFUSED"}
    ended |= {"fingerprint": FINGERPRINT, "raised_in": "shop/payments/gateway.py:charge_card"}
    ended |= {"exception_type": "shop.payments.errors.ProviderDown"}
    # Insert rows with long words for narrow columns: a queue without a worker, an overdue schedule.
    add_task(connection, queue_name="payments", task_name="charge_card", enqueued_at=ago(281))
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, updated_at, timing) VALUES "
        "('every-second-night', now() - interval '1 hour', now() - interval '1 hour', "
        '\'{"pattern": {"type": "interval", "hours": 1}}\')'
    )
    add_attempt(connection, failed, error_message="the bank said no", **ended)
    connection.execute(
        sql.SQL("INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('mail', now())")
    )
    return failed


def _start_run(app: Horsies) -> str:
    @app.task("fetch")
    def fetch(url: str) -> str:
        return url

    @app.task("check")
    def check(page: str) -> str:
        return page

    first = fetch.node(node_id="fetch")(url="https://example.org")
    last = check.node(node_id="check")(page=from_node(first))
    spec = app.workflow("import shop", [first, last], output=last, definition_key="import.v1")
    return spec.start().unwrap().workflow_id


def _add_schedule(app: Horsies, connection: Database) -> str:
    """Add a schedule with as many slots as its pages show."""

    @app.task("sync")
    def sync() -> None: ...

    schedule = TaskSchedule(name="hourly", task_name="sync", pattern=IntervalSchedule(hours=1))
    name = app.schedules.add(schedule).unwrap().name
    failed = {"status": "FAILED", "error_code": "UNHANDLED_EXCEPTION", "failed_at": ago(1)}
    for hours in range(1, 21):
        slot = ago(3600 * hours)
        add_task(connection, task_name="sync", schedule_name=name, scheduled_for=slot, **failed)
    return name


def _store_order(app: Horsies) -> str:
    """Store an order that no process executes, so that its page has every button."""

    @app.task("charge_card")
    def charge_card(order_id: int, card: str = "") -> None: ...

    broker = app.get_broker()
    draft = draft_order(OrderVerb.CANCEL_TASKS, TaskFilters(queues=["payments"])).unwrap()
    order = broker.perform(_READING, preview_script(draft)).unwrap().order
    script = store_script(order, "running", Actor("anonymous", "web"))
    return broker.perform(_READING, script, atomic=True).unwrap().order.id


def path_of(route: Route, examples: dict[str, str]) -> str:
    """Return the path of a route with an example for each parameter, and with the query that it needs."""
    (path,) = paths_of(route, {folder: [example] for folder, example in examples.items()})
    return path + QUERIES.get(route.path, "")


def paths_of(route: Route, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Return the paths of a route, with every known value of each parameter."""
    parts: Sequence[str] = route.path.split("/")
    choices = [
        known.get(parts[index - 1], ["unknown"]) if re.fullmatch(r"{.*}", part) else [part]
        for index, part in enumerate(parts)
    ]
    return map("/".join, product(*choices))
