"""The cost of encrypted payload and of large payload in a store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.rounds import heading
from horsies import AppConfig, FernetCodec, Horsies, PostgresConfig, TableStore
from horsies.encryption import Payloads

KILOBYTES = (1, 10, 100)
# The maximum processor time in microseconds per additional kilobyte, in each direction.
TARGET = 10.0
# Judge the best series, because other processes can only slow a series down.
SERIES = 25
# The number of large payloads stored in each way.
STORED = 60


def codec(url: str) -> bool:
    """Encrypt and decrypt texts of several sizes; the slope between the sizes is the cost of a kilobyte."""
    payloads = Payloads(FernetCodec(FernetCodec.new_key()))
    heading(
        f"encryption of one text by Fernet, µs of processor time, best of {SERIES} short series"
    )
    found: dict[str, dict[int, float]] = {"encrypt": {}, "decrypt": {}}
    for size in KILOBYTES:
        text = json.dumps(os.urandom(size * 512).hex())
        stored = payloads.encrypt(text)
        found["encrypt"][size] = _microseconds(payloads.encrypt, text)
        found["decrypt"][size] = _microseconds(payloads.decrypt, stored)
    smallest, largest = KILOBYTES[0], KILOBYTES[-1]
    slopes = []
    for name, costs in found.items():
        slope = (costs[largest] - costs[smallest]) / (largest - smallest)
        sizes = ", ".join(f"{size} KB {cost:.1f}" for size, cost in costs.items())
        print(
            f"  {name}: {sizes}; {slope:.2f} per further KB, {costs[smallest] - slope:.1f} per text"
        )
        slopes.append(slope)
    print(f"  target: at most {TARGET:g} per KB; measured {max(slopes):.2f}")
    _store(url)
    return max(slopes) <= TARGET


def _store(url: str) -> None:
    """Send and read a task, once with its arguments in its row and once in a TableStore."""
    heading("a send and a look at its task with 200 KB of arguments, ms, median of 60, alternating")
    bare = PostgresConfig(database_url=url)
    apps = [Horsies(AppConfig(broker=bare)), Horsies(AppConfig(broker=_with_table(bare)))]
    text, seconds = "x" * 200_000, [[0.0] * STORED, [0.0] * STORED]
    try:
        tasks = [_measured_task(app) for app in apps]
        for turn in range(STORED):
            for place, task in enumerate(tasks):
                begun = time.perf_counter()
                sent = task.send(text).unwrap()
                apps[place].get_task_info(sent.task_id, include_result=True).unwrap()
                seconds[place][turn] = time.perf_counter() - begun
    finally:
        for app in apps:
            app.close()
    row, table = (median(one) * 1000 for one in seconds)
    print(f"  in the row {row:.2f}, in a TableStore {table:.2f}; ratio {table / row:.2f}")


def _with_table(config: PostgresConfig) -> PostgresConfig:
    return config.model_copy(update={"store": TableStore()})


def _measured_task(app: Horsies) -> Any:
    @app.task("benchmark-large")
    def keep(text: str) -> int:
        return len(text)

    keep.send("").unwrap()
    return keep


def _microseconds(call: Callable[[str], str], text: str) -> float:
    calls = max(5, 500_000 // len(text))
    best = float("inf")
    for _ in range(SERIES):
        begun = time.process_time()
        for _ in range(calls):
            call(text)
        best = min(best, time.process_time() - begun)
    return best / calls * 1e6


BENCHMARKS = {"codec": codec}
