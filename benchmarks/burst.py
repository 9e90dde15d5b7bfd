"""The gain from windows: a child that holds several short tasks, compared with a child that holds one
task. Only tasks that are retried after a crash have windows; strict tasks are measured for comparison.
The reference is bare SQL in the same run, with batches of 8 and with the batch sizes of the worker's
turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks import lifecycle
from benchmarks.rounds import Checkout, alternate, begin_round, heading, median, ratios, spread
from benchmarks.worker import bare_rate, costs

CHILDREN = (2, 4, 8)
ROUNDS = 3
TASKS = 10_000
NEVER_REPLACED = ("--max-tasks-per-child", "0")
NAP_SECONDS = 0.005
# The targets, as fractions of the rate of bare SQL with batches of 8.
TARGETS = {2: 0.85, 4: 1.2, 8: 1.4}
STRICT_TARGETS = {2: 0.32, 4: 0.51, 8: 0.72}
NAP_TARGET = 0.88
DELAY_TARGET_MS = 6.0
LATENCY_TARGET = 1.05

Runs = list[dict[str, float]]


def burst(url: str) -> bool:
    """Measure drains, then figures that windows could worsen: tasks of 5 ms, start delays, latency."""
    here = Checkout(url)
    if not here.has_windows:
        print("\nThe worker has no option --window: windows are off in every figure.")
    checks = [_drains(here), _naps(here), _delays(here), _latency(here)]
    return all(checks)


def _windows(here: Checkout) -> dict[str, tuple[str, ...]]:
    return {"window 0": ("--window", "0"), "windows": ()} if here.has_windows else {"windows": ()}


def _drains(here: Checkout) -> bool:
    checks = []
    for children in CHILDREN:
        found = alternate(_drain_variants(here, children), ROUNDS)
        turn = round(1 / median(found["windows"], "commits"))
        found["bare SQL, same turns"] = [_bare(here.url, turn) for _ in range(ROUNDS)]
        checks.append(_print_drains(children, turn, found))
    return all(checks)


def _drain_variants(here: Checkout, children: int) -> dict[str, Callable[[], dict[str, float]]]:
    def drain(task: str, *flags: str) -> Callable[[], dict[str, float]]:
        arguments = {"children": children, "task": task, "count": TASKS}
        return partial(here.measure, "drain", **arguments, flags=[*NEVER_REPLACED, *flags])

    return {
        "bare SQL, batches of 8": partial(_bare, here.url, 8),
        "strict tasks": drain("noop"),
        **{name: drain("burst", *flags) for name, flags in _windows(here).items()},
    }


def _bare(url: str, batch: int) -> dict[str, float]:
    begin_round()
    return {"rate": bare_rate(url, lifecycle.two_commits, batch, TASKS)}


def _print_drains(children: int, turn: int, found: dict[str, Runs]) -> bool:
    heading(
        f"{children} children, {TASKS:,} no-op tasks, tasks/s, median (min-max) of {ROUNDS}; "
        f"turns of about {turn} tasks with windows"
    )
    targets = {"strict tasks": STRICT_TARGETS[children], "windows": TARGETS[children]}
    good = True
    for name, runs in found.items():
        parts = ratios(runs, found["bare SQL, batches of 8"], "rate")
        target = targets.get(name)
        good &= target is None or sorted(parts)[ROUNDS // 2] >= target
        wanted = "" if target is None else f"  target {target:.2f}"
        rates = spread([run["rate"] for run in runs])
        print(f"  {name:24}{rates:>26}  ratio {spread(parts, 2)}{wanted}")
    for name in ("strict tasks", "window 0", "windows"):
        if name in found:
            print(f"  {name}, per task: {costs(found[name])}")
    return good


def _naps(here: Checkout) -> bool:
    children, count = 8, 4_000
    ideal = children / NAP_SECONDS
    arguments = {"children": children, "task": "burst_nap", "count": count}
    found = alternate(
        {
            name: partial(here.measure, "drain", **arguments, flags=[*NEVER_REPLACED, *flags])
            for name, flags in _windows(here).items()
        },
        ROUNDS,
    )
    heading(f"tasks of 5 ms, {children} children, part of the ideal {ideal:,.0f} tasks/s")
    for name, runs in found.items():
        print(f"  {name:24}{spread([run['rate'] / ideal for run in runs], 3):>26}")
    print(f"  target {NAP_TARGET}")
    return median(found["windows"], "rate") / ideal >= NAP_TARGET


def _delays(here: Checkout) -> bool:
    found = alternate(
        {
            name: partial(here.measure, "mixed", flags=[*NEVER_REPLACED, *flags])
            for name, flags in _windows(here).items()
        },
        ROUNDS,
    )
    heading("start delay of 1 % tasks of 50 ms among no-op tasks, 8 children, ms after the claim")
    for name, runs in found.items():
        middle, late = (
            spread([run[f"nap_delay_{quantile}_ms"] for run in runs], 2)
            for quantile in ("p50", "p99")
        )
        print(f"  {name:24}p50 {middle:>22}  p99 {late:>22}")
    if "window 0" not in found:
        return True
    added = median(found["windows"], "nap_delay_p99_ms") - median(
        found["window 0"], "nap_delay_p99_ms"
    )
    print(f"  windows add {added:.2f} ms to p99 (target at most {DELAY_TARGET_MS:.0f})")
    return added <= DELAY_TARGET_MS


def _latency(here: Checkout) -> bool:
    found = alternate(
        {
            name: partial(here.measure, "latency", flags=list(flags))
            for name, flags in _windows(here).items()
        },
        ROUNDS,
    )
    heading("send to result on an idle worker, ms")
    for name, runs in found.items():
        middle, late = (spread([run[f"{q}_ms"] for run in runs], 2) for q in ("p50", "p99"))
        print(f"  {name:24}p50 {middle:>22}  p99 {late:>22}")
    if "window 0" not in found:
        return True
    ratio = median(found["windows"], "p50_ms") / median(found["window 0"], "p50_ms")
    print(f"  ratio of p50 {ratio:.2f} (target at most {LATENCY_TARGET})")
    return ratio <= LATENCY_TARGET


BENCHMARKS = {"burst": burst}
