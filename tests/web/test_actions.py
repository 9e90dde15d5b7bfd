"""Changes from the dashboard: every button and its twin below /api, refusals, rights, orders, the history."""

from __future__ import annotations

import asyncio
import html
import json
import logging
import re
import shlex
from collections.abc import Iterator
from datetime import time
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import psycopg
import pytest

from horsies import AppConfig, DailySchedule, Horsies, TaskSchedule, Webhook
from horsies.ids import new_id
from horsies.monitor import orders
from horsies.web import AllowAll, ViewOnly
from horsies.web.access import Access, Policy
from horsies.web.app import ROUTES
from tests.support.command_line import Run
from tests.support.database import Database, lock_waiters
from tests.support.rows import (
    UNKNOWN_ID,
    actions,
    add_failed,
    add_run,
    add_task,
    ago,
    drafts,
    resent,
    row_of,
)
from tests.support.wait import wait_until
from tests.support.web_server import WebServer, served
from tests.support.web_visitor import INTENT, Visitor

# "orders" as a number: the lock of every batch.
LOCK_OF_ORDERS = int.from_bytes(b"orders")


@pytest.fixture
def anna(app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Visitor]:
    monkeypatch.setattr(orders, "PAUSE_SECONDS", 0)
    visitor = Visitor(app, AllowAll("anna"))
    yield visitor
    visitor.close()


def test_a_queue_is_paused_and_resumed_with_author_and_reason(
    anna: Visitor, connection: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "horsies.audit")
    reason = "</td><script>alert(1)</script>\nanna"
    paused = anna.post("/queues/default/pause", "pause_queue", reason=reason)
    assert paused.headers["location"] == "/queues/default"
    assert anna.notice(paused) == (
        "Queue default is paused. To undo it: horsies queues resume default"
    )
    assert anna.api("/queues/default/resume").json()["paused"] is False
    missing = anna.api("/queues/mial/pause")
    assert (missing.status_code, missing.json()["code"]) == (404, "UNKNOWN_QUEUE")
    assert [row[1:4] for row in actions(connection)] == [
        ("pause_queue", "queue default", "done"),
        ("resume_queue", "queue default", "done"),
        ("pause_queue", "queue mial", "refused"),
    ]
    page = anna.get("/history").text
    assert "&lt;/td&gt;&lt;script&gt;" in page
    assert "<script>alert" not in page
    assert caplog.messages[0].startswith("anna (web): pause_queue queue default: done, ")
    listed = anna.get("/api/actions?subject=queue+default").json()["actions"]
    assert [row["source"] for row in listed] == ["web", "web"]


def test_tasks_are_cancelled_and_sent_again(anna: Visitor, connection: Database) -> None:
    waiting = add_task(connection)
    running = add_task(connection, status="RUNNING")
    failed = add_task(connection, status="FAILED")
    assert "it is cancelled" in (
        anna.notice(anna.post(f"/tasks/{waiting}/cancel", "cancel_task")) or ""
    )
    assert "asked to stop" in (
        anna.notice(anna.post(f"/tasks/{running}/cancel", "cancel_task")) or ""
    )
    refused = anna.post(f"/tasks/{failed}/cancel", "cancel_task")
    assert anna.notice(refused) == f"Task {failed} is FAILED and can no longer be cancelled."
    again = anna.post(f"/tasks/{failed}/retry", "retry_task")
    new = again.headers["location"].removeprefix("/tasks/")
    assert row_of(connection, new)["retried_from_task_id"] == failed
    conflict = anna.api(f"/tasks/{running}/retry")
    assert (conflict.status_code, conflict.json()["code"]) == (409, "TASK_NOT_RETRYABLE")
    assert conflict.json()["task_status"] == "RUNNING"
    assert anna.api(f"/tasks/{UNKNOWN_ID}/cancel").status_code == 404
    assert [row[3] for row in actions(connection)] == [
        *("done", "done", "refused", "done", "refused", "refused")
    ]


def test_an_idempotency_key_sends_a_task_once(anna: Visitor, connection: Database) -> None:
    failed = add_task(connection, status="FAILED")
    answers = [anna.api(f"/tasks/{failed}/retry", Idempotency_Key="k-1").json() for _ in range(3)]
    assert len({answer["task_id"] for answer in answers}) == 1
    assert resent(connection) == [1]
    other = anna.api(f"/tasks/{failed}/retry", Idempotency_Key="k-2").json()
    assert other["task_id"] != answers[0]["task_id"]
    assert resent(connection) == [2]


def test_runs_are_controlled(anna: Visitor, connection: Database) -> None:
    run = add_run(connection, status="RUNNING", started_at=ago(5))
    path = f"/workflows/{run}"
    assert anna.notice(anna.post(f"{path}/pause", "control_run")) == (
        f"Workflow {run} is paused. To undo it: horsies workflow resume {run}"
    )
    twice = anna.api(f"{path}/pause")
    assert (twice.status_code, twice.json()["code"]) == (409, "NOTHING_CHANGED")
    assert anna.api(f"{path}/resume").json() == {"workflow_id": run, "changed": True}
    nothing = anna.post(f"{path}/retry", "control_run")
    assert anna.notice(nothing) == f"No node of workflow {run} has failed."
    value = anna.post(f"{path}/signal", "signal_run", name="paid", value="no JSON")
    assert (anna.notice(value) or "").startswith("The value is not JSON")
    unknown = anna.api(f"{path}/signal", {"name": "paid", "value": 1})
    assert (unknown.status_code, unknown.json()["code"]) == (409, "SIGNAL_NOT_FOUND")
    assert anna.api(f"{path}/cancel", {"reason": "a duplicate"}).status_code == 200
    assert anna.api(f"/workflows/{UNKNOWN_ID}/pause").status_code == 404
    assert [row[1] for row in actions(connection)] == [
        *("pause_run", "pause_run", "resume_run", "retry_run", "signal_run", "cancel_run"),
        "pause_run",
    ]


def test_schedules_are_paused_and_run(anna: Visitor, connection: Database) -> None:
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, config_hash) VALUES ('nightly', 'h')"
    )
    paused = anna.post("/schedules/nightly/pause", "control_schedule", reason="holidays")
    assert anna.notice(paused) == (
        "Schedule nightly is paused. To undo it: horsies schedules resume nightly"
    )
    assert anna.api("/schedules/nightly/resume").json() == {"name": "nightly", "paused": False}
    assert anna.api("/schedules/hourly/run").status_code == 404
    anna.dashboard.site.app = None
    without = anna.api("/schedules/nightly/run")
    assert (without.status_code, without.json()["code"]) == (409, "NO_APPLICATION")
    assert [row[1:4] for row in actions(connection)][:2] == [
        ("pause_schedule", "schedule nightly", "done"),
        ("resume_schedule", "schedule nightly", "done"),
    ]


def order_of(page: httpx.Response) -> str:
    """Return the id of the order in the form of a dry run."""
    found = re.search(r'name="order" value="([^"]+)"', page.text)
    assert found, page.text
    return found[1]


def test_the_list_links_to_the_orders_that_its_statuses_allow(anna: Visitor) -> None:
    linked = {
        query: re.findall(r"/orders/new\?verb=(\w+)", anna.get(f"/tasks{query}").text)
        for query in ("", "?status=FAILED", "?status=PENDING", "?status=FAILED&status=PENDING")
    }
    assert [*linked.values()] == [
        ["retry_task", "cancel_task"],
        ["retry_task"],
        ["cancel_task"],
        [],
    ]


def test_an_order_is_counted_started_and_shown(anna: Visitor, connection: Database) -> None:
    add_failed(connection, 300)
    add_task(
        connection, status="FAILED", error_code="CARD_REFUSED", workflow_id=add_run(connection)
    )
    page = anna.get("/orders/new?verb=retry_task&status=FAILED&error_code=CARD_REFUSED")
    assert 'data-count="matching">301 tasks' in page.text
    assert 'data-count="eligible">300' in page.text
    late = add_task(connection, status="FAILED", error_code="CARD_REFUSED", failed_at=ago(-1))
    order = order_of(page)
    started = [anna.post("/orders", "retry_task", order=order, reason="bank") for _ in range(2)]
    (path,) = {answer.headers["location"] for answer in started}
    ended = anna.finish(path.removeprefix("/orders/"))
    assert (ended["outcome"], ended["done"], ended["actor"]) == ("done", 300, "anna")
    assert ended["refused"] == {orders.IN_WORKFLOW: 1}
    shown = anna.get(path).text
    assert 'data-outcome="done"' in shown
    assert "Stop the order</button>" not in shown
    sent = "SELECT count(*), count(DISTINCT retried_from_task_id) FROM horsies_tasks"
    assert connection.execute(f"{sent} WHERE status = 'PENDING'").fetchone() == (300, 300)
    again = f"{sent} WHERE retried_from_task_id = %s"
    assert connection.execute(again, (late,)).fetchone() == (0, 0)
    ((*_, outcome, detail),) = actions(connection)
    assert (outcome, detail.endswith(". bank")) == ("done", True)


def test_an_order_is_stopped_and_continued(anna: Visitor, connection: Database) -> None:
    add_failed(connection, 300)
    order = order_of(anna.get("/orders/new?verb=retry_task"))
    connection.execute("SELECT pg_advisory_lock(%s)", (LOCK_OF_ORDERS,))  # no batch can begin
    try:
        path = anna.post("/orders", "retry_task", order=order).headers["location"]
        stopped = anna.post(f"{path}/stop", "retry_task")
        assert anna.notice(stopped) == "The order stops after its current batch."
        assert 'data-outcome="stopping"' in anna.get(path).text
    finally:
        connection.execute("SELECT pg_advisory_unlock(%s)", (LOCK_OF_ORDERS,))
    ended = anna.finish(path.removeprefix("/orders/"))
    assert (ended["outcome"], ended["done"]) == ("stopped", 0)
    assert "Continue the order</button>" in anna.get(path).text
    assert anna.notice(anna.post(f"{path}/stop", "retry_task")) == "The order does not run."
    anna.post("/orders", "retry_task", order=order)
    assert anna.finish(path.removeprefix("/orders/"))["done"] == 300
    assert resent(connection) == [1]
    found = [(row[1], row[3]) for row in actions(connection)]
    assert found == [("retry_tasks", "done"), ("stop_order", "done"), ("stop_order", "unchanged")]


def test_an_order_that_is_continued_right_after_it_stopped_is_carried_out(
    anna: Visitor, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop is committed, and the task of this process that saw it has not ended yet."""
    add_failed(connection, 3)
    order = anna.api("/orders", {"verb": "retry_tasks", "dry_run": True}).json()["order"]
    run_batches, gate = orders.run_batches_async, asyncio.Event()

    async def ends_late(*given: Any) -> Any:
        state = await run_batches(*given)
        await gate.wait()
        return state

    monkeypatch.setattr("horsies.web.orders.run_batches_async", ends_late)
    connection.execute("SELECT pg_advisory_lock(%s)", (LOCK_OF_ORDERS,))  # no batch can begin
    try:
        anna.api("/orders", {"order": order})
        anna.api(f"/orders/{order}/stop")
    finally:
        connection.execute("SELECT pg_advisory_unlock(%s)", (LOCK_OF_ORDERS,))
    assert anna.finish(order)["outcome"] == "stopped"
    assert anna.api("/orders", {"order": order}).json()["outcome"] == "running"
    gate.set()
    ended = anna.finish(order)
    assert (ended["outcome"], ended["done"]) == ("done", 3)
    assert resent(connection) == [1]


@pytest.mark.parametrize(
    "extra", [{"dry_run": True}, {"filters": {"queue": "mail"}}, {"ids": [UNKNOWN_ID]}]
)
def test_a_request_that_names_an_order_has_no_dry_run_and_no_filters(
    anna: Visitor, connection: Database, extra: dict[str, Any]
) -> None:
    add_failed(connection, 2)
    order = anna.api("/orders", {"verb": "retry_tasks", "dry_run": True}).json()["order"]
    (name,) = extra
    refused = anna.api("/orders", {"order": order, **extra})
    assert (refused.status_code, refused.json()["code"]) == (400, "INVALID_VALUE")
    assert refused.json()["title"] == (
        f"A request that names an order starts it as it was counted; leave out {name}."
    )
    assert (len(drafts(connection)), actions(connection), resent(connection)) == (1, [], [0])


def test_a_member_that_no_order_has_is_refused(anna: Visitor, connection: Database) -> None:
    add_failed(connection, 2)
    refused = anna.api("/orders", {"verb": "retry_tasks", "dryrun": True})
    assert (refused.status_code, refused.json()["code"]) == (400, "INVALID_VALUE")
    assert refused.json()["title"].startswith("An order has no member 'dryrun'; the members are ")
    assert (actions(connection), resent(connection)) == ([], [0])


def test_an_order_that_is_stopped_before_its_turn_changes_nothing(
    anna: Visitor, connection: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "horsies.audit")
    add_failed(connection, 2)
    waiting = add_task(connection)
    first = order_of(anna.get("/orders/new?verb=retry_task"))
    second = order_of(anna.get("/orders/new?verb=cancel_task"))
    connection.execute("SELECT pg_advisory_lock(%s)", (LOCK_OF_ORDERS,))  # no batch can begin
    try:
        anna.post("/orders", "retry_task", order=first)
        anna.post("/orders", "cancel_task", order=second)
        anna.post(f"/orders/{second}/stop", "cancel_task")
        assert 'data-outcome="stopping"' in anna.get(f"/orders/{second}").text
    finally:
        connection.execute("SELECT pg_advisory_unlock(%s)", (LOCK_OF_ORDERS,))
    assert anna.finish(first)["done"] == 2
    ended = anna.finish(second)
    assert (ended["outcome"], ended["done"]) == ("stopped", 0)
    assert row_of(connection, waiting)["status"] == "PENDING"
    told = f"(order {second}): stopped, 0 of 1 changed."
    # The end is told when it is stored, by a task that goes on while this loop runs.
    wait_until(lambda: anna.finish(second) and told in caplog.text)
    anna.post("/orders", "cancel_task", order=second)
    assert anna.finish(second)["done"] == 1


def test_selected_tasks_are_cancelled_after_a_dry_run(anna: Visitor, connection: Database) -> None:
    first, second, third = (add_task(connection) for _ in range(3))
    ids = [first, second]
    page = anna.post("/orders/selected?verb=cancel_task", "cancel_task", id=ids)
    again = (
        f"This cannot be undone; to send them again: <code>horsies retry {first} {second}</code>"
    )
    assert f"<b>Cancel 2 tasks?</b> {again}" in page.text
    assert row_of(connection, first)["status"] == "PENDING"
    path = anna.post("/orders", "cancel_task", order=order_of(page)).headers["location"]
    ended = anna.finish(path.removeprefix("/orders/"))
    assert (ended["done"], ended["subject"]) == (2, "2 selected tasks")
    assert again in anna.get(path).text
    assert row_of(connection, third)["status"] == "PENDING"
    runs = anna.post("/orders/selected?verb=resume_runs", "control_run", id=third)
    assert (runs.status_code, "ids are those of tasks" in runs.text) == (400, True)
    none = anna.post("/orders/selected", "cancel_task", verb="cancel_task")
    assert anna.notice(none) == "No task is selected."


def test_selected_tasks_are_sent_again_after_a_dry_run(anna: Visitor, connection: Database) -> None:
    failed = [add_task(connection, status="FAILED") for _ in range(2)]
    page = anna.post("/orders/selected?verb=retry_task", "retry_task", id=failed)
    assert "<b>Send 2 tasks again?</b>" in page.text
    assert connection.execute("SELECT count(*) FROM horsies_tasks").fetchone() == (2,)
    answer = anna.post("/orders", "retry_task", order=order_of(page))
    assert anna.finish(answer.headers["location"].removeprefix("/orders/"))["done"] == 2


UNDOING = re.compile(r"(?:To undo it|to send)[^:<]*: <code>horsies ([^<]+)</code>")


def undoing(page: httpx.Response) -> list[str]:
    """Return the words of the command that the page of an order names."""
    found = UNDOING.search(page.text)
    assert found, page.text
    return shlex.split(html.unescape(found[1]))


def test_the_page_of_an_order_names_the_command_that_undoes_it(
    anna: Visitor, connection: Database, horsies: Run
) -> None:
    """The commands change the tasks of the order, and none of those sent just before and after it."""
    states = "SELECT status, count(*) FROM horsies_tasks GROUP BY status ORDER BY status"
    other = add_task(connection, queue_name="mail")
    add_failed(connection, 3)
    dry_run = anna.get("/orders/new?verb=retry_task")
    path = anna.post("/orders", "retry_task", order=order_of(dry_run)).headers["location"]
    assert anna.finish(path.removeprefix("/orders/"))["done"] == 3
    late = add_task(connection)
    assert undoing(dry_run) == undoing(anna.get(path))
    assert horsies(*undoing(dry_run), "--yes").code == 0
    counts = connection.execute(states).fetchall()
    assert counts == [("CANCELLED", 3), ("FAILED", 3), ("PENDING", 2)]

    dry_run = anna.get("/orders/new?verb=cancel_task&queue=mail&task_name=work")
    path = anna.post("/orders", "cancel_task", order=order_of(dry_run)).headers["location"]
    assert anna.finish(path.removeprefix("/orders/"))["done"] == 1
    assert horsies(*undoing(anna.get(path)), "--yes").code == 0
    sent = connection.execute(
        "SELECT retried_from_task_id::text FROM horsies_tasks WHERE status = 'PENDING' AND id <> %s",
        [late],
    ).fetchall()
    assert sent == [(other,)]


def test_an_order_that_is_final_says_so(anna: Visitor, connection: Database) -> None:
    ended = add_task(connection, status="COMPLETED")
    page = anna.post("/orders/selected?verb=delete_tasks", "erase_task", id=ended)
    assert "<b>Delete 1 task permanently?</b> This cannot be undone.</p>" in page.text
    assert row_of(connection, ended)["status"] == "COMPLETED"


def test_a_queue_is_purged_after_a_dry_run(anna: Visitor, connection: Database) -> None:
    add_task(connection)
    answer = anna.post("/queues/default/purge", "purge_queue")
    page = anna.get(answer.headers["location"])
    assert 'data-count="eligible">1' in page.text
    path = anna.post("/orders", "purge_queue", order=order_of(page)).headers["location"]
    assert anna.finish(path.removeprefix("/orders/"))["done"] == 1


def test_the_api_counts_and_starts_orders(anna: Visitor, connection: Database) -> None:
    add_failed(connection, 3)
    body = {"verb": "retry_tasks", "filters": {"error_code": "CARD_REFUSED", "since": "1h"}}
    dry = anna.api("/orders", {**body, "dry_run": True}).json()
    assert (dry["matching"], dry["eligible"], dry["verb"]) == (3, 3, "retry_tasks")
    started = [anna.api("/orders", body, Idempotency_Key="all").json() for _ in range(2)]
    assert started[0]["order_id"] == started[1]["order_id"]
    assert anna.finish(started[0]["order_id"])["done"] == 3
    late = anna.api("/orders", {"order": dry["order"]}).json()
    assert anna.finish(late["order_id"])["refused"] == {orders.SENT_AGAIN: 3}
    assert resent(connection) == [1]
    for wrong, code in (
        ({"verb": "drop"}, "UNKNOWN_VERB"),
        ({"verb": "retry_tasks", "filters": {"statsu": "FAILED"}}, "UNKNOWN_FILTER"),
        ({"verb": "retry_tasks", "filters": {"status": "RUNNING"}}, "INVALID_FILTER"),
        ({"verb": "purge_queue"}, "INVALID_FILTER"),
    ):
        answer = anna.api("/orders", wrong)
        assert (answer.status_code, answer.json()["code"]) == (400, code), json.dumps(wrong)
    forged = anna.api("/orders", {"order": dry["order"][:-2] + "xx"})
    assert (forged.status_code, forged.json()["code"]) == (409, "STALE_ORDER")
    assert anna.get("/api/orders/none").status_code == 404
    searched = anna.get("/orders/new?verb=retry_task&argument=17")
    assert "cannot filter by argument" in searched.text


def test_a_draft_is_no_change_and_is_replaced_by_its_order(
    anna: Visitor, connection: Database
) -> None:
    add_failed(connection, 2)
    page = anna.get("/orders/new?verb=retry_task")
    order_id = order_of(page)
    assert drafts(connection) == [("anna", "retry_tasks", "tasks FAILED")]
    assert (actions(connection), resent(connection)) == ([], [0])
    assert "No change was made by hand yet" in anna.get("/history").text
    assert anna.get("/api/actions").json()["actions"] == []
    shown = anna.get(f"/orders/{order_id}").text
    assert 'data-outcome="draft"' in shown
    assert "Start the order</button>" in shown
    assert anna.notice(anna.post(f"/orders/{order_id}/stop", "retry_task")) == (
        "The order does not run."
    )
    anna.api("/orders", {"order": order_id, "reason": "bank"})
    assert anna.finish(order_id)["done"] == 2
    assert (drafts(connection), resent(connection)) == ([], [1])
    verbs = [(row[1], row[4]) for row in actions(connection)]
    assert verbs == [("stop_order", None), ("retry_tasks", "2 of 2 changed. bank")]


def test_a_draft_that_is_out_of_date_starts_nothing_and_is_deleted(
    anna: Visitor, connection: Database
) -> None:
    add_failed(connection, 2)
    order_id = order_of(anna.get("/orders/new?verb=retry_task"))
    connection.execute("UPDATE horsies_actions SET at = at - interval '61 minutes'")
    refused = anna.api("/orders", {"order": order_id})
    assert (refused.status_code, refused.json()["code"]) == (409, "STALE_ORDER")
    assert refused.json()["title"] == "The dry run is out of date; count again."
    assert anna.get(f"/api/orders/{order_id}").status_code == 404
    again = order_of(anna.get("/orders/new?verb=retry_task"))
    assert len(drafts(connection)) == 1
    anna.api("/orders", {"order": again})
    assert anna.finish(again)["done"] == 2
    assert drafts(connection) == []


def test_a_page_that_is_loaded_over_and_over_leaves_few_drafts(
    app: Horsies, anna: Visitor, connection: Database
) -> None:
    add_failed(connection, 2)
    other = Visitor(app, AllowAll("berta"))
    try:
        other.get("/orders/new?verb=retry_task")
    finally:
        other.close()
    pages = [anna.get("/orders/new?verb=retry_task") for _ in range(orders.DRAFTS_MAX + 3)]
    authors = [row[0] for row in drafts(connection)]
    assert (authors.count("anna"), authors.count("berta")) == (orders.DRAFTS_MAX, 1)
    gone = anna.api("/orders", {"order": order_of(pages[0])})
    assert (gone.status_code, gone.json()["code"]) == (409, "STALE_ORDER")
    anna.api("/orders", {"order": order_of(pages[3])})
    assert anna.finish(order_of(pages[3]))["done"] == 2


@pytest.mark.parametrize("berta", ["berta", "berta\x00", "berta" * 100])
def test_a_draft_is_started_only_by_the_user_who_made_it(
    app: Horsies, anna: Visitor, connection: Database, berta: str
) -> None:
    add_failed(connection, 2)
    author = Visitor(app, AllowAll(berta))
    try:
        order = order_of(author.get("/orders/new?verb=retry_task"))
        made = drafts(connection)
        refused = anna.api("/orders", {"order": order})
        assert (refused.status_code, refused.json()["code"]) == (403, "DRAFT_OF_ANOTHER_USER")
        sentence = "Another user made this dry run; make your own to start the order."
        assert refused.json()["title"] == sentence
        posted = anna.post("/orders", "retry_task", order=order)
        assert (posted.status_code, sentence in posted.text) == (403, True)
        assert "Start the order</button>" not in anna.get(f"/orders/{order}").text
        assert (drafts(connection), resent(connection)) == (made, [0])
        assert "Start the order</button>" in author.get(f"/orders/{order}").text
        assert author.api("/orders", {"order": order}).status_code == 202
        assert author.finish(order)["done"] == 2
    finally:
        author.close()
    assert anna.api("/orders", {"order": order}).json()["outcome"] == "done"


class OnlyRetries:
    """A policy whose user may send tasks again and nothing else."""

    async def access(self, request: Any) -> Access:
        return Access("anna", frozenset({"retry_task"}))


def test_an_order_of_as_many_ids_as_a_request_can_name_is_started(anna: Visitor) -> None:
    asked = {"verb": "cancel_tasks", "ids": [new_id() for _ in range(1_600)], "dry_run": True}
    dry_run = anna.api("/orders", asked).json()
    assert dry_run["refused"] == {"not found": 1_600}
    started = anna.api("/orders", {"order": dry_run["order"]})
    assert started.status_code == 202, started.text
    assert anna.finish(dry_run["order_id"])["refused"] == {"not found": 1_600}


def test_an_order_needs_the_right_of_its_verb(app: Horsies, connection: Database) -> None:
    waiting = add_task(connection)
    add_failed(connection, 1)
    operator = Visitor(app, AllowAll("berta"))
    try:
        another = order_of(operator.get("/orders/new?verb=cancel_task"))
    finally:
        operator.close()
    visitor = Visitor(app, OnlyRetries())
    try:
        for path in ("/orders/new?verb=cancel_task", "/live/orders/new?verb=cancel_task"):
            page = visitor.get(path)
            assert page.status_code == 403
            assert "You lack the right cancel_task." in html.unescape(page.text)
        both = visitor.client.request(
            "GET", "/orders/new?verb=cancel_task", data={"verb": "retry_task"}
        )
        assert "can be sent again" in visitor.runner.run(both).text.lower()
        form = visitor.get("/orders/new?verb=retry_task").text
        draft = {"order": re.findall(r'name="order" value="([^"]+)"', form)[0]}
        for answer in (
            visitor.post("/orders/selected?verb=cancel_task", "retry_task", id=waiting, **draft),
            visitor.post("/orders/selected?verb=cancel_task", "cancel_task", id=waiting),
            visitor.post("/orders/selected?verb=cancel_task", "retry_task", id=waiting),
            visitor.post("/orders/selected", "retry_task", id=waiting, verb="cancel_task"),
            visitor.api("/orders", {"verb": "cancel_tasks"}),
            visitor.api("/orders", {"order": another}),
            visitor.post("/orders", "cancel_task", order=another),
            visitor.post("/orders", "retry_task", order=another),
            visitor.api(f"/orders/{another}/stop", draft),
            visitor.api(f"/orders/{another}/stop", ["not an object"]),
        ):
            assert answer.status_code == 403, answer.text
    finally:
        visitor.close()
    assert row_of(connection, waiting)["status"] == "PENDING"
    assert actions(connection) == []


def test_a_key_of_another_order_is_refused(anna: Visitor, connection: Database) -> None:
    waiting = add_task(connection)
    first = anna.api("/orders", {"verb": "retry_tasks"}, idempotency_key="k")
    anna.finish(first.json()["order_id"])
    other = anna.api("/orders", {"verb": "cancel_tasks"}, idempotency_key="k")
    assert (other.status_code, other.json()["code"]) == (409, "KEY_REUSED")
    assert row_of(connection, waiting)["status"] == "PENDING"


def test_the_name_of_a_purged_queue_is_not_read_as_filters(
    anna: Visitor, connection: Database
) -> None:
    anna.dashboard.site.app = None  # which has a list of its queues
    connection.execute("INSERT INTO horsies_queues (queue_name) VALUES ('a&queue=b')")
    answer = anna.post("/queues/a&queue=b/purge", "purge_queue")
    assert parse_qs(urlsplit(answer.headers["location"]).query)["queue"] == ["a&queue=b"]


def test_a_text_that_cannot_be_stored_is_refused(anna: Visitor) -> None:
    for path in ("/schedules/%00/pause", "/queues/default/pause"):
        answer = anna.api(path, {"reason": "a\x00b"})
        assert answer.status_code == 400, answer.text
        assert "NUL" in answer.json()["title"]
    for body in ({"ids": ["\ud800"]}, {"filters": {"error_code": "\ud800"}}):
        answer = anna.api("/orders", {"verb": "retry_tasks", **body})
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_VALUE")
    assert anna.api("/orders", {"order": "\ud800"}).json()["code"] == "STALE_ORDER"


def test_a_deeply_nested_body_is_refused(anna: Visitor) -> None:
    for path in ("/api/orders", "/api/queues/default/pause"):
        sent = anna.client.post(path, content=b"[" * 60_000, headers=INTENT)
        answer = anna.runner.run(sent)
        assert (answer.status_code, answer.json()["title"]) == (400, "The body is not JSON.")


@pytest.mark.parametrize("actions_on", [True, False])
def test_every_change_is_refused_to_a_viewer(
    app: Horsies, connection: Database, actions_on: bool
) -> None:
    visitor = Visitor(app, ViewOnly("anna"), actions=actions_on)
    places = {"{name}": "default", "{id}": UNKNOWN_ID}
    try:
        for route in ROUTES:
            if route.method != "POST":
                continue
            path = route.path
            for place, value in places.items():
                path = path.replace(place, value)
            verb = route.verb if isinstance(route.verb, str) else "retry_task"
            answer = visitor.post(path, verb, headers=INTENT)
            assert answer.status_code == 403, (path, answer.text)
    finally:
        visitor.close()
    assert actions(connection) == []


def test_a_foreign_referer_never_leads_away(anna: Visitor, connection: Database) -> None:
    def after(referer: str) -> str:
        answer = anna.post("/queues/default/pause", "pause_queue", {"Referer": referer})
        return answer.headers["location"]

    assert after("http://localhost/queues?a=1") == "/queues?a=1"
    for foreign in ("http://evil.example/queues", "http://localhost//evil.example/", "http://["):
        assert after(foreign) == "/queues/default"


@pytest.mark.parametrize(
    ("policy", "actions", "code"),
    [(ViewOnly(), True, "NO_RIGHT"), (AllowAll(), False, "ACTIONS_OFF")],
)
def test_a_dry_run_is_refused_before_it_reads_the_database(
    policy: Policy, actions: bool, code: str
) -> None:
    unreachable = Horsies("postgresql://127.0.0.1:1/none")
    visitor = Visitor(unreachable, policy, actions=actions)
    try:
        answer = visitor.get("/orders/new?verb=retry_task")
    finally:
        visitor.close()
    assert answer.status_code == 403
    assert code in answer.text


def test_an_order_survives_a_killed_dashboard(process_url: str, connection: Database) -> None:
    add_failed(connection, 300)
    options = ("--enable-actions", "--database-url", process_url)
    with psycopg.connect(process_url, autocommit=True) as other, served(*options) as server:
        page = server.get("/orders/new?verb=retry_task")
        connection.execute("SELECT pg_advisory_lock(%s)", (LOCK_OF_ORDERS,))
        path = submit(server, page, "/orders").headers["location"]
        wait_until(lambda: lock_waiters(connection) == 1, what="the first batch")
        behind = Thread(target=other.execute, args=(f"SELECT pg_advisory_lock({LOCK_OF_ORDERS})",))
        behind.start()
        wait_until(lambda: lock_waiters(connection) == 2)
        # The lock is fair: the first batch gets it, then the other session, and the second batch waits.
        connection.execute("SELECT pg_advisory_unlock(%s)", (LOCK_OF_ORDERS,))
        behind.join()
        server.process.kill()
        server.process.wait()
        assert resent(connection) == [0, 1]
    with served(*options) as server:
        assert 'data-outcome="running"' in server.get(path).text
        submit(server, server.get(path), "/orders")
        wait_until(lambda: 'data-outcome="done"' in server.get(path).text)
    assert resent(connection) == [1]
    ((*_, outcome, detail),) = actions(connection)
    assert (outcome, detail) == ("done", "300 of 300 changed.")


def submit(server: WebServer, page: httpx.Response, action: str) -> httpx.Response:
    """Send the form of a page with this action."""
    found = re.search(f'action="{action}">(.*?)</form>', page.text, re.DOTALL)
    assert found, page.text
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', found[1]))
    return httpx.post(server.url + action, data=fields, timeout=30)


@pytest.fixture
def shopkeeper(app: Horsies, connection: Database) -> Iterator[Visitor]:
    """A user who may act and see arguments, and an application with a task."""

    @app.task("pay")
    def pay(order: int, amount: float, card: str = "") -> None: ...

    visitor = Visitor(app, AllowAll("anna"), payload=True)
    yield visitor
    visitor.close()


def test_a_task_is_sent_again_with_edited_arguments(
    shopkeeper: Visitor, connection: Database
) -> None:
    task = add_task(
        connection, task_name="pay", status="FAILED", args="[7, 9.5]", kwargs='{"card":"4111"}'
    )
    page = shopkeeper.get(f"/tasks/{task}/edit")
    assert page.status_code == 200
    assert "4111" not in page.text
    shown = html.unescape(re.search(r"(?s)<textarea[^>]*>(.*?)</textarea>", page.text)[1])  # type: ignore[index]
    arguments = json.loads(shown)
    assert arguments == {"order": 7, "amount": 9.5, "card": {"masked": True}}
    text = json.dumps(arguments | {"amount": 12})
    sent = shopkeeper.post(f"/tasks/{task}/retry", "retry_task", arguments=text, reason="price")
    new_id = sent.headers["location"].rpartition("/")[2]
    assert f"To undo it: horsies cancel {new_id}" in (shopkeeper.notice(sent) or "")
    row = row_of(connection, new_id)
    assert json.loads(row["kwargs"]) == {"order": 7, "amount": 12.0, "card": "4111"}
    assert row["args"] == "[]"
    done = shopkeeper.api(f"/tasks/{task}/retry", {"arguments": {"order": 8}}).json()
    assert done["edited"] == ["order"]
    kwargs = json.loads(row_of(connection, done["task_id"])["kwargs"])
    assert kwargs == {"order": 8, "amount": 9.5, "card": "4111"}
    assert [detail for *_, detail in actions(connection)] == [
        "edited amount: price",
        "edited order",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "an object"),
        ('{"order": "x", "amount": 1}', "order"),
        ('{"order": 1, "amount": 1, "note": {"masked": true}}', "masked value"),
    ],
)
def test_edited_arguments_that_do_not_fit_are_refused_and_kept_in_the_form(
    shopkeeper: Visitor, connection: Database, text: str, problem: str
) -> None:
    task = add_task(connection, task_name="pay", status="FAILED", args="[7, 9.5]")
    answer = shopkeeper.post(f"/tasks/{task}/retry", "retry_task", arguments=text)
    assert (answer.status_code, problem in html.unescape(answer.text)) == (422, True)
    assert text in html.unescape(answer.text)
    assert "Nothing was sent." in answer.text
    assert resent(connection) == [0]


def test_arguments_are_edited_only_where_they_are_known_and_seen(
    anna: Visitor, shopkeeper: Visitor, connection: Database
) -> None:
    unknown = add_task(connection, task_name="gone", status="FAILED")
    answer = shopkeeper.get(f"/tasks/{unknown}/edit")
    assert (answer.status_code, "needs the application" in answer.text) == (409, True)
    task = add_task(connection, task_name="pay", status="FAILED", args="[7, 9.5]")
    for hidden in (
        anna.get(f"/tasks/{task}/edit"),
        anna.api(f"/tasks/{task}/retry", {"arguments": {"order": 1}}),
    ):
        assert hidden.status_code == 403
    assert shopkeeper.get(f"/tasks/{UNKNOWN_ID}/edit").status_code == 404
    wrong = shopkeeper.api(f"/tasks/{task}/retry", {"arguments": {"order": "x"}})
    assert (wrong.status_code, "Nothing was sent." in wrong.text) == (400, True)
    assert resent(connection) == [0]


def test_the_event_of_a_delivery_is_sent_again_only_as_it_is(
    app: Horsies, connection: Database
) -> None:
    hook = Webhook(name="alerts", url="https://example.com/", secret="s" * 32, on=["task.failed"])
    hooked = Horsies(AppConfig(broker=app.config.broker, webhooks=[hook]))
    visitor = Visitor(hooked, AllowAll("anna"), payload=True)
    try:
        kwargs = '{"event": {"id": "1"}}'
        name = "horsies.webhook.alerts"
        task = add_task(connection, task_name=name, status="FAILED", kwargs=kwargs)
        forged = {"event": {"id": "2"}}
        for refused in (
            visitor.get(f"/tasks/{task}/edit"),
            visitor.post(f"/tasks/{task}/retry", "retry_task", arguments=json.dumps(forged)),
            visitor.api(f"/tasks/{task}/retry", {"arguments": forged}),
        ):
            assert (refused.status_code, "belongs to horsies itself" in refused.text) == (409, True)
        assert f"/tasks/{task}/edit" not in visitor.get(f"/tasks/{task}").text
        assert resent(connection) == [0]
        again = visitor.api(f"/tasks/{task}/retry").json()
        assert row_of(connection, again["task_id"])["kwargs"] == kwargs
    finally:
        visitor.close()


def test_the_form_of_a_timing_shows_the_slots_keeps_what_was_typed_and_saves(
    app: Horsies, anna: Visitor, connection: Database
) -> None:
    @app.task("report")
    def report() -> None: ...

    daily = TaskSchedule(name="nightly", task_name="report", pattern=DailySchedule(time=time(3)))
    app.schedules.add(daily).unwrap()
    path, right = "/schedules/nightly/edit", "control_schedule"
    zone: dict[str, Any] = {"timezone": "Asia/Tokyo"}
    shown = anna.post(path, right, pattern="every 2 hours", dry_run="1", **zone)
    assert shown.status_code == 200
    listed = [part.split("</ol>")[0] for part in shown.text.split('class="slot-list">')[1:]]
    assert [part.count("<li>") for part in listed] == [10, 10]
    assert 'value="every 2 hours"' in shown.text
    typo = anna.post(path, right, pattern="<every> hour", **zone)
    assert typo.status_code == 422
    assert 'value="&lt;every&gt; hour"' in typo.text
    assert "it has none of these forms" in typo.text
    bad_zone = anna.post(path, right, pattern="every hour at :15", timezone="Mars/Olympus")
    assert bad_zone.status_code == 422
    assert not app.schedules.list().unwrap()[0].is_edited
    saved = anna.post(path, right, pattern="0 4 * * *", **zone)
    assert anna.notice(saved) == (
        "Schedule nightly fires 0 4 * * *, Asia/Tokyo. To undo it: horsies schedules reset nightly"
    )
    reset = anna.post("/schedules/nightly/reset", right)
    undoing = "horsies schedules edit nightly --pattern '0 4 * * *' --timezone Asia/Tokyo"
    assert undoing in (anna.notice(reset) or "")
    again = anna.post("/schedules/nightly/reset", right)
    assert anna.notice(again) == "Schedule nightly has this timing already."
