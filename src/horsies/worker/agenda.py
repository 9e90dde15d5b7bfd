"""The agenda: when the worker's loop has something to do, and how long it may sleep until then.

Pure bookkeeping on the monotonic clock, no I/O. A claim that came back short means the queues are
empty for now; from then on only a notification, a due time, or the safety poll makes another claim
worth its while.
"""

from __future__ import annotations

from dataclasses import dataclass

# An idle worker looks ahead at once; a busy one at most this often.
LOOK_AHEAD_SECONDS = 0.1
REST_FACTOR = 10
NEVER = float("inf")


@dataclass(slots=True)
class Agenda:
    """What is planned, in monotonic seconds."""

    poll_seconds: float
    may_have_work: bool = True
    needs_look_ahead: bool = True
    # Whatever is due counts, not only what became due since the last look.
    needs_full_look: bool = False
    looked_ahead_at: float = -NEVER
    due_at: float = NEVER
    again_at: float = NEVER
    poll_at: float = 0.0

    def wake(self) -> None:
        """Somebody says there is work, or there may be: a notification, a gap, freed capacity."""
        self.may_have_work = True

    def plan(self, at: float) -> None:
        """Claim again then, whatever is known to be due."""
        self.again_at = at

    def tick(self, now: float) -> None:
        """Turn a due time into a wish to claim, the safety poll into a look at everything."""
        if now >= self.again_at:
            self.may_have_work = True
            self.again_at = NEVER
        if now < self.due_at and now < self.poll_at:
            return
        # Deadlines pass while every child is busy, too.
        self.needs_look_ahead = True
        if now >= self.due_at:
            self.may_have_work = True
        if now >= self.poll_at:
            self.needs_full_look = True
        self.due_at = NEVER
        self.poll_at = now + self.poll_seconds

    def note_claim(self, wanted: int, got: int) -> None:
        """A claim came back: full means there may be more, short means there is no more for now."""
        self.may_have_work = got >= wanted
        if got < wanted:
            self.needs_look_ahead = True

    def wants_look_ahead(self, now: float) -> bool:
        """Tell whether to ask when the next task is due."""
        return self.needs_look_ahead and now >= self.looked_ahead_at + LOOK_AHEAD_SECONDS

    def note_look_ahead(
        self, now: float, seconds: float | None, taken_seconds: float = 0.0
    ) -> None:
        """The next task is due in that many seconds, 0 meaning now, or none is planned.

        A look that took long is followed by a rest, so that looking takes a tenth of the time at most.
        """
        self.needs_look_ahead = False
        self.needs_full_look = False
        self.looked_ahead_at = now + max(0.0, REST_FACTOR * taken_seconds - LOOK_AHEAD_SECONDS)
        self.due_at = now + seconds if seconds else NEVER
        if seconds == 0:
            self.may_have_work = True

    def next_at(self) -> float:
        """Return when the loop must be awake again if nothing else happens."""
        planned = min(self.poll_at, self.due_at, self.again_at)
        if self.needs_look_ahead:
            planned = min(planned, self.looked_ahead_at + LOOK_AHEAD_SECONDS)
        return planned
