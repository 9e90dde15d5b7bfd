"""The reaper and runs: those paused for too long end, those past their retention are deleted."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, LiteralString

import psycopg
import pytest

from horsies import (
    ErrorCode,
    Horsies,
    HorsiesError,
    OnError,
    OutcomeCode,
    RecoveryConfig,
    SubWorkflowNode,
    TaskResult,
    WorkflowDefinition,
    WorkflowHandle,
    WorkflowSpec,
    WorkflowStatus,
    from_node,
    start_many,
)
from horsies.db.pipeline import Pipeline
from horsies.db.statements.blocked import list_blocked
from horsies.db.statements.workers import try_lead
from horsies.ids import new_id
from horsies.tasks.blocked import Blocked
from horsies.worker.reaper import EXPIRE_BATCH, RETENTION_RUNS, expire_paused, sweep
from tests.support.database import Database
from tests.support.poison import DEFERRED, IMMEDIATE, poisoned
from tests.support.runs import problems
from tests.support.turns import Hands, Tasks

HOUR = RecoveryConfig(paused_workflow_auto_cancel_after=timedelta(hours=1))
TABLES = (
    "horsies_workflows",
    "horsies_workflow_tasks",
    "horsies_workflow_signals",
    "horsies_tasks",
    "horsies_task_attempts",
)


@pytest.fixture
def pipeline(process_url: str, connection: Database) -> Iterator[Pipeline]:
    """The connection of a reaping worker."""
    with psycopg.connect(process_url, autocommit=True) as mine:
        yield Pipeline(mine)


class Inner(WorkflowDefinition[int]):
    """A child with one node."""

    name = "inner"
    definition_key = "reaping.inner"

    @classmethod
    def build_with(cls, app: Any) -> WorkflowSpec[int]:
        only = app.get_task("number").node(node_id="only")()
        return WorkflowSpec(cls.name, [only], output=only, on_error=OnError.PAUSE)


def chain(app: Horsies, tasks: Tasks) -> WorkflowSpec[int]:
    first = tasks.number.node(node_id="first")()
    last = tasks.add.node(node_id="last")(first=from_node(first))
    return app.workflow("chain", [first, last], output=last, definition_key="reaping.chain")


def family(app: Horsies, hands: Hands) -> tuple[WorkflowHandle[Any], WorkflowHandle[Any]]:
    node = SubWorkflowNode(Inner, node_id="inner")
    spec = app.workflow("outer", [node], output=node, definition_key="reaping.outer")
    handle, child_id = spec.start().unwrap(), new_id()
    hands.expand(handle.workflow_id, "inner", Inner.build_with(app), child_id)
    return handle, app.workflow_handle(child_id)


def make_older(connection: Database, column: str, hours: float, *run_ids: str) -> None:
    connection.execute(
        f"UPDATE horsies_workflows SET {column} = {column} - %s * interval '1 hour' "
        "WHERE id = ANY(%s::uuid[])".encode(),
        (hours, list(run_ids)),
    )


# Paused for too long


def test_a_run_paused_for_too_long_expires(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, pipeline: Pipeline
) -> None:
    old, young, running = (chain(app, tasks).start().unwrap() for _ in range(3))
    for handle in (old, young):
        handle.pause().unwrap()
    make_older(connection, "paused_at", 2, old.workflow_id)
    make_older(connection, "started_at", 2, running.workflow_id)
    assert expire_paused(pipeline, HOUR, Blocked()) == 1
    error = old.get(timeout_ms=30_000).err_value
    assert error.error_code is OutcomeCode.WORKFLOW_EXPIRED
    assert error.data["policy"] == "paused_workflow_auto_cancel_after"
    assert error.data["allowed_seconds"] == 3600
    assert error.data["paused_seconds"] >= 7200
    assert old.status().unwrap() is WorkflowStatus.EXPIRED
    assert hands.statuses(old.workflow_id) == {"first": "SKIPPED", "last": "SKIPPED"}
    assert young.status().unwrap() is WorkflowStatus.PAUSED
    assert running.status().unwrap() is WorkflowStatus.RUNNING
    assert expire_paused(pipeline, HOUR, Blocked()) == 0


@pytest.mark.parametrize("trigger", [IMMEDIATE, DEFERRED], ids=["immediate", "deferred"])
def test_a_run_that_cannot_expire_does_not_keep_others_from_it(
    app: Horsies, tasks: Tasks, connection: Database, pipeline: Pipeline, trigger: LiteralString
) -> None:
    bad, *others = start_many([chain(app, tasks)] * 3).unwrap()
    for handle in (bad, *others):
        handle.pause().unwrap()
    make_older(connection, "paused_at", 2, *(one.workflow_id for one in (bad, *others)))
    blocked = Blocked()
    table = "horsies_workflows"
    with poisoned(connection, "NEW.id = {}", bad.workflow_id, table=table, trigger=trigger):
        assert expire_paused(pipeline, HOUR, blocked) == 2
        (row,) = list_blocked.fetch(connection, 5)
        assert (row.id, row.kind, row.action) == (bad.workflow_id, "run", "expire")
        assert expire_paused(pipeline, HOUR, blocked) == 0
        (problem,) = problems(connection)
        assert problem.startswith("the run is blocked: the database refuses to expire it: 54000")
    assert expire_paused(pipeline, HOUR, Blocked()) == 1


def test_without_the_setting_a_run_may_be_paused_for_ever(
    app: Horsies, tasks: Tasks, connection: Database, pipeline: Pipeline
) -> None:
    handle = chain(app, tasks).start().unwrap()
    handle.pause().unwrap()
    make_older(connection, "paused_at", 100_000, handle.workflow_id)
    assert expire_paused(pipeline, RecoveryConfig(), Blocked()) == 0
    assert handle.status().unwrap() is WorkflowStatus.PAUSED


@pytest.mark.parametrize("allowed", [timedelta(0), timedelta(seconds=-1)])
def test_the_time_allowed_is_above_nothing(allowed: timedelta) -> None:
    with pytest.raises(HorsiesError) as refused:
        RecoveryConfig(paused_workflow_auto_cancel_after=allowed)
    assert refused.value.code is ErrorCode.CONFIG_INVALID_RECOVERY


def test_one_pass_ends_a_bounded_number_of_runs(
    app: Horsies, tasks: Tasks, connection: Database, pipeline: Pipeline
) -> None:
    handles = start_many([chain(app, tasks)] * (EXPIRE_BATCH + 1)).unwrap()
    for handle in handles:
        handle.pause().unwrap()
    make_older(connection, "paused_at", 2, *(handle.workflow_id for handle in handles))
    assert expire_paused(pipeline, HOUR, Blocked()) == EXPIRE_BATCH
    assert expire_paused(pipeline, HOUR, Blocked()) == 1


def test_a_resume_that_comes_first_wins(
    app: Horsies, tasks: Tasks, connection: Database, pipeline: Pipeline, process_url: str
) -> None:
    handle = chain(app, tasks).start().unwrap()
    handle.pause().unwrap()
    make_older(connection, "paused_at", 2, handle.workflow_id)
    found = pipeline.run

    def resumed_in_between(steps: Any, timeout_seconds: float | None = None) -> Any:
        answers = found(steps, timeout_seconds)
        if steps[0][0] is try_lead:  # the look is over, nothing has ended yet
            assert handle.resume().unwrap() is True
        return answers

    pipeline.run = resumed_in_between  # type: ignore[method-assign]
    assert expire_paused(pipeline, HOUR, Blocked()) == 0
    assert handle.status().unwrap() is WorkflowStatus.RUNNING


def test_an_expired_run_is_a_failure_to_the_one_above(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, pipeline: Pipeline
) -> None:
    outer, inner = family(app, hands)
    hands.fail(inner.workflow_id, "only")
    assert inner.status().unwrap() is WorkflowStatus.PAUSED
    make_older(connection, "paused_at", 2, inner.workflow_id)
    assert expire_paused(pipeline, HOUR, Blocked()) == 1
    error = outer.get(timeout_ms=30_000).err_value
    assert error.error_code is OutcomeCode.SUBWORKFLOW_FAILED


def test_each_run_of_a_family_has_an_age_of_its_own(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, pipeline: Pipeline
) -> None:
    outer, inner = family(app, hands)
    outer.pause().unwrap()
    make_older(connection, "paused_at", 2, outer.workflow_id)
    assert expire_paused(pipeline, HOUR, Blocked()) == 1
    assert outer.status().unwrap() is WorkflowStatus.EXPIRED
    assert inner.status().unwrap() is WorkflowStatus.PAUSED


# Retention


def ended(app: Horsies, tasks: Tasks, hands: Hands) -> WorkflowHandle[int]:
    handle = chain(app, tasks).start().unwrap()
    hands.complete(handle.workflow_id, "first")
    hands.complete(handle.workflow_id, "last", 2)
    return handle


def test_runs_past_their_retention_go_with_everything_that_is_theirs(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, pipeline: Pipeline
) -> None:
    old, young = ended(app, tasks, hands), ended(app, tasks, hands)
    make_older(connection, "completed_at", 25, old.workflow_id)
    connection.execute(
        "INSERT INTO horsies_workflow_signals (workflow_id, name, value) VALUES (%s, 'go', '1')",
        (old.workflow_id,),
    )
    assert sweep(pipeline, RecoveryConfig(terminal_record_retention_hours=24)) is False
    assert [hands.count(table) for table in TABLES] == [1, 2, 0, 2, 2]
    assert old.status().is_err()
    assert young.get(timeout_ms=30_000) == TaskResult(ok=2)


def test_a_long_run_counts_from_its_end(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, pipeline: Pipeline
) -> None:
    handle = ended(app, tasks, hands)
    make_older(connection, "created_at", 10_000, handle.workflow_id)
    make_older(connection, "started_at", 10_000, handle.workflow_id)
    connection.execute("UPDATE horsies_tasks SET completed_at = now() - interval '1 year'")
    sweep(pipeline, RecoveryConfig(terminal_record_retention_hours=24))
    assert handle.get(timeout_ms=30_000) == TaskResult(ok=2), "its tasks stay as long as the run"


def test_runs_that_have_not_ended_stay_and_so_do_those_with_a_task_that_runs(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, pipeline: Pipeline
) -> None:
    running = chain(app, tasks).start().unwrap()
    make_older(connection, "created_at", 10_000, running.workflow_id)
    cancelled = chain(app, tasks).start().unwrap()
    taken = hands.take(cancelled.workflow_id, "first")
    cancelled.cancel().unwrap()
    make_older(connection, "completed_at", 10_000, cancelled.workflow_id)
    sweep(pipeline, RecoveryConfig())
    assert hands.count("horsies_workflows") == 2
    hands.end(cancelled.workflow_id, taken, {"ok": 1})
    sweep(pipeline, RecoveryConfig())
    assert hands.count("horsies_workflows") == 1
    assert running.status().unwrap() is WorkflowStatus.RUNNING


def test_families_are_deleted_as_a_whole(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, pipeline: Pipeline
) -> None:
    outer, inner = family(app, hands)
    hands.complete(inner.workflow_id, "only", 6)
    make_older(connection, "completed_at", 10_000, inner.workflow_id)
    sweep(pipeline, RecoveryConfig())
    assert outer.get(timeout_ms=30_000) == TaskResult(ok=6), "the result lies in the run below"
    make_older(connection, "completed_at", 10_000, outer.workflow_id)
    sweep(pipeline, RecoveryConfig())
    assert [hands.count(table) for table in TABLES] == [0] * len(TABLES)


def test_retention_goes_in_bounded_batches_and_can_be_switched_off(
    app: Horsies, tasks: Tasks, hands: Hands, connection: Database, pipeline: Pipeline
) -> None:
    handles = start_many([chain(app, tasks)] * (RETENTION_RUNS + 1)).unwrap()
    for handle in handles:
        handle.cancel().unwrap()
    make_older(connection, "completed_at", 10_000, *(handle.workflow_id for handle in handles))
    sweep(pipeline, RecoveryConfig(terminal_record_retention_hours=None))
    assert hands.count("horsies_workflows") == RETENTION_RUNS + 1
    assert sweep(pipeline, RecoveryConfig()) is True
    assert hands.count("horsies_workflows") == 1
    assert sweep(pipeline, RecoveryConfig()) is False
    assert hands.count("horsies_workflows") == 0
