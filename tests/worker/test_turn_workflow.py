"""Turns on workflows without children: one transaction records a step, moves the run on, claims the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from psycopg import Connection

from horsies.app import Horsies
from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import ClaimedTask
from horsies.db.statements.workflows import start_runs
from horsies.ids import new_id
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.outcome import Outcome
from horsies.worker.node_inputs import NodeInputs
from horsies.worker.turn import Claimer, TurnRequest, TurnResult, take_turn
from horsies.workflow.build.plan import plan
from horsies.workflow.nodes.nodes import AnyNode, TaskNode
from tests.support.runs import status

STEPS = 1_000
CHILDREN = 8


@pytest.fixture
def step(app: Horsies) -> Any:
    @app.task("step")
    def step(before: TaskResult[int, TaskError] | None = None) -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    return step


def start(app: Horsies, connection: Connection[Any], nodes: Sequence[AnyNode]) -> str:
    run_id = new_id()
    spec = app.workflow("run", nodes, definition_key="turns")
    start_runs.fetch(connection, f"[{plan(spec, run_id)}]")
    return run_id


def turn(pipeline: Pipeline, ended: Sequence[ClaimedTask], children: int) -> TurnResult:
    claimer = Claimer("me", "host", ["default"], [None])
    outcomes = [Outcome.completed(task, '{"ok":1}') for task in ended]
    wanted = TurnRequest(pids=list(range(1, children + 1)))
    turned = take_turn(pipeline, claimer, outcomes, wanted)
    assert turned.recorded == {task.id for task in ended}
    return turned


def test_a_step_of_a_chain_is_one_round_trip_and_one_commit(
    app: Horsies, connection: Connection[Any], pipeline: Pipeline, step: Any
) -> None:
    nodes = [TaskNode(step)]
    for _ in range(STEPS - 1):
        nodes.append(TaskNode(step, args_from={"before": nodes[-1]}, waits_for=[nodes[-1]]))
    run_id = start(app, connection, nodes)
    inputs, ended = NodeInputs(), turn(pipeline, (), 1).claimed
    while ended:
        (task,) = ended
        parts, _ = inputs.read(pipeline, ended)
        assert len(parts[task.id].sources) == (0 if task.workflow_node_index == 0 else 1)
        inputs.note_completed(task, '{"ok":1}')
        ended = turn(pipeline, ended, 1).claimed
    assert status(connection, run_id) == "COMPLETED"
    assert pipeline.round_trips == STEPS + 1
    # The run's lock, the end, the claim.
    assert pipeline.statements == 3 * STEPS + 1


def test_a_wide_fan_takes_less_than_a_statement_per_node(
    app: Horsies, connection: Connection[Any], pipeline: Pipeline, step: Any
) -> None:
    first = TaskNode(step)
    middle = [TaskNode(step, args_from={"before": first}, waits_for=[first]) for _ in range(STEPS)]
    last = TaskNode(step, waits_for=middle)
    run_id = start(app, connection, [first, *middle, last])
    inputs, ended = NodeInputs(), turn(pipeline, (), CHILDREN).claimed
    while ended:
        assert len(inputs.read(pipeline, ended)[0]) == len(ended)
        for task in ended:
            inputs.note_completed(task, '{"ok":1}')
        ended = turn(pipeline, ended, CHILDREN).claimed
    assert status(connection, run_id) == "COMPLETED"
    assert pipeline.statements < STEPS


def test_an_outcome_the_database_refuses_is_recorded_otherwise_and_not_handed_on(
    app: Horsies, connection: Connection[Any], pipeline: Pipeline, step: Any
) -> None:
    run_id = start(app, connection, [TaskNode(step)])
    (task,) = turn(pipeline, (), 1).claimed
    refused = Outcome.completed(task, '{"ok":"\0"}')
    claimer = Claimer("me", "host", ["default"], [None])
    turned = take_turn(pipeline, claimer, [refused], TurnRequest())
    assert turned.recorded == {task.id}
    assert not turned.as_decided
    assert status(connection, run_id) == "FAILED"
