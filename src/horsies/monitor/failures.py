"""Failed attempts grouped by task and error code.

The groups come from the newest 20,000 attempts; at most 2,000 failed attempts among them are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from horsies.db.statement import Script, one_or_none
from horsies.db.statements.lookup import (
    AttemptPlace,
    FailureGroup,
    end_of_attempts,
    group_failures,
)

ATTEMPTS_MAX = 20_000
FAILURES_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Failures:
    """Groups, the largest first. ``looked_back_to`` is None if all recorded attempts were read."""

    groups: list[FailureGroup]
    looked_back_to: datetime | None = None

    @property
    def total(self) -> int:
        return sum(group.total for group in self.groups)

    @property
    def is_cut(self) -> bool:
        """Whether more attempts failed than were read."""
        return self.total >= FAILURES_MAX


def failures_script(names: Sequence[str] = ()) -> Script[Failures]:
    """Read the groups; ``names`` limits them to these tasks."""
    first: AttemptPlace | None = one_or_none((yield end_of_attempts(ATTEMPTS_MAX)))
    from_id = 0 if first is None else first.id
    groups: list[FailureGroup] = yield group_failures(from_id, FAILURES_MAX, list(names))
    return Failures(groups, None if first is None else first.finished_at)


def failures_document(failures: Failures) -> dict[str, Any]:
    """Return the groups as a JSON object, without the times of single failures."""
    groups = [group._asdict() for group in failures.groups]
    for group in groups:
        del group["times"]
    return {"failures": groups, "looked_back_to": failures.looked_back_to}
