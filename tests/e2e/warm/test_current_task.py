"""Tasks that ask for themselves and report progress, from the row to the producer."""

from __future__ import annotations

import asyncio
import importlib
import json
from types import ModuleType
from typing import Any

import pytest

from horsies import MapNode, TaskHandle, TaskInfo, TaskNode, TaskStatus, TaskWatchFailed
from horsies.ids import new_id
from tests.support.database import Database
from tests.support.rows import add_task, ago, insert_raw
from tests.support.tables import attempts, wait_for_status
from tests.support.wait import wait_until

WORKER = {"application": "tests.support.apps.inside:app"}

pytestmark = pytest.mark.usefixtures("worker")


@pytest.fixture
def inside(programs: ModuleType) -> ModuleType:
    return importlib.import_module("tests.support.apps.inside")


def handle(programs: ModuleType, task_id: str) -> TaskHandle[Any]:
    return TaskHandle(task_id, programs.app.get_broker())


def test_a_task_sees_its_row(programs: ModuleType, connection: Database) -> None:
    moment = "2030-01-02 03:04:05.5+00"
    task_id = add_task(
        connection,
        task_name="describe_self",
        args="[]",
        priority=3,
        max_retries=2,
        timeout_ms=60_000,
        enqueued_at=ago(5),
        sent_at=ago(7),
        good_until=moment,
        schedule_name="nightly",
        scheduled_for=moment,
        task_options=json.dumps({"headers": {"tenant": "a"}}),
    )
    seen = programs.app.get_result(task_id, 30_000).ok_value
    row = handle(programs, task_id).info().unwrap()
    assert row is not None
    expected = {"id": task_id, "name": "describe_self", "queue": "default", "priority": 3}
    expected |= {"attempt": 1, "max_attempts": 3, "is_last_attempt": False}
    expected |= {"schedule_name": "nightly", "headers": {"tenant": "a"}, "workflow_id": None}
    assert expected.items() <= seen.items()
    assert (seen["sent_at"], seen["enqueued_at"]) == (str(row.sent_at), str(row.enqueued_at))
    assert seen["slot"] == seen["good_until"] == "2030-01-02 03:04:05.500000+00:00"
    assert seen["started_at"][:10] == seen["deadline"][:10] or seen["started_at"] < seen["deadline"]


def test_the_item_of_a_map_sees_its_run_its_node_and_its_index(
    inside: ModuleType, connection: Database
) -> None:
    listed = TaskNode(inside.numbers, kwargs={"count": 3})
    described = MapNode(inside.describe_self, over=listed, each="item", node_id="each")
    nodes = [listed, described]
    spec = inside.app.workflow("inside", nodes, output=described, definition_key="inside.v1")
    run = spec.start().unwrap()
    found = [item.ok_value for item in run.get(timeout_ms=30_000).ok_value]
    places = [(one["workflow_id"], one["node_id"], one["item_index"]) for one in found]
    assert places == [(run.workflow_id, "each", index) for index in range(3)]


def test_ten_thousand_reports_a_second_write_at_most_four_rows_a_second(
    programs: ModuleType, connection: Database
) -> None:
    connection.execute(
        "CREATE TABLE public.written (at timestamptz DEFAULT clock_timestamp(), done float8);"
        "CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO public.written (done) VALUES (NEW.done); RETURN NULL; END';"
        "CREATE TRIGGER note AFTER INSERT OR UPDATE ON public.horsies_task_progress"
        " FOR EACH ROW EXECUTE FUNCTION public.note()"
    )
    try:
        task_id = insert_raw(connection, "hammer", "[3.0]")
        calls, seconds, as_json = programs.app.get_result(task_id, 20_000).ok_value
        rows = connection.execute(
            "SELECT extract(epoch FROM at)::float8, done FROM public.written ORDER BY at"
        ).fetchall()
    finally:
        connection.execute(
            "DROP TRIGGER note ON public.horsies_task_progress;"
            "DROP FUNCTION public.note(); DROP TABLE public.written"
        )
    assert len(rows) >= 2, "one while the task runs, one at its end"
    (attempt,) = attempts(connection, task_id)
    taken = (attempt.finished_at - attempt.started_at).total_seconds()
    assert len(rows) <= 4 * taken + 2, "one row at the start and one at the end"
    assert rows[-1][1] == calls
    # 0.7 us where JSON takes 1.6; the fastest hundred calls of each, as the machine may be busy or slow.
    assert seconds < as_json
    info = handle(programs, task_id).info().unwrap()
    assert info is not None
    assert info.progress is not None
    assert str(info.progress) == f"{calls:.0f} of 1000000, hammering"


def test_the_end_of_a_burst_is_stored_while_the_task_does_something_else(
    programs: ModuleType, connection: Database
) -> None:
    task = handle(programs, insert_raw(connection, "burst", "[]"))

    def shown() -> tuple[Any, ...] | None:
        info = task.info().unwrap()
        if info is None or info.progress is None:
            return None
        return (info.progress.attempt, info.progress.done, info.progress.note)

    wait_until(lambda: shown() == (1, 50, "read"), what="the end of the burst")
    task.cancel().unwrap()
    wait_for_status(connection, task.task_id, "CANCELLED")


def test_a_crashed_attempt_keeps_its_last_report_until_the_next_attempt_replaces_it(
    inside: ModuleType,
) -> None:
    states = list(inside.die_reporting.send().unwrap().watch(timeout_ms=20_000))
    reports = [str(state.progress) for state in states if state.status is TaskStatus.PENDING]
    assert reports[-1] == "9 of 10"
    last = states[-1]
    assert (last.status, last.retry_count) == (TaskStatus.COMPLETED, 1)
    assert last.progress is not None
    assert (last.progress.attempt, str(last.progress)) == (2, "1, by a thread")


def test_processes_that_a_task_forks_may_report(programs: ModuleType, connection: Database) -> None:
    task = handle(programs, insert_raw(connection, "fork_and_report", "[]"))
    assert task.get(timeout_ms=30_000).is_ok()
    info = task.info().unwrap()
    assert info is not None
    assert info.progress is not None
    assert str(info.progress) == "7, by a forked process"


def test_a_watch_ends_with_the_task(programs: ModuleType, connection: Database) -> None:
    task = handle(programs, insert_raw(connection, "hammer", "[3.0]"))
    states = list(task.watch(timeout_ms=20_000))
    assert states[-1].status is TaskStatus.COMPLETED
    running = [one.progress.done for one in states if one.progress is not None]
    assert len(running) >= 2
    assert running == sorted(running)

    async def follow() -> list[TaskInfo]:
        return [state async for state in task.watch_async(timeout_ms=30_000)]

    assert [one.status for one in asyncio.run(follow())] == [TaskStatus.COMPLETED]


def test_a_watch_of_nothing_or_for_too_long_fails(
    programs: ModuleType, connection: Database
) -> None:
    missing = new_id()
    with pytest.raises(TaskWatchFailed, match=f"There is no task {missing}"):
        next(handle(programs, missing).watch())
    waiting = handle(programs, add_task(connection, enqueued_at=ago(-600)))
    seen = []
    with pytest.raises(TimeoutError, match="within 50 ms"):
        seen += [state.status for state in waiting.watch(timeout_ms=50)]
    assert waiting.cancel().is_ok()

    async def block() -> None:
        waiting.watch()

    with pytest.raises(TaskWatchFailed, match="watch_async"):
        asyncio.run(block())
