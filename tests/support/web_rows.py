"""A small busy system for the dashboard's pages: tasks of every status, a worker, a run and a schedule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from psycopg import sql

from horsies import SignalNode, from_node
from horsies.app import Horsies
from horsies.config.schedules import TaskSchedule
from horsies.monitor.order_plan import OrderVerb, draft_order
from horsies.monitor.orders import preview_script, store_script
from horsies.monitor.queries import TaskFilters
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.recording import Actor
from horsies.timetable.patterns import IntervalSchedule
from horsies.web.app import ROUTES
from horsies.web.rendering import Route
from tests.support import measures
from tests.support.database import Database
from tests.support.keys import add_keyed, limit
from tests.support.rows import add_attempt, add_snapshot, add_task, add_worker, ago

QUEUE = "default"
# Pages that need a query.
QUERIES = {"/orders/new": "?verb=cancel_task"}
# Pages that have more to show with a query.
FILTERED = ["/search?q=charge", "/tasks?status=FAILED", "/send?task=charge_card", "/queues?after=a"]
# The routes of the dashboard, and those of them that open a page.
GETS = [route for route in ROUTES if route.method == "GET"]
POSTS = [route for route in ROUTES if route.method == "POST"]
DOWNLOADS = (".csv", "/payload/{part}")
PAGES = [
    route
    for route in GETS
    if not route.path.startswith(("/api/", "/metrics")) and not route.path.endswith(DOWNLOADS)
]
_READING = BrokerErrorCode.MONITORING_QUERY_FAILED
FINGERPRINT = "ef96c64c5a97"
# Its lines are wider than a phone.
TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/.venv/lib/python3.12/site-packages/httpx/_client.py", line 912, in send
    raise ConnectTimeout(request)
  File "/srv/shop/payments/gateway.py", line 41, in charge_card
    answer = provider.charge(order_id, card, idempotency_key=f"{order_id}-{attempt}", timeout=TIMEOUT_SECONDS)
shop.payments.errors.ProviderDown: the bank said no
"""
FAILURE = json.dumps(
    {
        "err": {
            "error_code": "CARD_REFUSED",
            "message": "the bank said no",
            "data": None,
            "exception": {"type": "ProviderDown", "traceback": TRACEBACK},
        }
    }
)


def fill(app: Horsies, connection: Database) -> dict[str, str]:
    """Insert the rows; return an example value for the path segment after each folder."""
    worker_id = add_worker(connection)
    add_snapshot(connection, worker_id)
    failed = _add_tasks(connection, worker_id)
    measures.fill_last_hour(connection, {"send_mail": 300, "charge_card": 40})
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
        result=FAILURE,
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


def add_rare_states(app: Horsies, connection: Database) -> list[str]:
    """Insert what waits for a person: paused keys, a paused run with a failed node, a held run of a durable
    function, and a paused schedule with an edited timing. Return the pages of the latter three; the keys
    are on the page of the queue. They have buttons that the pages of ``fill`` lack.
    """
    add_keyed(connection, "acme", 3)
    add_keyed(connection, "umbrella")
    limit(connection, "umbrella", paused_at="2026-01-01")
    return [
        f"/workflows/{_start_paused_run(app, connection)}?node=0",
        f"/tasks/{_add_held_run(connection)}",
        f"/schedules/{_add_paused_schedule(app)}",
    ]


def _start_paused_run(app: Horsies, connection: Database) -> str:
    @app.task("parse")
    def parse() -> str:
        return ""

    first = parse.node(node_id="parse")()
    approval = SignalNode("approve", waits_for=[first], node_id="approval")
    spec = app.workflow("import prices", [first, approval], definition_key="prices.v1")
    run_id = spec.start().unwrap().workflow_id
    connection.execute(
        "UPDATE horsies_workflow_tasks SET status = 'FAILED' WHERE workflow_id = %s AND task_index = 0",
        [run_id],
    )
    connection.execute(
        "UPDATE horsies_workflows SET status = 'PAUSED', paused_at = now(), failed_nodes = 1 WHERE id = %s",
        [run_id],
    )
    return run_id


def _add_held_run(connection: Database) -> str:
    task_id = add_task(connection, task_name="release", enqueued_at="9999-01-01", held=True)
    connection.execute(
        "INSERT INTO horsies_steps (task_id, name, position, kind, result, attempt, started_at, ended_at) "
        "VALUES (%s, 'charge', 1, 'step', '1', 1, now(), now())",
        [task_id],
    )
    connection.execute(
        "INSERT INTO horsies_parked (task_id, generation, since, signals, children, problem) "
        "VALUES (%s, 0, now(), '{approve}', '{}', 'The code has no step \"charge\".')",
        [task_id],
    )
    return task_id


def _add_paused_schedule(app: Horsies) -> str:
    schedule = TaskSchedule(name="nightly", task_name="sync", pattern=IntervalSchedule(hours=24))
    app.schedules.add(schedule).unwrap()
    app.schedules.edit("nightly", pattern="every 2 hours").unwrap()
    return app.schedules.pause("nightly").unwrap().name


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
