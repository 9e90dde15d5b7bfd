"""The judgement of an idle machine, the order and the ratios of the rounds, and the model of capacity."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest
from benchmarks import saved
from benchmarks.__main__ import main
from benchmarks.against import reaches, relative_speeds
from benchmarks.capacity import Cost, Line, tasks_per_second
from benchmarks.machine import BUSY_MARK, Machine, MachineBusyError, is_idle, used_share
from benchmarks.paired import Share, is_within, order
from benchmarks.rounds import alternate, ratios, spread
from benchmarks.unchecked import LOGS, TRACING, Feature, checked_functions, code_without_checks
from hypothesis import given
from hypothesis import strategies as st


def test_recorded_steps_beside_a_peer_need_no_package_of_other_benchmarks() -> None:
    """The environment of the peers has no package that only other benchmarks need."""
    code = "import sys; sys.modules['httpx'] = None; import benchmarks.peers.durable_steps"
    subprocess.run([sys.executable, "-c", code], check=True)


class Processors:
    """Two processors and a clock: each sleep uses up the next share of the list."""

    def __init__(self, *shares: float) -> None:
        self._shares = list(shares)
        self.seconds = 0.0
        self.idle_seconds = 0.0

    def sleep(self, seconds: float) -> None:
        share = self._shares.pop(0) if len(self._shares) > 1 else self._shares[0]
        self.seconds += seconds
        self.idle_seconds += 2 * seconds * (1 - share)

    def machine(self, *, accepts_busy: bool = False) -> Machine:
        return Machine(
            accepts_busy=accepts_busy,
            idle_clock=lambda: self.idle_seconds,
            clock=lambda: self.seconds,
            sleep=self.sleep,
            processors=2,
        )


@pytest.mark.parametrize(
    ("idle_seconds", "share"), [(3.0, 0.0), (2.7, 0.1), (1.5, 0.5), (0.0, 1.0), (3.1, 0.0)]
)
def test_the_share_in_use_is_that_of_all_processors(idle_seconds: float, share: float) -> None:
    assert used_share(idle_seconds, seconds=1.5, processors=2) == pytest.approx(share)


@pytest.mark.parametrize(("share", "idle"), [(0.0, True), (0.09, True), (0.1, False), (1.0, False)])
def test_a_machine_is_idle_below_a_tenth(share: float, idle: bool) -> None:
    assert is_idle(share) is idle


def test_a_round_waits_until_the_others_have_stopped() -> None:
    processors = Processors(0.6, 0.3, 0.05)
    processors.machine().wait_until_idle()
    assert processors.seconds == pytest.approx(4.5)


def test_a_machine_that_stays_busy_is_refused_in_one_sentence() -> None:
    processors = Processors(0.5)
    with pytest.raises(MachineBusyError, match=r"used 50% of the processors.*--busy") as refused:
        processors.machine().wait_until_idle()
    assert "\n" not in str(refused.value)
    assert processors.seconds < 70


def test_a_busy_machine_marks_the_figures_when_it_is_accepted() -> None:
    machine = Processors(0.5, 0.0).machine(accepts_busy=True)
    machine.wait_until_idle()
    machine.wait_until_idle()
    assert machine.take_mark() == BUSY_MARK
    assert machine.take_mark() == ""


def test_every_variant_is_first_in_some_round() -> None:
    ran: list[str] = []
    found = alternate({name: partial(ran.append, name) for name in "abc"}, 3)
    assert "".join(ran) == "abcbcacab"
    assert {name: len(runs) for name, runs in found.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratios_are_those_of_the_rounds() -> None:
    runs, base = [{"rate": 10.0}, {"rate": 4.0}], [{"rate": 5.0}, {"rate": 2.0}]
    assert ratios(runs, base, "rate") == [2.0, 2.0]
    assert spread([1.0, 2.0, 1_500.0]) == "2 (1-1,500)"


CHECKED = [(feature, one) for feature in (TRACING, LOGS) for one in checked_functions(feature)]


@pytest.mark.parametrize(
    ("feature", "function"), CHECKED, ids=lambda one: getattr(one, "__qualname__", "")
)
def test_the_checks_for_a_feature_can_be_removed(feature: Feature, function: FunctionType) -> None:
    checked = code_without_checks(function, Feature(frozenset(), ()))
    unchecked = code_without_checks(function, feature)
    assert len(unchecked.co_code) < len(checked.co_code)
    assert (
        unchecked.co_varnames[: unchecked.co_argcount] == checked.co_varnames[: checked.co_argcount]
    )
    gone = {"tracing", "_tracing", "traces"} if feature is TRACING else {"begin"}
    assert not gone & set(unchecked.co_names)


def test_every_round_reverses_the_one_before_and_every_side_is_first_in_some_round() -> None:
    found = ["".join(order("abc", done)) for done in range(6)]
    assert found == ["abc", "cba", "bca", "acb", "cab", "bac"]


def figures(*rates: float) -> list[dict[str, float]]:
    return [{"rate": rate, "total_us": 1_000 / rate} for rate in rates]


def test_a_side_is_judged_by_the_median_of_its_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    base = [figures(10.0, 10.0, 10.0), figures(20.0, 20.0)]
    found = {"off": base, "idle": [figures(9.8, 9.9, 4.0), figures(19.8, 40.0)]}
    share = Share.of(found, "idle", "off", "rate")
    assert share.median == pytest.approx(0.99)
    assert share.sessions == pytest.approx([0.98, 1.495])
    assert is_within(found, "idle", "off", 0.03, was_idle=True)
    assert not is_within(found, "idle", "off", 0.005, was_idle=True)
    assert "measured 1.010 and 0.990" in capsys.readouterr().out


def test_the_rate_of_a_busy_machine_is_not_judged() -> None:
    base, slower = [{"rate": 10.0, "total_us": 100.0}] * 3, [{"rate": 5.0, "total_us": 101.0}] * 3
    found = {"off": [base], "idle": [slower]}
    assert not is_within(found, "idle", "off", 0.03, was_idle=True)
    assert is_within(found, "idle", "off", 0.03, was_idle=False)
    assert not is_within(found, "idle", "off", 0.005, was_idle=False)


@pytest.mark.parametrize(("slowest", "is_met"), [(1.0, True), (0.985, False)])
def test_a_checkout_that_is_slower_than_the_other_misses_its_target(
    capsys: pytest.CaptureFixture[str], slowest: float, is_met: bool
) -> None:
    there = [{"rate": 10.0, "parent_us": 60.0, "server_us": 40.0}] * 3
    here = [
        {"rate": 10.0 * share, "parent_us": 60.0 / share, "server_us": 40.0 / share}
        for share in (0.5, slowest, 1.2)
    ]
    speeds = relative_speeds(here, there, was_idle=True)
    assert speeds == pytest.approx({"processor time": slowest, "rate": slowest})
    assert reaches(speeds, 0.99) is is_met
    assert (
        f"measured {slowest:.3f} by processor time, {slowest:.3f} by rate"
        in capsys.readouterr().out
    )
    assert "rate" not in relative_speeds(here, there, was_idle=False)


def test_figures_without_a_speed_reach_no_target() -> None:
    memory = [{"pss_mb": 10.0}]
    assert relative_speeds(memory, memory, was_idle=True) == {}
    assert not reaches({}, 0.5)


def test_a_target_without_another_checkout_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["throughput", "--at-least", "0.99"]) == 2
    assert capsys.readouterr().out == "--at-least needs --against.\n"


COST = Cost(Line(300, 40), Line(500, 60), 100, 2, 8)


def test_a_line_runs_through_both_measurements() -> None:
    line = Line.through((2, 264), (8, 113))
    assert line.turn(2) == pytest.approx(2 * 264)
    assert line.turn(8) == pytest.approx(8 * 113)


def test_one_worker_waits_for_nobody() -> None:
    # parent 380, server 620, two tasks in parallel 100, flush 200: 1,300 µs for two tasks
    rate = tasks_per_second(COST, cores=2, workers=1, children=2, flush_us=200)
    assert rate == pytest.approx(2 / 0.0013)


def test_many_workers_use_all_processors_and_no_more() -> None:
    rate = tasks_per_second(COST, cores=2, workers=200, children=2, flush_us=0)
    assert rate == pytest.approx(2 * 2 / 0.0012, rel=0.01)


def test_commits_that_notify_share_no_flush() -> None:
    rate = tasks_per_second(COST, cores=64, workers=200, children=8, flush_us=1_000)
    assert rate == pytest.approx(8 * 1_000, rel=0.01)


@given(st.integers(1, 40), st.integers(1, 32), st.floats(0, 5_000))
def test_another_worker_never_lowers_the_rate(workers: int, cores: int, flush: float) -> None:
    fewer, more = (
        tasks_per_second(COST, cores=cores, workers=count, children=2, flush_us=flush)
        for count in (workers, workers + 1)
    )
    assert more >= fewer * (1 - 1e-9)


def test_results_are_kept_one_by_one_and_drawn_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "RESULTS", tmp_path)
    monkeypatch.setenv("HORSIES_BENCH_SAVE", str(tmp_path / "found.json"))
    monkeypatch.setenv("HORSIES_BENCH_SERIES", "quiet")
    for size, milliseconds in (("10", 30.0), ("2", 4.0), ("10", 20.0), ("10", 100.0)):
        saved.save_result(size, {"ms": milliseconds, "more": 2.0})
    saved.save_result("5 x 8", {"more": 1_500.0})
    rows = [
        saved.Row("both", ["ms", "more"], 1),
        saved.Row("each", ["ms"], is_each=True),
        saved.Row("more", ["more"]),
    ]
    assert saved.markdown("found.json", "quiet", "workers", rows).splitlines() == [
        "| workers | 2 | 10 | 5 x 8 |",
        "| --- | --- | --- | --- |",
        "| both | 6.0 | 32.0 (22.0-102.0) | - |",
        "| each | 2 | 3 (2-10) | - |",
        "| more | 2 | 2 | 1,500 |",
    ]


def test_the_saved_drains_of_many_workers_have_the_names_that_the_table_reads() -> None:
    table = saved.markdown("workers.json", "now", "workers", saved.WORKERS)
    (strict,) = [line for line in table.splitlines() if "strict tasks" in line]
    assert "| - |" not in strict
