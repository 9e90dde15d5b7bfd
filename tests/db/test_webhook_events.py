"""Events of webhooks: every end of a task or run that is subscribed to has its delivery in the same
transaction, whichever statement records it; nothing else has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg import sql

from horsies import (
    AppConfig,
    Horsies,
    OnError,
    SubWorkflowNode,
    Webhook,
    WorkflowDefinition,
    WorkflowSpec,
    from_node,
)
from horsies.db.statements.tasks import cancel_tasks
from horsies.db.statements.turn import (
    CompleteTasks,
    ExpireTasks,
    FailTasks,
    ReleaseUnstarted,
    RetryTasks,
    complete_tasks,
    expire_tasks,
    fail_tasks,
    release_unstarted,
    retry_tasks,
)
from horsies.db.statements.webhooks import ask_for_findings, record_findings, store_webhooks
from horsies.db.statements.workflows import expire_run
from horsies.ids import new_id
from horsies.monitor.diagnose import doctor
from horsies.monitor.diagnose.doctor import CHEAP_IDS, SLOW_IDS
from horsies.webhooks.findings import due_checks, look_for_findings
from horsies.webhooks.task import subscriptions
from tests.support.database import Database
from tests.support.receiver import SECRET
from tests.support.rows import add_task, add_worker, ago
from tests.support.turns import Hands, Tasks, define_tasks

OWNER = "worker-1"
EVENTS = ["task.failed", "task.cancelled", "task.expired", "run.ended"]


def subscribe(connection: Database, app: Horsies, **changes: Any) -> Webhook:
    """Register a webhook of the application as a worker does."""
    fields: dict[str, Any] = {
        "name": "alerts",
        "url": "https://hooks.example/very-secret",
        "secret": SECRET,
        "on": EVENTS,
    }
    hook = Webhook(**fields | changes)
    register(connection, app, [hook])
    return hook


def register(connection: Database, app: Horsies, hooks: list[Webhook]) -> None:
    config = AppConfig(broker=app.config.broker, webhooks=hooks)
    store_webhooks.run(connection, (subscriptions(config), ["default"]))


def deliveries(connection: Database) -> list[tuple[str, dict[str, Any]]]:
    """The stored deliveries: task name and event."""
    found = connection.execute(
        "SELECT task_name, kwargs FROM horsies_tasks WHERE task_name LIKE 'horsies.webhook.%' ORDER BY id"
    )
    return [(name, json.loads(kwargs)["event"]) for name, kwargs in found]


def events(connection: Database) -> list[tuple[str, str]]:
    """Of every delivery: the type, and the task or run."""
    found = [event for _, event in deliveries(connection)]
    return [(one["type"], one["data"].get("task_id") or one["data"]["run_id"]) for one in found]


def row(connection: Database, status: str = "RUNNING", **columns: Any) -> str:
    owned: dict[str, Any] = {"status": status, "started_at": ago(1)}
    if status in ("CLAIMED", "RUNNING"):
        owned |= {"generation": 1, "claimed_by_worker_id": OWNER}
    return add_task(connection, **owned | columns)


def fail(connection: Database, ids: list[str], status: str = "FAILED") -> None:
    count = len(ids)
    outcome = (["FAILED"] * count, ["BROKE"] * count, ["it broke"] * count, ["line 1"] * count)
    values = FailTasks(OWNER, ids, [1] * count, [status] * count, ['{"err":1}'] * count, *outcome)
    assert len(fail_tasks.run(connection, values)) == count


def failed(connection: Database) -> str:
    task_id = row(connection)
    fail(connection, [task_id])
    return task_id


def stopped(connection: Database) -> str:
    task_id = row(connection)
    cancel_tasks.fetch(connection, [task_id], True)
    fail(connection, [task_id], "CANCELLED")
    return task_id


def cancelled(connection: Database) -> str:
    task_id = row(connection, "PENDING")
    cancel_tasks.fetch(connection, [task_id], False)
    return task_id


def expired(connection: Database) -> str:
    task_id = row(connection, "PENDING", good_until=ago(1))
    expire_tasks.run(connection, ExpireTasks('{"err":"late"}', 10))
    return task_id


def late_retry(connection: Database) -> str:
    """A retry after its good_until is a failure."""
    task_id = row(connection, good_until=ago(-5), max_retries=3)
    values = RetryTasks(
        OWNER, [task_id], [1], [60.0], ["FAILED"], ["BROKE"], ["it broke"], ["line 1"]
    )
    assert not retry_tasks.run(connection, values)
    fail(connection, [task_id])
    return task_id


def released(connection: Database) -> str:
    """A claim in doubt that is given back after its cancellation."""
    task_id = row(connection, cancel_requested_at=ago(1))
    release_unstarted.run(connection, ReleaseUnstarted(OWNER, [], []))
    return task_id


def of_lost_worker(connection: Database) -> str:
    """Recovery records the end in the name of the worker, or without one."""
    task_id = row(connection, claimed_by_worker_id=None)
    values = FailTasks(
        None, [task_id], [1], ["FAILED"], [None], ["WORKER_FAILURE"], ["X"], [None], [None]
    )
    assert fail_tasks.run(connection, values)
    return task_id


def by_hand(connection: Database) -> str:
    task_id = row(connection)
    connection.execute("UPDATE horsies_tasks SET status = 'FAILED' WHERE id = %s", (task_id,))
    return task_id


ENDS: dict[str, list[Callable[[Database], str]]] = {
    "task.failed": [failed, late_retry, of_lost_worker, by_hand],
    "task.cancelled": [stopped, cancelled, released],
    "task.expired": [expired],
}


@pytest.mark.parametrize(
    ("kind", "end"), [(kind, end) for kind, ends in ENDS.items() for end in ends]
)
def test_every_end_has_its_delivery(
    connection: Database, app: Horsies, kind: str, end: Callable[[Database], str]
) -> None:
    end(connection)
    assert not deliveries(connection), "before the webhook was registered"
    subscribe(connection, app)
    task_id = end(connection)
    assert events(connection) == [(kind, task_id)]


@pytest.mark.parametrize("end", [end for ends in ENDS.values() for end in ends])
def test_a_delivery_exists_with_its_end_or_not_at_all(
    connection: Database, app: Horsies, end: Callable[[Database], str]
) -> None:
    subscribe(connection, app)
    with connection.transaction(force_rollback=True):
        end(connection)
        assert len(deliveries(connection)) == 1
    assert not deliveries(connection)


def test_a_success_and_a_retry_have_none(connection: Database, app: Horsies) -> None:
    subscribe(connection, app)
    first, second = row(connection), row(connection, max_retries=3)
    assert complete_tasks.run(connection, CompleteTasks(OWNER, [first], [1], ['{"ok":1}']))
    values = RetryTasks(OWNER, [second], [1], [1.0], ["FAILED"], ["X"], [None], [None])
    assert retry_tasks.run(connection, values)
    assert not deliveries(connection)


def test_many_ends_in_one_statement_have_one_delivery_each(
    connection: Database, app: Horsies
) -> None:
    subscribe(connection, app)
    ids = [row(connection) for _ in range(50)]
    fail(connection, ids)
    assert sorted(events(connection)) == sorted(("task.failed", one) for one in ids)
    assert len({event["id"] for _, event in deliveries(connection)}) == 50


def test_an_event_has_facts_and_no_payload(connection: Database, app: Horsies) -> None:
    subscribe(connection, app)
    task_id = row(connection, args='["ada@example.org"]', kwargs='{"card":"4111"}', retry_count=2)
    fail(connection, [task_id])
    ((name, event),) = deliveries(connection)
    assert name == "horsies.webhook.alerts"
    facts = event["data"]
    assert {
        key: facts[key] for key in ("task_name", "queue_name", "status", "error_code", "retries")
    } == {
        "task_name": "work",
        "queue_name": "default",
        "status": "FAILED",
        "error_code": "BROKE",
        "retries": 2,
    }
    assert facts["ended_at"].endswith("Z")
    stored = connection.execute(
        "SELECT id::text, kwargs, task_options, queue_name, max_retries, timeout_ms, priority, status, args "
        "FROM horsies_tasks WHERE task_name LIKE 'horsies.webhook.%'"
    ).fetchone()
    assert stored is not None
    assert stored[0] == event["id"]
    assert stored[3:] == ("default", 36, 15_000, 100, "PENDING", "[]")
    for hidden in ("ada@example.org", "4111", "it broke", "line 1", "very-secret", SECRET):
        assert hidden not in stored[1] + stored[2]


def test_address_and_secret_are_in_no_table(connection: Database, app: Horsies) -> None:
    subscribe(connection, app)
    failed(connection)
    tables = connection.execute(
        "SELECT relname FROM pg_class WHERE relname LIKE 'horsies%' AND relkind = 'r'"
    )
    for (table,) in tables.fetchall():
        query = sql.SQL("SELECT count(*) FROM {} AS line WHERE line::text ~ %s").format(
            sql.Identifier(table)
        )
        assert connection.execute(query, (f"{SECRET}|very-secret|hooks.example",)).fetchone() == (
            0,
        ), table


def test_a_delivery_that_fails_is_not_announced(connection: Database, app: Horsies) -> None:
    subscribe(connection, app)
    task_id = row(connection, task_name="horsies.webhook.alerts")
    fail(connection, [task_id])
    other = row(connection, "PENDING", task_name="horsies.webhook.other")
    cancel_tasks.fetch(connection, [other], False)
    stored = connection.execute("SELECT count(*) FROM horsies_tasks").fetchone()
    assert stored == (2,)


def test_a_webhook_gets_what_it_subscribes_to(connection: Database, app: Horsies) -> None:
    first = Webhook(
        name="a", url="https://h.example/", secret=SECRET, on=["task.failed"], task_names=["pay"]
    )
    second = Webhook(
        name="b", url="https://h.example/", secret=SECRET, on=["task.cancelled", "task.failed"]
    )
    register(connection, app, [first, second])
    fail(connection, [row(connection, task_name="pay"), row(connection, task_name="mail")])
    cancelled(connection)
    expired(connection)
    found = [
        (name, event["type"], event["data"]["task_name"]) for name, event in deliveries(connection)
    ]
    assert sorted(found) == [
        ("horsies.webhook.a", "task.failed", "pay"),
        ("horsies.webhook.b", "task.cancelled", "work"),
        ("horsies.webhook.b", "task.failed", "mail"),
        ("horsies.webhook.b", "task.failed", "pay"),
    ]


def test_without_webhooks_an_end_takes_no_statement_more(
    connection: Database, app: Horsies
) -> None:
    """The functions of webhooks are not even called."""
    connection.execute("SET track_functions = 'pl'")
    failed(connection)
    connection.execute("SELECT pg_stat_force_next_flush()")
    query = (
        "SELECT coalesce(sum(pg_stat_get_function_calls(oid)), 0) FROM pg_proc "
        "WHERE proname IN ('horsies_announce_tasks', 'horsies_send_events')"
    )
    before = connection.execute(query).fetchone()
    failed(connection)
    connection.execute("SELECT pg_stat_force_next_flush()")
    assert connection.execute(query).fetchone() == before


# Runs


@pytest.fixture
def tasks(app: Horsies) -> Tasks:
    return define_tasks(app)


@pytest.fixture
def hands(connection: Database) -> Hands:
    return Hands(connection)


def ended_runs(connection: Database) -> list[tuple[str, str, str | None]]:
    found = [one for _, one in deliveries(connection) if one["type"] == "run.ended"]
    return [
        (one["data"]["run_id"], one["data"]["status"], one["data"]["error_code"]) for one in found
    ]


def test_a_run_that_ends_is_delivered_once(
    connection: Database, app: Horsies, tasks: Tasks, hands: Hands
) -> None:
    subscribe(connection, app, on=["run.ended"])
    first = tasks.number.node(node_id="first")()
    last = tasks.add.node(node_id="last")(first=from_node(first))
    spec = app.workflow("chain", [first, last], output=last, definition_key="hooks.chain")
    good, bad = spec.start().unwrap().workflow_id, spec.start().unwrap().workflow_id
    hands.complete(good, "first")
    assert not deliveries(connection)
    hands.complete(good, "last")
    hands.fail(bad, "first")
    assert ended_runs(connection) == [(good, "COMPLETED", None), (bad, "FAILED", "BOOM")]
    (_, event), _ = deliveries(connection)
    assert (event["data"]["name"], event["data"]["nodes"], event["data"]["failed_nodes"]) == (
        "chain",
        2,
        0,
    )


def test_cancelled_and_expired_runs_are_delivered(
    connection: Database, app: Horsies, tasks: Tasks, hands: Hands
) -> None:
    subscribe(connection, app)
    node = tasks.number.node(node_id="first")()
    spec = app.workflow("one", [node], definition_key="hooks.one", on_error=OnError.PAUSE)
    first, second = spec.start().unwrap(), spec.start().unwrap()
    first.cancel().unwrap()
    hands.fail(second.workflow_id, "first")
    assert [run for run, _, _ in ended_runs(connection)] == [first.workflow_id], (
        "a pause is not an end"
    )
    reason = '{"error_code":"WORKFLOW_EXPIRED","message":null,"data":null}'
    expire_run.fetch(connection, second.workflow_id, 0.0, reason)
    assert ended_runs(connection)[1] == (second.workflow_id, "EXPIRED", "WORKFLOW_EXPIRED")
    kinds = sorted(kind for kind, _ in events(connection))
    assert kinds == ["run.ended", "run.ended", "task.cancelled", "task.failed"]


class Inner(WorkflowDefinition[int]):
    """A run inside another."""

    name = "inner"
    definition_key = "hooks.inner"

    @classmethod
    def build_with(cls, app: Any) -> WorkflowSpec[int]:
        only = app.get_task("number").node(node_id="inner")()
        return WorkflowSpec(cls.name, [only], output=only)


def test_a_run_inside_another_is_not_delivered_by_itself(
    connection: Database, app: Horsies, tasks: Tasks, hands: Hands
) -> None:
    subscribe(connection, app, on=["run.ended"])
    sub = SubWorkflowNode(Inner, node_id="sub")
    spec = app.workflow("outer", [sub], definition_key="hooks.outer")
    outer, child_id = spec.start().unwrap().workflow_id, new_id()
    hands.expand(outer, "sub", Inner.build_with(app), child_id)
    assert not deliveries(connection)
    hands.complete(child_id, "inner")
    assert ended_runs(connection) == [(outer, "COMPLETED", None)]


# Registering


def registered(connection: Database) -> list[str]:
    found = connection.execute("SELECT name FROM horsies_webhooks ORDER BY name")
    return [name for (name,) in found]


def test_a_webhook_is_removed_when_its_last_worker_has_stopped(
    connection: Database, app: Horsies
) -> None:
    subscribe(connection, app)
    known = json.dumps({"tasks": {"horsies.webhook.alerts": "x"}, "workflows": {}})
    worker_id = add_worker(connection, known_tasks=known)
    register(connection, app, [])
    assert registered(connection) == ["alerts"], "a worker of the release before still has it"
    connection.execute(
        "UPDATE horsies_workers SET stopped_at = now() WHERE worker_id = %s", (worker_id,)
    )
    config = AppConfig(broker=app.config.broker)
    store_webhooks.run(connection, (subscriptions(config), ["another"]))
    assert registered(connection) == ["alerts"], "it belongs to an application with other queues"
    register(connection, app, [])
    assert registered(connection) == []


def test_the_worker_that_starts_last_decides_and_an_equal_row_stays(
    connection: Database, app: Horsies
) -> None:
    hook = subscribe(connection, app)
    before = connection.execute("SELECT xmin::text FROM horsies_webhooks").fetchall()
    register(connection, app, [hook])
    assert connection.execute("SELECT xmin::text FROM horsies_webhooks").fetchall() == before
    subscribe(connection, app, on=["run.ended"], max_retries=3)
    stored = connection.execute("SELECT events, max_retries FROM horsies_webhooks").fetchall()
    assert stored == [(["run.ended"], 3)]


# Findings


def noticed(code: str, subject: str = "queue mail", check_id: str = "unserved") -> dict[str, Any]:
    return {
        "check_id": check_id,
        "code": code,
        "subject": subject,
        "level": "red",
        "sentence": f"{subject} is in trouble.",
        "remedy": None,
    }


def changes(connection: Database) -> list[tuple[str, str, str]]:
    """The announced changes in the order of their checks; within one check, by type and code."""
    found = [event for _, event in deliveries(connection)]
    found.sort(key=lambda one: (one["timestamp"], one["type"], one["data"]["code"]))
    return [(one["type"], one["data"]["code"], one["data"]["subject"]) for one in found]


def test_a_finding_is_announced_when_it_opens_and_when_it_closes(
    connection: Database, app: Horsies
) -> None:
    subscribe(connection, app, on=["finding.opened", "finding.closed"])

    def record(*found: dict[str, Any], checks: tuple[str, ...] = ("unserved", "blocked")) -> int:
        return record_findings.fetch(connection, json.dumps(found), list(checks))[0].announced

    first, second = noticed("A"), noticed("B", check_id="blocked")
    assert record(first, first, second) == 2
    assert record(first, second) == 0, "it is still open"
    assert record(first, checks=("unserved",)) == 0, "its check could not be read"
    assert record(first) == 1
    assert record() == 1
    assert record(first) == 1, "it has come back"
    assert changes(connection) == [
        ("finding.opened", "A", "queue mail"),
        ("finding.opened", "B", "queue mail"),
        ("finding.closed", "B", "queue mail"),
        ("finding.closed", "A", "queue mail"),
        ("finding.opened", "A", "queue mail"),
    ]


def test_slow_checks_run_every_tenth_minute_and_their_findings_do_not_flap(
    connection: Database, app: Horsies, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the checks take longer.
    monkeypatch.setattr(doctor, "PATIENCE_SECONDS", 60.0)
    subscribe(connection, app, on=["finding.opened", "finding.closed"])
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)

    def look(minute: int) -> list[str]:
        look_for_findings(app.get_broker(), noon + timedelta(minutes=minute))
        return [kind for kind, code, _ in changes(connection) if code == "TRIGGERS"]

    connection.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER horsies_task_changed")
    try:
        assert look(9) == []
        assert look(10) == ["finding.opened"]
        assert look(11) == look(20) == ["finding.opened"]
    finally:
        connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER horsies_task_changed")
    assert look(21) == ["finding.opened"], "only the slow check itself can close it"
    assert look(30) == ["finding.opened", "finding.closed"]


def test_a_check_runs_once_in_ten_minutes_or_every_minute() -> None:
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    asked = [due_checks(noon + timedelta(minutes=minute, seconds=59)) for minute in range(60)]
    assert [ids[0] for ids in asked] == [CHEAP_IDS] * 60
    assert [minute for minute, ids in enumerate(asked) if SLOW_IDS in ids] == [
        0,
        10,
        20,
        30,
        40,
        50,
    ]


def test_the_check_is_sent_once_a_minute_for_all_workers(connection: Database) -> None:
    with connection.transaction():
        for _ in range(3):
            ask_for_findings.run(connection, ("horsies.findings", "default", 100, "{}", 30_000))
        stored = connection.execute("SELECT task_name, status, retention FROM horsies_tasks")
        assert [(name, status) for name, status, _ in stored] == [("horsies.findings", "PENDING")]


def test_the_end_of_a_check_is_not_announced(connection: Database, app: Horsies) -> None:
    subscribe(connection, app)
    fail(connection, [row(connection, task_name="horsies.findings")])
    assert not deliveries(connection)
