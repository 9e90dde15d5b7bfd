"""The JSON API: the documents of the command line, rights, and errors as problem documents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from horsies.app import Horsies
from horsies.web import Access, ViewOnly
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_attempt, add_run, add_snapshot, add_task, add_worker, ago
from tests.support.web_server import Ask

MISSING = "019a0000-0000-7000-8000-000000000000"
LISTS = ("queues", "workers", "workflows", "schedules", "failures", "measures", "overview", "meta")


@pytest.mark.parametrize(
    ("command", "path"),
    [
        (["tasks", "--json", "--limit", "50"], "/api/tasks"),
        (["queues", "--json"], "/api/queues"),
        (["workers", "--json"], "/api/workers"),
        (["workflows", "--json", "--limit", "50"], "/api/workflows"),
        (["schedules", "--json"], "/api/schedules"),
    ],
)
def test_the_api_answers_what_the_command_line_prints(
    ask: Ask, connection: Database, horsies: Run, command: list[str], path: str
) -> None:
    worker = add_worker(connection)
    add_snapshot(connection, worker)
    add_run(connection)
    task = add_task(connection, queue_name="mail")
    add_attempt(connection, task, outcome="FAILED", error_code="BROKE")
    printed = json.loads(horsies(*command).out)
    answer = ask(path)
    assert answer.headers["content-type"] == "application/json"
    document = answer.json()
    (rows,) = (key for key, value in printed.items() if isinstance(value, list))
    assert [_steady(row) for row in document[rows]] == [_steady(row) for row in printed[rows]]
    assert printed.keys() <= document.keys()


def _steady(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the ages, which change from call to call."""
    moving = ("oldest_waiting_seconds", "seen_seconds_ago")
    return {key: value for key, value in row.items() if key not in moving}


def test_every_list_answers_on_an_empty_database(ask: Ask) -> None:
    for name in LISTS:
        assert ask(f"/api/{name}").status_code == 200, name
    assert ask("/api/workers/schedules").json() == {"schedules": []}
    assert ask("/api/measures?since=2h&step=10m&queue=mail").json()["step_seconds"] == 600.0


def test_single_subjects_and_their_parts(ask: Ask, connection: Database) -> None:
    worker, run = add_worker(connection), add_run(connection)
    add_snapshot(connection, worker)
    task = add_task(connection, queue_name="a/b")
    add_attempt(connection, task, outcome="FAILED", error_message="postgresql://u:hunter2@db")
    shown = ask(f"/api/workers/{worker}").json()
    assert (shown["id"], shown["receives_notifications"]) == (worker, True)
    (snapshot,) = ask(f"/api/workers/{worker}/history?limit=10").json()["snapshots"]
    assert (snapshot["worker_id"], snapshot["receives_notifications"]) == (worker, True)
    assert not {"hears", "worker_id"} & shown.keys()
    assert ask(f"/api/workflows/{run}").json()["id"] == run
    assert ask(f"/api/tasks/{task}").json()["id"] == task
    (attempt,) = ask(f"/api/tasks/{task}/attempts").json()["attempts"]
    assert attempt["error_message"] == "postgresql://u:***@db"
    overview = ask("/api/overview").json()
    assert overview["queues"][0]["name"] == "a/b"
    assert {line["code"] for line in overview["attention"]}
    assert ask("/api/meta").json()["access"] == {
        "user": "anonymous",
        "may": [],
        "sees_payload": False,
    }


def test_an_overview_of_very_many_queues_and_workers_is_short_unless_all_are_asked_for(
    ask: Ask, connection: Database
) -> None:
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) "
        "SELECT 'q-' || n, CASE WHEN n = 299 THEN now() END FROM generate_series(1, 300) AS n"
    )
    add_worker(connection, queues=[f"q-{number}" for number in range(1, 31)])
    short, every = ask("/api/overview").json(), ask("/api/overview?all=1").json()
    assert (len(short["queues"]), len(every["queues"])) == (200, 301)
    assert "q-299" in {queue["name"] for queue in short["queues"] if queue["paused"]}
    assert (short["totals"]["queues"], short["totals"]["workers"]) == (301, 1)
    (worker,), (whole,) = short["workers"], every["workers"]
    assert (len(worker["queues"]), worker["queue_count"], len(whole["queues"])) == (20, 30, 30)


def test_queues_are_listed_page_by_page(ask: Ask, connection: Database) -> None:
    connection.execute(
        "INSERT INTO horsies_queues (queue_name) SELECT 'q-' || n FROM generate_series(1, 5) AS n"
    )
    seen, after = [], ""
    while after is not None:
        page = ask(f"/api/queues?limit=2&after={after}").json()
        seen += [queue["name"] for queue in page["queues"]]
        after = page["next_after"]
    assert seen == ["default", *(f"q-{number}" for number in range(1, 6))]


def test_logs_are_masked_and_only_for_those_who_see_arguments(
    ask: Ask, connection: Database
) -> None:
    task = add_task(connection)
    connection.execute(
        "INSERT INTO horsies_task_logs (task_id, generation, attempt, body, dropped, cut_after)"
        " VALUES (%s, 1, 1, 'card=4111 order=17', 0, 1)",
        [task],
    )
    (log,) = ask(f"/api/tasks/{task}/logs", payload=True).json()["logs"]
    assert log["first"] == ["card=••• order=17"]
    assert "card=••• order=17" in ask(f"/tasks/{task}", payload=True).text
    assert ask(f"/api/tasks/{task}/logs").status_code == 404
    assert "order=17" not in ask(f"/tasks/{task}").text


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("tasks?colour=red", 400, "UNKNOWN_FILTER"),
        ("tasks?status=BROKEN", 400, "INVALID_FILTER"),
        ("tasks?since=soon", 400, "INVALID_FILTER"),
        ("tasks?limit=0", 400, "INVALID_FILTER"),
        ("queues?x=1", 400, "UNKNOWN_FILTER"),
        ("overview?all=perhaps", 400, "INVALID_FILTER"),
        ("workflows?status=LOST", 400, "INVALID_QUERY"),
        ("measures?since=90d", 400, "INVALID_FILTER"),
        ("measures?since=14d&step=1m", 400, "INVALID_FILTER"),
        ("tasks?argument=x", 403, "NO_PAYLOAD"),
        ("measures?queue=%00", 400, "BAD_REQUEST"),
        ("workers/%00", 400, "BAD_REQUEST"),
        ("tasks/x", 404, "TASK_NOT_FOUND"),
        (f"tasks/{MISSING}/attempts", 404, "TASK_NOT_FOUND"),
        ("queues/nothing", 404, "QUEUE_NOT_FOUND"),
        ("workers/nobody", 404, "WORKER_NOT_FOUND"),
        (f"workflows/{MISSING}", 404, "RUN_NOT_FOUND"),
        (f"workflows?before={MISSING}", 400, "INVALID_QUERY"),
        ("schedules/nothing", 404, "SCHEDULE_NOT_FOUND"),
        ("schedules/nothing/next", 404, "UNKNOWN_SCHEDULE"),
    ],
)
def test_errors_are_problem_documents(ask: Ask, path: str, status: int, code: str) -> None:
    answer = ask(f"/api/{path}")
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert (answer.status_code, document["status"], document["code"]) == (status, status, code)
    assert document["title"].endswith(".")


def test_payloads_appear_masked_and_only_with_the_right(
    ask: Ask, app: Horsies, connection: Database
) -> None:
    @app.task("charge")
    def charge(order: int, card: str) -> None: ...

    task = add_task(
        connection,
        task_name="charge",
        args='[17,"4111"]',
        kwargs='{"token":"hunter2","big":12345678901234567890}',
        result='{"ok":{"dsn":"postgresql://u:hunter2@db"}}',
        task_options='{"headers":{"auth":"hunter2","tenant":"acme"}}',
    )
    hidden = ask(f"/api/tasks/{task}", payload=True, policy=ViewOnly())
    assert not {"args", "kwargs", "result"} & hidden.json().keys()
    shown = ask(f"/api/tasks/{task}", payload=True)
    document = shown.json()
    assert document["args"] == [17, {"masked": True}]
    assert document["kwargs"] == {"token": {"masked": True}, "big": 12345678901234567890}
    assert document["options"]["headers"] == {"auth": {"masked": True}, "tenant": "acme"}
    assert "hunter2" not in hidden.text + shown.text
    (found,) = ask("/api/tasks?argument=order%3D17", payload=True).json()["tasks"]
    assert found["id"] == task
    assert not {"args", "kwargs"} & found.keys()
    assert ask("/api/tasks?argument=4111", payload=True).json()["tasks"] == []


def test_pages_of_the_api_continue_with_their_cursor(ask: Ask, connection: Database) -> None:
    ids = [add_task(connection, status="COMPLETED", completed_at=ago(1)) for _ in range(3)][::-1]
    first = ask("/api/tasks?limit=2").json()
    assert [task["id"] for task in first["tasks"]] == ids[:2]
    second = ask(f"/api/tasks?limit=2&before={first['next_before']}").json()
    assert [task["id"] for task in second["tasks"]] == ids[2:]
    assert second["next_before"] is None


def test_a_user_without_access_sees_nothing_of_the_api(ask: Ask) -> None:
    class Nobody:
        async def access(self, request: Any) -> Access | None:
            return None

    for path in ("/api/meta", "/api/tasks", "/api/failures"):
        answer = ask(path, policy=Nobody())
        assert answer.status_code == 403
        assert answer.headers["content-type"] == "application/problem+json"
