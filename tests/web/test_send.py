"""`/send`: a new task from the page, checked by its parameters, shown before it is sent, and recorded."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from horsies import Horsies
from horsies.tasks.options import OutgoingTask
from horsies.web import VERBS, Access, AllowAll
from tests.support.database import Database
from tests.support.web_axe import found_on
from tests.support.web_keyboard import WIDTHS, enter, tab_to
from tests.support.web_server import WebServer, served, watched
from tests.support.web_visitor import Visitor
from tests.support.workers import DATABASE_VARIABLE

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def shop(app: Horsies, connection: Database) -> Iterator[Visitor]:
    """A user who may send, and an application with tasks."""

    @app.task("pay")
    def pay(order: int, note: str, card: str = "", **more: int) -> None: ...

    @app.task(HOSTILE)
    def hostile(text: str) -> None: ...

    @app.task("old")
    def old(order: int, /) -> None: ...

    visitor = Visitor(app, AllowAll("anna"))
    yield visitor
    visitor.close()


def sent(connection: Database) -> list[tuple[str, dict[str, object]]]:
    rows = connection.execute("SELECT task_name, kwargs FROM horsies_tasks ORDER BY id").fetchall()
    return [(name, json.loads(kwargs)) for name, kwargs in rows]


def recorded(connection: Database) -> list[tuple[str, ...]]:
    return connection.execute(
        "SELECT actor, source, verb, outcome, detail FROM horsies_actions ORDER BY id"
    ).fetchall()


def stamp_of(text: str) -> str:
    found = re.search(r'name="stamp" value="([^"]+)"', text)
    assert found is not None, text
    return html.unescape(found[1])


FIELDS: dict[str, Any] = {
    "task": "pay",
    "argument.order": "7",
    "argument.note": "say yes",
    "reason": "order 7",
}


def test_a_task_is_shown_sent_once_and_recorded(shop: Visitor, connection: Database) -> None:
    form = shop.get("/send?task=pay").text
    assert 'name="argument.order"' in form
    assert "Send now" not in form
    checked = shop.post("/send", "send_task", **{**FIELDS, "argument.card": "4111"})
    assert checked.status_code == 200
    assert "Ready to send" in checked.text
    assert sent(connection) == []
    stamp = stamp_of(checked.text)
    ready = {**FIELDS, "argument.card": "4111", "argument.": ' {"gift": 1}'}
    other = shop.post("/send", "send_task", **ready, stamp=stamp)  # never shown with a gift
    assert (other.status_code, sent(connection)) == (200, [])
    ready.pop("argument.")
    done = shop.post("/send", "send_task", **ready, stamp=stamp)
    new_id = done.headers["location"].rpartition("/")[2]
    assert shop.notice(done) == (
        f"Task pay was sent as this one. To undo it: horsies cancel {new_id}"
    )
    again = shop.post("/send", "send_task", **ready, stamp=stamp)
    assert again.headers["location"] == done.headers["location"]
    assert sent(connection) == [("pay", {"order": 7, "note": "say yes", "card": "4111"})]
    assert recorded(connection) == [
        ("anna", "web", "send_task", "done", "pay: order 7"),
        ("anna", "web", "send_task", "unchanged", "order 7"),
    ]
    assert new_id in shop.get("/history").text


def test_a_masked_argument_is_not_shown_where_it_is_confirmed(shop: Visitor) -> None:
    checked = shop.post("/send", "send_task", **{**FIELDS, "argument.card": "4111 1111"})
    (shown,) = re.findall(r"(?s)<pre.*?</pre>", checked.text)
    assert "4111" not in shown


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"argument.order": "seven"}, "order is not JSON"),
        ({"argument.order": '"seven"'}, "order"),
        ({"argument.order": ""}, "Argument 'order' is missing"),
        ({"argument.ordr": "7"}, "no parameter 'ordr'"),
        ({"argument.": "[1]"}, "More arguments are an object"),
        ({"argument.": '{"note": "twice"}'}, "names that no other field has"),
        ({"argument.": '{"gift": "x"}'}, "gift"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_and_kept_in_the_form(
    shop: Visitor, connection: Database, change: dict[str, Any], problem: str
) -> None:
    answer = shop.post("/send", "send_task", **{**FIELDS, **change})
    text = html.unescape(answer.text)
    assert (answer.status_code, problem in text, "Nothing was sent." in text) == (422, True, True)
    assert "say yes" in text
    assert all(value in text for name, value in change.items() if name != "argument.ordr")
    assert sent(connection) == []
    assert recorded(connection) == []


def test_the_api_sends_at_once_and_checks_in_the_same_way(
    shop: Visitor, connection: Database
) -> None:
    call = {"task": "pay", "arguments": {"order": 7, "note": "x", "gift": 1}}
    assert shop.api("/send", call | {"dry_run": True}).json()["dry_run"] is True
    assert sent(connection) == []
    done = shop.api("/send", call | {"reason": "by a bot"}).json()
    assert (done["task_name"], done["queue_name"]) == ("pay", "default")
    assert sent(connection) == [("pay", call["arguments"])]
    for body, status, words in (
        (call | {"arguments": {"order": "x", "note": "y"}}, 400, "Nothing was sent"),
        (call | {"arguments": [1]}, 400, "an object"),
        (call | {"args": {}}, 400, "no member 'args'"),
        (call | {"task": "nobody"}, 404, "has no task"),
        (call | {"task": None}, 404, "has no task"),
        (call | {"task": "old"}, 409, "without names"),
        (call | {"reason": 1}, 400, "reason must be text"),
    ):
        answer = shop.api("/send", body)
        assert (answer.status_code, words in answer.text) == (status, True), answer.text
    assert len(sent(connection)) == 1
    keyed = {"Idempotency_Key": "incident-17"}
    first, again = (shop.api("/send", call, **keyed).json() for _ in range(2))
    assert first["task_id"] == again["task_id"]
    other = shop.api("/send", {**call, "arguments": {"order": 8, "note": "x"}}, **keyed)
    assert (other.status_code, other.json()["code"]) == (409, "PAYLOAD_MISMATCH")
    assert len(sent(connection)) == 2
    assert [row[3] for row in recorded(connection)] == ["done", "done", "unchanged"]


def test_hostile_names_and_values_are_text(shop: Visitor, connection: Database) -> None:
    names = shop.get("/send").text
    assert html.escape(HOSTILE) in names
    fields: dict[str, Any] = {"task": HOSTILE, "argument.text": HOSTILE, "reason": HOSTILE}
    for page in (names, shop.post("/send", "send_task", **fields).text):
        assert HOSTILE not in page
        assert "<img" not in page
    stamp = stamp_of(shop.post("/send", "send_task", **fields).text)
    done = shop.post("/send", "send_task", **fields, stamp=stamp)
    assert sent(connection) == [(HOSTILE, {"text": HOSTILE})]
    for path in (done.headers["location"], "/history", f"/names/{HOSTILE.replace('/', '%2F')}"):
        assert "<img" not in shop.get(path).text, path


def test_hooks_of_the_application_see_the_send(
    app: Horsies, shop: Visitor, connection: Database
) -> None:
    @app.on_send
    def add_tenant(outgoing: OutgoingTask) -> None:
        outgoing.headers["tenant"] = "north"

    shop.api("/send", {"task": "pay", "arguments": {"order": 7, "note": "x"}})
    ((options,),) = connection.execute("SELECT task_options FROM horsies_tasks").fetchall()
    assert json.loads(options)["headers"] == {"tenant": "north"}


class MayNotSend:
    """A user who may do everything else."""

    async def access(self, request: object) -> Access:
        return Access("anna", VERBS - {"send_task"}, sees_payload=True)


def test_without_the_right_the_token_or_the_application_nothing_is_sent(
    app: Horsies, shop: Visitor, connection: Database
) -> None:
    other = Visitor(app, MayNotSend())
    read_only = Visitor(app, AllowAll("anna"), actions=False)
    try:
        call = {"task": "pay", "arguments": {"order": 7, "note": "x"}}
        for visitor in (other, read_only):
            assert visitor.get("/send?task=pay").status_code == 403
            assert visitor.post("/send", "send_task", **FIELDS).status_code == 403
            assert visitor.api("/send", call).status_code == 403
            assert "/send?task" not in visitor.get("/names/pay").text
        assert "/send?task=pay" in shop.get("/names/pay").text
        # A form of another site, a token of another change, and a stamp of another user.
        evil = {"Origin": "https://evil.example"}
        assert shop.post("/send", "send_task", evil, **FIELDS).status_code == 403
        assert shop.post("/send", "retry_task", **FIELDS).status_code == 403
        forged = shop.dashboard.site.signer.sealed("send bert", "x y z", 60)
        assert "Ready to send" in shop.post("/send", "send_task", **FIELDS, stamp=forged).text
        without = shop.post("/send", "send_task", **{**FIELDS, "task": "horsies.findings"})
        assert without.status_code in (404, 409)
    finally:
        other.close()
        read_only.close()
    assert sent(connection) == []


def test_a_dashboard_without_the_application_says_what_it_needs(
    dashboard: WebServer, connection: Database
) -> None:
    answer = dashboard.get("/send")
    assert (answer.status_code, "needs the application" in answer.text) == (409, True)


def test_suppressed_sends_stay_suppressed(
    app: Horsies, shop: Visitor, connection: Database
) -> None:
    app.suppress_sends()
    answer = shop.api("/send", {"task": "pay", "arguments": {"order": 7, "note": "x"}})
    assert (answer.status_code, answer.json()["code"]) == (409, "SEND_SUPPRESSED")
    assert sent(connection) == []


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_task_is_sent_with_the_keyboard_alone(
    browser: Browser, connection: Database, process_url: str, width: int
) -> None:
    options = ("tests.support.apps.programs:app", "--enable-actions")
    with (
        served(*options, env={DATABASE_VARIABLE: process_url}) as server,
        watched(browser, server, bypass_csp=True, viewport={"width": width, "height": 900}) as tabs,
    ):
        page = tabs.new_page()
        page.goto("/send?task=log_lines")
        tab_to(page, "argument.text")
        page.keyboard.type("<b>ünïcode</b>")
        enter(page)  # checks: the first button of the form
        assert found_on(page, [width]) == {}
        assert sent(connection) == []
        tab_to(page, "Send now")
        enter(page)
        expect(page.get_by_text("Task log_lines was sent as this one.")).to_be_visible()
        assert sent(connection) == [("log_lines", {"text": "<b>ünïcode</b>"})]
