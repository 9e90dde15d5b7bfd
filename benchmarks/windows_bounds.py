"""The guarantees of windows in milliseconds: how soon tasks behind a slow task run elsewhere, how exact
a time limit is, and whether two workers share few tasks. Tests check the same without a clock.
"""

from __future__ import annotations

import importlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from benchmarks.figures import percentile, wait_for
from benchmarks.rounds import alternate, begin_round, heading, median, spread
from benchmarks.worker import connect, running_worker

ROUNDS = 3
WARM_UP = (0.0,) * 500
BACKLOG = (0.0,) * 1_000
SLOW_SECONDS = 1.0
LIMIT_MS = 100
TRICKLES, TRICKLE = 100, (0.004,) * 3
TAKE_BACK_TARGET_MS = 50.0
LIMIT_TARGET_MS = 20.0
DELAY_TARGET_MS = 6.0

RUNS = """
SELECT (task.result::jsonb -> 'ok' ->> 0)::float8, (task.result::jsonb -> 'ok' ->> 1)::float8,
    task.generation, extract(epoch FROM task.enqueued_at)::float8, attempt.worker_id
FROM horsies_tasks AS task JOIN horsies_task_attempts AS attempt ON attempt.task_id = task.id
ORDER BY task.id
"""

APPLICATION = "benchmarks.newer_app:app"

Drain = Callable[..., list["Run"]]


class Run(NamedTuple):
    """One task: its start and duration by its own clock, and the number and worker of its claims."""

    began_at: float
    seconds: float
    claims: int
    sent_at: float
    worker: str


@contextmanager
def running(url: str, workers: int, children: int, *flags: str) -> Iterator[Drain]:
    """Run this many warm workers; yield the function that makes them run tasks of these durations."""
    begin_round()
    os.environ["HORSIES_DATABASE_URL"] = url
    function = importlib.import_module("benchmarks.newer_app").burst_for
    more = ("--max-tasks-per-child", "0", *flags)
    with connect(url) as connection, ExitStack() as stack:
        processes = [
            stack.enter_context(running_worker(url, children, *more, application=APPLICATION))
            for _ in range(workers)
        ]

        def drain(*batches: Sequence[float], **options: Any) -> list[Run]:
            connection.execute("TRUNCATE horsies_tasks CASCADE")
            count = 0
            for batch in batches:
                calls = [function.bind(seconds) for seconds in batch]
                function.with_options(**options).send_many(calls).unwrap()
                count += len(batch)
                time.sleep(0.02)
            wait_for(connection, count, processes[0])
            found = [Run(*row) for row in connection.execute(RUNS).fetchall()]
            assert len(found) == count, "a task had more than one attempt"
            return found

        drain(WARM_UP)
        yield drain


def taken_back(url: str, workers: int, children: int) -> dict[str, float]:
    """Return the time from the start of a slow task to the start of the last task behind it in another
    child.
    """
    with running(url, workers, children) as drain:
        runs = drain([*BACKLOG, SLOW_SECONDS, *BACKLOG])
    slow, *rest = runs[len(BACKLOG) :]
    # The windows of four children end before the 128th task behind the slow task.
    behind = [run.began_at - slow.began_at for run in rest[:128] if run.claims > 1]
    return {"tasks": len(behind), "last_ms": 1000 * max(behind, default=0.0)}


def limited(url: str) -> dict[str, float]:
    """Return how early or late slow tasks among short ones were stopped, compared with their time limit."""
    with running(url, 1, 4) as drain:
        runs = drain([*BACKLOG, SLOW_SECONDS] * 5, timeout_ms=LIMIT_MS)
    errors = [1000 * run.seconds - LIMIT_MS for run in runs if run.seconds > LIMIT_MS / 2000]
    assert len(errors) == 5
    return {"early_ms": -min(errors), "late_ms": max(errors)}


def shared(url: str, *flags: str) -> dict[str, float]:
    """Give two workers three tasks of 4 ms at a time; measure the delay of their start, and the smaller
    worker's share.
    """
    with running(url, 2, 2, *flags) as drain:
        runs = drain(*[TRICKLE] * TRICKLES)
    delays = [run.began_at - run.sent_at for run in runs]
    shares = Counter(run.worker for run in runs)
    smaller = min(shares.values()) / len(runs) if len(shares) == 2 else 0.0
    return {"p99_ms": 1000 * percentile(delays, 99), "share": smaller}


def windows(url: str) -> bool:
    """Measure the guarantees of windows, and print every figure with its target."""
    checks = [_print_taken_back(url), _print_limits(url), _print_shares(url)]
    return all(checks)


def _print_taken_back(url: str) -> bool:
    found = alternate(
        {
            "4 children of one worker": partial(taken_back, url, 1, 4),
            "two workers of one child": partial(taken_back, url, 2, 1),
        },
        ROUNDS,
    )
    heading("tasks behind one of 1 s: how many, and ms until the last of them began elsewhere")
    good = True
    for name, runs in found.items():
        tasks, last = (spread([run[key] for run in runs], 1) for key in ("tasks", "last_ms"))
        print(f"  {name:26}{tasks:>20} tasks  {last:>22} ms  target {TAKE_BACK_TARGET_MS:.0f}")
        good &= median(runs, "tasks") > 0 and median(runs, "last_ms") <= TAKE_BACK_TARGET_MS
    return good


def _print_limits(url: str) -> bool:
    runs = alternate({"limit": partial(limited, url)}, ROUNDS)["limit"]
    heading(f"time limit of {LIMIT_MS} ms among short tasks, ms off the limit, worst of 5")
    early, late = (spread([run[key] for run in runs], 1) for key in ("early_ms", "late_ms"))
    print(f"  early {early}  late {late}  target {LIMIT_TARGET_MS:.0f}")
    return max(median(runs, "early_ms"), median(runs, "late_ms")) <= LIMIT_TARGET_MS


def _print_shares(url: str) -> bool:
    variants = {"window 0": partial(shared, url, "--window", "0"), "windows": partial(shared, url)}
    found = alternate(variants, ROUNDS)
    heading("three tasks of 4 ms at a time, two workers of 2 children: start delay, smaller share")
    for name, runs in found.items():
        late, share = spread([run["p99_ms"] for run in runs], 1), median(runs, "share")
        print(f"  {name:26}p99 {late:>22} ms  smaller share {share:.2f}")
    added = median(found["windows"], "p99_ms") - median(found["window 0"], "p99_ms")
    print(f"  windows add {added:.1f} ms to p99 (target at most {DELAY_TARGET_MS:.0f})")
    return added <= DELAY_TARGET_MS and median(found["windows"], "share") > 0


BENCHMARKS = {"windows": windows}
