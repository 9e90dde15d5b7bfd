"""The pages of tasks in a real browser: live states of a real worker's tasks, keys, selection."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from horsies import Horsies, RetryPolicy
from tests.support.database import Database
from tests.support.rows import add_task, finish
from tests.support.wait import wait_until
from tests.support.web_keyboard import WIDTHS, resize
from tests.support.workers import Fleet

pytestmark = pytest.mark.browser


def count(connection: Database, query: str, task_id: str) -> int:
    found = connection.execute(query.encode(), (task_id,)).fetchone()
    assert found is not None
    return int(found[0])


def test_the_page_of_a_task_follows_a_real_worker_without_a_reload(
    page: Page, app: Horsies, fleet: Fleet, connection: Database
) -> None:
    policy = RetryPolicy.fixed(
        [1, 1], auto_retry_for=["tests.support.apps.programs.Away"], jitter=False
    )

    @app.task("raise_then_work", retry_policy=policy)
    def raise_then_work() -> None: ...

    @app.task("sleep")
    def sleep(seconds: float) -> None: ...

    failing, sleeping = raise_then_work.send().unwrap().task_id, sleep.send(20).unwrap().task_id
    page.goto(f"/tasks/{failing}")
    other = page.context.new_page()
    other.goto(f"/tasks/{sleeping}")
    state, other_state = page.locator("[data-region=state]"), other.locator("[data-region=state]")
    expect(state).to_contain_text("pending")
    for tab in (page, other):
        tab.evaluate("window.isSamePage = true")

    page.bring_to_front()
    fleet.start(processes=2)
    attempts = "SELECT count(*) FROM horsies_task_attempts WHERE task_id = %s"
    wait_until(lambda: count(connection, attempts, failing) == 1)
    first = page.locator("[data-key='attempt-1']")
    expect(first).to_contain_text("retried by")
    ended = "SELECT count(*) FROM horsies_tasks WHERE id = %s AND status = 'FAILED'"
    wait_until(lambda: count(connection, ended, failing) == 1)
    expect(state).to_contain_text("failed")
    expect(page.locator("[data-region=error]")).to_contain_text("KeyError")
    expect(page.locator("[data-region=error]")).to_contain_text("programs.py")
    expect(page.locator("[data-region=attempts] tbody tr")).to_have_count(3)
    assert page.evaluate("window.isSamePage") is True

    other.bring_to_front()
    expect(other_state).to_contain_text("running")
    assert other.evaluate("window.isSamePage") is True


@pytest.mark.parametrize("width", WIDTHS)
def test_keys_move_and_select_and_a_selection_survives_live_updates(
    page: Page, connection: Database, width: int
) -> None:
    resize(page, width)
    ids = [add_task(connection) for _ in range(3)][::-1]
    page.goto("/tasks")
    row = [page.locator(f"tr[data-key='{one}']") for one in ids]
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(row[1].locator("a").first).to_be_focused()
    page.keyboard.press("x")
    box = row[1].locator("[data-select]")
    expect(box).to_be_checked()
    expect(page.locator("[data-selected-count]")).to_have_text("1")
    page.keyboard.press("k")
    expect(row[0].locator("a").first).to_be_focused()

    # While a row is selected nothing changes under the pointer; then all changes arrive.
    finish(connection, ids[2])
    newer = add_task(connection)
    with page.expect_event("console", lambda message: message.text == "sample") as _:
        page.evaluate(
            "document.querySelector('main').addEventListener('horsies:sample', "
            "() => console.log('sample'), {once: true})"
        )
    expect(row[2]).to_contain_text("pending")
    expect(box).to_be_checked()
    page.context.watch.expected.append("sample")  # type: ignore[attr-defined]
    box.uncheck()
    expect(row[2]).to_contain_text("completed")
    expect(page.get_by_text("1 newer")).to_be_visible()
    expect(page.locator(f"tr[data-key='{newer}']")).to_have_count(0)

    page.keyboard.press("k")
    expect(row[0].locator("a").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{page.url.split('/tasks')[0]}/tasks/{ids[0]}")


def test_a_newer_task_leaves_the_focus_on_its_row(page: Page, connection: Database) -> None:
    second = [add_task(connection) for _ in range(3)][1]
    page.goto("/tasks")
    link = page.locator(f"tr[data-key='{second}'] a").first
    link.focus()
    for count in (1, 2):
        add_task(connection)
        expect(page.get_by_text(f"{count} newer")).to_be_visible()
        expect(link).to_be_focused()


def test_a_search_in_the_browser_keeps_its_filter_in_the_address(
    page: Page, connection: Database
) -> None:
    wanted = add_task(connection, kwargs='{"order_id":17}')
    add_task(connection, kwargs='{"order_id":170}')
    page.goto("/tasks")
    page.get_by_label("Argument").fill("order_id=17")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    assert "argument=order_id%3D17" in page.url
    # The rows of the next page are there before its script is, which listens for keys.
    page.wait_for_load_state()
    page.keyboard.press("/")
    page.keyboard.type(wanted)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("work")
    assert page.url.endswith(f"/tasks/{wanted}")
