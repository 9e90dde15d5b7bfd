"""The cost of encrypted payload: processor time per text and per kilobyte."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from benchmarks.rounds import heading
from horsies import FernetCodec
from horsies.encryption import Payloads

KILOBYTES = (1, 10, 100)
# Microseconds of processor time that one more kilobyte may cost, in each direction.
TARGET = 10.0


def codec(_: str) -> bool:
    """Encrypt and decrypt texts of several sizes; the price of a kilobyte is the slope between them."""
    payloads = Payloads(FernetCodec(FernetCodec.new_key()))
    heading("encryption of one text by Fernet, µs of processor time, best of 5 series")
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
    return max(slopes) <= TARGET


def _microseconds(call: Callable[[str], str], text: str) -> float:
    calls = max(20, 2_000_000 // len(text))
    best = float("inf")
    for _ in range(5):
        begun = time.process_time()
        for _ in range(calls):
            call(text)
        best = min(best, time.process_time() - begun)
    return best / calls * 1e6


BENCHMARKS = {"codec": codec}
