"""Wake-ups: a send wakes a few of many workers, and each of them serves it or passes it on. Pure.

A woken worker must either make a claim that leaves no due task in the queue, or pass the wake-up on. It
passes it on if its children stay busy, if it excludes tasks that it does not know, or while it shuts
down. So no task waits because the wrong workers were woken; ``db/functions/10_notify.sql`` chooses
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from horsies.worker.agenda import NEVER

# A short task ends within this time, and its child takes the next one: in that case there is nothing to
# pass on.
PASS_SECONDS = 0.005
# If no other worker waits for tasks, all of them are busy, and each claims again when a task ends.
REST_SECONDS = 1.0


@dataclass(slots=True)
class WakeUps:
    """The wake-ups that this worker has not served yet, and whether sends may wake it."""

    # Whether this worker can immediately start a task from any of its queues.
    waits: bool = False
    # Whether the workers table says so.
    is_stored: bool = False
    # When to pass on the wake-ups for these queues.
    pass_at: float = NEVER
    owed: set[str] = field(default_factory=set)
    _rests_until: float = 0.0

    @property
    def must_store(self) -> bool:
        """Whether no send would wake this worker although it waits."""
        return self.waits and not self.is_stored

    def note_wake(self, queues: Iterable[str], now: float) -> None:
        self.owed.update(queues)
        if self.owed and self.pass_at == NEVER:
            self.pass_at = max(now + PASS_SECONDS, self._rests_until)

    def note_served(self) -> None:
        """Note a claim that left behind no due task that this worker could have met."""
        self.owed.clear()
        self.pass_at = NEVER

    def note_passed(self, woken: int, now: float) -> None:
        """Note that this many workers were woken instead, and that the table says that this one does
        not wait.
        """
        self.note_served()
        self.is_stored = False
        self._rests_until = now if woken else now + REST_SECONDS
