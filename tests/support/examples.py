"""How many random examples a property gets: all of them, or a fifth for `make test-fast`.

The profile's own number of examples, 100 unless `--hypothesis-profile fast` is given, is the percentage
of the number a test asks for.
"""

from __future__ import annotations

from hypothesis import settings

EXAMPLES_MIN = 5

settings.register_profile("fast", max_examples=20)


def examples(count: int) -> int:
    """Scale the number of examples of one property to the profile."""
    percentage = settings().max_examples
    return max(min(count, EXAMPLES_MIN), count * percentage // 100)
