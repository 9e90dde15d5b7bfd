"""The graph of a run in a browser: fitted at first, zoom, jump to the failed node, follow the running one."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.support.database import Database
from tests.support.rows import add_run
from tests.support.web_keyboard import WIDTHS, resize

pytestmark = pytest.mark.browser

# The scale of the drawing, and whether all of it, or one node, is inside its frame.
SCALE = "svg => svg.getScreenCTM().a"
IS_INSIDE = """element => {
    const box = element.getBoundingClientRect();
    const frame = document.querySelector(".graph-frame").getBoundingClientRect();
    return box.left >= frame.left - 1 && box.right <= frame.right + 1
        && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
}"""

SCROLLED = "frame => [frame.scrollLeft, frame.scrollTop]"
# A place in the middle of the visible graph, between its nodes.
BACKGROUND = """frame => {
    frame.scrollIntoView({block: "center"});
    const box = frame.getBoundingClientRect();
    const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    for (let step = 0; step < 200; step += 4) {
        const at = document.elementFromPoint(x + step, y);
        if (frame.contains(at) && !at.closest("g.node")) return [x + step, y];
    }
    throw new Error("no free place in the graph"); }"""


def large_run(connection: Database) -> str:
    """A run of 240 nodes in twelve layers: one failed, one running."""
    run_id = add_run(connection, name="grid", status="RUNNING", total_nodes=240, open_nodes=100)
    connection.execute(
        "INSERT INTO horsies_workflow_tasks (workflow_id, task_index, node_id, kind, status, propagated,"
        " dependencies, dependents, context_dependents, join_type, allow_failed_deps, pauses, deps_open,"
        " task_name, task_kwargs, queue_name, priority, task_options, max_retries)"
        " SELECT %s, n, 'node_' || n, 'task', CASE WHEN n = 150 THEN 'FAILED' WHEN n = 238 THEN 'RUNNING'"
        " WHEN n < 140 THEN 'COMPLETED' ELSE 'PENDING' END, n < 140,"
        " CASE WHEN n < 20 THEN '{}'::integer[] ELSE ARRAY[n - 20] END,"
        " CASE WHEN n < 220 THEN ARRAY[n + 20] ELSE '{}'::integer[] END, '{}', 'all', false, false, 0,"
        " 'work', '{}', 'default', 100, '{}', 0 FROM generate_series(0, 239) AS n",
        [run_id],
    )
    return run_id


@pytest.mark.parametrize("width", WIDTHS)
def test_a_large_graph_opens_fitted_and_is_explored_by_keys(
    page: Page, connection: Database, width: int
) -> None:
    resize(page, width)
    page.goto(f"/workflows/{large_run(connection)}?boxes=all")
    graph = page.locator("svg.graph")
    assert page.locator("g.node").count() == 240
    assert graph.evaluate(IS_INSIDE)
    fitted = graph.evaluate(SCALE)
    page.keyboard.press("+")
    page.keyboard.press("+")
    assert graph.evaluate(SCALE) > 1.4 * fitted
    page.keyboard.press("-")
    page.keyboard.press("0")
    assert graph.evaluate(IS_INSIDE)
    page.keyboard.press("f")
    failed = page.locator('g.node[data-key="n150"]')
    assert failed.evaluate(IS_INSIDE)
    assert graph.evaluate(SCALE) >= 0.6
    expect(failed.locator("a").first).to_be_focused()
    page.keyboard.press("r")
    follow = page.get_by_role("button", name="Follow running")
    expect(follow).to_have_attribute("aria-pressed", "true")
    assert page.locator('g.node[data-key="n238"]').evaluate(IS_INSIDE)


def test_a_drag_with_the_mouse_moves_the_graph(page: Page, connection: Database) -> None:
    resize(page, 1024)
    page.goto(f"/workflows/{large_run(connection)}?boxes=all&zoom=full")
    frame = page.locator(".graph-frame")
    frame.evaluate("frame => frame.scrollTo(400, 200)")
    x, y = frame.evaluate(BACKGROUND)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 60, y - 40, steps=4)
    page.mouse.up()
    assert frame.evaluate(SCROLLED) == [460, 240]
    page.mouse.move(x, y, steps=4)  # without the button
    assert frame.evaluate(SCROLLED) == [460, 240]
    page.mouse.move(x - 60, y - 40)  # the same place of the graph
    page.mouse.down()
    page.mouse.move(x + 30, y - 40, steps=4)
    page.mouse.up()
    assert frame.evaluate(SCROLLED) == [370, 240]


def test_live_updates_keep_the_zoom_and_follow_the_running_node(
    page: Page, connection: Database
) -> None:
    run_id = large_run(connection)
    page.goto(f"/workflows/{run_id}?boxes=all&zoom=full")
    graph = page.locator("svg.graph")
    page.get_by_role("button", name="Zoom in").click()
    zoomed = graph.evaluate(SCALE)
    page.get_by_role("button", name="Follow running").click()
    connection.execute(
        "UPDATE horsies_workflow_tasks SET status = CASE task_index WHEN 238 THEN 'COMPLETED'"
        " WHEN 0 THEN 'RUNNING' ELSE status END WHERE workflow_id = %s",
        [run_id],
    )
    first = page.locator('g.node[data-key="n0"]')
    expect(first).to_have_class("node status-running")
    page.wait_for_function(f"({IS_INSIDE})(document.querySelector('g.node[data-key=n0]'))")
    assert graph.evaluate(SCALE) == pytest.approx(zoomed)


def test_without_a_script_the_failed_node_and_both_sizes_are_links(
    page: Page, connection: Database
) -> None:
    page.goto(f"/workflows/{large_run(connection)}?boxes=all")
    page.get_by_role("link", name="First failed node").click()
    expect(page.locator("#node h2")).to_contain_text("node_150")
    page.get_by_role("link", name="Full size").click()
    assert page.locator("svg.graph").evaluate(SCALE) == pytest.approx(1.0)
