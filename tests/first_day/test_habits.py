"""Habits of users of other task queues: each test is one of them, and works here as they expect."""

from __future__ import annotations

import pytest

from horsies import RetryPolicy
from horsies.retry import delay_seconds


@pytest.mark.parametrize(
    "policy",
    [
        RetryPolicy.exponential(
            5, max_retries=20, auto_retry_for=["DOWN"], max_delay_seconds=60, jitter=False
        ),
        RetryPolicy(
            auto_retry_for=["DOWN"],
            max_retries=20,
            intervals=[5],
            max_delay_seconds=60,
            backoff_strategy="exponential",
            jitter=False,
        ),
    ],
    ids=["exponential", "constructor"],
)
def test_waits_grow_up_to_max_delay_seconds(policy: RetryPolicy) -> None:
    stored = RetryPolicy.from_json(policy.to_json())
    assert stored == policy
    waits = [delay_seconds(policy, number) for number in (1, 2, 3, 4, 5, 20)]
    assert waits == [5, 10, 20, 40, 60, 60]
