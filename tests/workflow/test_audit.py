"""Runs that somebody with a prompt has broken: the audit names what is wrong and puts it right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from psycopg import Connection

from tests.support.oracle.compare import Duet
from tests.support.oracle.shapes import NodeShape, RunShape, chain, fan
from tests.support.oracle.tree import End, Place

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

    def mend(self) -> None:
        """Mend the runs; a second time there is nothing left to change."""
        for run_id in (self.run, self.child):
            self.duet.engine.mend(run_id)
        assert self.problems() == []
        rows = self.duet.connection.execute(ROWS).fetchall()
        for run_id in (self.run, self.child):
            self.duet.engine.mend(run_id)
        assert self.duet.connection.execute(ROWS).fetchall() == rows

    def finish(self) -> None:
        """Let everything that is open succeed, and see the run complete as if nothing had been."""
        duet = self.duet
        duet.look_away()
        while places := duet.claimable() + duet.places("RUNNING"):
            duet.succeed(*places)
            duet.check()
        assert duet.oracle.runs[self.run].status == "COMPLETED"


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


def test_a_sound_run_has_no_problems_and_mending_it_changes_nothing(patient: Patient) -> None:
    rows = patient.duet.connection.execute(ROWS).fetchall()
    assert patient.problems() == []
    patient.duet.engine.mend(patient.run)
    assert patient.duet.connection.execute(ROWS).fetchall() == rows
    patient.finish()


def test_a_node_whose_task_was_deleted_gets_another(patient: Patient) -> None:
    patient.delete_task((patient.run, 2, None))
    assert patient.problems() == ["node n2 waits for a task that is no longer stored"]
    patient.mend()
    patient.finish()


def test_a_task_that_ended_unnoticed_counts(patient: Patient) -> None:
    result = '{"ok":"unnoticed"}'
    patient.set_task((patient.run, 1, None), f"status = 'COMPLETED', result = '{result}'")
    assert patient.problems() == ["node n1 is open although its task ended as COMPLETED"]
    patient.mend()
    node = patient.duet.oracle.runs[patient.run].nodes[1]
    patient.duet.oracle.finish([_end((patient.run, 1, None), "unnoticed")])
    assert node.status == "COMPLETED"
    patient.duet.check()
    patient.finish()


def test_a_failure_that_went_unnoticed_pauses_a_run_that_pauses(
    connection: Connection[Any],
) -> None:
    duet = Duet(connection)
    run = duet.start_one(chain(2, on_error="pause"))
    patient = Patient(duet, run, run)
    patient.set_task((run, 0, None), "status = 'FAILED', error_code = 'BOOM'")
    patient.mend()
    found = connection.execute("SELECT status FROM horsies_workflows WHERE id = %s", (run,))
    assert found.fetchone() == ("PAUSED",)


@pytest.mark.parametrize("status", ["PENDING", "READY"])
def test_a_node_that_was_set_back_finds_its_task_again(patient: Patient, status: str) -> None:
    patient.set_node(2, f"status = '{status}'")
    assert "node n2 waits although it has a task" in patient.problems()
    patient.mend()
    patient.duet.check()
    patient.finish()


def test_an_ended_node_that_was_set_back_ends_again_and_its_dependents_do_not(
    patient: Patient,
) -> None:
    patient.set_node(0, "status = 'ENQUEUED'")
    assert patient.problems() == [
        "node n0 is open although its task ended as COMPLETED",
        "node n0 is ENQUEUED but its end was counted",
    ]
    patient.mend()
    patient.duet.check()
    patient.finish()


def test_a_waiting_node_that_was_forgotten_begins(connection: Connection[Any]) -> None:
    duet = Duet(connection)
    run = duet.start_one(fan(2))
    patient = Patient(duet, run, run)
    patient.set_task((run, 0, None), "status = 'COMPLETED', result = '{\"ok\":1}'")
    ended = "status = 'COMPLETED', completed_at = now(), result_task_id = task_id"
    patient.set_node(0, f"{ended}, propagated = true")
    assert any("waits although its dependencies are decided" in one for one in patient.problems())
    patient.mend()
    duet.oracle.finish([_end((run, 0, None), 1)])
    assert [node.status for node in duet.oracle.runs[run].nodes] == [
        "COMPLETED",
        "ENQUEUED",
        "ENQUEUED",
        "PENDING",
    ]
    patient.finish()


def test_an_end_that_was_never_counted_counts(patient: Patient) -> None:
    patient.set_task((patient.run, 2, None), "status = 'COMPLETED', result = '{\"ok\":1}'")
    patient.set_node(2, "status = 'COMPLETED', completed_at = now(), result_task_id = task_id")
    assert patient.problems() == ["the end of node n2 was never counted"]
    patient.mend()
    patient.duet.oracle.finish([_end((patient.run, 2, None), 1)])
    patient.finish()


def test_a_node_declared_done_by_hand_is_believed_and_its_task_cancelled(
    patient: Patient,
) -> None:
    patient.set_node(2, "status = 'COMPLETED', completed_at = now()")
    ((task_id, _),) = patient.duet.engine.tasks([(patient.run, 2, None)])
    assert patient.problems() == [
        "the end of node n2 was never counted",
        f"task {task_id} belongs to a node that does not wait for it",
    ]
    patient.mend()
    status = patient.duet.connection.execute(
        "SELECT status FROM horsies_tasks WHERE id = %s", (task_id,)
    ).fetchone()
    assert status == ("CANCELLED",)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("open_nodes = open_nodes + 3", "the run counts 9 open and 0 failed nodes"),
        ("failed_nodes = 2", "the run counts 6 open and 2 failed nodes, there are 6 and 0"),
        ("open_nodes = 0", "the run goes on although none of its nodes is open"),
    ],
)
def test_wrong_counters_of_a_run_are_counted_anew(
    patient: Patient, change: str, problem: str
) -> None:
    patient.break_(f"UPDATE horsies_workflows SET {change} WHERE id = %s", patient.run)
    assert any(one.startswith(problem) for one in patient.problems())
    patient.mend()
    patient.duet.check()
    patient.finish()


@pytest.mark.parametrize("counter", ["deps_open", "deps_ok", "deps_bad", "context_open"])
def test_wrong_counters_of_a_node_are_counted_anew(patient: Patient, counter: str) -> None:
    patient.set_node(3, f"{counter} = {counter} + 1")
    (problem,) = patient.problems()
    assert problem.startswith("node n3 counts")
    patient.mend()
    patient.duet.check()
    patient.finish()


@pytest.mark.parametrize("counter", ["items_open", "items_bad", "items_total"])
def test_wrong_counters_of_a_map_are_counted_anew(patient: Patient, counter: str) -> None:
    patient.set_node(4, f"{counter} = {counter} + 1")
    (problem,) = patient.problems()
    assert problem.startswith("map node n4 has")
    patient.mend()
    patient.duet.check()
    patient.finish()


def test_a_lost_item_runs_again_in_its_place(patient: Patient) -> None:
    patient.delete_task((patient.run, 4, 1))
    (problem, *_) = patient.problems()
    assert problem == (
        "map node n4 has 3 items (3 open, 0 failed), 2 are stored (2 open, 0 failed)"
    )
    patient.mend()
    patient.finish()


def test_items_left_parked_follow_and_no_more_than_allowed(patient: Patient) -> None:
    patient.set_task((patient.run, 4, 0), "status = 'COMPLETED', result = '{\"ok\":1}'")
    patient.set_node(4, "items_open = 2")
    assert patient.problems() == ["map node n4 keeps items waiting for no reason"]
    patient.mend()
    patient.duet.oracle.finish([_end((patient.run, 4, 0), 1)])
    patient.duet.check()
    patient.finish()


def test_a_map_whose_items_all_ended_unnoticed_ends(patient: Patient) -> None:
    for item in range(3):
        patient.set_task((patient.run, 4, item), "status = 'COMPLETED', result = '{\"ok\":1}'")
    patient.mend()
    patient.duet.oracle.finish([_end((patient.run, 4, item), 1) for item in range(3)])
    node = patient.duet.oracle.runs[patient.run].nodes[4]
    assert node.status == "COMPLETED"
    patient.finish()


def test_a_map_that_was_set_back_finds_its_items_again(patient: Patient) -> None:
    patient.set_node(4, "status = 'PENDING'")
    assert "map node n4 is PENDING although it has open items" in patient.problems()
    patient.mend()
    patient.duet.check()
    patient.finish()


def test_a_sub_workflow_that_was_deleted_is_expanded_again(patient: Patient) -> None:
    patient.duet.connection.execute("DELETE FROM horsies_workflows WHERE id = %s", (patient.child,))
    assert patient.problems() == ["node n5 runs a sub-workflow that is no longer stored"]
    patient.mend()
    status = patient.duet.connection.execute(
        "SELECT status FROM horsies_workflow_tasks WHERE workflow_id = %s AND task_index = 5",
        (patient.run,),
    ).fetchone()
    assert status == ("ENQUEUED",)


def test_a_sub_workflow_that_ended_unnoticed_ends_its_node(patient: Patient) -> None:
    patient.break_(
        "UPDATE horsies_workflows SET status = 'COMPLETED', completed_at = now() WHERE id = %s",
        patient.child,
    )
    assert patient.problems() == ["node n5 runs a sub-workflow that ended as COMPLETED"]
    patient.mend()
    found = patient.duet.connection.execute(
        "SELECT status, result FROM horsies_workflow_tasks WHERE workflow_id = %s AND task_index = 5",
        (patient.run,),
    ).fetchone()
    assert found == ("COMPLETED", '{"ok":null}')


@pytest.mark.parametrize("status", ["PENDING", "ENQUEUED", "COMPLETED"])
def test_a_sub_workflow_node_that_was_set_elsewhere_returns_to_its_run(
    patient: Patient, status: str
) -> None:
    patient.set_node(5, f"status = '{status}'")
    assert patient.problems() != []
    patient.mend()
    patient.duet.check()
    patient.finish()


def test_tasks_on_hold_in_a_running_run_are_let_go(patient: Patient) -> None:
    patient.set_task((patient.run, 2, None), "held = true")
    patient.set_task((patient.run, 1, None), "held = true")
    problems = patient.problems()
    assert len(problems) == 2
    assert all(one.endswith("is on hold although the run is RUNNING") for one in problems)
    patient.mend()
    patient.duet.check()
    patient.finish()


def test_tasks_let_go_in_a_paused_run_are_held_and_lost_ones_come_with_the_resume(
    patient: Patient,
) -> None:
    patient.duet.pause(patient.run)
    patient.set_task((patient.run, 4, 1), "held = false")
    patient.delete_task((patient.run, 2, None))
    problems = patient.problems()
    assert any(one.endswith("is not on hold although the run is PAUSED") for one in problems)
    assert "node n2 waits for a task that is no longer stored" in problems
    patient.mend()
    patient.duet.resume(patient.run)
    patient.finish()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM horsies_workflow_tasks WHERE workflow_id = %s AND task_index = 6",
        "DELETE FROM horsies_workflow_tasks WHERE workflow_id = %s",
    ],
)
def test_a_run_that_lost_nodes_fails_and_what_runs_below_it_is_cancelled(
    patient: Patient, statement: str
) -> None:
    patient.break_(statement, patient.run)
    assert any(one.startswith("the run has 7 nodes") for one in patient.problems())
    patient.mend()
    found = dict(
        patient.duet.connection.execute("SELECT id::text, status FROM horsies_workflows").fetchall()
    )
    assert found == {patient.run: "FAILED", patient.child: "CANCELLED"}


def test_every_open_run_is_audited_and_no_other(
    patient: Patient, connection: Connection[Any]
) -> None:
    ended = patient.duet.start_one(chain(1))
    patient.duet.succeed((ended, 0, None))
    patient.break_("UPDATE horsies_workflows SET open_nodes = 5 WHERE id = %s", ended)
    assert patient.problems() == []
    patient.break_("UPDATE horsies_workflows SET open_nodes = 5 WHERE id = %s", patient.child)
    assert len(patient.problems()) == 1
    patient.duet.engine.mend(ended)
    patient.mend()


def test_a_run_nobody_knows_is_mended_without_a_word(patient: Patient) -> None:
    patient.duet.engine.mend("01a1ddaf-6266-7aa0-ba8c-10f98933ddff")
    assert patient.problems() == []


def _end(place: Place, value: Any) -> End:

    return End(place, "COMPLETED", {"ok": value})
