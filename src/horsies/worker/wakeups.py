"""Wake-ups: a send wakes a few of many workers, and each of them serves it or passes it on. Pure.

A woken worker owes something for the queue: a claim that leaves no due task behind, or to pass the wake-up
on. It passes it on when its children stay busy, when it leaves out tasks that it does not know, or while it
shuts down. So no task waits because the wrong workers were woken; ``db/functions/10_notify.sql`` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from horsies.worker.agenda import NEVER

# A short task ends within that time, and its child takes the next one: then there is nothing to pass on.
PASS_SECONDS = 0.005
# While no other worker waits for tasks, all of them are busy, and each claims again when a task ends.
REST_SECONDS = 1.0


@dataclass(slots=True)
class WakeUps:
    """The wake-ups that this worker has not served yet, and whether sends may wake it."""

    # Whether this worker can start a task of any of its queues at once.
    waits: bool = False
    # Whether the table of workers says so.
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
        """A claim left no due task behind that this worker could have met."""
        self.owed.clear()
        self.pass_at = NEVER

    def note_passed(self, woken: int, now: float) -> None:
        """So many workers were woken instead, and the table says that this one does not wait."""
        self.note_served()
        self.is_stored = False
        self._rests_until = now if woken else now + REST_SECONDS
