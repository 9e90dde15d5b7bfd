"""Bookmarks: behind which task of each queue the next claim looks first.

Claimed tasks leave entries in the claim index that lead nowhere until vacuum removes them, which it may
not do while anybody keeps a transaction open. A claim that starts at the front of the queue walks over
all of them, one that starts behind the last task it got over none. Nothing is lost by it: see
``Bookmarks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statements.turn import ClaimedTask

# How long claims may rely on bookmarks alone.
EVERYWHERE_SECONDS = 0.1
# Looking everywhere is costly when the whole turn takes longer than this.
COSTLY_SECONDS = 0.01
# A costly look is followed by a rest of so many times its length: looking takes a tenth of the time at most.
REST_FACTOR = 10


class Marks(NamedTuple):
    """Per queue, behind which task to look first, and whether to look everywhere for the rest."""

    priorities: Sequence[int | None] = ()
    moments: Sequence[str | None] = ()
    ids: Sequence[str | None] = ()
    looks_everywhere: bool = True


EVERYWHERE = Marks()


class Bookmarks:
    """The last task claimed from each queue, and when everything was last looked at.

    A task that stands before a bookmark is not seen by a claim that looks behind it. It is claimed all
    the same, because claims look everywhere

    * when they are short: what is not found behind the bookmarks is looked for in the same call;
    * after a notification: whatever puts a task before a bookmark sends one (a better priority, a slow
      transaction's commit, a release, a retry, a queue resumed);
    * every ``EVERYWHERE_SECONDS``: a scheduled task of a better priority that is due now, or the rollback
      of another worker's claim, is announced by nobody.

    So a worker with more work than children may take a task too late by a tenth of a second; the order
    behind the bookmark is exact. Only while looking everywhere is itself slow does the next such look
    wait for ten times as long as the last one took.
    """

    def __init__(self, queues: Sequence[str]) -> None:
        self._queues = queues
        self._last: dict[str, ClaimedTask] = {}
        self._has_news = True
        self._everywhere_at = 0.0
        self._rested_at = 0.0

    @property
    def rested_at(self) -> float:
        """From when on claims may look everywhere again."""
        return self._rested_at

    def note_news(self) -> None:
        """A task may stand before a bookmark now."""
        self._has_news = True

    def marks(self, now: float) -> Marks:
        """Where the next claim looks."""
        is_rested = now >= self._rested_at
        is_time = self._has_news or now >= self._everywhere_at
        if not self._last or (is_rested and is_time):
            return EVERYWHERE
        last = [self._last.get(queue) for queue in self._queues]
        return Marks(
            [None if task is None else task.priority for task in last],
            [None if task is None else task.enqueued_at for task in last],
            [None if task is None else task.id for task in last],
            is_rested,
        )

    def note_claim(
        self,
        marks: Marks,
        claimed: Sequence[ClaimedTask],
        *,
        was_short: bool,
        span: tuple[float, float],
    ) -> bool:
        """A claim by these marks, within that span of time, brought these tasks; True if it looked
        everywhere.
        """
        for task in claimed:
            self._last[task.queue_name] = task
        if not (marks is EVERYWHERE or (was_short and marks.looks_everywhere)):
            return False
        started, ended = span
        taken = ended - started
        self._has_news = False
        self._everywhere_at = ended + EVERYWHERE_SECONDS
        self._rested_at = ended + (REST_FACTOR * taken if taken > COSTLY_SECONDS else 0.0)
        return True
