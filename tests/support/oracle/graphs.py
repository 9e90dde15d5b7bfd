"""Random graphs: shapes of runs for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.support.oracle.shapes import NodeShape, RunShape

KINDS = ["task"] * 8 + ["map", "map", "workflow", "workflow", "sleep", "signal"]
JOINS = ["all", "all", "all", "any", "quorum"]
SIGNALS = ["go", "stop"]


@st.composite
def run_shapes(draw: st.DrawFn, most: int = 12, depth: int = 2, least: int = 1) -> RunShape:
    """Draw a run of up to ``most`` nodes, nested up to ``depth`` levels below it."""
    count = draw(st.integers(least, most))
    policy = draw(st.sampled_from(["none", "none", "cases"]))
    nodes = tuple(
        draw(_nodes(index, depth, with_optional=policy == "cases")) for index in range(count)
    )
    return RunShape(
        nodes,
        on_error=draw(st.sampled_from(["fail", "fail", "pause"])),
        output=draw(st.none() | st.integers(0, count - 1)),
        cases=draw(_cases(count)) if policy == "cases" else None,
    )


def _cases(count: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    case = st.sets(st.integers(0, count - 1), min_size=1, max_size=3)
    ordered = case.map(lambda indexes: tuple(sorted(indexes)))
    return st.lists(ordered, min_size=1, max_size=3).map(tuple)


@st.composite
def _nodes(draw: st.DrawFn, index: int, depth: int, *, with_optional: bool) -> NodeShape:
    after = draw(_sources(index))
    kind = draw(st.sampled_from(KINDS))
    if (kind == "map" and not after) or (kind == "workflow" and depth == 0):
        kind = "task"
    join = draw(st.sampled_from(JOINS)) if after else "all"
    takes = after and kind in {"task", "map", "workflow"}
    return NodeShape(
        kind=kind,
        after=after,
        join=join,
        min_success=draw(st.integers(1, len(after))) if join == "quorum" else None,
        allow_failed_deps=join == "all" and draw(st.sampled_from([False, False, True])),
        context=draw(_some_of(after)) if takes and draw(st.booleans()) else (),
        optional=with_optional and draw(st.booleans()),
        over=draw(st.sampled_from(after)) if kind == "map" else None,
        max_parallel=draw(st.none() | st.integers(1, 3)) if kind == "map" else None,
        allow_failed_items=kind == "map" and draw(st.booleans()),
        signal=draw(st.sampled_from(SIGNALS)) if kind == "signal" else None,
        child=draw(run_shapes(most=4, depth=depth - 1)) if kind == "workflow" else None,
    )


def _sources(index: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw up to five earlier nodes, preferring near ones."""
    if index == 0:
        return st.just(())
    near = st.integers(1, min(index, 6)).map(lambda back: index - back)
    source = st.one_of(near, near, st.integers(0, index - 1))
    return st.sets(source, max_size=5).map(lambda found: tuple(sorted(found)))


def _some_of(indexes: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.sampled_from(indexes), min_size=1).map(lambda found: tuple(sorted(found)))
