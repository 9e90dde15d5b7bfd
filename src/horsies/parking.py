"""Park requests: the events that a run of a durable function waits for, passed from its child to the
worker that parks the run.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

# Ten years: a longer wait is stored as a wait without a limit.
_SECONDS_MAX = 10 * 366 * 86_400


class ParkRequest(NamedTuple):
    """The events that a run waits for: a time, a signal or the end of a child. The first event wakes the
    run.

    A run with a ``problem`` is held until an operator resumes it. ``cancelled`` is the message of a run
    that has finished its clean-up and ends as CANCELLED. With ``args`` and ``kwargs``, which are JSON
    texts, the run continues immediately with these arguments and an empty record.
    """

    seconds: float | None = None
    signals: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    problem: str | None = None
    cancelled: str | None = None
    args: str | None = None
    kwargs: str | None = None

    def to_json(self) -> str:
        """Return the request in the form that ``horsies_park_v1`` reads."""
        values = self._asdict().items()
        return json.dumps({name: value for name, value in values if value not in (None, ())})

    @classmethod
    def from_json(cls, text: str) -> ParkRequest:
        """Parse the request in a child's report; raise ValueError if it is malformed."""
        try:
            fields: dict[str, Any] = json.loads(text)
            seconds, problem = fields.pop("seconds", None), fields.pop("problem", None)
            cancelled = fields.pop("cancelled", None)
            args, kwargs = fields.pop("args", None), fields.pop("kwargs", None)
            signals, children = fields.pop("signals", []), fields.pop("children", [])
            is_time = seconds is None or 0 <= seconds <= _SECONDS_MAX
            texts = [
                *signals,
                *children,
                *(one or "" for one in (problem, cancelled, args, kwargs)),
            ]
        except (AttributeError, TypeError, RecursionError) as error:
            raise ValueError("not a request") from error
        if fields or not is_time or not all(isinstance(one, str) for one in texts):
            raise ValueError("not a request")
        return cls(seconds, tuple(signals), tuple(children), problem, cancelled, args, kwargs)
