"""A run in a real browser: a worker runs it, the page follows, and the drawing does not move."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from horsies.workflow.nodes.nodes import MapNode, SignalNode, SubWorkflowNode, TaskNode
from horsies.workflow.spec import WorkflowSpec
from tests.support import runs
from tests.support.database import Database
from tests.support.workers import CONFIG_VARIABLE, DATABASE_VARIABLE, Fleet

pytestmark = pytest.mark.browser

# The boxes and sampled points of the edges of a drawing, in its own coordinates.
GEOMETRY = """svg => {
    const boxes = [...svg.querySelectorAll("g.node")].map(node => {
        const [x, y] = node.getAttribute("transform").match(/-?\\d+/g).map(Number);
        const box = node.querySelector("rect.box").getBBox();
        return {key: node.dataset.key, x, y, width: box.width, height: box.height};
    });
    const edges = [...svg.querySelectorAll("path.edge")].map(path => {
        const points = [], length = path.getTotalLength();
        for (let at = 0; at <= length; at += 3) {
            const point = path.getPointAtLength(at);
            points.push([point.x, point.y]);
        }
        return {key: path.dataset.key, d: path.getAttribute("d"), points};
    });
    const wide = [...svg.querySelectorAll("g.node")].flatMap(node => {
        const edge = node.querySelector("rect.box").getBoundingClientRect().right;
        return [...node.querySelectorAll("a:not(.open) text")]
            .filter(text => text.getBoundingClientRect().right > edge).map(text => text.textContent);
    });
    return {boxes, edges, wide};
}"""


@pytest.fixture
def flows(process_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The application of the worker, imported once the database is known."""
    monkeypatch.setitem(os.environ, DATABASE_VARIABLE, process_url)
    monkeypatch.setitem(os.environ, CONFIG_VARIABLE, json.dumps({}))
    module = import_module("tests.support.apps.flows")
    yield module
    module.app.close()


def picture(flows: ModuleType) -> WorkflowSpec[Any]:
    """A diamond, a map, a signal and a sub-workflow, and an edge that passes over layers."""
    start = TaskNode(flows.one, node_id="start")
    left = TaskNode(flows.next_step, args_from={"before": start}, waits_for=[start], node_id="left")
    right = TaskNode(
        flows.next_step, args_from={"before": start}, waits_for=[start], node_id="right"
    )
    both = TaskNode(
        flows.maybe,
        kwargs={"fails": False},
        args_from={"a": left, "b": right},
        waits_for=[left, right],
        node_id="both",
    )
    numbers = TaskNode(flows.numbers_up_to, kwargs={"count": 5}, node_id="numbers")
    squares = MapNode(flows.square_slowly, over=numbers, each="number", node_id="squares")
    approval = SignalNode("approve", waits_for=[both], node_id="approval")
    child = SubWorkflowNode(flows.Outer, kwargs={"steps": 2}, waits_for=[approval], node_id="child")
    end = TaskNode(
        flows.maybe, kwargs={"fails": False}, waits_for=[squares, child, start], node_id="end"
    )
    nodes = [start, left, right, both, numbers, squares, approval, child, end]
    spec: WorkflowSpec[Any] = flows.app.workflow(
        "a picture", nodes, output=end, definition_key="web.picture"
    )
    return spec


def geometry(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.locator("svg.graph").evaluate(GEOMETRY)
    return found


def refuse_overlaps(found: dict[str, Any]) -> None:
    """No two boxes touch, and no edge runs inside a box."""
    boxes = found["boxes"]
    for one in boxes:
        for other in boxes:
            apart_x = abs(one["x"] - other["x"]) >= one["width"]
            assert one is other or apart_x or abs(one["y"] - other["y"]) >= one["height"]
    for edge in found["edges"]:
        for x, y in edge["points"]:
            for box in boxes:
                inside_x = box["x"] + 1 < x < box["x"] + box["width"] - 1
                inside_y = box["y"] + 1 < y < box["y"] + box["height"] - 1
                assert not (inside_x and inside_y), f"edge {edge['key']} crosses {box['key']}"


def node(page: Page, index: int) -> Any:
    return page.locator(f'g.node[data-key="n{index}"]')


def has_status(name: str) -> Any:
    return re.compile(rf"\bstatus-{name}\b")


def test_a_run_is_followed_live_and_its_drawing_stays_still(
    page: Page, connection: Database, flows: ModuleType, fleet: Fleet
) -> None:
    (run_id,) = runs.start(connection, picture(flows))
    page.goto(f"/workflows/{run_id}")
    before = geometry(page)
    assert len(before["boxes"]) == 9
    assert before["wide"] == []
    refuse_overlaps(before)
    page.locator("svg.graph").evaluate("svg => { svg.isTheSame = true }")
    expect(node(page, 8)).to_have_class(has_status("off"))

    fleet.start(application="tests.support.apps.flows:app", processes=1)
    for done in (0, 1, 2, 3, 4, 5):
        expect(node(page, done)).to_have_class(has_status("ok"))
    expect(node(page, 5)).to_contain_text("5/5 items")
    expect(node(page, 6)).to_have_class(has_status("waiting"))
    assert geometry(page) == before

    page.get_by_text("Send a signal…").click()
    page.get_by_label("Value, as JSON").fill("true")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("[data-notice]")).to_have_text("Signal approve is delivered.")
    page.locator("svg.graph").evaluate("svg => { svg.isTheSame = true }")
    for done in (6, 7, 8):
        expect(node(page, done)).to_have_class(has_status("ok"))
    expect(page.locator("[data-region=state]")).to_contain_text("9 of 9 nodes ended")
    assert geometry(page) == before
    assert page.locator("svg.graph").evaluate("svg => svg.isTheSame === true")

    node(page, 0).locator("a").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.closest('g.node').dataset.key") in ("n1", "n2")
    page.keyboard.press("Enter")
    expect(page.locator("[data-region=node] h2")).to_contain_text("completed")

    page.get_by_role("link", name="Timeline").click()
    expect(page.locator("svg.timeline a.bar-row")).to_have_count(9)
    expect(page.locator("svg.timeline a.critical").first).to_be_visible()
    page.get_by_role("link", name="Nodes").click()
    expect(page.locator("[data-region=tab] tbody tr")).to_have_count(9)
    page.get_by_role("link", name="Graph").click()
    node(page, 7).locator("a.open").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Workflow outer")
    expect(page.locator("[data-region=state]")).to_contain_text(run_id)
