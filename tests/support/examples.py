"""The number of random examples per property: a half, a fifth for `make test-fast`, all for `make soak`.
A profile's number of examples is a percentage of the number in the test. No profile has deadlines or
speed checks, which fail by chance on a busy machine.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

EXAMPLES_MIN = 5

for name, percentage in (("usual", 50), ("fast", 20), ("long", 200)):
    settings.register_profile(
        name,
        max_examples=percentage,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("usual")


def examples(count: int) -> int:
    """Scale the number of examples of one property to the profile."""
    percentage = settings().max_examples
    return max(min(count, EXAMPLES_MIN), count * percentage // 100)
