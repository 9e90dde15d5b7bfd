"""Runs whose rows were edited manually: the audit names every contradiction and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from psycopg import Connection

from tests.support.oracle.compare import Duet
from tests.support.oracle.shapes import NodeShape, RunShape, chain, fan
from tests.support.oracle.tree import Place

# One of everything: 0 has ended, 1 and 2 are under way, 3 waits for both, 4 is a map with three
# items of which two may run, 5 a sub-workflow, 6 waits for those.
ALL_SORTS = RunShape(
    (
        NodeShape(),
        NodeShape(after=(0,)),
        NodeShape(after=(0,)),
        NodeShape(after=(1, 2), context=(1,)),
        NodeShape(kind="map", after=(0,), over=0, max_parallel=2),
        NodeShape(kind="workflow", child=chain(2)),
        NodeShape(after=(4, 5), join="any"),
    )
)

ROWS = """
SELECT 'run', id::text, xmin::text, ctid::text FROM horsies_workflows UNION ALL
SELECT 'node', workflow_id || '/' || task_index, xmin::text, ctid::text FROM horsies_workflow_tasks UNION ALL
SELECT 'task', id::text, xmin::text, ctid::text FROM horsies_tasks ORDER BY 1, 2
"""


@dataclass(slots=True)
class Patient:
    """A run under way, with hands on its rows."""

    duet: Duet
    run: str
    child: str

    def break_(self, statement: str, *values: Any) -> None:
        """Change rows behind the engine's back."""
        with self.duet.connection.transaction():
            self.duet.connection.execute("SET LOCAL session_replication_role = replica")
            self.duet.connection.execute(statement.encode(), values)

    def set_node(self, index: int, assignment: str) -> None:
        self.break_(
            f"UPDATE horsies_workflow_tasks SET {assignment} "
            "WHERE workflow_id = %s AND task_index = %s",
            self.run,
            index,
        )

    def set_task(self, place: Place, assignment: str) -> None:
        ((task_id, _),) = self.duet.engine.tasks([place])
        self.break_(f"UPDATE horsies_tasks SET {assignment} WHERE id = %s", task_id)

    def delete_task(self, place: Place) -> None:
        ((task_id, _),) = self.duet.engine.tasks([place])
        self.break_("DELETE FROM horsies_tasks WHERE id = %s", task_id)

    def problems(self) -> list[str]:
        return self.duet.engine.problems()

    def statuses(self) -> dict[str, str]:
        found = self.duet.connection.execute("SELECT id::text, status FROM horsies_workflows")
        return dict(found.fetchall())


@pytest.fixture
def patient(connection: Connection[Any]) -> Patient:
    duet = Duet(connection)
    run = duet.start_one(ALL_SORTS)
    duet.succeed((run, 0, None), value=["a", "b", "c"])
    duet.succeed((run, 5, None))
    duet.claim([(run, 1, None), (run, 4, 0)])
    duet.check()
    child = list(duet.oracle.runs)[1]
    return Patient(duet, run, child)


def test_a_sound_run_has_no_problems_and_the_audit_changes_nothing(patient: Patient) -> None:
    rows = patient.duet.connection.execute(ROWS).fetchall()
    assert patient.problems() == []
    assert patient.duet.connection.execute(ROWS).fetchall() == rows


def test_a_run_with_problems_can_be_cancelled(patient: Patient) -> None:
    patient.delete_task((patient.run, 2, None))
    patient.set_node(3, "deps_open = deps_open + 1")
    assert len(patient.problems()) == 2
    patient.duet.engine.cancel(patient.run, {"message": "edited by hand"})
    assert patient.statuses() == {patient.run: "CANCELLED", patient.child: "CANCELLED"}
    assert patient.problems() == []


def test_a_node_whose_task_was_deleted_is_reported(patient: Patient) -> None:
    patient.delete_task((patient.run, 2, None))
    assert patient.problems() == ["node n2 waits for a task that is no longer stored"]


def test_a_task_whose_end_reached_no_node_is_reported(patient: Patient) -> None:
    patient.set_task((patient.run, 1, None), "status = 'COMPLETED', result = '{\"ok\":1}'")
    assert patient.problems() == ["node n1 is open although its task ended as COMPLETED"]


@pytest.mark.parametrize("status", ["PENDING", "READY"])
def test_a_node_that_was_set_back_is_reported(patient: Patient, status: str) -> None:
    patient.set_node(2, f"status = '{status}'")
    assert "node n2 waits although it has a task" in patient.problems()


def test_a_ready_node_without_a_task_is_reported(patient: Patient) -> None:
    patient.set_node(2, "status = 'READY', task_id = NULL")
    assert "node n2 is ready but has no task" in patient.problems()


def test_an_ended_node_that_was_set_back_is_reported(patient: Patient) -> None:
    patient.set_node(0, "status = 'ENQUEUED'")
    assert patient.problems() == [
        "node n0 is open although its task ended as COMPLETED",
        "node n0 is ENQUEUED but its end was counted",
    ]


def test_a_waiting_node_whose_dependencies_are_decided_is_reported(
    connection: Connection[Any],
) -> None:
    duet = Duet(connection)
    run = duet.start_one(fan(2))
    patient = Patient(duet, run, run)
    patient.set_task((run, 0, None), "status = 'COMPLETED', result = '{\"ok\":1}'")
    ended = "status = 'COMPLETED', completed_at = now(), result_task_id = task_id"
    patient.set_node(0, f"{ended}, propagated = true")
    assert any("waits although its dependencies are decided" in one for one in patient.problems())


def test_an_end_that_was_never_counted_is_reported(patient: Patient) -> None:
    patient.set_task((patient.run, 2, None), "status = 'COMPLETED', result = '{\"ok\":1}'")
    patient.set_node(2, "status = 'COMPLETED', completed_at = now(), result_task_id = task_id")
    assert patient.problems() == ["the end of node n2 was never counted"]


def test_a_node_declared_done_by_hand_leaves_a_stray_task(patient: Patient) -> None:
    patient.set_node(2, "status = 'COMPLETED', completed_at = now()")
    ((task_id, _),) = patient.duet.engine.tasks([(patient.run, 2, None)])
    assert patient.problems() == [
        "the end of node n2 was never counted",
        f"task {task_id} belongs to a node that does not wait for it",
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("open_nodes = open_nodes + 3", "the run counts 9 open and 0 failed nodes"),
        ("failed_nodes = 2", "the run counts 6 open and 2 failed nodes, there are 6 and 0"),
        ("open_nodes = 0", "the run goes on although none of its nodes is open"),
    ],
)
def test_wrong_counters_of_a_run_are_reported(patient: Patient, change: str, problem: str) -> None:
    patient.break_(f"UPDATE horsies_workflows SET {change} WHERE id = %s", patient.run)
    assert any(one.startswith(problem) for one in patient.problems())


@pytest.mark.parametrize("counter", ["deps_open", "deps_ok", "deps_bad", "context_open"])
def test_wrong_counters_of_a_node_are_reported(patient: Patient, counter: str) -> None:
    patient.set_node(3, f"{counter} = {counter} + 1")
    (problem,) = patient.problems()
    assert problem.startswith("node n3 counts")


@pytest.mark.parametrize("counter", ["items_open", "items_bad", "items_total"])
def test_wrong_counters_of_a_map_are_reported(patient: Patient, counter: str) -> None:
    patient.set_node(4, f"{counter} = {counter} + 1")
    (problem,) = patient.problems()
    assert problem.startswith("map node n4 has")


def test_a_lost_item_is_reported(patient: Patient) -> None:
    patient.delete_task((patient.run, 4, 1))
    (problem, *_) = patient.problems()
    assert problem == (
        "map node n4 has 3 items (3 open, 0 failed), 2 are stored (2 open, 0 failed)"
    )


def test_items_parked_without_a_reason_are_reported(patient: Patient) -> None:
    patient.set_task((patient.run, 4, 0), "status = 'COMPLETED', result = '{\"ok\":1}'")
    patient.set_node(4, "items_open = 2")
    assert patient.problems() == ["map node n4 keeps items waiting for no reason"]


def test_a_map_that_was_set_back_is_reported(patient: Patient) -> None:
    patient.set_node(4, "status = 'PENDING'")
    assert "map node n4 is PENDING although it has open items" in patient.problems()


def test_a_sub_workflow_that_was_deleted_is_reported(patient: Patient) -> None:
    patient.duet.connection.execute("DELETE FROM horsies_workflows WHERE id = %s", (patient.child,))
    assert patient.problems() == ["node n5 runs a sub-workflow that is no longer stored"]


def test_a_sub_workflow_whose_end_reached_no_node_is_reported(patient: Patient) -> None:
    patient.break_(
        "UPDATE horsies_workflows SET status = 'COMPLETED', completed_at = now() WHERE id = %s",
        patient.child,
    )
    assert patient.problems() == ["node n5 runs a sub-workflow that ended as COMPLETED"]


@pytest.mark.parametrize("status", ["PENDING", "ENQUEUED", "COMPLETED"])
def test_a_sub_workflow_node_that_left_its_run_is_reported(patient: Patient, status: str) -> None:
    patient.set_node(5, f"status = '{status}'")
    expected = f"node n5 is {status} although sub-workflow {patient.child} is RUNNING"
    assert expected in patient.problems()


def test_tasks_held_in_a_running_run_are_reported(patient: Patient) -> None:
    patient.set_task((patient.run, 2, None), "held = true")
    patient.set_task((patient.run, 1, None), "held = true")
    problems = patient.problems()
    assert len(problems) == 2
    assert all(one.endswith("is on hold although the run is RUNNING") for one in problems)


def test_tasks_not_held_in_a_paused_run_are_reported(patient: Patient) -> None:
    patient.duet.pause(patient.run)
    patient.set_task((patient.run, 4, 1), "held = false")
    (problem,) = patient.problems()
    assert problem.endswith("is not on hold although the run is PAUSED")


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM horsies_workflow_tasks WHERE workflow_id = %s AND task_index = 6",
        "DELETE FROM horsies_workflow_tasks WHERE workflow_id = %s",
    ],
)
def test_a_run_that_lost_nodes_is_reported(patient: Patient, statement: str) -> None:
    patient.break_(statement, patient.run)
    assert any(one.startswith("the run has 7 nodes") for one in patient.problems())


def test_every_open_run_is_audited_and_no_other(patient: Patient) -> None:
    ended = patient.duet.start_one(chain(1))
    patient.duet.succeed((ended, 0, None))
    patient.break_("UPDATE horsies_workflows SET open_nodes = 5 WHERE id = %s", ended)
    assert patient.problems() == []
    patient.break_("UPDATE horsies_workflows SET open_nodes = 5 WHERE id = %s", patient.child)
    assert len(patient.problems()) == 1
