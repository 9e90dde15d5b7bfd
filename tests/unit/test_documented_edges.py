"""Single sentences of the documentation, each with the case that once contradicted it."""

from __future__ import annotations

import pytest

from horsies.retry import Backoff


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_db_retry_max_ms_is_the_longest_wait(draw: float) -> None:
    backoff = Backoff(initial_ms=500, max_ms=3_000, random=lambda: draw)
    waits = [backoff.next_delay_seconds() or 0.0 for _ in range(8)]
    assert max(waits) <= 3.0


def test_waits_at_the_maximum_still_vary() -> None:
    draws = iter([0.6, 0.9])
    backoff = Backoff(initial_ms=3_000, max_ms=3_000, random=lambda: next(draws))
    assert backoff.next_delay_seconds() != backoff.next_delay_seconds()
