"""Pages of tasks and runs from Python: filters, cursors, refused input, and their JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import TypeAdapter

from horsies.app import Horsies
from horsies.ids import first_id_at, new_id
from horsies.monitor import paging
from horsies.monitoring import RunPage, TaskPage, TaskSummary
from horsies.states import TaskStatus, WorkflowStatus
from horsies.tasks.broker import BrokerErrorCode
from tests.support.applications import Call, app_at
from tests.support.database import Database
from tests.support.rows import add_run, add_task

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: int) -> datetime:
    return START + timedelta(seconds=seconds)


def add_tasks(connection: Database, count: int, **columns: Any) -> list[str]:
    """Add tasks that were sent a second apart; the newest comes first."""
    return [add_task(connection, id=first_id_at(at(n)), **columns) for n in range(count)][::-1]


def add_runs(connection: Database, count: int, **columns: Any) -> list[str]:
    return [add_run(connection, created_at=at(n), **columns) for n in range(count)][::-1]


def everything(app: Horsies, call: Call, method: str, **query: Any) -> list[str]:
    """Follow the cursors to the end."""
    found: list[str] = []
    after = None
    while True:
        page = call(app, app, method, **query, after=after).unwrap()
        found += [row.id for row in page.rows]
        after = page.next_cursor
        if after is None:
            return found


def test_cursors_lead_through_all_tasks(app: Horsies, connection: Database, call: Call) -> None:
    stored = add_tasks(connection, 7)
    assert everything(app, call, "tasks_where", limit=3) == stored
    assert everything(app, call, "tasks_where", limit=1000) == stored


def test_cursors_lead_through_all_runs(app: Horsies, connection: Database, call: Call) -> None:
    same_time = [add_run(connection, created_at=at(-1)) for _ in range(3)]
    stored = [*add_runs(connection, 4), *sorted(same_time, reverse=True)]
    assert everything(app, call, "runs_where", limit=2) == stored


def test_rows_that_come_or_go_between_two_pages_change_nothing_else(
    app: Horsies, connection: Database
) -> None:
    runs, tasks = add_runs(connection, 4), add_tasks(connection, 4)
    run_page = app.runs_where(limit=2).unwrap()
    task_page = app.tasks_where(limit=2).unwrap()
    add_run(connection, created_at=at(9))
    add_task(connection, id=first_id_at(at(9)))
    # The last rows of both pages are deleted, as retention does.
    connection.execute("DELETE FROM horsies_workflows WHERE id = %s", (runs[1],))
    connection.execute("DELETE FROM horsies_tasks WHERE id = %s", (tasks[1],))
    found = app.runs_where(limit=2, after=run_page.next_cursor).unwrap()
    assert [run.id for run in found.rows] == runs[2:]
    listed = app.tasks_where(limit=2, after=task_page.next_cursor).unwrap()
    assert [task.id for task in listed.rows] == tasks[2:]


@pytest.mark.parametrize("window", [1, 3, 50_000])
def test_a_search_that_ends_early_continues_with_its_cursor(
    app: Horsies,
    connection: Database,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    window: int,
) -> None:
    monkeypatch.setattr(paging, "LIST_WINDOW", window)
    tasks = add_tasks(connection, 8, status="COMPLETED")
    runs = add_runs(connection, 8, status="COMPLETED")
    connection.execute("UPDATE horsies_tasks SET task_name = 'rare' WHERE id = %s", (tasks[6],))
    connection.execute("UPDATE horsies_workflows SET name = 'rare' WHERE id = %s", (runs[6],))
    assert everything(app, call, "tasks_where", name="rare") == [tasks[6]]
    assert everything(app, call, "runs_where", name="rare") == [runs[6]]


def test_filters_take_one_value_or_several(app: Horsies, connection: Database, call: Call) -> None:
    mail = add_task(connection, queue_name="mail", status="FAILED", error_code="BROKE")
    images = add_task(connection, queue_name="images", task_name="resize")
    reports = add_task(connection, queue_name="reports", status="RUNNING")

    def found(**query: Any) -> set[str]:
        return set(everything(app, call, "tasks_where", **query))

    assert found() == {mail, images, reports}
    assert found(queue="mail") == {mail}
    assert found(queue=("mail", "images")) == {mail, images}
    assert found(status=TaskStatus.RUNNING) == found(status="running") == {reports}
    assert found(status=[TaskStatus.FAILED, "PENDING"]) == {mail, images}
    assert found(name={"resize"}, status="PENDING") == {images}
    assert found(error_code="BROKE") == {mail}


def test_times_bound_the_send_from_since_to_before_until(
    app: Horsies, connection: Database, call: Call
) -> None:
    tasks, runs = add_tasks(connection, 5), add_runs(connection, 5)
    for query, expected in (
        ({"since": at(1), "until": at(3)}, slice(2, 4)),
        ({"until": at(3)}, slice(2, 5)),
        ({"since": at(4)}, slice(0, 1)),
    ):
        for limit in (1, 100):
            assert everything(app, call, "tasks_where", limit=limit, **query) == tasks[expected]
            assert everything(app, call, "runs_where", limit=limit, **query) == runs[expected]


def test_runs_are_filtered_by_status_name_and_key(
    app: Horsies, connection: Database, call: Call
) -> None:
    failed = add_run(connection, status="FAILED", name="billing")
    keyed = add_run(connection, workflow_key="order-7")
    child = add_run(connection, parent_workflow_id=keyed)

    def found(**query: Any) -> set[str]:
        return set(everything(app, call, "runs_where", **query))

    assert found() == {failed, keyed}
    assert found(include_children=True) == {failed, keyed, child}
    assert found(status=WorkflowStatus.FAILED) == found(name="billing") == {failed}
    assert found(workflow_key=["order-7"]) == {keyed}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"limit": 0}, "limit must be a whole number from 1 to 1,000, not 0."),
    ({"limit": 1001}, "limit must be a whole number from 1 to 1,000, not 1001."),
    ({"limit": True}, "limit must be a whole number from 1 to 1,000, not True."),
    ({"limit": "10"}, "limit must be a whole number from 1 to 1,000, not '10'."),
    (
        {"name": []},
        "name must be a text or several texts, not []; leave it out to match everything.",
    ),
    (
        {"name": 7},
        "name must be a text or several texts, not 7; leave it out to match everything.",
    ),
    (
        {"name": ["a", 7]},
        "name must be a text or several texts, not ['a', 7]; leave it out to match everything.",
    ),
    (
        {"name": "a\0"},
        "name must not contain NUL or a lone surrogate, which PostgreSQL cannot store, as in 'a\\x00'.",
    ),
    (
        {"name": ["a", "\ud800"]},
        "name must not contain NUL or a lone surrogate, which PostgreSQL cannot store, as in '\\ud800'.",
    ),
    (
        {"since": datetime(2026, 1, 1)},
        "since must be a datetime with a time zone, such as datetime.now(UTC), not "
        "datetime.datetime(2026, 1, 1, 0, 0).",
    ),
    (
        {"until": "yesterday"},
        "until must be a datetime with a time zone, such as datetime.now(UTC), not 'yesterday'.",
    ),
    ({"since": at(1), "until": at(1)}, "since must be earlier than until."),
    ({"after": "nonsense"}, "after must be the next_cursor of a page, not 'nonsense'."),
    ({"after": 7}, "after must be the next_cursor of a page, not 7."),
]


@pytest.mark.parametrize(("query", "message"), REFUSED)
@pytest.mark.parametrize("method", ["tasks_where", "runs_where"])
def test_bad_input_is_refused_without_a_database(
    call: Call, method: str, query: dict[str, Any], message: str
) -> None:
    app = app_at("postgresql://app@127.0.0.1:1/shop")
    error = call(app, app, method, **query).unwrap_err()
    assert (error.code, error.message) == (BrokerErrorCode.INVALID_QUERY, message)


@pytest.mark.parametrize(
    ("method", "known"),
    [("tasks_where", TaskStatus), ("runs_where", WorkflowStatus)],
)
def test_an_unknown_status_is_answered_with_the_known_ones(
    app: Horsies, method: str, known: type[TaskStatus | WorkflowStatus]
) -> None:
    error = getattr(app, method)(status="done").unwrap_err()
    assert error.message == f"status must be one of {', '.join(known)}, not 'done'."


@pytest.mark.parametrize("end", ["", "@", "@-1", "@x", f"@{10**30}"])
def test_a_forged_cursor_of_runs_is_refused(app: Horsies, end: str) -> None:
    assert (
        app.runs_where(after=f"{new_id()}{end}").unwrap_err().code is BrokerErrorCode.INVALID_QUERY
    )


def test_pages_are_json(app: Horsies, connection: Database) -> None:
    (task_id,) = add_tasks(connection, 1, status="FAILED", error_code="BROKE")
    add_runs(connection, 1)
    task_page, run_page = app.tasks_where(limit=1).unwrap(), app.runs_where(limit=1).unwrap()
    row = task_page.to_dict()["rows"][0]
    assert (row["id"], row["status"], row["error_code"]) == (task_id, "FAILED", "BROKE")
    assert task_page.rows[0].to_dict() == row
    for kind, page in ((TaskPage, task_page), (RunPage, run_page)):
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        assert adapter.validate_json(adapter.dump_json(page)) == page
        assert adapter.validate_python(page.to_dict()) == page
        assert json.loads(adapter.dump_json(page)) == page.to_dict()
    assert isinstance(task_page.rows[0], TaskSummary)
    assert task_page.rows[0].status is TaskStatus.FAILED
