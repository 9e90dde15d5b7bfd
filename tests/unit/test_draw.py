"""The picture of a run: a graph as a tree of lines that holds every node once and stays readable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from horsies.db.statements.workflows import RunRow, TreeNode
from horsies.workflow.run.draw import ASCII_SYMBOLS, FOLD_ABOVE, INDENT_MAX, SYMBOLS, Line, draw
from horsies.workflow.run.listing import RunReport
from tests.support.examples import examples

STATUSES = tuple(SYMBOLS.statuses)
NO_VALUES = dict.fromkeys(TreeNode._fields)


def node(node_id: str, *dependencies: int, status: str = "COMPLETED", **values: Any) -> TreeNode:
    given = {"node_id": node_id, "status": status, "dependencies": dependencies, **values}
    return TreeNode(**{**NO_VALUES, "task_name": node_id, "join_type": "all", **given})


def run_row(run_id: str, status: str = "RUNNING") -> RunRow:
    values: dict[str, Any] = {"id": run_id, "name": "orders", "status": status, "total_nodes": 1}
    return RunRow(**{**dict.fromkeys(RunRow._fields), **values, "duration_seconds": 2.0})


def text_of(line: Line) -> str:
    return "".join(piece.text for piece in line)


def picture(nodes: Sequence[TreeNode], **options: Any) -> list[str]:
    title, *lines = draw(RunReport(run_row("1"), [], {"1": list(nodes)}), **options)
    assert text_of(title).startswith("orders  1  RUNNING")
    return [text_of(line) for line in lines]


def test_steps_in_a_row_stand_below_each_other() -> None:
    nodes = [node("fetch"), node("render", 0, status="RUNNING"), node("mail", 1, status="PENDING")]
    assert picture(nodes) == ["✓ fetch", "▶ render", "· mail"]


def test_a_node_named_like_one_of_its_notes_keeps_the_note() -> None:
    nodes = [node("retry 1", status="RUNNING", retry_count=1), node("2.0s", duration_seconds=2.0)]
    assert picture(nodes) == ["┌─ ▶ retry 1  retry 1", "└─ ✓ 2.0s  2.0s"]


def test_branches_are_indented_and_what_joins_them_goes_on_at_the_left() -> None:
    nodes = [
        node("order"),
        node("charge", 0),
        node("reserve", 0),
        node("pack", 2, status="RUNNING"),
        node("ship", 1, 3, status="PENDING"),
        node("close", 4, status="PENDING"),
    ]
    assert picture(nodes) == [
        "✓ order",
        "├─ ✓ charge",
        "├─ ✓ reserve",
        "│  ▶ pack",
        "· ship  ← charge, pack",
        "· close",
    ]


def test_branches_that_never_meet_end_with_a_corner() -> None:
    nodes = [node("order"), node("mail", 0), node("ship", 0), node("track", 2)]
    assert picture(nodes) == ["✓ order", "├─ ✓ mail", "└─ ✓ ship", "   ✓ track"]


def test_several_roots_are_branches_of_the_run() -> None:
    nodes = [
        node("a"),
        node("b", status="FAILED", error_code="BOOM"),
        node("c", 0, 1, status="SKIPPED"),
    ]
    assert picture(nodes) == ["┌─ ✓ a", "├─ ✗ b  BOOM", "- c  ← a, b"]


def test_joins_of_joins_are_recognised() -> None:
    nodes = [node("r"), node("a", 0), node("b", 0), node("j", 1, 2), node("c", 0), node("k", 3, 4)]
    assert picture(nodes) == [
        "✓ r",
        "├─ ✓ a",
        "├─ ✓ b",
        "├─ ✓ j  ← a, b",
        "├─ ✓ c",
        "✓ k  ← j, c",
    ]


def test_a_join_says_how_many_it_needs() -> None:
    nodes = [node("a"), node("b"), node("first", 0, 1, join_type="any")]
    assert picture(nodes)[-1] == "✓ first  ← any of a, b"
    nodes = [
        node("a"),
        node("b"),
        node("c"),
        node("most", 0, 1, 2, join_type="quorum", min_success=2),
    ]
    assert picture(nodes)[-1] == "✓ most  ← 2 of a, b, c"
    many = [*(node(f"n{number}") for number in range(5)), node("all", 0, 1, 2, 3, 4)]
    assert picture(many)[-1] == "✓ all  ← 5 nodes"


def test_labels_notes_and_errors_follow_the_name() -> None:
    shown = node(
        "pages",
        status="FAILED",
        kind="map",
        task_name="fetch",
        items_total=1_000,
        items_open=260,
        duration_seconds=3.2,
        error_code="MAP_ITEMS_FAILED",
    )
    assert picture([shown]) == ["✗ pages  map of fetch  740/1,000  3.2s  MAP_ITEMS_FAILED"]
    assert picture([node("fetch", task_name="fetch")]) == ["✓ fetch"], "said once"
    (_, line) = draw(RunReport(run_row("1"), [], {"1": [shown]}))
    assert [piece.style for piece in line] == ["FAILED", "name", "note", "note", "note", "error"]


def test_a_sub_workflow_is_drawn_inside_its_node() -> None:
    nodes = {
        "1": [
            node("billing", status="RUNNING", sub_workflow_id="2"),
            node("close", 0, status="PENDING"),
        ],
        "2": [node("charge"), node("receipt", 0, status="RUNNING", sub_workflow_id="3")],
        "3": [node("deep", status="ENQUEUED")],
    }
    report = RunReport(run_row("1"), [run_row("2"), run_row("3", "PAUSED")], nodes)
    assert [text_of(line) for line in draw(report)[1:]] == [
        "▶ billing",
        "┊  ✓ charge",
        "┊  ‖ receipt  paused",
        "┊  ┊  ‖ deep",
        "· close",
    ]


def test_a_wide_fan_out_is_folded_to_what_matters() -> None:
    leaves = [
        node(f"n{number}", 0, status="FAILED" if number == 500 else "COMPLETED")
        for number in range(1_000)
    ]
    nodes = [node("root"), *leaves, node("sum", *range(1, 1_001), status="PENDING")]
    assert picture(nodes) == [
        "✓ root",
        "├─ ✓ n0",
        "├─ ✓ n1",
        "├─ ⋮ 498 more branches: 498 ✓",
        "├─ ✗ n500",
        "├─ ⋮ 498 more branches: 498 ✓",
        "├─ ✓ n999",
        "· sum  ← 1,000 nodes",
    ]
    assert len(picture(nodes, fold=False)) == 1_002


def test_a_long_chain_is_folded_to_what_matters() -> None:
    chain = [node("s0")]
    for number in range(1, 1_000):
        status = "COMPLETED" if number < 500 else "RUNNING" if number == 500 else "PENDING"
        chain.append(node(f"s{number}", number - 1, status=status))
    assert picture(chain) == [
        "✓ s0",
        "✓ s1",
        "⋮ 498 more steps: 498 ✓",
        "▶ s500",
        "⋮ 498 more steps: 498 ·",
        "· s999",
    ]


def test_a_folded_branch_counts_all_of_its_nodes() -> None:
    nodes = [node("root")]
    for number in range(20):
        nodes += [node(f"a{number}", 0), node(f"b{number}", len(nodes), status="SKIPPED")]
    assert "├─ ⋮ 17 more branches: 17 ✓ 17 -" in picture(nodes)


def test_plain_marks_serve_terminals_without_unicode() -> None:
    nodes = [node("a"), node("b", 0), node("c", 0, status="RUNNING"), node("d", 1, 2)]
    lines = picture(nodes, symbols=ASCII_SYMBOLS)
    assert lines == ["+ a", "|- + b", "|- > c", "+ d  <- b, c"]
    assert ASCII_SYMBOLS.statuses.keys() == SYMBOLS.statuses.keys()
    assert all(mark.isascii() for mark in ASCII_SYMBOLS.statuses.values())


def test_a_very_deep_graph_stays_inside_the_window() -> None:
    comb = [node("n0")]
    for number in range(600):
        comb += [node(f"leaf{number}", 2 * number), node(f"n{number + 1}", 2 * number)]
    lines = picture(comb, fold=False)
    assert len(lines) == len(comb)
    assert max(len(line) for line in lines) < 3 * (INDENT_MAX + 12)


@st.composite
def graphs(draw_value: st.DrawFn) -> list[TreeNode]:
    """Any graph without cycles; dependencies may point in either direction of the list."""
    size = draw_value(st.integers(1, 40))
    places = draw_value(st.permutations(range(size)))
    nodes: list[TreeNode | None] = [None] * size
    for rank, place in enumerate(places):
        sources = draw_value(st.sets(st.sampled_from(places[:rank]), max_size=4)) if rank else set()
        status = draw_value(st.sampled_from(STATUSES))
        nodes[place] = node(f"node-{place}.", *sorted(sources), status=status)
    return [one for one in nodes if one is not None]


@settings(max_examples=examples(150), deadline=None)
@given(nodes=graphs())
def test_every_node_is_drawn_once_and_below_those_it_waits_for(nodes: list[TreeNode]) -> None:
    lines = [line.partition("←")[0] for line in picture(nodes, fold=False)]
    where = {one.node_id: [f"{one.node_id}" in line for line in lines] for one in nodes}
    assert len(lines) == len(nodes)
    for one in nodes:
        assert sum(where[one.node_id]) == 1
        for source in one.dependencies:
            assert where[nodes[source].node_id].index(True) < where[one.node_id].index(True)


@settings(max_examples=examples(100), deadline=None)
@given(nodes=graphs(), width=st.integers(FOLD_ABOVE + 1, 200))
def test_folding_leaves_nothing_out_of_the_counts(nodes: list[TreeNode], width: int) -> None:
    base = len(nodes)
    nodes = [*nodes, *(node(f"leaf-{number}.", 0) for number in range(width))]
    counted = 0
    for line in picture(nodes):
        if "⋮" in line:
            numbers = line.split(": ")[1].split()[::2]
            counted += sum(int(number.replace(",", "")) for number in numbers)
        else:
            counted += 1
    assert counted == base + width
