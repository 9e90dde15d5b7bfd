"""How many random examples a property gets: half of them, a fifth for `make test-fast`, all for `make soak`.

The profile's own number of examples is the percentage of the number a test asks for. No profile has a
deadline or a health check of speed: on a busy machine both fail by chance.
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
