"""What a run of a durable function waits for, from the child that leaves it to the worker that parks it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

# Ten years; a wait without a limit has no time at all.
_SECONDS_MAX = 10 * 366 * 86_400


class ParkRequest(NamedTuple):
    """The events of which the first one wakes a run: a time, a signal or the end of a child.

    A run with a ``problem`` is held until an operator resumes it.
    """

    seconds: float | None = None
    signals: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    problem: str | None = None

    def to_json(self) -> str:
        """The request as ``horsies_park_v1`` reads it."""
        values = self._asdict().items()
        return json.dumps({name: value for name, value in values if value not in (None, ())})

    @classmethod
    def from_json(cls, text: str) -> ParkRequest:
        """Read the request in the report of a child; ValueError if it is malformed."""
        try:
            fields: dict[str, Any] = json.loads(text)
            seconds, problem = fields.pop("seconds", None), fields.pop("problem", None)
            signals, children = fields.pop("signals", []), fields.pop("children", [])
            is_time = seconds is None or 0 <= seconds <= _SECONDS_MAX
            texts = [*signals, *children, problem or ""]
        except (AttributeError, TypeError, RecursionError) as error:
            raise ValueError("not a request") from error
        if fields or not is_time or not all(isinstance(one, str) for one in texts):
            raise ValueError("not a request")
        return cls(seconds, tuple(signals), tuple(children), problem)
