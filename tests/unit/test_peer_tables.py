"""The figures of `make bench-peers` as text: rates, ratios, sentences, regions of pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.peers.bench import QUICK, Sizes
from benchmarks.peers.results import OtherSizesError, Result, Results
from benchmarks.peers.table import (
    COLUMNS,
    Measured,
    cell,
    crash_sentence,
    document,
    ratio,
    steady_rate,
    with_regions,
)

FACTS = {
    "version": "1.0",
    "servers": ["PostgreSQL"],
    "isolates": "no",
    "results": "yes",
    "durable": "yes",
    "choices": [{"setting": "slots", "reason": "as documented", "link": "docs/workers.md"}],
}


def test_a_rate_leaves_out_the_start_of_the_worker() -> None:
    samples = [(0.0, 0), (5.0, 0), (6.0, 100), (7.0, 600), (8.0, 1_100)]
    assert steady_rate(samples) == 500.0


def test_a_drain_between_two_samples_still_has_a_rate() -> None:
    assert steady_rate([(0.0, 0), (1.0, 0), (1.5, 200)]) == 400.0


@pytest.mark.parametrize(
    ("values", "text"),
    [([], "-"), ([1234.4], "1,234"), ([3.0, 1.0, 2.0], "2 (1-3)")],
)
def test_a_cell_has_the_median_and_its_range(values: list[float], text: str) -> None:
    assert cell(values, 0) == text


def test_ratios_compare_medians_and_are_absent_without_figures() -> None:
    assert ratio([10.0, 30.0, 20.0], [40.0]) == "0.50"
    assert ratio([10.0], []) == "-"


def test_a_cell_without_a_figure_says_whether_the_workload_failed() -> None:
    found = Measured(FACTS)
    found.add("latency", {"p50": 1.5}, "")
    found.add("latency", {"p50": 2.5}, "the idle | worker ended")
    assert found.cell(COLUMNS["result p50, ms"]) == "2.0 (1.5-2.5)"
    assert found.cell(COLUMNS["memory, MB"]) == "failed: the idle / worker ended"
    assert found.cell(COLUMNS["send/s"]) == "-"


def test_a_continued_run_keeps_figures_and_repeats_failures(tmp_path: Path) -> None:
    first = Results(tmp_path / "results", QUICK)
    first.begin()
    first.add(Result(0, "rq", "latency", {"p50": 1.5}))
    first.add(Result(0, "arq", "latency", {}, "no server"))
    second = Results(tmp_path / "results", QUICK)
    second.resume()
    assert [result.peer for result in second] == ["rq"]
    second.add(Result(0, "arq", "latency", {"p50": 2.5}))
    third = Results(tmp_path / "results", QUICK)
    third.resume()
    assert (0, "arq", "latency") in third
    assert (1, "arq", "latency") not in third


def test_a_run_is_not_continued_with_other_sizes(tmp_path: Path) -> None:
    Results(tmp_path / "results", QUICK).begin()
    with pytest.raises(OtherSizesError, match="without RESUME"):
        Results(tmp_path / "results", Sizes()).resume()


def test_the_crash_sentence_tells_lost_repeated_and_finished_tasks_apart() -> None:
    journal = [f"{word} {number}" for number in range(98) for word in ("start", "end")]
    journal.remove("end 50")
    journal.append("start 7")
    assert crash_sentence(journal, "PENDING", is_alive=False) == (
        "97 of 99 others finished, 1 of them started twice, the worker ended; "
        "the task itself: started once, now PENDING"
    )


def test_a_page_keeps_its_text_and_gets_only_its_own_regions() -> None:
    measured = {"horsies": Measured(FACTS, {"drain 2": [10.0]}), "rq": Measured(FACTS)}
    regions = document(measured, "today, 2 cores", {"arq, drain": "no server"})
    page = "# Title\n\n<!-- measured: facts -->\nold\n<!-- end measured: facts -->\n\nend\n"
    written = with_regions(page, regions)
    assert written.startswith("# Title\n\n<!-- measured: facts -->\n\n|")
    assert written.endswith("<!-- end measured: facts -->\n\nend\n")
    assert "old" not in written
    assert "today" not in written
    assert with_regions(written, regions) == written


def test_a_new_file_gets_all_regions() -> None:
    regions = document({"horsies": Measured(FACTS, {"drain 2": [10.0]})}, "today", {})
    written = with_regions("", regions)
    assert all(f"<!-- measured: {name} -->" in written for name in regions)
    assert "[as documented](workers.md)" in written
