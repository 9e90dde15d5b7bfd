"""Layout: the positions of a graph's boxes and edges, in layers from left to right.

Pure and deterministic: positions depend only on the graph, which never changes during a run, so the
drawing does not move when statuses change. An edge across several layers has its own lane between their
boxes, so no box hides an edge.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

BOX_WIDTH, BOX_HEIGHT = 216, 48
COLUMN_GAP, ROW_GAP = 56, 20
MARGIN = 12
# The distance between two lanes, and the length of an edge's straight last part.
LANE_GAP = 14
EDGE_END = 16
_SWEEPS = 4
_SWAP_ROUNDS = 4
# The maximum number of items for swaps, which cost more than sweeps; a larger drawing keeps the
# order of the sweeps.
_SWAP_ITEMS_MAX = 1_000
_PLACING_PASSES = 8

Graph: TypeAlias = tuple[tuple[int, ...], ...]
Point: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Box:
    """A node's upper left corner, and its layer."""

    x: int
    y: int
    layer: int


@dataclass(frozen=True, slots=True)
class Edge:
    """The path from a source to a target: curves between layers, straight lines across them. ``points``
    are pairs: a curve connects the two points of a pair, and a line connects it to the next pair.
    """

    source: int
    target: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The boxes in node order, the edges, and the size of the drawing in pixels."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    width: int
    height: int
    crossings: int


@lru_cache(maxsize=32)
def lay_out(dependencies: Graph) -> Layout:
    """Place a graph's nodes, given their dependencies.

    The newest layouts are cached, because a layout of 300 nodes takes 20 to 40 ms and a live page needs
    it every second.
    """
    if not dependencies:
        return Layout((), (), 2 * MARGIN, 2 * MARGIN, 0)
    items = _Items(dependencies, layers_of(dependencies))
    crossings = _arrange(items)
    return _drawn(items, _heights(items), crossings)


def layers_of(dependencies: Sequence[Sequence[int]]) -> list[int]:
    """Return each node's layer: after all its dependencies, and directly before its only dependent, if
    it has only one.
    """
    dependents = dependents_of(dependencies)
    order = topological(dependencies, dependents)
    layers = [0] * len(dependencies)
    for node in order:
        layers[node] = max((layers[source] + 1 for source in dependencies[node]), default=0)
    for node in reversed(order):
        if len(dependents[node]) == 1 and len(dependencies[node]) <= 1:
            layers[node] = layers[dependents[node][0]] - 1
    return layers


def dependents_of(dependencies: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return each node's dependents."""
    dependents: list[list[int]] = [[] for _ in dependencies]
    for node, sources in enumerate(dependencies):
        for source in sources:
            dependents[source].append(node)
    return dependents


def topological(
    dependencies: Sequence[Sequence[int]], dependents: Sequence[Sequence[int]]
) -> list[int]:
    """Return the nodes in an order in which each node comes after its dependencies."""
    missing = [len(sources) for sources in dependencies]
    order = [node for node, count in enumerate(missing) if count == 0]
    for node in order:
        for dependent in dependents[node]:
            missing[dependent] -= 1
            if missing[dependent] == 0:
                order.append(dependent)
    return order


class _Items:
    """The nodes and the lanes. Lanes are numbered after the nodes; a source has one lane in every layer
    that its edges cross.

    ``left`` and ``right`` are an item's neighbours in the adjacent layers; ``rows`` are each layer's
    items in order.
    """

    def __init__(self, dependencies: Graph, layers: list[int]) -> None:
        self.dependencies = dependencies
        self.layers = layers[:]
        self.origins = list(range(len(dependencies)))
        self.left: list[list[int]] = [[] for _ in dependencies]
        self.right: list[list[int]] = [[] for _ in dependencies]
        self.lanes: list[list[int]] = [
            self._connect(source, targets)
            for source, targets in enumerate(dependents_of(dependencies))
        ]
        self.rows: list[list[int]] = [[] for _ in range(max(layers) + 1)]
        for item in sorted(range(len(self.layers)), key=lambda item: (self.origins[item], item)):
            self.rows[self.layers[item]].append(item)

    def _connect(self, source: int, targets: Sequence[int]) -> list[int]:
        """Add one source's lanes up to the layer before its farthest target."""
        first = self.layers[source]
        chain = [source]
        farthest = max((self.layers[target] for target in targets), default=first)
        for layer in range(first + 1, farthest):
            chain.append(self._add_lane(layer, source))
            self._join(chain[-2], chain[-1])
        for target in targets:
            self._join(chain[self.layers[target] - first - 1], target)
        return chain

    def _add_lane(self, layer: int, origin: int) -> int:
        self.layers.append(layer)
        self.origins.append(origin)
        self.left.append([])
        self.right.append([])
        return len(self.layers) - 1

    def _join(self, one: int, other: int) -> None:
        self.right[one].append(other)
        self.left[other].append(one)

    def is_lane(self, item: int) -> bool:
        return item >= len(self.dependencies)

    def way(self, source: int, target: int) -> list[int]:
        return self.lanes[source][1 : self.layers[target] - self.layers[source]]


# The order inside the layers


def _arrange(items: _Items) -> int:
    """Order the layers to reduce crossings of edges; return the nodes' original order if it has fewer
    crossings.
    """
    best, fewest = [row[:] for row in items.rows], _crossings(items)
    for _ in range(_SWEEPS):
        if fewest == 0:
            break
        for towards, rows in ((items.left, items.rows), (items.right, items.rows[::-1])):
            _sweep(rows, towards)
            found = _crossings(items)
            if found < fewest:
                best, fewest = [row[:] for row in items.rows], found
    items.rows = best
    if fewest and len(items.layers) <= _SWAP_ITEMS_MAX:
        fewest -= _swap_neighbours(items)
    return fewest


def _sweep(rows: Sequence[list[int]], towards: Sequence[Sequence[int]]) -> None:
    """Order each layer by the median position of the neighbours in the previous layer."""
    for before, row in pairwise(rows):
        place = {item: number for number, item in enumerate(before)}
        own = {item: number for number, item in enumerate(row)}
        medians = {
            item: _median([place[one] for one in towards[item]]) if towards[item] else number
            for item, number in own.items()
        }
        row.sort(key=lambda item: (medians[item], own[item]))


def _median(values: list[int] | list[float]) -> float:
    if len(values) == 1:
        return values[0]
    values.sort()
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _crossings(items: _Items) -> int:
    """Count the pairs of edges that cross between adjacent layers."""
    total = 0
    for row, following in pairwise(items.rows):
        place = {item: number for number, item in enumerate(following)}
        ends: list[int] = []
        for item in row:
            found = [place[one] for one in items.right[item]]
            for end in found:
                total += len(ends) - bisect_right(ends, end)
            for end in found:
                insort(ends, end)
    return total


def _swap_neighbours(items: _Items) -> int:
    """Swap adjacent items while a swap removes crossings; return the number of removed crossings."""
    removed = 0
    place = {item: number for row in items.rows for number, item in enumerate(row)}
    for _ in range(_SWAP_ROUNDS):
        before = removed
        for row in items.rows:
            for number in range(len(row) - 1):
                upper, lower = row[number], row[number + 1]
                gain = _gain(items, place, upper, lower)
                if gain > 0:
                    row[number], row[number + 1] = lower, upper
                    place[upper], place[lower] = number + 1, number
                    removed += gain
        if removed == before:
            break
    return removed


def _gain(items: _Items, place: dict[int, int], upper: int, lower: int) -> int:
    """Return the number of crossings that a swap of two adjacent items removes."""
    gain = 0
    for side in (items.left, items.right):
        above = sorted(place[one] for one in side[upper])
        below = sorted(place[one] for one in side[lower])
        for end in above:
            gain += bisect_left(below, end) - (len(below) - bisect_right(below, end))
    return gain


# The heights


def _heights(items: _Items) -> list[float]:
    """Move every item towards its neighbours, layer by layer; keep the minimum distances."""
    heights = [0.0] * len(items.layers)
    gaps = [_gaps(items, row) for row in items.rows]
    for row, distances in zip(items.rows, gaps, strict=True):
        place = -sum(distances) / 2
        for item, distance in zip(row, [*distances, 0.0], strict=True):
            heights[item], place = place, place + distance
    columns = list(zip(items.rows, gaps, strict=True))
    for number in range(_PLACING_PASSES):
        towards = items.left if number % 2 == 0 else items.right
        for row, distances in columns if number % 2 == 0 else reversed(columns):
            wanted = [_wanted(towards[item], heights, item) for item in row]
            weights = [_weight(items, towards[item], item) for item in row]
            for item, height in zip(row, _spread(wanted, weights, distances), strict=True):
                heights[item] = height
    return heights


def _gaps(items: _Items, row: Sequence[int]) -> list[float]:
    """Return the minimum distances between the centres of adjacent items."""
    half = [0 if items.is_lane(item) else BOX_HEIGHT / 2 for item in row]
    return [
        upper + lower + (ROW_GAP if upper or lower else LANE_GAP) for upper, lower in pairwise(half)
    ]


def _wanted(neighbours: Sequence[int], heights: Sequence[float], item: int) -> float:
    return _median([heights[one] for one in neighbours]) if neighbours else heights[item]


def _weight(items: _Items, neighbours: Sequence[int], item: int) -> float:
    """Return an item's weight: lanes weigh more than boxes, so that long edges become straight."""
    if not neighbours:
        return 0.1
    if not items.is_lane(item):
        return 1.0
    return 8.0 if items.is_lane(neighbours[0]) else 2.0


def _spread(
    wanted: Sequence[float], weights: Sequence[float], gaps: Sequence[float]
) -> list[float]:
    """Return the heights nearest to the wanted heights, by least squares, that keep the order and the
    gaps. Apart from the gaps, this is isotonic regression, which pools neighbours in the wrong order.
    """
    offsets = [0.0]
    for gap in gaps:
        offsets.append(offsets[-1] + gap)
    pools: list[tuple[float, float, int]] = []
    for height, weight, offset in zip(wanted, weights, offsets, strict=True):
        mean, total, count = height - offset, weight, 1
        while pools and pools[-1][0] > mean:
            before, weight_before, count_before = pools.pop()
            mean = (mean * total + before * weight_before) / (total + weight_before)
            total, count = total + weight_before, count + count_before
        pools.append((mean, total, count))
    flat = [mean for mean, _, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(flat, offsets, strict=True)]


# The drawing's coordinates


def _drawn(items: _Items, heights: Sequence[float], crossings: int) -> Layout:
    top = min(heights) - BOX_HEIGHT / 2 - MARGIN
    centres = [round(height - top) for height in heights]
    boxes = tuple(
        Box(_left_of(layer), centres[node] - BOX_HEIGHT // 2, layer)
        for node, layer in enumerate(items.layers[: len(items.dependencies)])
    )
    edges = tuple(
        _edge(items, centres, source, target)
        for target, sources in enumerate(items.dependencies)
        for source in sources
    )
    width = _left_of(len(items.rows) - 1) + BOX_WIDTH + MARGIN
    return Layout(boxes, edges, width, max(centres) + BOX_HEIGHT // 2 + MARGIN, crossings)


def _left_of(layer: int) -> int:
    return MARGIN + layer * (BOX_WIDTH + COLUMN_GAP)


def _edge(items: _Items, centres: Sequence[int], source: int, target: int) -> Edge:
    points = [(_left_of(items.layers[source]) + BOX_WIDTH, centres[source])]
    for lane in items.way(source, target):
        left = _left_of(items.layers[lane])
        points += [(left, centres[lane]), (left + BOX_WIDTH, centres[lane])]
    points.append((_left_of(items.layers[target]), centres[target]))
    return Edge(source, target, tuple(points))
