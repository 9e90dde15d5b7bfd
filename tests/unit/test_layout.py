"""The layout of a graph: layers, boxes that do not overlap, edges that avoid boxes, no movement."""

from __future__ import annotations

import random
import time
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from horsies.web.folding import FOLD_ABOVE, fold, folded_graph
from horsies.web.layout import (
    BOX_HEIGHT,
    BOX_WIDTH,
    COLUMN_GAP,
    EDGE_END,
    Edge,
    Graph,
    Layout,
    lay_out,
)
from horsies.web.run_graph import Node, draw_graph
from tests.support.examples import examples

STATUSES = ("COMPLETED", "FAILED", "SKIPPED", "RUNNING", "PAUSED", "ENQUEUED", "READY", "PENDING")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs of up to 300 nodes: narrow or wide, sparse or dense, also without edges."""
    size = draw(st.integers(1, 300))
    span, most = draw(st.integers(1, size)), draw(st.integers(0, 4))
    chance = random.Random(draw(st.integers(0, 2**32)))
    return tuple(
        tuple(sorted({chance.randrange(max(0, one - span), one) for _ in range(most)}))
        if one and chance.random() < 0.9
        else ()
        for one in range(size)
    )


def curve(edge: Edge) -> list[tuple[float, float]]:
    """Points along an edge as it is drawn, close enough to find every box it would touch."""
    found: list[tuple[float, float]] = []
    pairs = list(zip(edge.points[::2], edge.points[1::2], strict=True))
    for number, ((left, start), (right, end)) in enumerate(pairs):
        stop = right - EDGE_END if number == len(pairs) - 1 else right
        for step in range(11):
            t = step / 10
            found.append((left + (stop - left) * t, start + (end - start) * t * t * (3 - 2 * t)))
    return found


def crossings(ends: list[tuple[int, float, float]]) -> int:
    """Count crossings between adjacent layers, pair by pair."""
    return sum(
        layer == other_layer and (left - other_left) * (right - other_right) < 0
        for (layer, left, right), (other_layer, other_left, other_right) in combinations(ends, 2)
    )


def drawn_ends(layout: Layout) -> list[tuple[int, float, float]]:
    """The curves between layers, once for each pair of ends: layer, left height, right height."""
    column = BOX_WIDTH + COLUMN_GAP
    return sorted(
        {
            (left[0] // column, left[1], right[1])
            for edge in layout.edges
            for left, right in zip(edge.points[::2], edge.points[1::2], strict=True)
        }
    )


def ends_by_index(graph: Graph, layout: Layout) -> list[tuple[int, float, float]]:
    """The same curves if every layer were ordered by the numbers of the sources."""
    layers = [box.layer for box in layout.boxes]
    found = set()
    for target, sources in enumerate(graph):
        for source in sources:
            for layer in range(layers[source], layers[target]):
                last = target if layer == layers[target] - 1 else source
                found.add((layer, float(source), float(last)))
    return sorted(found)


@settings(max_examples=examples(25), deadline=None)
@given(graphs())
def test_layers_increase_along_edges_and_nothing_overlaps(graph: Graph) -> None:
    layout = lay_out(graph)
    for edge in layout.edges:
        assert layout.boxes[edge.source].layer < layout.boxes[edge.target].layer
    assert sorted((edge.target, edge.source) for edge in layout.edges) == sorted(
        (target, source) for target, sources in enumerate(graph) for source in sources
    )
    columns: dict[int, list[int]] = {}
    for box in layout.boxes:
        columns.setdefault(box.x, []).append(box.y)
        assert 0 <= box.x <= layout.width - BOX_WIDTH
        assert 0 <= box.y <= layout.height - BOX_HEIGHT
    for heights in columns.values():
        heights.sort()
        for upper, lower in pairwise(heights):
            assert lower - upper > BOX_HEIGHT + 10


@settings(max_examples=examples(10), deadline=None)
@given(graphs())
def test_no_edge_runs_through_a_box(graph: Graph) -> None:
    layout = lay_out(graph)
    columns: dict[int, list[int]] = {}
    for box in layout.boxes:
        columns.setdefault(box.x, []).append(box.y)
    for edge in layout.edges:
        lanes = zip(edge.points[1::2], edge.points[2::2], strict=False)
        for (left, height), (right, same) in lanes:
            assert height == same
            assert right - left == BOX_WIDTH
            assert all(not y < height < y + BOX_HEIGHT for y in columns.get(left, []))
        for x, _ in curve(edge):
            inside = (x - 12) % (BOX_WIDTH + COLUMN_GAP)
            assert inside == 0 or inside >= BOX_WIDTH, "a curve leaves the gap between two layers"


@settings(max_examples=examples(10), deadline=None)
@given(graphs())
def test_the_same_graph_has_the_same_picture(graph: Graph) -> None:
    first = lay_out(graph)
    lay_out.cache_clear()
    assert lay_out(graph) == first


@settings(max_examples=examples(10), deadline=None)
@given(graphs().filter(lambda graph: sum(map(len, graph)) < 250))
def test_the_order_has_no_more_crossings_than_the_order_by_index(graph: Graph) -> None:
    layout = lay_out(graph)
    found = crossings(drawn_ends(layout))
    assert found <= crossings(ends_by_index(graph, layout))
    assert found <= layout.crossings


def node(number: int, status: str) -> Node:
    return Node(str(number), status, f"step {number}", "", f"?node={number}", time=status.lower())


@settings(max_examples=examples(10), deadline=None)
@given(graphs(), st.integers(0, 2**32))
def test_a_change_of_status_moves_nothing(graph: Graph, seed: int) -> None:
    chance = random.Random(seed)
    shapes = set()
    for _ in range(2):
        nodes = [node(number, chance.choice(STATUSES)) for number in range(len(graph))]
        picture = str(draw_graph(lay_out(graph), nodes, "a run", ""))
        places = [part.split('"')[0] for part in picture.split('transform="')[1:]]
        paths = [part.split('"')[0] for part in picture.split(' d="')[1:]]
        shapes.add((*places, *paths))
    assert len(shapes) == 1


def test_a_diamond_is_two_boxes_high_and_has_no_crossing() -> None:
    layout = lay_out(((), (0,), (0,), (1, 2)))
    start, upper, lower, end = layout.boxes
    assert (start.layer, upper.layer, lower.layer, end.layer) == (0, 1, 1, 2)
    assert layout.crossings == 0
    assert abs(start.y - end.y) <= 1
    assert upper.y < start.y < lower.y


def test_a_node_that_only_feeds_a_late_one_stands_before_it() -> None:
    layout = lay_out(((), (0,), (1,), (), (2, 3)))
    assert [box.layer for box in layout.boxes] == [0, 1, 2, 2, 3]


def test_three_hundred_nodes_are_laid_out_quickly() -> None:
    """About 30 ms of processor time on an idle machine; the best of five, for busy ones."""
    chance = random.Random(1)
    graph = tuple(
        tuple(sorted({chance.randrange(max(0, one - 20), one) for _ in range(2)})) if one else ()
        for one in range(300)
    )
    taken = []
    for _ in range(5):
        lay_out.cache_clear()
        begin = time.process_time()
        lay_out(graph)
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.1


def fan(width: int) -> Graph:
    return ((), *((0,) for _ in range(width)), tuple(range(1, width + 1)))


def test_a_wide_fan_is_folded_to_three_boxes() -> None:
    graph = fan(4_998)
    groups = fold(graph, ("split", *["resize"] * 4_998, "publish"))
    assert [len(group) for group in groups] == [1, 4_998, 1]
    assert folded_graph(graph, groups) == ((), (0,), (1,))


def test_parallel_chains_are_folded_to_one_chain() -> None:
    chains = 400
    graph: Graph = ((), *((0,) for _ in range(chains)), *((one + 1,) for one in range(chains)))
    groups = fold(graph, ("split", *["fetch"] * chains, *["store"] * chains))
    assert folded_graph(graph, groups) == ((), (0,), (1,))


def test_a_long_row_of_equal_steps_is_one_box_and_of_different_ones_few() -> None:
    graph: Graph = ((), *((one,) for one in range(4_999)))
    assert fold(graph, ("step",) * 5_000) == (tuple(range(5_000)),)
    groups = fold(graph, tuple(f"step {one}" for one in range(5_000)))
    assert 50 <= len(groups) <= FOLD_ABOVE


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(301, 900), st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32))
def test_every_large_graph_becomes_small_and_keeps_its_nodes(
    size: int, most: int, names: int, seed: int
) -> None:
    chance = random.Random(seed)
    graph = tuple(
        tuple(sorted({chance.randrange(one) for _ in range(chance.randint(0, most))}))
        if one
        else ()
        for one in range(size)
    )
    groups = fold(graph, tuple(f"task {chance.randrange(names)}" for _ in range(size)))
    assert len(groups) <= FOLD_ABOVE
    assert sorted(node for group in groups for node in group) == list(range(size))
    layout = lay_out(folded_graph(graph, groups))
    assert all(
        layout.boxes[edge.source].layer < layout.boxes[edge.target].layer for edge in layout.edges
    )


def test_text_in_a_box_is_escaped_and_cut() -> None:
    hostile = '"><script>alert(1)</script>' * 3
    box = Node("0", "FAILED", hostile, hostile, '?a="b"', note=hostile, error=hostile, join=hostile)
    picture = str(draw_graph(lay_out(((),)), [box], hostile, hostile))
    assert "<script" not in picture
    assert 'href="?a=&#34;b&#34;"' in picture
    names = [part.split("</text>")[0] for part in picture.split('class="name"')[1:]]
    assert names[0].endswith("…")
