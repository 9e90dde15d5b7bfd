"""Keys on the dashboard: the section of a queue's page, its buttons and their twins below /api."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from horsies import Horsies
from horsies.monitor.panels import KEYS_SHOWN
from horsies.web import AllowAll, ViewOnly
from tests.support.database import Database
from tests.support.keys import add_keyed, limit
from tests.support.rows import actions, add_task, ago
from tests.support.web_site import cells
from tests.support.web_visitor import Visitor

HOSTILE = "</td><script>alert(1)</script>"


@pytest.fixture
def anna(app: Horsies, connection: Database) -> Iterator[Visitor]:
    visitor = Visitor(app, AllowAll("anna"))
    yield visitor
    visitor.close()


def test_a_queue_without_keys_has_no_section(anna: Visitor, connection: Database) -> None:
    add_task(connection)
    page = anna.get("/queues/default").text
    assert "<h2>Keys</h2>" not in page
    assert "Change a key…" in page  # which may be limited before its first task is sent


def test_keys_are_shown_with_tasks_limits_and_buttons(anna: Visitor, connection: Database) -> None:
    limit(connection, max_concurrency=2)
    add_keyed(connection, "acme", 3)
    add_keyed(connection, HOSTILE)
    page = anna.get("/queues/default").text
    row = cells(page, "acme")
    assert (row["Due"], row["In flight"], row["Limits"]) == ("3", "0 / 2", "at most 2")
    assert 'action="/queues/default/keys/pause"' in page
    assert "<script>alert" not in page


def test_the_front_of_a_queue_shows_keys_in_turn(anna: Visitor, connection: Database) -> None:
    add_keyed(connection, "noisy", 3, task_name="loud", enqueued_at=ago(90))
    add_keyed(connection, "quiet", task_name="soft", enqueued_at=ago(50))
    add_keyed(connection, "stopped", task_name="never", enqueued_at=ago(900))
    add_task(connection, task_name="plain", enqueued_at=ago(70))
    limit(connection, "stopped", paused_at="2026-01-01")
    page = anna.get("/queues/default").text
    front = re.search(r'data-region="front">(.*?)</section>', page, re.DOTALL)
    assert front is not None
    shown = re.findall(r"loud|soft|plain|never", front[1])
    assert shown == ["loud", "plain", "soft", "loud", "loud"]


def test_a_key_is_paused_and_resumed_with_author_and_reason(
    anna: Visitor, connection: Database
) -> None:
    add_keyed(connection, HOSTILE)
    paused = anna.post("/queues/default/keys/pause", "pause_key", key=HOSTILE, reason="asked")
    assert paused.headers["location"] == "/queues/default"
    assert anna.notice(paused) == f"Key {HOSTILE} of queue default is paused."
    page = anna.get("/queues/default").text
    assert 'action="/queues/default/keys/resume"' in page
    assert "asked" in page
    (listed,) = anna.get("/api/queues/default/keys").json()["keys"]
    assert (listed["key"], listed["paused"], listed["pause_reason"]) == (HOSTILE, True, "asked")
    resumed = anna.api("/queues/default/keys/resume", {"key": HOSTILE})
    assert (resumed.status_code, resumed.json()["paused"]) == (200, False)
    subject = f"key {HOSTILE} of queue default"
    assert [row[:4] for row in actions(connection)] == [
        ("anna", "pause_key", subject, "done"),
        ("anna", "resume_key", subject, "done"),
    ]


def test_a_key_that_is_not_listed_is_changed_with_the_form(
    anna: Visitor, connection: Database
) -> None:
    keys = [f"customer-{number:02}" for number in range(KEYS_SHOWN + 1)]
    for key in keys:
        add_keyed(connection, key)
    page = anna.get("/queues/default").text
    (key,) = [one for one in keys if f'data-key="{one}"' not in page]
    for button in ("set", "clear", "pause", "resume"):
        assert f'formaction="/queues/default/keys/{button}"' in page

    fields: dict[str, Any] = {"max_concurrency": "3", "rate": "10/4", "burst": "5", "weight": ""}
    limited = anna.post("/queues/default/keys/set", "limit_key", key=key, reason="plan", **fields)
    limits = "at most 3, 2.5 per second, burst 5"
    assert anna.notice(limited) == f"The limits of key {key} of queue default: {limits}."
    anna.post("/queues/default/keys/set", "limit_key", key=key, max_concurrency="", weight="2")
    anna.post("/queues/default/keys/pause", "pause_key", key=key, reason="asked")
    page = anna.get("/queues/default").text
    assert cells(page, key)["Limits"] == f"{limits}, weight 2 of its own"
    assert "asked" in page

    cleared = anna.post("/queues/default/keys/clear", "limit_key", key=key)
    assert anna.notice(cleared) == f"The limits of key {key} of queue default: none."
    resumed = anna.post("/queues/default/keys/resume", "pause_key", key=key)
    assert anna.notice(resumed) == f"Key {key} of queue default is not paused."
    verbs = ("set", "set", "pause", "clear", "resume")
    assert [row[:2] for row in actions(connection)] == [("anna", f"{verb}_key") for verb in verbs]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "Enter at least one of the limits max_concurrency, rate, weight."),
        ({"max_concurrency": "two"}, "max_concurrency must be a whole number, not 'two'."),
        (
            {"max_concurrency": "-1"},
            "max_concurrency: input should be greater than or equal to 0.",
        ),
        (
            {"rate": "fast"},
            "rate takes a number of starts and a number of seconds, as 100/60, not 'fast'.",
        ),
        ({"rate": "0/60"}, "rate: Rate.count: input should be greater than or equal to 1."),
        (
            {"rate": "9/60", "burst": "0"},
            "rate: Rate.burst: input should be greater than or equal to 1.",
        ),
        ({"burst": "2", "weight": "2"}, "A burst needs a rate."),
        ({"weight": "heavy"}, "weight must be a number, not 'heavy'."),
        ({"weight": "0"}, "weight: input should be greater than or equal to 0.01."),
        ({"key": "", "weight": "2"}, "Key must have 1 to 255 characters, not 0."),
        ({"key": "k" * 256, "weight": "2"}, "Key must have 1 to 255 characters, not 256."),
    ],
)
def test_bad_input_of_the_form_gets_one_sentence(
    anna: Visitor, connection: Database, fields: dict[str, Any], sentence: str
) -> None:
    refused = anna.post("/queues/default/keys/set", "limit_key", **{"key": "acme", **fields})
    assert refused.headers["location"] == "/queues/default"
    assert anna.notice(refused) == sentence
    assert connection.execute("SELECT FROM horsies_lanes").fetchall() == []


def test_refusals(anna: Visitor, connection: Database) -> None:
    assert anna.api("/queues/mial/keys/pause", {"key": "acme"}).status_code == 404
    assert anna.get("/api/queues/mial/keys").status_code == 404
    assert anna.get("/api/queues/default/keys?limit=0").status_code == 400
    for body in ({}, {"key": 7}):
        answer = anna.api("/queues/default/keys/pause", body)
        assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_VALUE")
    empty = anna.api("/queues/default/keys/pause", {"key": ""})
    assert empty.json()["code"] == "INVALID_QUERY"
    assert connection.execute("SELECT FROM horsies_lanes").fetchall() == []


def test_a_key_gets_its_own_limits_and_loses_them(anna: Visitor, connection: Database) -> None:
    limits = {"max_concurrency": 3, "rate": {"count": 10, "per_seconds": 2, "burst": 4}}
    changed = anna.api("/queues/default/keys/set", {"key": "acme", "reason": "plan", **limits})
    assert changed.status_code == 200
    stored = "SELECT lane_key, max_concurrency, rate_seconds, rate_burst FROM horsies_lanes"
    assert connection.execute(stored).fetchall() == [("acme", 3, 0.2, 4)]
    anna.api("/queues/default/keys/set", {"key": "acme", "rate": None, "weight": 2})
    shown = anna.get("/api/queues/default/keys").json()["keys"][0]
    assert (shown["max_concurrency"], shown["rate_seconds"], shown["weight"]) == (3, None, 2)
    assert anna.api("/queues/default/keys/clear", {"key": "acme"}).status_code == 200
    assert connection.execute(stored).fetchall() == []
    assert [row[:2] for row in actions(connection)] == [
        *[("anna", "set_key")] * 2,
        ("anna", "clear_key"),
    ]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_concurrency": -1},
        {"rate": {"count": 0, "per_seconds": 1}},
        {"rate": "10/s"},
        {"queue": "other", "weight": 1},
    ],
)
def test_limits_that_a_key_cannot_have_are_refused(
    anna: Visitor, connection: Database, limits: dict[str, object]
) -> None:
    answer = anna.api("/queues/default/keys/set", {"key": "acme", **limits})
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_VALUE")
    assert "-->" not in answer.text, "the place of an error in the code is nobody's business"
    assert connection.execute("SELECT FROM horsies_lanes").fetchall() == []


def test_a_viewer_sees_keys_and_may_not_change_them(app: Horsies, connection: Database) -> None:
    add_keyed(connection, "acme")
    viewer = Visitor(app, ViewOnly("anna"))
    try:
        page = viewer.get("/queues/default").text
        assert "acme" in page
        assert "/queues/default/keys/" not in page
        for verb, right in (("pause", "pause_key"), ("set", "limit_key"), ("clear", "limit_key")):
            path = f"/queues/default/keys/{verb}"
            assert viewer.post(path, right, key="acme", weight="2").status_code == 403
            assert viewer.api(path, {"key": "acme", "weight": 2}).status_code == 403
    finally:
        viewer.close()
    assert connection.execute("SELECT FROM horsies_lanes").fetchall() == []
