"""Explanations of stored rows: program, command line, API and page give the same reasons."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Page, expect
from psycopg import sql

from horsies import Horsies, TaskError, TaskResult
from horsies.ids import fixed_id, new_id
from horsies.tasks.outcome import RETURNED_TO_QUEUE, TOO_LATE
from horsies.web.words import short_id
from horsies.workflow.nodes.nodes import MapNode, OnError, SignalNode, SleepNode, TaskNode
from horsies.workflow.run.handle import WorkflowHandle
from tests.support.database import Database
from tests.support.explained import Doors, codes, the
from tests.support.rows import (
    add_attempt,
    add_heartbeat,
    add_snapshot,
    add_task,
    add_worker,
    ago,
    finish,
)
from tests.support.web_server import Ask

RECOVERY = '{"terminal_record_retention_hours": 720, "unknown_task_grace_ms": 600000}'


@pytest.fixture
def doors(app: Horsies) -> Doors:
    return Doors(app)


def serve(connection: Database, **columns: Any) -> str:
    """A live worker of the default queue, with a snapshot."""
    caps = columns.pop("caps", "{}")
    cluster_cap = columns.pop("cluster_cap", None)
    worker_id = add_worker(connection, **columns)
    add_snapshot(
        connection,
        worker_id,
        queue_max_concurrency=caps,
        cluster_wide_cap=cluster_cap,
        recovery_config=RECOVERY,
    )
    return worker_id


def test_a_task_that_nothing_hinders_should_start_now(doors: Doors, connection: Database) -> None:
    serve(connection)
    explanation = doors.task(add_task(connection))
    assert codes(explanation) == ["SHOULD_START_NOW"]
    assert explanation.status == "PENDING"
    assert explanation.holds == (
        "It has been due for 1 min.",
        "No workflow run holds it back.",
        "Queue 'default' is not paused.",
        "1 live worker serves the queue and knows the task.",
        "No other transaction locks its row.",
    )


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"enqueued_at": ago(-60)}, ["SENT_FOR_LATER"]),
        ({"enqueued_at": ago(-60), "retry_count": 1, "max_retries": 3}, ["RETRY_LATER"]),
        ({"good_until": ago(12)}, ["EXPIRED_UNSWEPT"]),
        ({"queue_name": "other"}, ["QUEUE_UNSERVED"]),
        ({"task_name": "unknown"}, ["TASK_UNKNOWN"]),
        ({"status": "COMPLETED", "completed_at": ago(3)}, ["ENDED"]),
        ({"status": "CANCELLED", "failed_at": ago(3)}, ["ENDED"]),
        ({"status": "EXPIRED", "failed_at": ago(3)}, ["ENDED"]),
        ({"status": "FAILED", "failed_at": ago(3)}, ["ENDED", "NOT_RETRIED_NO_POLICY"]),
    ],
)
def test_a_stored_task_has_these_reasons(
    doors: Doors, connection: Database, columns: dict[str, Any], expected: list[str]
) -> None:
    serve(connection, known_tasks='{"tasks": {"work": "1"}}')
    assert codes(doors.task(add_task(connection, **columns))) == expected


def test_an_ended_task_has_no_obstacle(doors: Doors, connection: Database) -> None:
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    task_id = add_task(connection, status="FAILED", failed_at=at, error_code="NO_CARD")
    explanation = doors.task(task_id)
    assert not any(one.blocks for one in explanation.reasons)
    assert the(explanation, "ENDED").since == at
    sentence = the(explanation, "ENDED").sentence
    assert sentence.startswith("It failed with NO_CARD at 2026-03-01 12:00:00 UTC, ")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"status": "CLAIMED", "claim_expires_at": ago(-50)}, ["PREFETCHED"]),
        ({"status": "CLAIMED", "claim_expires_at": ago(5)}, ["LEASE_LAPSED"]),
        ({"status": "RUNNING", "started_at": ago(5)}, ["RUNS"]),
        (
            {"status": "RUNNING", "started_at": ago(5), "cancel_requested_at": ago(2)},
            ["STOPPING", "RUNS"],
        ),
        ({"status": "RUNNING", "started_at": ago(5), "timeout_ms": 1_000}, ["OVER_LIMIT", "RUNS"]),
        (
            {"status": "RUNNING", "started_at": ago(5), "claimed_by_worker_id": "gone"},
            ["RUNNER_LOST"],
        ),
        ({"status": "CLAIMED", "claimed_by_worker_id": "gone"}, ["CLAIMER_LOST"]),
    ],
)
def test_a_task_in_the_hands_of_a_worker_has_these_reasons(
    doors: Doors, connection: Database, columns: dict[str, Any], expected: list[str]
) -> None:
    owner = {"claimed_by_worker_id": serve(connection), "claimed_at": ago(6), "worker_pid": 9}
    task_id = add_task(connection, **owner | columns)
    add_heartbeat(connection, task_id, 1)
    explanation = doors.task(task_id)
    assert codes(explanation) == expected
    if "RUNS" in expected:
        # A second, and what the explanation took.
        assert re.search(r"heartbeat \d+ s ago", the(explanation, "RUNS").sentence)


def test_a_silent_worker_that_is_connected_is_named(doors: Doors, connection: Database) -> None:
    worker = serve(connection, name="pay-1", lock_key=4_711, seen_at=ago(60))
    connection.execute("SELECT pg_advisory_lock(4711)")
    running = add_task(
        connection, status="RUNNING", started_at=ago(90), claimed_by_worker_id=worker
    )
    explanation = doors.task(running)
    assert codes(explanation) == ["SILENT", "RUNS"]
    assert the(explanation, "SILENT").subjects == ("pay-1",)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("not retried: max_retries=3 is reached", "NOT_RETRIED_USED_UP"),
        ("not retried: code X is not listed in auto_retry_for", "NOT_RETRIED_UNLISTED"),
        (TOO_LATE, "NOT_RETRIED_TOO_LATE"),
    ],
)
def test_a_failed_task_tells_why_it_was_not_retried(
    doors: Doors, connection: Database, reason: str, expected: str
) -> None:
    failed = {"status": "FAILED", "failed_at": ago(3), "error_code": "X", "max_retries": 3}
    task_id = add_task(connection, **failed)
    add_attempt(connection, task_id, outcome="FAILED", error_code="X", retry_reason=reason)
    explanation = doors.task(task_id)
    assert codes(explanation) == ["ENDED", expected]
    assert the(explanation, "ENDED").remedy == f"horsies show {task_id} --payload"
    assert the(explanation, expected).remedy == f"horsies retry {task_id}"
    connection.execute("UPDATE horsies_tasks SET cancel_requested_at = now()")
    if reason == TOO_LATE:
        assert codes(doors.task(task_id)) == ["ENDED", "NOT_RETRIED_CANCELLED"]


def test_the_last_attempt_of_a_waiting_task_is_remembered(
    doors: Doors, connection: Database
) -> None:
    serve(connection)
    task_id = add_task(connection, retry_count=1)
    lost = {"outcome": "WORKER_FAILURE", "will_retry": True, "worker_hostname": "vm-3"}
    add_attempt(connection, task_id, **lost)
    explanation = doors.task(task_id)
    assert codes(explanation) == ["WORKER_LOST_RECENTLY", "SHOULD_START_NOW"]
    assert "vm-3" in explanation.reasons[0].sentence
    connection.execute("UPDATE horsies_task_attempts SET retry_reason = %s", (RETURNED_TO_QUEUE,))
    assert codes(doors.task(task_id)) == ["RETURNED", "SHOULD_START_NOW"]


def test_caps_name_the_tasks_that_take_the_places(doors: Doors, connection: Database) -> None:
    worker = serve(connection, caps='{"default": 1}', cluster_cap=2, hears=False)
    running = {"status": "RUNNING", "claimed_by_worker_id": worker, "started_at": ago(600)}
    first = add_task(connection, claimed_at=ago(600), **running)
    waiting = add_task(connection)
    explanation = doors.task(waiting)
    assert codes(explanation) == ["QUEUE_CAP", "WORKERS_POLL"]
    assert the(explanation, "QUEUE_CAP").subjects == (first,)
    assert "for 10 min" in the(explanation, "QUEUE_CAP").sentence
    other = add_task(connection, claimed_at=ago(60), queue_name="other", **running)
    explanation = doors.task(waiting)
    assert codes(explanation) == ["QUEUE_CAP", "CLUSTER_CAP", "WORKERS_POLL"]
    assert the(explanation, "CLUSTER_CAP").subjects == (first, other)
    connection.execute("UPDATE horsies_workers SET hears = true")
    serve(connection, caps='{"default": 0}', cluster_cap=2)
    assert codes(doors.task(waiting)) == ["QUEUE_CAP", "CLUSTER_CAP", "CAPS_DISAGREE"]


def test_a_rate_names_the_time_of_the_next_start(doors: Doors, connection: Database) -> None:
    serve(connection)
    waiting = add_task(connection)
    connection.execute(
        "INSERT INTO horsies_meters (queue_name, lane, next_at, seconds, burst) "
        "VALUES ('default', 0, now() + interval '300 seconds', 60, 2)"
    )
    explanation = doors.task(waiting)
    assert codes(explanation) == ["QUEUE_RATE"]
    sentence = the(explanation, "QUEUE_RATE").sentence
    assert sentence.startswith(
        "The rate of queue 'default' allows one every 1 min, and the next task"
    )
    assert codes(doors.queue("default")) == ["QUEUE_RATE", "TASKS_DUE"]
    connection.execute("UPDATE horsies_meters SET next_at = now(), seconds = 0.01")
    assert codes(doors.task(waiting)) == ["SHOULD_START_NOW"]


def test_a_task_behind_others_is_told_how_many_and_how_long(
    doors: Doors, connection: Database
) -> None:
    serve(connection, queues=["first", "default"], known_tasks='{"tasks": {"work": "1"}}')
    serve(connection, queues=["first", "default"], known_tasks='{"tasks": {"work": "2"}}')
    last = add_task(connection)
    for number in range(3):
        add_task(connection, enqueued_at=ago(100 + number))
        add_task(connection, queue_name="first")
        add_task(connection, enqueued_at=ago(-100), priority=1)
        done = add_task(connection, status="COMPLETED")
        add_attempt(connection, done)
    explanation = doors.task(last)
    assert codes(explanation) == ["PARAMETERS_DIFFER", "BEHIND", "BETTER_QUEUES_FIRST"]
    assert the(explanation, "BEHIND").sentence == (
        "3 tasks are ahead of it in queue 'default'; at 3 per minute that takes 1 min."
    )
    assert "first (3 due)" in the(explanation, "BETTER_QUEUES_FIRST").sentence


def test_a_blocked_task_and_run_name_the_error(
    doors: Doors, connection: Database, app: Horsies
) -> None:
    task_id = add_task(connection, queue_name="other")
    run_id = start(app, TaskNode(number_task(app), kwargs={"n": 1})).workflow_id
    for row_id, kind in ((task_id, "task"), (run_id, "run")):
        connection.execute(
            "INSERT INTO horsies_blocked (id, kind, status, generation, action, error) "
            "VALUES (%s, %s, %s, 0, 'claim', 'P0001 no')",
            (row_id, kind, "PENDING" if kind == "task" else "RUNNING"),
        )
    assert codes(doors.task(task_id)) == ["BLOCKED", "QUEUE_UNSERVED"]
    assert "P0001 no" in the(doors.run(run_id), "BLOCKED").sentence


# Rows that are missing


def test_an_uncommitted_send_is_not_found_yet(
    doors: Doors, connection: Database, process_url: str
) -> None:
    with psycopg.connect(process_url, application_name="shop") as sender:
        task_id = add_task(sender)
        explanation = doors.task(task_id)
        assert codes(explanation) == ["NOT_FOUND_YET"]
        assert f"pid {sender.info.backend_pid} (shop" in explanation.reasons[0].sentence
        sender.rollback()
    assert codes(doors.task(task_id)) == ["NOT_FOUND"]


def test_an_old_id_was_deleted_by_retention(doors: Doors, connection: Database) -> None:
    old = fixed_id(datetime.now(UTC) - timedelta(days=40), "old")
    assert codes(doors.task(old)) == ["NOT_FOUND"]  # no worker, so its retention is not known
    serve(connection)
    assert codes(doors.task(old)) == ["NOT_FOUND_DELETED"]
    assert codes(doors.run(new_id())) == ["NOT_FOUND"]


@pytest.mark.parametrize("nonsense", ["nonsense", "<script>alert(1)</script>", "%00"])
def test_a_text_that_is_not_an_id_is_not_found(doors: Doors, nonsense: str) -> None:
    assert codes(doors.app.explain(nonsense).unwrap()) == ["NOT_FOUND"]


# The last one is of the year 10889, after the years of Python.
@pytest.mark.parametrize("beginning", ["02000000", "ffffffff"])
def test_an_id_of_a_time_to_come_is_not_found(doors: Doors, beginning: str) -> None:
    explanation = doors.task(f"{beginning}-ffff-7fff-bfff-ffffffffffff")
    assert codes(explanation) == ["NOT_FOUND"]
    assert "check the id" in explanation.reasons[0].sentence


# Runs and nodes


def number_task(app: Horsies) -> Any:
    def number(n: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=n)

    return app.task("number")(number)


def numbers_task(app: Horsies) -> Any:
    def numbers() -> TaskResult[list[int], TaskError]:
        return TaskResult(ok=[1, 2, 3])

    return app.task("numbers")(numbers)


def start(app: Horsies, *nodes: Any, **options: Any) -> WorkflowHandle[Any]:
    return app.workflow("w", nodes, definition_key="w.v1", **options).start().unwrap()


def task_of(connection: Database, run_id: str, node_id: str) -> str:
    (row,) = connection.execute(
        "SELECT task_id::text FROM horsies_workflow_tasks WHERE workflow_id = %s AND node_id = %s",
        (run_id, node_id),
    )
    return str(row[0])


def test_nodes_wait_for_signals_time_and_each_other(
    doors: Doors, connection: Database, app: Horsies
) -> None:
    approval = SignalNode("approve", node_id="approval")
    nap = SleepNode(3_600, node_id="nap")
    last = TaskNode(number_task(app), kwargs={"n": 1}, waits_for=[approval, nap], node_id="last")
    run_id = start(app, approval, nap, last).workflow_id
    builtin = '{"tasks": {"horsies.signal": "1", "horsies.sleep": "1", "number": "1"}}'
    serve(connection, known_tasks=builtin)
    waiting = doors.node(run_id, "approval")
    assert codes(waiting) == ["PARKED_SIGNAL"]
    assert the(waiting, "PARKED_SIGNAL").remedy == (
        f"horsies workflow signal {run_id} approve VALUE"
    )
    assert codes(doors.task(task_of(connection, run_id, "nap"))) == ["SLEEPS"]
    blocked = doors.node(run_id, "last")
    assert codes(blocked) == ["WAITS_FOR"]
    assert blocked.reasons[0].subjects == ("approval", "nap")
    assert blocked.reasons[0].remedy == f"horsies explain {run_id} approval"
    whole = doors.run(run_id)
    assert codes(whole) == ["PARKED_SIGNAL", "SLEEPS", "NODE_OPEN", "NODE_OPEN"]
    assert codes(doors.node(run_id, "missing")) == ["NOT_FOUND"]


def test_a_paused_run_holds_its_tasks_and_names_the_author(
    doors: Doors, connection: Database, app: Horsies
) -> None:
    first = TaskNode(number_task(app), kwargs={"n": 1}, node_id="first")
    handle = start(app, first)
    run_id = handle.workflow_id
    handle.pause().unwrap()
    explanation = doors.run(run_id)
    assert codes(explanation) == ["RUN_PAUSED", "QUEUE_UNSERVED", "NODE_OPEN"]
    assert " was paused by " in explanation.reasons[0].sentence
    held = doors.task(task_of(connection, run_id, "first"))
    assert codes(held) == ["HELD_BY_RUN", "QUEUE_UNSERVED"]
    assert the(held, "HELD_BY_RUN").remedy == f"horsies workflow resume {run_id}"
    handle.cancel().unwrap()
    assert codes(doors.run(run_id)) == ["RUN_ENDED"]
    assert codes(doors.node(run_id, "first")) == ["NEVER", "RUN_ENDED"]


def test_a_failure_pauses_a_run_or_ends_it(
    doors: Doors, connection: Database, app: Horsies
) -> None:
    task = number_task(app)
    runs = []
    for on_error in (OnError.PAUSE, OnError.FAIL):
        first = TaskNode(task, kwargs={"n": 1}, node_id="first")
        after = TaskNode(task, kwargs={"n": 2}, waits_for=[first], node_id="after")
        runs.append(start(app, first, after, on_error=on_error).workflow_id)
        failure = '{"err":{"error_code":"NO_CARD","message":"no"}}'
        finish(connection, task_of(connection, runs[-1], "first"), failure, status="FAILED")
    paused, failed = runs
    explanation = doors.run(paused)
    assert codes(explanation) == ["RUN_PAUSED"]
    assert "because node first failed with NO_CARD" in explanation.reasons[0].sentence
    assert codes(doors.node(paused, "after")) == ["RUN_PAUSED", "WAITS_FOR"]
    assert codes(doors.run(failed)) == ["RUN_ENDED"]
    never = doors.node(failed, "after")
    assert codes(never) == ["NEVER", "RUN_ENDED"]
    assert "first (FAILED" in the(never, "NEVER").sentence
    assert codes(doors.node(failed, "first")) == ["ENDED", "NOT_RETRIED_NO_POLICY"]


def test_an_item_of_a_map_waits_for_a_place(
    doors: Doors, connection: Database, app: Horsies
) -> None:
    source = TaskNode(numbers_task(app), node_id="source")
    mapped = MapNode(number_task(app), over=source, max_parallel=1, node_id="mapped")
    run_id = start(app, source, mapped).workflow_id
    serve(connection)
    assert codes(doors.node(run_id, "mapped")) == ["WAITS_FOR"]
    finish(connection, task_of(connection, run_id, "source"), '{"ok":[1,2,3]}')
    items = [
        str(row[0])
        for row in connection.execute(
            "SELECT id FROM horsies_tasks WHERE workflow_item_index IS NOT NULL "
            "ORDER BY workflow_item_index"
        )
    ]
    parked = doors.task(items[2])
    assert codes(parked) == ["PARKED_MAP"]
    assert "item 3 of 3 of map mapped" in parked.reasons[0].sentence
    assert parked.reasons[0].subjects == (items[0],)
    opened = doors.node(run_id, "mapped")
    assert codes(opened) == ["MAP_OPEN"]
    assert opened.reasons[0].subjects == (items[0],)


@pytest.mark.parametrize(
    ("status", "expected"), [("PAUSED", "SUB_RUN_PAUSED"), ("RUNNING", "SUB_RUN_OPEN")]
)
def test_a_node_waits_for_its_sub_run(
    doors: Doors, connection: Database, app: Horsies, status: str, expected: str
) -> None:
    task = TaskNode(number_task(app), kwargs={"n": 1}, node_id="inside")
    run_id = start(app, task).workflow_id
    child = start(app, task).workflow_id
    connection.execute("UPDATE horsies_workflows SET status = %s WHERE id = %s", (status, child))
    connection.execute(
        "UPDATE horsies_workflow_tasks SET kind = 'workflow', status = 'RUNNING', sub_workflow_id = %s "
        "WHERE workflow_id = %s",
        (child, run_id),
    )
    explanation = doors.node(run_id, "inside")
    assert expected in codes(explanation)
    assert the(explanation, expected).subjects == (child,)


# Queues and schedules


UNFIT = "The stored call does not fit the function: there is no parameter 'title'. Deploy the same release."


def refuse(
    connection: Database, task_id: str, fingerprint: str = "1", message: str = UNFIT
) -> None:
    connection.execute(
        "INSERT INTO horsies_refusals (task_id, fingerprint, message, until) VALUES (%s, %s, %s, now())",
        (task_id, fingerprint, message),
    )


def test_a_queue_of_calls_that_fit_no_worker_is_explained(
    doors: Doors, connection: Database
) -> None:
    serve(connection, queues=["first", "mail"], known_tasks='{"tasks": {"work": "1"}}')
    refuse(connection, add_task(connection, queue_name="first"))
    waiting = add_task(connection, queue_name="mail")
    explanation = doors.queue("first")
    assert codes(explanation) == ["CALL_DOES_NOT_FIT", "TASKS_DUE"]
    found = the(explanation, "CALL_DOES_NOT_FIT")
    assert found.subjects == ("work",)
    assert "there is no parameter 'title'." in found.sentence
    assert "Deploy" not in found.sentence
    assert "no obstacle" not in the(explanation, "TASKS_DUE").sentence
    # A call that no worker can run keeps no other queue waiting.
    assert codes(doors.queue("mail")) == ["TASKS_DUE"]
    assert codes(doors.task(waiting)) == ["SHOULD_START_NOW"]
    add_task(connection, queue_name="first")
    assert "first (1 due)" in the(doors.queue("mail"), "BETTER_QUEUES_FIRST").sentence
    # A worker of another release may run it.
    serve(connection, queues=["first"], known_tasks='{"tasks": {"work": "2"}}')
    assert codes(doors.queue("first")) == ["TASKS_DUE"]


def test_a_queue_names_a_sub_workflow_that_no_worker_has(
    doors: Doors, connection: Database, app: Horsies
) -> None:
    serve(connection, queues=["mail"], known_tasks='{"tasks": {"expand": "1"}, "workflows": {}}')
    run_id = start(app, TaskNode(number_task(app), kwargs={"n": 1})).workflow_id
    connection.execute(
        "UPDATE horsies_workflow_tasks SET kind = 'workflow', sub_definition_key = 'shop.sub' "
        "WHERE workflow_id = %s",
        (run_id,),
    )
    task = add_task(
        connection, queue_name="mail", task_name="expand", workflow_id=run_id, workflow_node_index=0
    )
    refuse(connection, task, "", "There is no workflow 'shop.sub'.")
    explanation = doors.queue("mail")
    assert codes(explanation) == ["TASK_UNKNOWN", "TASKS_DUE"]
    assert the(explanation, "TASK_UNKNOWN").subjects == ("shop.sub",)


def test_a_queue_is_explained(doors: Doors, connection: Database) -> None:
    assert codes(doors.queue("mail")) == ["NOT_FOUND"]
    serve(connection, queues=["first", "mail"], known_tasks='{"tasks": {"work": "1"}}')
    assert codes(doors.queue("mail")) == ["QUEUE_EMPTY"]
    add_task(connection, queue_name="mail", enqueued_at=ago(-60))
    assert codes(doors.queue("mail")) == ["ALL_DELAYED"]
    add_task(connection, queue_name="mail", task_name="other")
    add_task(connection, queue_name="first")
    explanation = doors.queue("mail")
    assert codes(explanation) == ["TASK_UNKNOWN", "BETTER_QUEUES_FIRST", "TASKS_DUE"]
    assert the(explanation, "TASK_UNKNOWN").subjects == ("other",)
    assert "1 live worker of queue 'mail' does not" in the(explanation, "TASK_UNKNOWN").sentence
    connection.execute("UPDATE horsies_workers SET stopped_at = now(), was_lost = true")
    connection.execute("INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('mail', now())")
    explanation = doors.queue("mail")
    assert codes(explanation) == ["QUEUE_PAUSED", "QUEUE_UNSERVED", "TASKS_DUE"]
    assert explanation.status == "PAUSED"
    assert "host-1:100, was lost" in the(explanation, "QUEUE_UNSERVED").sentence


def test_the_author_of_a_pause_is_named_with_the_reason(
    doors: Doors, connection: Database, app: Horsies
) -> None:
    app.pause_queue("default", reason="bank is down").unwrap()
    explanation = doors.task(add_task(connection))
    assert codes(explanation) == ["QUEUE_PAUSED", "QUEUE_UNSERVED"]
    assert "(bank is down)" in the(explanation, "QUEUE_PAUSED").sentence
    assert the(explanation, "QUEUE_PAUSED").remedy == "horsies queues resume default"


def schedule(connection: Database, **columns: Any) -> None:
    values = {"schedule_name": "nightly", "owner": "shop:app", "next_run_at": ago(-60), **columns}
    connection.execute(
        sql.SQL("INSERT INTO horsies_schedule_state ({}) VALUES ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, values)),
            sql.SQL(", ").join(
                one if isinstance(one, sql.SQL) else sql.Literal(one) for one in values.values()
            ),
        )
    )


@pytest.mark.parametrize(
    ("columns", "is_connected", "expected"),
    [
        ({}, False, ["NOT_DUE"]),
        ({"next_run_at": None}, False, ["SCHEDULE_ENDED"]),
        ({"paused_at": ago(60), "next_run_at": ago(5)}, False, ["PAUSED"]),
        ({"next_run_at": ago(5)}, False, ["NO_SCHEDULER"]),
        ({"next_run_at": ago(5)}, True, ["SHOULD_FIRE_NOW"]),
        ({"next_run_at": ago(90)}, True, ["NOT_SERVED"]),
        ({"skipped_at": ago(60), "skip_reason": "OVERLAP"}, True, ["NOT_DUE", "SKIPPED_OVERLAP"]),
    ],
)
def test_a_schedule_has_these_reasons(
    doors: Doors,
    connection: Database,
    process_url: str,
    columns: dict[str, Any],
    is_connected: bool,
    expected: list[str],
) -> None:
    schedule(connection, **columns)
    name = "horsies:scheduler" if is_connected else "other"
    with psycopg.connect(process_url, application_name=name):
        assert codes(doors.schedule("nightly")) == expected
    assert codes(doors.schedule("missing")) == ["NOT_FOUND"]


def test_a_schedule_that_waits_for_its_last_task_names_it(
    doors: Doors, connection: Database, process_url: str
) -> None:
    schedule(connection, next_run_at=ago(5))
    unfinished = add_task(connection, schedule_name="nightly")
    with psycopg.connect(process_url, application_name="horsies:scheduler"):
        explanation = doors.schedule("nightly")
    assert codes(explanation) == ["OVERLAP"]
    assert the(explanation, "OVERLAP").remedy == f"horsies explain {unfinished}"


# The page


def test_hostile_names_are_shown_as_text(doors: Doors, connection: Database) -> None:
    name = "<script>alert(1)</script>"
    serve(connection, queues=["q"], known_tasks="{}")
    explanation = doors.task(add_task(connection, task_name=name, queue_name="q"))
    assert codes(explanation) == ["TASK_UNKNOWN"]


def test_an_id_leads_to_the_explanation_of_its_task_or_run(
    ask: Ask, connection: Database, app: Horsies
) -> None:
    task_id = add_task(connection)
    run_id = start(app, TaskNode(number_task(app), kwargs={"n": 1})).workflow_id
    assert 'name="id"' in ask("/explain").text
    assert ask(f"/explain?id={task_id}").headers["location"] == f"/tasks/{task_id}/explain"
    assert ask(f"/explain?id={run_id}").headers["location"] == f"/workflows/{run_id}/explain"
    missing = ask(f"/explain?id={new_id()}")
    assert missing.status_code == 404
    assert "NOT_FOUND" in missing.text


@pytest.mark.browser
def test_the_page_follows_the_reasons_and_resumes_a_queue(page: Page, connection: Database) -> None:
    task_id = add_task(connection)
    page.goto(f"/tasks/{task_id}/explain")
    reasons = page.locator(".reasons .code")
    expect(reasons).to_have_text(["QUEUE_UNSERVED"])
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('default', now())"
    )
    expect(reasons).to_have_text(["QUEUE_PAUSED", "QUEUE_UNSERVED"])
    serve(connection)
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("status")).to_contain_text("Queue default is not paused.")
    page.goto(f"/tasks/{task_id}")
    expect(reasons).to_have_text(["SHOULD_START_NOW"])


def test_the_heading_asks_what_the_status_leaves_open(ask: Ask, connection: Database) -> None:
    for status, question in (
        ("PENDING", "Why does task {} not move?"),
        ("FAILED", "How did task {} end?"),
    ):
        task = add_task(connection, status=status)
        heading = f"<h1>{question.format(short_id(task))}</h1>"
        assert heading in ask(f"/tasks/{task}/explain").text
