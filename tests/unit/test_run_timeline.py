"""The timeline of a run: folded idle time, bars in order, and the critical path."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horsies.web.run_timeline import (
    GAP_WIDTH,
    LABEL_WIDTH,
    SCALE_WIDTH,
    Gap,
    Scale,
    Span,
    critical_path,
    draw_timeline,
    idle_gaps,
)
from tests.support.examples import examples


def span(start: float | None, end: float | None, *dependencies: int, **values: object) -> Span:
    enqueued = values.pop("enqueued", start)
    return Span("step", "COMPLETED", enqueued, start, end, dependencies, **values)  # type: ignore[arg-type]


def test_two_hours_of_sleep_are_folded_to_a_gap() -> None:
    spans = [span(0, 2), span(7_202, 7_204, 0, enqueued=2.0)]
    (gap,) = idle_gaps(spans, 7_204)
    assert gap == Gap(2, 7_202)
    picture = str(draw_timeline(spans, frozenset(), 7_204, "a run"))
    assert "⋯ 2h00m" in picture


@pytest.mark.parametrize(
    ("spans", "until"),
    [
        ([span(0, 2), span(62, 64)], 64.0),
        ([span(0, 1_000), span(1_100, 2_000)], 2_000.0),
        ([span(0, None), span(7_200, 7_300)], 7_300.0),
    ],
    ids=["one minute", "a small share", "a node runs meanwhile"],
)
def test_other_stretches_are_not_folded(spans: list[Span], until: float) -> None:
    assert idle_gaps(spans, until) == []


def test_a_second_stretch_is_folded_when_the_first_leaves_it_large() -> None:
    spans = [span(0, 10), span(7_210, 7_220), span(7_820, 7_830)]
    assert idle_gaps(spans, 7_830) == [Gap(10, 7_210), Gap(7_220, 7_820)]


@given(st.lists(st.floats(0, 10_000), min_size=2, max_size=20), st.integers(0, 3))
def test_the_scale_keeps_the_order_of_time_and_uses_the_width(
    times: list[float], folded: int
) -> None:
    gaps = [Gap(1_000.0 * number + 100, 1_000.0 * number + 900) for number in range(folded)]
    scale = Scale(10_000, gaps)
    places = [scale.x(at) for at in sorted(times)]
    assert places == sorted(places)
    assert scale.x(0) == LABEL_WIDTH
    assert scale.x(10_000) == pytest.approx(LABEL_WIDTH + SCALE_WIDTH)
    for gap in gaps:
        assert scale.x(gap.end) - scale.x(gap.start) == pytest.approx(GAP_WIDTH)


def every_path(spans: list[Span], last: int) -> list[list[int]]:
    if not spans[last].dependencies:
        return [[last]]
    return [[*path, last] for one in spans[last].dependencies for path in every_path(spans, one)]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 9), st.integers(0, 2**32))
def test_the_critical_path_equals_the_best_of_all_paths(size: int, seed: int) -> None:
    """Of all paths to the node that ended last, the one whose nodes ended last, from the back."""
    chance = random.Random(seed)
    spans: list[Span] = []
    ends = chance.sample(range(1, 1_000), 2 * size)
    for number in range(size):
        sources = sorted(
            {chance.randrange(number) for _ in range(chance.randint(0, 3))} if number else ()
        )
        begin = max((spans[one].ended or 0.0 for one in sources), default=0.0)
        spans.append(span(begin + 0.5, begin + ends[number], *sources, enqueued=begin))
    last = max(range(size), key=lambda one: spans[one].ended or 0.0)
    best = max(
        every_path(spans, last),
        key=lambda path: [spans[one].ended or 0.0 for one in reversed(path)],
    )
    assert critical_path(spans) == best


def test_a_join_of_any_was_released_by_the_dependency_that_ended_before_it() -> None:
    spans = [span(0, 5), span(0, 50), span(5, 60, 0, 1, enqueued=5.0)]
    assert critical_path(spans) == [0, 2]


def test_a_run_without_an_ended_node_has_no_critical_path() -> None:
    assert critical_path([span(0, None), span(None, None, 0)]) == []


def test_retries_are_notches_and_names_are_escaped() -> None:
    spans = [Span("<b>", "FAILED", 0, 1, 9, failures=(3.0, 6.0), href="?node=0")]
    picture = str(draw_timeline(spans, frozenset([0]), 9, "<i>"))
    assert picture.count('class="notch"') == 2
    assert "<b>" not in picture
    assert "<i>" not in picture
    assert "2 failed attempts before" in picture
