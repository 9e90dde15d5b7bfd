"""Fairness of the claim by keys, for any number of keys, children and late arrivals."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.db.test_keys import Ring, add_keyed, add_many_keyed
from tests.support.database import Database
from tests.support.examples import examples
from tests.support.rows import add_task

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
    data=st.data(),
)
def test_keys_that_always_have_tasks_get_the_same_and_no_arrival_more(
    connection: Database, keys: int, has_plain: bool, claims: list[int], data: Any
) -> None:
    connection.execute("TRUNCATE horsies_tasks CASCADE")
    names = [f"key {number}" for number in range(keys)]
    for key in names:
        add_many_keyed(connection, key, BACKLOG)
    if has_plain:
        for _ in range(BACKLOG // 3):
            add_task(connection)
    arrives_before = data.draw(st.integers(0, len(claims) - 1))
    served: Counter[str | None] = Counter()
    lanes = [*names, None] if has_plain else names
    counts = [0]
    waited: list[int] = []
    ring = Ring(connection)
    for number, children in enumerate(claims):
        if number >= arrives_before and "late" not in waiting(connection):
            add_keyed(connection, "late")  # one at a time
        before = served.copy()
        served.update(ring.claim(children))
        assert served.total() - before.total() == children, "no child is left idle"
        if number < arrives_before:
            counts = [served[key] for key in lanes]
        else:
            waited = [] if served["late"] > before["late"] else [*waited, children]
            assert sum(waited) <= keys + has_plain + max(claims), "its turn comes within a round"
    # After the arrival, the places that a key which runs empty leaves may all go to one of the others.
    assert max(counts) - min(counts) <= 2 + max(claims)
    assert served["late"] <= max(served[key] for key in lanes) + 1, (
        "a key with one task at a time gets no more than others"
    )


def waiting(connection: Database) -> set[str]:
    query = (
        "SELECT DISTINCT lane_key FROM horsies_tasks WHERE status = 'PENDING' AND lane IS NOT NULL"
    )
    return {key for (key,) in connection.execute(query).fetchall()}
