"""Failed attempts grouped by fingerprint: the task, the error code, the exception class and its place.

The groups come from the newest 20,000 attempts; at most 2,000 failed attempts among them are read. The
first time of a group, and a single group, are read from the index on fingerprints, so they cover all
attempts on record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from horsies.db.statement import Script, one_or_none
from horsies.db.statements.lookup import (
    AttemptPlace,
    FailureGroup,
    end_of_attempts,
    group_failures,
    read_failure,
)

ATTEMPTS_MAX = 20_000
FAILURES_MAX = 2_000
# The number of equal time slots in which one group's failures are counted.
SLOTS = 48
_MESSAGE_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Failures:
    """The groups, largest first. ``looked_back_to`` is None if all recorded attempts were read."""

    groups: list[FailureGroup]
    looked_back_to: datetime | None = None

    @property
    def total(self) -> int:
        return sum(group.total for group in self.groups)

    @property
    def is_cut(self) -> bool:
        """Whether some failed attempts were not read."""
        return self.total >= FAILURES_MAX


def failures_script(names: Sequence[str] = ()) -> Script[Failures]:
    """Read the groups; ``names`` limits them to tasks with these names."""
    first: AttemptPlace | None = one_or_none((yield end_of_attempts(ATTEMPTS_MAX)))
    from_id = 0 if first is None else first.id
    groups: list[FailureGroup] = yield group_failures(from_id, FAILURES_MAX, list(names))
    shown = [_cut(group) for group in groups]
    return Failures(shown, None if first is None else first.finished_at)


def failure_script(fingerprint: str) -> Script[FailureGroup | None]:
    """Read one group from its newest 2,000 attempts; return None if no recorded attempt belongs to it."""
    group: FailureGroup | None = one_or_none((yield read_failure(fingerprint, FAILURES_MAX)))
    return None if group is None else _cut(group)


def _cut(group: FailureGroup) -> FailureGroup:
    """Shorten the group's message after decryption, because an encrypted message must be read as a
    whole.
    """
    return group._replace(message=group.message and group.message[:_MESSAGE_CHARACTERS])


class Slot(NamedTuple):
    """A time slot of a chart, and its failures."""

    at: datetime
    failures: int


def over_time(group: FailureGroup, now: datetime) -> list[Slot]:
    """Count a group's failures in equal time slots, from the oldest read failure until now."""
    oldest = min(group.times)
    seconds = max(now.timestamp() - oldest, 60.0)
    counts = counts_by_part(group.times, oldest, seconds, SLOTS)
    start, step = datetime.fromtimestamp(oldest, UTC), timedelta(seconds=seconds / SLOTS)
    return [Slot(start + place * step, count) for place, count in enumerate(counts)]


def counts_by_part(times: Sequence[float], start: float, seconds: float, parts: int) -> list[int]:
    """Count times in the equal parts of a time span."""
    counts = [0] * parts
    for time in times:
        place = int((time - start) / seconds * parts)
        counts[min(max(place, 0), parts - 1)] += 1
    return counts


def reason_text(group: FailureGroup) -> str:
    """Describe a group in one line: its exception class and place, or its error code."""
    kind = group.exception_type or group.error_code or "without a code"
    return f"{kind} in {group.raised_in}" if group.raised_in else kind


def release_text(group: FailureGroup) -> str | None:
    """Describe the releases in which a group was first and last seen; return None if neither is known."""
    first, last = group.first_release, group.last_release
    if first == last or last is None:
        return first
    return f"{first or 'unknown'} to {last}"


def failures_document(failures: Failures) -> dict[str, Any]:
    """Return the groups as a JSON object, without the times of single failures."""
    groups = [_document(group) for group in failures.groups]
    return {"failures": groups, "looked_back_to": failures.looked_back_to}


def failure_document(group: FailureGroup, now: datetime) -> dict[str, Any]:
    """Return one group as a JSON object, with its counts over time."""
    slots = [slot._asdict() for slot in over_time(group, now)]
    return _document(group) | {"is_cut": group.total >= FAILURES_MAX, "over_time": slots}


def _document(group: FailureGroup) -> dict[str, Any]:
    return {name: value for name, value in group._asdict().items() if name != "times"}
