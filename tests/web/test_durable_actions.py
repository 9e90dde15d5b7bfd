"""Runs of durable functions on the dashboard: signals, resumes and resets, and their refusals and records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import pytest
from playwright.sync_api import Browser, expect
from pydantic import BaseModel

from horsies import Durable, Horsies, TaskFunction, TaskHandle
from horsies.testing import clock_of, run_pending
from horsies.web import AllowAll, ViewOnly
from tests.support.database import Database
from tests.support.rows import UNKNOWN_ID, actions, add_task
from tests.support.web_server import WebServer, watched
from tests.support.web_visitor import Visitor


class Approval(BaseModel):
    by: str


names = ["first"]


@pytest.fixture
def release(app: Horsies) -> TaskFunction[[], str]:
    names[0] = "first"

    @app.durable("release", signals={"approve": Approval})
    def release(ctx: Durable) -> str:
        ctx.with_options(name=names[0]).step(abs, 1)
        ctx.with_options(name="second").step(abs, 2)
        ctx.sleep(timedelta(days=1))
        approval = ctx.wait_signal("approve", Approval)
        ctx.with_options(name="last").step(abs, 3)
        return approval.by

    return release


@pytest.fixture
def anna(app: Horsies, connection: Database) -> Iterator[Visitor]:
    visitor = Visitor(app, AllowAll("anna"))
    yield visitor
    visitor.close()


def waiting(app: Horsies, release: TaskFunction[[], str]) -> TaskHandle[str]:
    """A run that waits for its signal."""
    sent = release.enqueue()
    run_pending(app)
    clock_of(app).advance(timedelta(days=2))
    run_pending(app)
    return sent


def held(app: Horsies, release: TaskFunction[[], str]) -> TaskHandle[str]:
    """A run whose code has changed."""
    sent = release.enqueue()
    run_pending(app)
    names[0] = "renamed"
    clock_of(app).advance(timedelta(days=2))
    run_pending(app)
    return sent


def test_the_overview_counts_parked_and_held_runs_apart_from_waiting_tasks(
    app: Horsies, anna: Visitor, release: TaskFunction[[], str]
) -> None:
    assert "parked runs" not in anna.get("/").text
    held(app, release)
    names[0] = "first"
    waiting(app, release)
    totals = anna.get("/api/overview").json()["totals"]
    assert totals["durable_runs"] == {"parked": 1, "held": 1}
    assert re.search(r"parked runs, <span[^>]*>1 held</span>", anna.get("/").text)


def test_a_signal_is_sent_and_its_value_is_checked(
    anna: Visitor, app: Horsies, connection: Database, release: TaskFunction[[], str]
) -> None:
    sent = waiting(app, release)
    path = f"/tasks/{sent.task_id}"
    page = anna.get(path).text
    assert "<option>approve</option>" in page
    assert "Resume…" not in page
    wrong = anna.post(f"{path}/signal", "signal_run", name="approve", value="yes")
    assert "not JSON" in (anna.notice(wrong) or "")
    wrong = anna.post(f"{path}/signal", "signal_run", name="approve", value='{"who": 1}')
    assert "The signal 'approve' was not sent" in (anna.notice(wrong) or "")
    unknown = anna.api(f"{path}/signal", {"name": "aprove", "value": 1})
    assert (unknown.status_code, unknown.json()["code"]) == (409, "SIGNAL_NOT_FOUND")
    assert anna.api(f"{path}/signal", {"value": 1}).status_code == 400
    done = anna.post(f"{path}/signal", "signal_run", name="approve", value='{"by": "ada"}')
    assert anna.notice(done) == "Signal approve is delivered."
    run_pending(app)
    assert sent.result(timeout_ms=0) == "ada"
    late = anna.api(f"{path}/signal", {"name": "approve", "value": {"by": "eve"}})
    assert (late.status_code, late.json()["code"]) == (409, "TASK_ENDED")
    assert "Send a signal" not in anna.get(path).text
    rows = [row[1:4] for row in actions(connection)]
    subject = f"task {sent.task_id}"
    ends = ["refused", "refused", "done", "refused"]
    assert rows == [("signal_run", subject, end) for end in ends]


def test_a_held_run_is_resumed(
    anna: Visitor, app: Horsies, connection: Database, release: TaskFunction[[], str]
) -> None:
    sent = held(app, release)
    path = f"/tasks/{sent.task_id}"
    assert "Resume…" in anna.get(path).text
    names[0] = "first"
    done = anna.post(f"{path}/resume", "control_run", reason="the code is back")
    assert (anna.notice(done) or "").startswith(f"Run {sent.task_id} is resumed.")
    run_pending(app)
    assert app.durable_handle(sent.task_id).info().unwrap().signals == ["approve"]
    again = anna.api(f"{path}/resume")
    assert (again.status_code, again.json()["code"]) == (409, "TASK_NOT_HELD")
    assert [row[1:4] for row in actions(connection)] == [
        ("resume_run", f"task {sent.task_id}", "done"),
        ("resume_run", f"task {sent.task_id}", "refused"),
    ]
    assert "the code is back" in anna.get("/history").text


def test_a_run_is_reset_to_a_step(
    anna: Visitor, app: Horsies, connection: Database, release: TaskFunction[[], str]
) -> None:
    sent = held(app, release)
    path = f"/tasks/{sent.task_id}"
    page = anna.get(path).text
    assert '<option value="second">' in page
    missing = anna.post(f"{path}/reset", "control_run", step="third")
    assert anna.notice(missing) == (
        f"Run {sent.task_id} has no recorded step 'third'; its steps are 'first', 'second', 'sleep'."
    )
    assert anna.api(f"{path}/reset").status_code == 400
    done = anna.post(f"{path}/reset", "control_run", step="first", reason="renamed")
    assert anna.notice(done) == (
        f"Run {sent.task_id} has forgotten 3 steps and continues with first. This cannot be undone."
    )
    run_pending(app)
    steps = app.durable_handle(sent.task_id).info().unwrap().steps
    assert [one.name for one in steps] == ["renamed", "second", "sleep"]
    answer = anna.api(f"{path}/reset", {"step": "sleep"})
    assert answer.json() == {"task_id": sent.task_id, "step": "sleep", "forgotten": 1}
    assert [row[1::2] for row in actions(connection)] == [
        ("reset_run", "refused"),
        *[("reset_run", "done")] * 2,
    ]


def test_other_tasks_and_viewers_have_no_such_buttons(
    anna: Visitor, app: Horsies, connection: Database, release: TaskFunction[[], str]
) -> None:
    plain = add_task(connection)
    page = anna.get(f"/tasks/{plain}").text
    assert "Send a signal" not in page
    assert "Reset…" not in page
    for what, body in (("signal", {"name": "go"}), ("resume", {}), ("reset", {"step": "one"})):
        assert anna.api(f"/tasks/{UNKNOWN_ID}/{what}", body).status_code == 404
    sent = held(app, release)
    viewer = Visitor(app, ViewOnly("vera"))
    try:
        page = viewer.get(f"/tasks/{sent.task_id}").text
        assert "HELD_BY_RECORD" in page
        assert not any(word in page for word in ("Send a signal", "Resume…", "Reset…"))
        refused = viewer.api(f"/tasks/{sent.task_id}/reset", {"step": "first"})
        assert refused.status_code == 403
    finally:
        viewer.close()


@pytest.mark.browser
@pytest.mark.parametrize("has_script", [False, True], ids=["without script", "with script"])
def test_the_buttons_reset_resume_and_signal_a_run(
    browser: Browser, dashboard: WebServer, app: Horsies, connection: Database, has_script: bool
) -> None:
    codes = ["first"]

    @app.durable("paper")
    def paper(ctx: Durable) -> str:
        ctx.with_options(name=codes[0]).step(abs, 1)
        ctx.on_cancel(print)
        ctx.sleep(timedelta(days=1))
        return ctx.wait_signal("approve", str)

    sent = paper.enqueue()
    run_pending(app)
    codes[0] = "renamed"
    clock_of(app).advance(timedelta(days=2))
    run_pending(app)
    with watched(browser, dashboard, java_script_enabled=has_script) as context:
        page = context.new_page()
        page.goto(f"{dashboard.url}/tasks/{sent.task_id}")
        expect(page.locator("main")).to_contain_text("HELD_BY_RECORD")
        expect(page.get_by_role("row").filter(has_text="on_cancel:print")).to_contain_text(
            "registered"
        )
        page.get_by_text("Resume…").click()
        page.get_by_label("Reason").locator("visible=true").fill("it fits now")
        page.get_by_role("button", name="Resume the run").click()
        expect(page.get_by_role("status")).to_contain_text(f"Run {sent.task_id} is resumed.")
        run_pending(app)  # the code still does not fit
        page.reload()
        page.get_by_text("Reset…").click()
        page.get_by_label("Step").select_option("first")
        page.get_by_role("button", name="Reset the run").click()
        expect(page.get_by_role("status")).to_contain_text("has forgotten 3 steps")
        run_pending(app)
        clock_of(app).advance(timedelta(days=2))
        run_pending(app)
        page.reload()
        # The reloaded page may be the copy of the last automatic update, which is a moment older.
        expect(page.locator("select[name=name] option")).to_have_text("approve")
        page.get_by_text("Send a signal…").click()
        page.get_by_label("Value, as JSON").fill('"yes"')
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.get_by_role("status")).to_contain_text("Signal approve is delivered.")
        run_pending(app)
        page.reload()
        expect(page.get_by_text("Send a signal…")).to_have_count(0)
    assert sent.result(timeout_ms=0) == "yes"
