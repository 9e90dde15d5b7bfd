"""How runs advance in the database, case by case: cases that random graphs rarely contain."""

from __future__ import annotations

import json
import threading
from datetime import datetime
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies import Horsies, WorkflowTaskStatus, from_node
from horsies.db.statements.workflows import start_runs
from horsies.ids import new_id
from tests.support.database import Database, lock_waiters
from tests.support.oracle.compare import Duet, status_of, statuses
from tests.support.oracle.engine import Engine
from tests.support.oracle.plans import plan
from tests.support.oracle.shapes import NodeShape, RunShape, chain, fan
from tests.support.oracle.tree import End
from tests.support.turns import Hands, define_tasks
from tests.support.wait import wait_until


def listed(**settings: Any) -> RunShape:
    """A task that gives a list, and a map over it."""
    return RunShape((NodeShape(), NodeShape(kind="map", after=(0,), over=0, **settings)))


def nested(child: RunShape, **settings: Any) -> RunShape:
    """A sub-workflow, and a task after it."""
    return RunShape((NodeShape(kind="workflow", child=child), NodeShape(after=(0,))), **settings)


# Maps


def test_items_run_in_order_and_no_more_of_them_at_once_than_allowed(duet: Duet) -> None:
    run = duet.start_one(listed(max_parallel=2))
    duet.succeed((run, 0, None), value=[10, 20, 30, 40])
    assert duet.claimable() == [(run, 1, 0), (run, 1, 1)]
    duet.check()
    duet.succeed((run, 1, 1), value="b")
    assert duet.claimable() == [(run, 1, 0), (run, 1, 2)]
    duet.check()
    duet.succeed((run, 1, 0), (run, 1, 2), value="x")
    duet.succeed((run, 1, 3), value="d")
    assert status_of(duet, run) == "COMPLETED"
    result = duet.oracle.runs[run].nodes[1].result
    assert result == {"ok": [{"ok": "x"}, {"ok": "b"}, {"ok": "x"}, {"ok": "d"}]}


def test_a_parked_item_that_is_cancelled_makes_room_for_nobody(duet: Duet) -> None:
    run = duet.start_one(listed(max_parallel=1))
    duet.succeed((run, 0, None), value=[1, 2, 3])
    duet.claim([(run, 1, 0)])
    duet.cancel_task((run, 1, 1))
    duet.check()
    assert duet.claimable() == []
    duet.succeed((run, 1, 0))
    duet.check()
    assert duet.claimable() == [(run, 1, 2)]


def test_a_map_over_nothing_completes_and_a_map_over_no_list_fails(duet: Duet) -> None:
    empty, wrong = duet.start(listed(), listed())
    duet.succeed((empty, 0, None), value=[])
    duet.succeed((wrong, 0, None), value={"not": "a list"})
    assert status_of(duet, empty) == "COMPLETED"
    assert statuses(duet, wrong) == ["COMPLETED", "FAILED"]


def test_a_map_that_fails_at_once_when_retried_pauses_its_run_again(duet: Duet) -> None:
    run = duet.start_one(
        RunShape((NodeShape(), NodeShape(kind="map", after=(0,), over=0)), on_error="pause")
    )
    duet.succeed((run, 0, None), value=7)
    assert status_of(duet, run) == "PAUSED"
    assert duet.retry(run) == "retried"
    assert status_of(duet, run) == "PAUSED"


def test_a_map_that_failed_before_it_had_items_runs_each_once_when_its_run_is_retried(
    duet: Duet, connection: Connection[Any]
) -> None:
    too_early = NodeShape(kind="map", after=(0, 1), join="any", over=1)
    run = duet.start_one(RunShape((NodeShape(), NodeShape(), too_early), on_error="pause"))
    duet.claim([(run, 1, None)])
    duet.succeed((run, 0, None))
    assert statuses(duet, run) == ["COMPLETED", "ENQUEUED", "FAILED"]
    duet.succeed((run, 1, None), value=[1, 2])
    assert status_of(duet, run) == "PAUSED"
    assert duet.retry(run) == "retried"
    duet.check()
    items = connection.execute(
        "SELECT workflow_item_index FROM horsies_tasks WHERE workflow_node_index = 2 ORDER BY 1"
    ).fetchall()
    assert items == [(0,), (1,)]


def test_a_retried_map_runs_only_its_failed_items_again(
    duet: Duet, connection: Connection[Any]
) -> None:
    run = duet.start_one(listed(max_parallel=1))
    duet.succeed((run, 0, None), value=[1, 2, 3])
    duet.succeed((run, 1, 0), value="first")
    duet.fail((run, 1, 1))
    duet.fail((run, 1, 2))
    assert status_of(duet, run) == "FAILED"
    assert duet.retry(run) == "retried"
    duet.check()
    assert duet.claimable() == [(run, 1, 1)]
    duet.succeed((run, 1, 1), value="second")
    duet.succeed((run, 1, 2), value="third")
    assert status_of(duet, run) == "COMPLETED"
    again = connection.execute(
        "SELECT count(*), bool_and(id > retried_from_task_id) FROM horsies_tasks "
        "WHERE retried_from_task_id IS NOT NULL"
    ).fetchone()
    assert again == (2, True)


def test_items_that_were_cancelled_or_expired_are_tried_again_too(duet: Duet) -> None:
    run = duet.start_one(listed())
    duet.succeed((run, 0, None), value=[1, 2, 3])
    duet.succeed((run, 1, 0))
    duet.cancel_task((run, 1, 1))
    duet.finish(End((run, 1, 2), "EXPIRED"))
    assert status_of(duet, run) == "FAILED"
    assert duet.retry(run) == "retried"
    duet.check()
    assert duet.claimable() == [(run, 1, 1), (run, 1, 2)]


@pytest.mark.parametrize("low", ["0" * 15 + "1", "8" + "f" * 15, "b" + "f" * 14 + "e"])
def test_an_item_that_runs_again_has_a_later_id_whatever_the_clock_says(
    connection: Connection[Any], low: str
) -> None:
    earlier = f"ffffffffffff7fff{low}"
    found = connection.execute(
        "SELECT horsies_next_id(%s::uuid) > %s::uuid", (earlier, earlier)
    ).fetchone()
    assert found == (True,)


# Sub-workflows


@pytest.mark.parametrize("answer", ["null", '"text"', "{}", '{"id": "no uuid", "nodes": []}'])
def test_a_plan_that_is_no_plan_fails_its_node_and_undoes_nothing_else(
    connection: Connection[Any], answer: str
) -> None:
    engine = Engine(connection)
    run = engine.start(RunShape((NodeShape(kind="workflow", child=chain(1)), NodeShape())))
    (expansion, _), (other, _) = engine.tasks([(run, 0, None), (run, 1, None)])
    connection.execute(
        "UPDATE horsies_tasks SET status = 'COMPLETED', result = "
        "CASE id WHEN %s::uuid THEN %s ELSE '{\"ok\":1}' END WHERE id = ANY(%s::uuid[])",
        (expansion, f'{{"ok":{answer}}}', [expansion, other]),
    )
    rows = connection.execute(
        "SELECT status, horsies_node_result_v1(node) FROM horsies_workflow_tasks AS node "
        "WHERE workflow_id = %s ORDER BY task_index",
        (run,),
    ).fetchall()
    assert [status for status, _ in rows] == ["FAILED", "COMPLETED"]
    error = json.loads(rows[0][1])["err"]
    assert error["error_code"] == {"__builtin_task_code__": "WORKFLOW_ENQUEUE_FAILED"}


def test_a_plan_whose_id_is_taken_does_not_adopt_the_other_run(
    connection: Connection[Any],
) -> None:
    engine = Engine(connection)
    stranger = engine.start(chain(1))
    run = engine.start(nested(chain(1)))
    engine.finish([End((run, 0, None), "COMPLETED", None, stranger, chain(1))])
    rows = connection.execute(
        "SELECT status, sub_workflow_id FROM horsies_workflow_tasks "
        "WHERE workflow_id = %s ORDER BY task_index",
        (run,),
    ).fetchall()
    assert rows == [("FAILED", None), ("SKIPPED", None)]


def test_a_sub_workflow_that_expands_under_a_paused_run_starts_on_hold(duet: Duet) -> None:
    run = duet.start_one(nested(chain(2)))
    duet.claim([(run, 0, None)])
    duet.pause(run)
    duet.succeed((run, 0, None))
    duet.check()
    assert duet.claimable() == []
    duet.resume(run)
    duet.check()
    assert len(duet.claimable()) == 1


def test_a_sub_workflow_that_expands_under_a_cancelled_run_never_starts(duet: Duet) -> None:
    run = duet.start_one(nested(chain(2)))
    duet.claim([(run, 0, None)])
    duet.cancel(run)
    duet.succeed((run, 0, None))
    assert statuses(duet, run) == ["SKIPPED", "SKIPPED"]
    assert list(duet.oracle.runs) == [run]


def test_a_cancelled_child_fails_its_node_at_once_and_the_parent_goes_on(duet: Duet) -> None:
    run = duet.start_one(nested(chain(2)))
    duet.succeed((run, 0, None))
    child = list(duet.oracle.runs)[1]
    duet.cancel(child)
    assert statuses(duet, run) == ["FAILED", "SKIPPED"]
    assert status_of(duet, run) == "FAILED"


def test_a_retried_run_retries_its_failed_child_from_its_failures(duet: Duet) -> None:
    run = duet.start_one(nested(chain(3)))
    duet.succeed((run, 0, None))
    child = list(duet.oracle.runs)[1]
    duet.succeed((child, 0, None))
    duet.fail((child, 1, None))
    assert status_of(duet, run) == "FAILED"
    assert duet.retry(child) == "PARENT_ENDED"
    assert duet.retry(run) == "retried"
    assert statuses(duet, child) == ["COMPLETED", "ENQUEUED", "PENDING"]
    duet.succeed((child, 1, None))
    duet.succeed((child, 2, None))
    duet.succeed((run, 1, None))
    assert status_of(duet, run) == "COMPLETED"


def test_a_run_that_took_the_place_of_a_cancelled_one_is_the_one_its_node_ends_with(
    duet: Duet,
) -> None:
    run = duet.start_one(nested(chain(2)))
    duet.succeed((run, 0, None))
    first = list(duet.oracle.runs)[-1]
    duet.cancel(first)
    assert duet.retry(run) == "retried"
    duet.succeed((run, 0, None))
    second = list(duet.oracle.runs)[-1]
    duet.cancel(run)
    duet.check()
    result = duet.oracle.runs[run].nodes[0].result
    assert result is not None
    assert result["err"]["sub_workflow_id"] == second


# Retries


def test_a_node_behind_a_failure_that_is_not_retried_is_skipped_once_more(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(), NodeShape(), NodeShape(after=(0, 1)))))
    duet.fail((run, 0, None), (run, 1, None))
    assert statuses(duet, run) == ["FAILED", "FAILED", "SKIPPED"]
    assert duet.retry(run, [0]) == "retried"
    assert statuses(duet, run) == ["ENQUEUED", "FAILED", "PENDING"]
    duet.succeed((run, 0, None))
    assert statuses(duet, run) == ["COMPLETED", "FAILED", "SKIPPED"]
    assert duet.retry(run) == "retried"
    duet.succeed((run, 1, None))
    duet.succeed((run, 2, None))
    assert status_of(duet, run) == "COMPLETED"


def test_a_child_retried_under_a_run_that_was_paused_again_waits_with_it(duet: Duet) -> None:
    child = NodeShape(kind="workflow", child=chain(1))
    run = duet.start_one(RunShape((child, child), on_error="pause"))
    duet.succeed((run, 0, None), (run, 1, None))
    failing, late = list(duet.oracle.runs)[1:]
    duet.claim([(late, 0, None)])
    duet.fail((failing, 0, None))
    duet.fail((late, 0, None))
    assert statuses(duet, run) == ["FAILED", "RUNNING"]
    assert duet.retry(run, [0]) == "retried"
    assert statuses(duet, run) == ["RUNNING", "FAILED"]
    assert status_of(duet, run) == "PAUSED"
    assert status_of(duet, failing) == "PAUSED"
    assert duet.claimable() == []
    duet.resume(run)
    duet.succeed((failing, 0, None))
    assert status_of(duet, run) == "FAILED"


# Pauses


def test_what_was_claimed_ahead_goes_back_on_hold_and_comes_again_after_the_pause(
    duet: Duet,
) -> None:
    run = duet.start_one(fan(2))
    duet.claim([(run, 0, None)], "CLAIMED")
    duet.pause(run)
    duet.check()
    assert duet.places("PENDING") == [(run, 0, None)]
    duet.resume(run)
    duet.check()
    assert duet.claimable() == [(run, 0, None)]


def test_a_task_that_is_tried_again_during_a_pause_waits_for_its_end(duet: Duet) -> None:
    run = duet.start_one(chain(1))
    duet.claim([(run, 0, None)])
    duet.pause(run)
    duet.give_back([(run, 0, None)])
    duet.check()
    assert duet.engine.claim([(run, 0, None)]) == 0
    duet.resume(run)
    assert duet.engine.claim([(run, 0, None)]) == 1


def test_a_run_paused_again_while_it_is_retried_holds_what_was_retried(duet: Duet) -> None:
    shape = RunShape((NodeShape(), NodeShape(kind="workflow", child=chain(1))), on_error="pause")
    run = duet.start_one(shape)
    duet.succeed((run, 1, None))
    child_id = list(duet.oracle.runs)[1]
    duet.claim([(child_id, 0, None)])
    duet.fail((run, 0, None))
    duet.fail((child_id, 0, None))
    assert status_of(duet, run) == "PAUSED"
    assert duet.retry(run, [0]) == "retried"
    assert status_of(duet, run) == "PAUSED"
    assert statuses(duet, run) == ["READY", "FAILED"]
    assert duet.claimable() == []
    duet.resume(run)
    assert statuses(duet, run) == ["ENQUEUED", "FAILED"]


# Cancels


def test_a_running_task_of_a_cancelled_run_is_not_tried_again(duet: Duet) -> None:
    run = duet.start_one(chain(2))
    duet.claim([(run, 0, None)])
    duet.cancel(run)
    assert duet.engine.give_back([(run, 0, None)]) == 0
    duet.finish_turn(duet.failed((run, 0, None)))
    assert statuses(duet, run) == ["FAILED", "SKIPPED"]
    assert status_of(duet, run) == "CANCELLED"


def test_a_cancel_that_interrupts_asks_the_running_tasks_to_stop(
    duet: Duet, process_url: str, connection: Connection[Any]
) -> None:
    run = duet.start_one(fan(3))
    duet.succeed((run, 0, None))
    duet.claim([(run, 1, None), (run, 2, None)])
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute("LISTEN horsies_cancel")
        duet.cancel(run, interrupt=True)
        asked = {note.payload for note in listener.notifies(timeout=30, stop_after=2)}
    running = duet.engine.tasks([(run, 1, None), (run, 2, None)])
    assert asked == {task_id for task_id, _ in running}
    requested = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE status = 'RUNNING' AND cancel_requested_at IS NOT NULL"
    ).fetchone()
    assert requested == (2,)


def test_a_cancel_waits_for_a_claim_under_way_and_meets_the_task_running(
    duet: Duet, process_url: str, connection: Connection[Any]
) -> None:
    run = duet.start_one(chain(2))
    ((task_id, _),) = duet.engine.tasks([(run, 0, None)])
    with (
        psycopg.connect(process_url) as worker,
        psycopg.connect(process_url, autocommit=True) as person,
    ):
        worker.execute("UPDATE horsies_tasks SET status = 'RUNNING' WHERE id = %s", (task_id,))
        reason = {"error_code": "X"}
        thread = threading.Thread(target=Engine(person).cancel, args=(run, reason))
        thread.start()
        wait_until(lambda: lock_waiters(connection, person.info.backend_pid))
        worker.commit()
        thread.join()
    duet.oracle.claim([(run, 0, None)], "RUNNING")
    duet.oracle.cancel(run, reason)
    assert statuses(duet, run) == ["ENQUEUED", "SKIPPED"]


# Signals


def test_signals_are_kept_in_order_until_somebody_waits_for_them(duet: Duet) -> None:
    waits = NodeShape(kind="signal", after=(0,), signal="go")
    run = duet.start_one(RunShape((NodeShape(), waits, waits, waits)))
    duet.signal(run, "go", "first")
    duet.signal(run, "go", "second")
    duet.signal(run, "other", "nobody")
    duet.check()
    duet.succeed((run, 0, None))
    duet.check()
    duet.signal(run, "go", "third")
    duet.check()
    values = [duet.oracle.work((run, index, None)).value for index in (1, 2, 3)]
    assert values == ["first", "second", "third"]
    duet.succeed((run, 1, None), (run, 2, None), (run, 3, None))
    assert status_of(duet, run) == "COMPLETED"


def test_a_signal_passes_over_a_node_whose_time_is_up_at_that_moment(
    connection: Connection[Any], process_url: str
) -> None:
    engine = Engine(connection)
    waits = NodeShape(kind="signal", signal="go")
    run = engine.start(RunShape((waits, waits)))
    (first, _), (second, _) = engine.tasks([(run, 0, None), (run, 1, None)])
    answers: list[str | None] = []
    with (
        psycopg.connect(process_url) as worker,
        psycopg.connect(process_url, autocommit=True) as person,
    ):
        worker.execute("UPDATE horsies_tasks SET status = 'RUNNING' WHERE id = %s", (first,))
        thread = threading.Thread(
            target=lambda: answers.append(Engine(person).signal(run, "go", 1))
        )
        thread.start()
        wait_until(lambda: lock_waiters(connection, person.info.backend_pid))
        worker.commit()
        thread.join()
    assert answers == ["delivered"]
    kwargs = connection.execute("SELECT kwargs FROM horsies_tasks WHERE id = %s", (second,))
    assert kwargs.fetchone() == ('{"value":1}',)


# Starts


def test_a_key_that_is_taken_names_who_has_it_and_is_free_after_the_end(
    connection: Connection[Any],
) -> None:
    engine = Engine(connection)
    first = engine.start(chain(1), key="order-7")
    (refused,) = engine.start_many([plan(new_id(), chain(1), key="order-7")])
    assert (refused.id, refused.created) == (first, False)
    engine.finish([End((first, 0, None), "COMPLETED", {"ok": 1})])
    second = new_id()
    (created,) = engine.start_many([plan(second, chain(1), key="order-7")])
    assert (created.id, created.created) == (second, True)


def test_a_retry_is_refused_while_another_run_has_the_key(connection: Connection[Any]) -> None:
    engine = Engine(connection)
    run = engine.start(chain(1), key="order-7")
    error = {"error_code": "BOOM", "message": "", "data": None, "exception": None}
    engine.finish([End((run, 0, None), "FAILED", {"err": error})])
    other = engine.start(chain(1), key="order-7")
    assert engine.retry(run) == "KEY_TAKEN"
    assert engine.problems() == []
    engine.finish([End((other, 0, None), "COMPLETED", {"ok": 1})])
    assert engine.retry(run) == "retried"


def test_two_starts_of_many_runs_with_the_same_keys_never_wait_for_each_other(
    connection: Connection[Any], process_url: str
) -> None:
    keys = [f"key-{number}" for number in range(30)]
    results: list[list[Any]] = []

    def start(order: list[str]) -> None:
        with psycopg.connect(process_url, autocommit=True) as mine:
            plans = [plan(new_id(), chain(1), key=key) for key in order]
            results.append(start_runs.fetch(mine, json.dumps(plans)))

    threads = [threading.Thread(target=start, args=(order,)) for order in (keys, keys[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(row.created for rows in results for row in rows) == len(keys)


def test_a_finished_run_says_when(connection: Connection[Any]) -> None:
    engine = Engine(connection)
    run = engine.start(chain(1))
    engine.finish([End((run, 0, None), "COMPLETED", {"ok": 1})])
    row = connection.execute(
        "SELECT completed_at, started_at FROM horsies_workflows WHERE id = %s", (run,)
    ).fetchone()
    assert row is not None
    assert isinstance(row[0], datetime)
    assert row[0] >= row[1]


@pytest.mark.parametrize("way", ["failed dependency", "cancelled run", "counted after a resume"])
def test_a_skipped_node_has_no_completed_at(app: Horsies, connection: Database, way: str) -> None:
    tasks, hands = define_tasks(app), Hands(connection)
    first = tasks.number.node(node_id="first")()
    last = tasks.add.node(node_id="last")(first=from_node(first))
    later = tasks.add.node(node_id="later")(first=from_node(last))
    spec = app.workflow("skipping", [first, last, later], definition_key="habits.skipping")
    handle = spec.start().unwrap()
    if way == "cancelled run":
        handle.cancel().unwrap()
    else:
        taken = hands.take(handle.workflow_id, "first")
        if way == "counted after a resume":
            handle.pause().unwrap()
        hands.end(handle.workflow_id, taken, {"err": {"error_code": "BOOM"}})
        handle.resume().unwrap()
    nodes = {node.node_id: node for node in handle.tasks().unwrap()}
    assert nodes["last"].status is nodes["later"].status is WorkflowTaskStatus.SKIPPED
    assert nodes["last"].completed_at is nodes["later"].completed_at is None
