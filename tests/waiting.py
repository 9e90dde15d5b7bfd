"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Return as soon as the condition holds; fail the test when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not true after {seconds} seconds"
        time.sleep(0.005)
