"""Fairness of the claim by keys, for any number of keys, children and late arrivals, and for any weights."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.database import Database
from tests.support.examples import examples
from tests.support.keys import Ring, add_keyed, add_many_keyed, limit
from tests.support.rows import add_many

# More than all claims of an example take.
BACKLOG = 150


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    keys=st.integers(1, 7),
    has_plain=st.booleans(),
    claims=st.lists(st.integers(1, 9), min_size=1, max_size=16),
    arrives_before=st.integers(0, 16),
    has_limits=st.booleans(),
)
@example(keys=1, has_plain=True, claims=[5] * 16, arrives_before=0, has_limits=False)
@example(keys=1, has_plain=True, claims=[5] * 16, arrives_before=0, has_limits=True)
def test_keys_that_always_have_tasks_get_the_same_and_no_arrival_more(
    connection: Database,
    keys: int,
    has_plain: bool,
    claims: list[int],
    arrives_before: int,
    has_limits: bool,
) -> None:
    connection.execute("TRUNCATE horsies_tasks, horsies_lanes CASCADE")
    if has_limits:
        limit(connection, max_concurrency=BACKLOG)
    names = [f"key {number}" for number in range(keys)]
    for key in names:
        add_many_keyed(connection, key, BACKLOG)
    if has_plain:
        add_many(connection, BACKLOG)
    served: Counter[str | None] = Counter()
    lanes = [*names, None] if has_plain else names
    waited: list[int] = []
    ring = Ring(connection)
    for number, children in enumerate(claims):
        if number >= arrives_before and "late" not in waiting(connection):
            add_keyed(connection, "late")  # one at a time
        before = served.copy()
        served.update(ring.claim(children))
        assert served.total() - before.total() == children, "no child is left idle"
        if number >= arrives_before:
            waited = [] if served["late"] > before["late"] else [*waited, children]
            assert sum(waited) <= keys + has_plain + max(claims), "its turn comes within a round"
    counts = [served[key] for key in lanes]
    assert max(counts) - min(counts) <= 1, "also of the places that the late key leaves"
    assert served["late"] <= max(counts) + 1, (
        "a key with one task at a time gets no more than others"
    )


def waiting(connection: Database) -> set[str]:
    query = (
        "SELECT DISTINCT lane_key FROM horsies_tasks WHERE status = 'PENDING' AND lane IS NOT NULL"
    )
    return {key for (key,) in connection.execute(query).fetchall()}


# Enough for the shares to show.
STARTS = 600
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0, 5.0])


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=4),
    children=st.sampled_from([1, 2, 5, 8, 16]),
    has_plain=st.booleans(),
)
@example(weights=[3.0, 1.0], children=8, has_plain=False)
@example(weights=[0.25, 1.0], children=8, has_plain=False)
@example(weights=[3.0, 3.0], children=16, has_plain=True)
def test_keys_that_always_have_tasks_start_by_their_weights(
    connection: Database, weights: list[float], children: int, has_plain: bool
) -> None:
    connection.execute("TRUNCATE horsies_tasks, horsies_lanes CASCADE")
    limit(connection, weight=1.0)
    by_key: dict[str | None, float] = {None: 1.0} if has_plain else {}
    for number, weight in enumerate(weights):
        limit(connection, f"key {number}", weight=weight)
        add_many_keyed(connection, f"key {number}", STARTS + children)
        by_key[f"key {number}"] = weight
    if has_plain:
        add_many(connection, STARTS + children)
    ring = Ring(connection)
    served: Counter[str | None] = Counter()
    while served.total() < STARTS:
        before = served.total()
        served.update(ring.claim(children))
        assert served.total() - before == children, "no child is left idle"
    for key, weight in by_key.items():
        share = weight / sum(by_key.values())
        expected = share * served.total()
        # A turn ends at random: six standard deviations, and a turn at either end.
        others = [other for name, other in by_key.items() if name != key]
        rounds = served.total() / sum(by_key.values())
        variance = (1 - share) ** 2 * spread(weight) + share**2 * sum(map(spread, others))
        tolerance = 6 * math.sqrt(rounds * variance) + 2 * children + 5
        assert abs(served[key] - expected) <= tolerance, (key, weight, served)


def spread(weight: float) -> float:
    """The variance of the number of tasks at one turn."""
    return weight * (weight - 1) if weight >= 1 else weight * (1 - weight)
