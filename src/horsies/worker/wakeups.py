"""Wake-ups: a send wakes a few of many workers, and each of them serves it or passes it on. Pure.

A woken worker must either make a claim that leaves no due task in the queue, or pass the wake-up on. It
does the latter if its children stay busy, if it excludes tasks that it does not know, or while it shuts
down. So no task waits because the wrong workers were woken; ``db/functions/10_notify.sql`` chooses the
workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from horsies.worker.agenda import NEVER

# How long a busy worker waits before it passes a wake-up on: a short task ends within this time, and its
# child takes the next task.
PASS_SECONDS = 0.005
# How long a worker waits before it tries again to pass a wake-up on. If no other worker waits for tasks,
# all workers are busy, and each of them claims again when a task ends.
REST_SECONDS = 1.0


@dataclass(slots=True)
class WakeUps:
    """The wake-ups that this worker has not served yet, and whether sends may wake it."""

    # Whether this worker can immediately start a task from any of its queues.
    waits: bool = False
    # Whether the workers table says that this worker waits.
    is_stored: bool = False
    # When to pass on the wake-ups that are not served yet, and the queues that they concern.
    pass_at: float = NEVER
    owed: set[str] = field(default_factory=set)
    _rests_until: float = 0.0

    @property
    def must_store(self) -> bool:
        """Whether this worker waits for tasks but the table does not say so; no send would wake it."""
        return self.waits and not self.is_stored

    def note_wake(self, queues: Iterable[str], now: float) -> None:
        self.owed.update(queues)
        if self.owed and self.pass_at == NEVER:
            self.pass_at = max(now + PASS_SECONDS, self._rests_until)

    def note_served(self) -> None:
        """Note a claim after which no due task that this worker can run was left in the queues."""
        self.owed.clear()
        self.pass_at = NEVER

    def note_passed(self, woken: int, now: float) -> None:
        """Note that this many other workers were woken instead, and that the table now says that this
        worker does not wait.
        """
        self.note_served()
        self.is_stored = False
        self._rests_until = now if woken else now + REST_SECONDS
