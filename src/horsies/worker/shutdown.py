"""The farewell: how far a worker's stop has come, and what follows from it.

Pure bookkeeping on the monotonic clock, beside the agenda. The loop obeys: asked once it finishes what
runs, asked again or out of patience it interrupts, asked a third time it leaves.
"""

from __future__ import annotations

from horsies.worker.agenda import NEVER

# How long a stopping worker waits for a lost database to take back a claim that was in doubt.
RELEASE_PATIENCE_SECONDS = 5.0


class Shutdown:
    """What was asked for, and until when there is time; without a grace period, for ever."""

    def __init__(self, grace_seconds: float | None) -> None:
        self._grace_seconds = NEVER if grace_seconds is None else grace_seconds
        self._requests = 0
        self._began_at: float | None = None
        self._grace_ends_at = NEVER
        self.has_interrupted = False

    def ask(self) -> None:
        """Somebody wants the worker to stop, or to stop sooner; may come from a signal handler."""
        self._requests += 1

    @property
    def is_asked(self) -> bool:
        """Whether the worker is stopping: nothing new is claimed."""
        return self._requests > 0

    @property
    def is_immediate(self) -> bool:
        """Whether nothing is waited for any more."""
        return self._requests >= 3

    def begin(self, now: float) -> bool:
        """The loop learns of the stop; True the first time."""
        if self._began_at is not None:
            return False
        self._began_at = now
        self._grace_ends_at = now + self._grace_seconds
        return True

    def wants_interruption(self, now: float) -> bool:
        """Tell whether what still runs should be interrupted now."""
        if self.has_interrupted:
            return False
        return self._requests >= 2 or now >= self._grace_ends_at

    def note_interruption(self, count: int) -> None:
        """So many tasks were interrupted; it happens once."""
        self._grace_ends_at = NEVER
        self.has_interrupted = count > 0

    def next_at(self) -> float:
        """When the loop must be awake for the end of the grace period."""
        return self._grace_ends_at

    def release_ends_at(self) -> float:
        """Until when to wait for a database that is away before leaving it a claim in doubt."""
        if self._began_at is None:
            return NEVER
        return self._began_at + (0.0 if self._requests >= 2 else RELEASE_PATIENCE_SECONDS)
