"""Pure functions that fold a large graph: nodes with the same role share a box. Groups depend only on
the graph and its node names, so boxes never appear or disappear during a run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

from horsies.web.layout import Graph, dependents_of, layers_of, topological

# The number of nodes above which a graph is folded, and the maximum number of boxes after folding.
FOLD_ABOVE = 300
_BANDS = 100
# Each round distinguishes nodes by neighbours one step farther away.
_ROUNDS = 6

Groups: TypeAlias = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=32)
def fold(dependencies: Graph, names: tuple[str, ...]) -> Groups:
    """Group a graph's nodes, in the order of their first members.

    Consecutive steps with the same name form a group, and nodes with the same name and the same
    neighbouring groups form a group. A graph that is still too large is grouped by layer and name, and
    finally by bands of layers.
    """
    groups: Groups = ()
    for keys in _groupings(dependencies, names):
        groups = _grouped(keys)
        if len(groups) <= FOLD_ABOVE:
            break
    return groups


def folded_graph(dependencies: Graph, groups: Groups) -> Graph:
    """Return the dependencies between groups, without those inside a group."""
    place = {node: number for number, group in enumerate(groups) for node in group}
    return tuple(
        tuple(sorted({place[source] for node in group for source in dependencies[node]} - {number}))
        for number, group in enumerate(groups)
    )


def _groupings(dependencies: Graph, names: Sequence[str]) -> Iterator[list[Hashable]]:
    """Yield increasingly coarse node keys; none of the resulting graphs of groups has a cycle."""
    chains = _grouped(_chain_heads(dependencies, names))
    graph = folded_graph(dependencies, chains)
    layers = layers_of(graph)
    kinds = [(layer, names[chain[0]]) for layer, chain in zip(layers, chains, strict=True)]
    yield _of_nodes(chains, _roles(graph, kinds))
    yield _of_nodes(chains, kinds)
    width = max(layers, default=0) // _BANDS + 1
    yield _of_nodes(chains, [layer // width for layer in layers])


def _chain_heads(dependencies: Graph, names: Sequence[str]) -> list[int]:
    """Map each node to the first step of its row of steps with the same name."""
    dependents = dependents_of(dependencies)
    heads = list(range(len(dependencies)))
    for node in topological(dependencies, dependents):
        sources = dependencies[node]
        is_next_step = len(sources) == 1 and len(dependents[sources[0]]) == 1
        if is_next_step and names[sources[0]] == names[node]:
            heads[node] = heads[sources[0]]
    return heads


def _roles(graph: Graph, kinds: Sequence[Hashable]) -> list[int]:
    """Refine roles until all nodes with the same role have neighbours with the same roles."""
    dependents = dependents_of(graph)
    roles = _numbered(kinds)
    for _ in range(_ROUNDS):
        refined = _numbered(
            [
                (
                    role,
                    frozenset(roles[one] for one in before),
                    frozenset(roles[one] for one in after),
                )
                for role, before, after in zip(roles, graph, dependents, strict=True)
            ]
        )
        if max(refined) == max(roles):
            break
        roles = refined
    return roles


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _of_nodes(groups: Groups, keys: Sequence[Hashable]) -> list[Hashable]:
    """Map each node to the key of its group."""
    found = {node: key for group, key in zip(groups, keys, strict=True) for node in group}
    return [found[node] for node in range(len(found))]


def _grouped(keys: Sequence[Hashable]) -> Groups:
    groups: dict[Hashable, list[int]] = {}
    for node, key in enumerate(keys):
        groups.setdefault(key, []).append(node)
    return tuple(tuple(group) for group in groups.values())
