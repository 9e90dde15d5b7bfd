"""Workflows on one worker that lives on notifications alone: shapes, signals, pauses, cancels."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from horsies import TaskFailed
from horsies.db.statements.workflows import (
    cancel_run,
    pause_run,
    resume_run,
    signal_run,
)
from horsies.workflow.nodes.factory import from_node
from horsies.workflow.nodes.nodes import (
    MapNode,
    SignalNode,
    SubWorkflowNode,
    TaskNode,
)
from tests.support import runs
from tests.support.database import Database
from tests.support.tables import attempts, tasks, wait_until_empty
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Journal, RunningWorker

WORKER = {
    "application": "tests.support.apps.flows:app",
    "config": HARDLY_POLLS | {"recovery": {"unknown_task_grace_ms": 1_000}},
}


ENOUGH = '{"error_code":"STOPPED","message":"enough","data":null,"exception":null}'


STEPS = 1_000


LISTENERS = 2


def test_a_sub_workflow_in_a_sub_workflow_hands_its_result_up(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    outer = SubWorkflowNode(flows.Outer, kwargs={"steps": 3})
    last = TaskNode(flows.next_step, args_from={"before": outer}, waits_for=[outer])
    spec = flows.app.workflow("top", [outer, last], output=last, definition_key="e2e.top")
    (run_id,) = runs.start(connection, spec)
    runs.wait_for(connection, run_id, "COMPLETED")
    assert runs.result(connection, run_id) == {"ok": 6}
    assert [(row.depth, row.status) for row in runs.all_runs(connection)] == [
        (depth, "COMPLETED") for depth in range(3)
    ]


def test_a_sub_workflow_nobody_knows_fails_its_node(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    spec = flows.app.workflow(
        "top", [SubWorkflowNode(flows.Outer, kwargs={"steps": 3})], definition_key="e2e.lost"
    )
    with connection.transaction():  # no worker sees the run before it is spoiled
        (run_id,) = runs.start(connection, spec)
        connection.execute(
            "UPDATE horsies_tasks SET kwargs = replace(kwargs, 'e2e.outer', 'e2e.gone') "
            "WHERE task_name = 'horsies.expand' AND status = 'PENDING'"
        )
    runs.wait_for(connection, run_id, "FAILED")
    (row,) = runs.all_runs(connection)
    assert "SUBWORKFLOW_LOAD_FAILED" in (row.error or "")


def test_a_task_knows_whether_it_is_part_of_a_workflow(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    nodes = [TaskNode(flows.whereabouts) for _ in range(3)]
    spec = flows.app.workflow("meta", nodes, output=nodes[2], definition_key="e2e.meta")
    (run_id,) = runs.start(connection, spec)
    runs.wait_for(connection, run_id, "COMPLETED")
    assert runs.result(connection, run_id) == {"ok": 2}
    assert flows.whereabouts.send().unwrap().get(timeout_ms=30_000).ok is None


def test_plain_functions_are_nodes_like_others(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    numbers = flows.plain_numbers.node()(count=4)
    squares = MapNode(flows.plain_square, over=numbers)
    total = flows.sum_of.node()(numbers=from_node(squares))
    nodes = [numbers, squares, total]
    spec = flows.app.workflow("plain", nodes, output=total, definition_key="e2e.plain")
    assert spec.start().unwrap().get(timeout_ms=30_000).ok == 14


def test_task_failed_is_retried_by_its_code_and_raised_where_the_result_is_read(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    handle = flows.always_busy.enqueue()
    with pytest.raises(TaskFailed) as failure:
        handle.result(timeout_ms=30_000)
    assert (failure.value.code, failure.value.data) == ("BUSY", {"lines": 3})
    assert failure.value.traceback is None
    assert [one.error_code for one in attempts(connection, handle.task_id)] == ["BUSY", "BUSY"]
    assert flows.plain_square.enqueue(5).result(timeout_ms=30_000) == 25


def test_a_signal_that_does_not_come_in_time_fails_its_node(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    (run_id,) = runs.start(connection, flows.signalled(timedelta(seconds=1)))
    runs.wait_for(connection, run_id, "FAILED")
    (row,) = runs.all_runs(connection)
    assert json.loads(row.error or "")["error_code"] == {"__builtin_task_code__": "SIGNAL_TIMEOUT"}


def lingering(programs: ModuleType, flows: ModuleType, label: str) -> Any:
    """A run whose first node lasts until the label is released."""
    first = TaskNode(programs.rest_until_released, kwargs={"label": label}, node_id="first")
    last = TaskNode(
        flows.linger,
        kwargs={"seconds": 0.0, "label": "last"},
        waits_for=[first],
        node_id="last",
    )
    return flows.app.workflow("linger", [first, last], definition_key="e2e.linger")


def test_a_paused_run_finishes_what_runs_and_starts_nothing(
    worker: RunningWorker,
    journal: Journal,
    connection: Database,
    programs: ModuleType,
    flows: ModuleType,
) -> None:
    (run_id,) = runs.start(connection, lingering(programs, flows, "paused"))
    wait_until(lambda: journal.lines("start"))
    assert pause_run.fetch(connection, run_id)[0].answer == "RUNNING"
    journal.release("paused")
    wait_until(lambda: runs.nodes(connection, run_id)["first"] == "COMPLETED")
    # A task outside of the run passes the same queue and the same turns.
    assert flows.one.send().unwrap().get(timeout_ms=30_000).ok == 1
    assert runs.nodes(connection, run_id)["last"] == "PENDING"
    assert runs.status(connection, run_id) == "PAUSED"
    resume_run.fetch(connection, run_id)
    runs.wait_for(connection, run_id, "COMPLETED")
    assert [line.label for line in journal.lines("start")] == ["paused", "last"]


def test_a_retry_that_falls_into_a_pause_waits_for_its_end(
    worker: RunningWorker, journal: Journal, connection: Database, flows: ModuleType
) -> None:
    spec = flows.app.workflow(
        "flaky", [TaskNode(flows.flaky_step, node_id="flaky")], definition_key="e2e.flaky"
    )
    (run_id,) = runs.start(connection, spec)
    wait_until(lambda: [row.retry_count for row in tasks(connection)] == [1])
    pause_run.fetch(connection, run_id)
    (row,) = tasks(connection)
    connection.execute("SELECT pg_sleep_until(%s + interval '0.5 seconds')", (row.next_retry_at,))
    assert len(journal.lines("start")) == 1
    assert runs.nodes(connection, run_id) == {"flaky": "RUNNING"}
    resume_run.fetch(connection, run_id)
    runs.wait_for(connection, run_id, "COMPLETED")
    assert [(one.attempt, one.will_retry) for one in attempts(connection)] == [
        (1, True),
        (2, False),
    ]


def test_a_cancelled_run_lets_its_running_task_end_or_interrupts_it(
    worker: RunningWorker,
    journal: Journal,
    connection: Database,
    programs: ModuleType,
    flows: ModuleType,
) -> None:
    patient, hasty = runs.start(
        connection, *(lingering(programs, flows, label) for label in ("patient", "hasty"))
    )
    wait_until(lambda: len(journal.lines("start")) == 2)
    cancel_run.fetch(connection, hasty, ENOUGH, True)
    cancel_run.fetch(connection, patient, ENOUGH, False)
    journal.release("patient")
    wait_until_empty(connection)
    assert [runs.status(connection, one) for one in (patient, hasty)] == ["CANCELLED"] * 2
    assert runs.nodes(connection, patient) == {"first": "COMPLETED", "last": "SKIPPED"}
    assert runs.nodes(connection, hasty) == {"first": "FAILED", "last": "SKIPPED"}
    assert sorted(row.status for row in tasks(connection)) == ["CANCELLED", "COMPLETED"]


def test_a_worker_that_dies_costs_its_node_an_attempt_and_the_run_goes_on(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    spec = flows.app.workflow(
        "crash",
        [
            first := TaskNode(flows.one),
            crash := TaskNode(flows.exit_then_work, waits_for=[first], node_id="crash"),
            TaskNode(flows.next_step, args_from={"before": crash}, waits_for=[crash]),
        ],
        definition_key="e2e.crash",
    )
    (run_id,) = runs.start(connection, spec)
    runs.wait_for(connection, run_id, "COMPLETED")
    outcomes = Counter(one.outcome for one in attempts(connection))
    assert outcomes == {"COMPLETED": 3, "WORKER_FAILURE": 1}


def test_values_of_nodes_are_passed_on_and_a_node_without_one_is_skipped(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    numbers = flows.numbers_up_to.node(node_id="numbers")(count=3)
    squares = MapNode(flows.square_slowly, over=numbers, each="number", node_id="squares")
    again = MapNode(flows.plus_one, over=squares, node_id="again")
    total = flows.sum_values.node(node_id="total")(values=from_node(squares))
    outer = SubWorkflowNode(
        flows.Outer, args_from={"steps": total}, waits_for=[total], node_id="outer"
    )
    last = flows.plus_one.node(node_id="last")(value=from_node(outer))
    broken = flows.refuse.node(node_id="broken")()
    skipped = flows.plus_one.node(node_id="skipped")(value=from_node(broken))
    tolerant = flows.sum_values.node(node_id="tolerant", allow_failed_deps=True)(
        values=[1], more=from_node(broken)
    )
    nodes = [numbers, squares, again, total, outer, last, broken, skipped, tolerant]
    spec = flows.app.workflow("values", nodes, output=last, definition_key="e2e.values")
    (run_id,) = runs.start(connection, spec)
    runs.wait_for(connection, run_id, "FAILED")
    ended = runs.nodes(connection, run_id)
    assert ended.pop("broken") == "FAILED"
    assert ended.pop("skipped") == "SKIPPED"
    assert set(ended.values()) == {"COMPLETED"}
    found = connection.execute("SELECT result FROM horsies_tasks WHERE task_name = 'plus_one'")
    assert sorted(json.loads(row[0])["ok"] for row in found) == [1, 2, 5, 8]


def test_a_signal_that_is_not_the_value_a_task_takes_fails_its_node(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    answer: SignalNode[Any] = SignalNode("answer", node_id="answer")
    taker = flows.plus_one.node(node_id="taker")(value=from_node(answer))
    spec = flows.app.workflow("answer", [answer, taker], definition_key="e2e.answer")
    (run_id,) = runs.start(connection, spec)
    signal_run.fetch(connection, run_id, "answer", '"forty-two"')
    runs.wait_for(connection, run_id, "FAILED")
    (row,) = runs.all_runs(connection)
    assert "value was stored in a form that does not fit int" in (row.error or "")
