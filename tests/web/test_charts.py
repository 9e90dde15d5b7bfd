"""Charts by their text: shapes inside of the view box, numbers in words, names escaped."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horsies.web.charts import (
    COLUMNS_MAX,
    HEIGHT,
    SPARK_HEIGHT,
    SPARK_WIDTH,
    WIDTH,
    Chart,
    Column,
    column_chart,
    decades,
    line_chart,
    nice_top,
    sparkline,
)

START = datetime(2026, 11, 16, 13, 0, tzinfo=UTC)
STEP = re.compile(r"([MLHVhvz])([-\d. ]*)")
values = st.one_of(st.none(), st.floats(), st.integers(0, 10**12).map(float))
columns = st.lists(st.tuples(values, values), max_size=200).map(
    lambda rows: [
        Column(START + timedelta(minutes=place), row, "/tasks") for place, row in enumerate(rows)
    ]
)


def chart(rows: list[Column], series: tuple[str, ...] = ("done", "failed")) -> Chart:
    return Chart("rate", "Attempts per minute", series, rows)


def column(minute: int, *numbers: float | None, href: str | None = None) -> Column:
    return Column(START + timedelta(minutes=minute), numbers, href)


def corners(path: str) -> list[tuple[float, float]]:
    """The points that a path of ours passes through."""
    x = y = 0.0
    found = []
    for command, text in STEP.findall(path):
        numbers = [float(part) for part in text.split()]
        match command:
            case "M" | "L":
                x, y = numbers
            case "H":
                (x,) = numbers
            case "h":
                x += numbers[0]
            case "v":
                y += numbers[0]
        found.append((x, y))
    return found


def assert_inside(text: str, width: int, height: int) -> None:
    assert "nan" not in text.lower().replace("tenant", "")
    assert "inf" not in text
    assert "style=" not in text
    page = ElementTree.fromstring(f"<div>{text}</div>")
    for element in page.iter():
        if element.tag == "path":
            for x, y in corners(element.attrib["d"]):
                assert -0.1 <= x <= width + 0.1
                assert -0.2 <= y <= height + 0.2
        if element.tag == "rect":
            right = float(element.attrib["x"]) + float(element.attrib["width"])
            assert right <= width + 0.1


@given(columns)
def test_no_column_leaves_the_view_box(rows: list[Column]) -> None:
    text = column_chart(chart(rows))
    assert_inside(text, WIDTH, HEIGHT)
    assert text.count("<rect") == min(len(rows), COLUMNS_MAX)


@given(columns)
def test_no_line_leaves_the_view_box(rows: list[Column]) -> None:
    assert_inside(line_chart(chart(rows, ("p50", "p95"))), WIDTH, HEIGHT)


@given(st.lists(values, max_size=200))
def test_no_sparkline_leaves_the_view_box(numbers: list[float | None]) -> None:
    assert_inside(sparkline("memory", "Memory", numbers), SPARK_WIDTH, SPARK_HEIGHT)


@given(st.floats(0, 1e15))
def test_an_axis_ends_at_or_above_the_highest_number(highest: float) -> None:
    assert nice_top(highest) >= highest
    assert nice_top(highest) <= max(2.0, highest * 2.6)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1))
def test_decades_end_at_or_above_the_longest_duration(seconds: list[float]) -> None:
    low, high = decades(seconds)
    assert 2 <= high - low <= 7
    assert 10.0**high >= max(seconds)


def test_columns_are_described_by_their_numbers() -> None:
    text = column_chart(chart([column(0, 3_900, 0), column(41, 5_120, 2), column(59, 4_210, 0)]))
    assert (
        '<desc id="rate-d">4,210 done now, 4,410 on average, highest 5,120 at 13:41 UTC; '
        "0 failed now, 0.7 on average, highest 2 at 13:41 UTC.</desc>"
    ) in text
    assert 'role="img" aria-labelledby="rate-t rate-d"><title id="rate-t">Attempts per' in text
    assert "<span>6,000</span><span>3,000</span><span>0</span>" in text
    assert re.findall(r'"2026-11-16T(.*?):00Z">(.*?)</time>', text)[:3] == [
        ("13:00", "13:00"),
        ("13:41", "13:41"),
        ("13:59", "13:59"),
    ]


def test_a_column_links_to_its_tasks_by_mouse_and_by_table() -> None:
    text = column_chart(chart([column(7, 12, 0, href="/tasks?since=a&until=b")]))
    assert (
        '<a href="/tasks?since=a&amp;until=b" tabindex="-1">'
        '<title>13:07 UTC: 12 done</title><rect x="0.0" width="640.0"/></a>'
    ) in text
    assert (
        '<td><a href="/tasks?since=a&amp;until=b"><time datetime="2026-11-16T13:07:00Z">'
        "13:07</time></a></td><td>12</td><td>0</td>"
    ) in text


def test_lines_have_a_logarithmic_axis_and_gaps() -> None:
    rows = [column(0, 0.05, 0.5), column(1, None, None), column(2, 0.5, 5.0), column(3, 0.5, None)]
    text = line_chart(chart(rows, ("p50", "p95")))
    assert "<span>10s</span><span>1s</span><span>100ms</span><span>10ms</span>" in text
    assert "p50 500ms now, highest 500ms; p95 5.0s now, highest 5.0s." in text
    (p50,) = re.findall(r'class="line-p50" d="([^"]*)"', text)
    assert re.sub(r"[\d. ]", "", p50) == "MHML"


def test_numbers_without_a_place_are_left_out() -> None:
    rows = [column(0, 1.7e308, 1.7e308), column(1, float("nan"), float("-inf")), column(2, -1, 0)]
    assert_inside(column_chart(chart(rows)), WIDTH, HEIGHT)
    assert_inside(line_chart(chart(rows)), WIDTH, HEIGHT)


def test_an_empty_chart_and_an_empty_sparkline_say_so() -> None:
    assert "No numbers in this time." in column_chart(chart([]))
    assert "No numbers in this time." in line_chart(chart([column(0, None, None)]))
    assert sparkline("memory", "Memory", [None]) == '<span class="muted">-</span>'


@pytest.mark.parametrize("draw", [column_chart, line_chart])
def test_names_are_escaped(draw: object) -> None:
    hostile = '"><script>alert(1)</script>'
    made = Chart(hostile, hostile, (hostile,), [column(0, 1.0, href=hostile)])
    assert callable(draw)
    text = draw(made)
    assert "<script" not in text
    ElementTree.fromstring(f"<div>{text}</div>")


def test_a_long_range_is_labelled_by_days() -> None:
    rows = [Column(START + timedelta(days=day), (1.0, 0.0)) for day in range(14)]
    assert ">11-16 13:00</time><time" in column_chart(chart(rows))


def test_a_short_range_is_labelled_by_seconds() -> None:
    rows = [Column(START + timedelta(seconds=9 * place), (1.0, 0.0)) for place in range(48)]
    text = column_chart(chart(rows))
    assert all(f">13:0{time}</time>" in text for time in ("0:00", "3:36", "7:03"))


def test_a_logarithmic_axis_is_named() -> None:
    assert "logarithmic axis</span>" in line_chart(chart([column(0, 0.05, 0.5)]))


def test_a_burst_is_cut_and_named_so_that_the_others_stay_readable() -> None:
    rows = [column(minute, 40.0, 0.0) for minute in range(59)] + [column(59, 12_000.0, 0.0)]
    text = column_chart(chart(rows))
    assert "<span>60</span><span>30</span><span>0</span>" in text
    assert "columns above 60 are cut; the highest is 12,000 at 13:59" in text
    assert 'class="line-cut"' in text
    assert "<title>13:59 UTC: 12,000 done</title>" in text
    even = column_chart(chart([column(minute, 40.0 + minute, 0.0) for minute in range(60)]))
    assert "are cut" not in even
    assert "are cut" not in column_chart(chart([column(0, 1.0, 0.0), column(1, 500.0, 0.0)]))


def test_every_chart_says_its_numbers_under_the_pointer() -> None:
    lines = line_chart(chart([column(0, 0.05, 0.5), column(1, None, None)], ("p50", "p95")))
    assert "<g><title>13:00 UTC: 50ms p50, 500ms p95</title><rect" in lines
    assert lines.count("<g>") == 1
    assert ">Done in mail: 3 now, highest 7</title>" in sparkline("k", "Done in mail", [7, 3])
