"""Hearing: whether notifications arrive at all, told by the echo of the worker's own signs of life.

A listening connection may live and deliver nothing. So every sign of life also calls a channel that
only this worker listens to; a call whose echo is still missing when the next one is due means that
nothing arrives. Pure bookkeeping on the monotonic clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

# However often we call, an echo has at least this long to come back.
PATIENCE_SECONDS = 1.0
# A connection that delivers nothing is replaced, ever more rarely if that does not help.
FIRST_REST_SECONDS = 5.0
LAST_REST_SECONDS = 60.0


@dataclass(slots=True)
class Hearing:
    """What is known of the listening connection."""

    hears: bool = True
    # Whether the connection should be replaced.
    gives_up: bool = False
    # The oldest call whose echo is missing.
    _called_at: float | None = None
    _rests_until: float = 0.0
    _rest_seconds: float = FIRST_REST_SECONDS

    def note_call(self, now: float) -> None:
        """We called: an echo should come."""
        if self._called_at is None:
            self._called_at = now

    def note_delivery(self) -> None:
        """Something arrived; an echo or anything else, it proves the same."""
        self.hears = True
        self.gives_up = False
        self._called_at = None
        self._rests_until = 0.0
        self._rest_seconds = FIRST_REST_SECONDS

    def note_lost(self) -> None:
        """The connection is gone: echoes on their way to it never come."""
        self.gives_up = False
        self._called_at = None

    def judge(self, now: float) -> None:
        """Draw the conclusion from a missing echo, before the next call."""
        if self._called_at is None or now - self._called_at < PATIENCE_SECONDS:
            return
        self.hears = False
        if now >= self._rests_until:
            self.gives_up = True
            self._rests_until = now + self._rest_seconds
            self._rest_seconds = min(2 * self._rest_seconds, LAST_REST_SECONDS)
