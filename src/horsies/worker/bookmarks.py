"""Bookmarks: the task of each queue behind which the next claim looks first.

Claimed tasks leave entries in the claim index that lead nowhere until vacuum removes them, which it
cannot do while any transaction is kept open. A claim that starts at the front of the queue walks over
all of them, one that starts behind the last task it got over none. No task is missed: see
``Bookmarks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statements.turn import ClaimedTask
from horsies.worker.agenda import REST_FACTOR

# How long claims may rely on bookmarks alone.
EVERYWHERE_SECONDS = 0.1
# Looking everywhere is costly when the whole turn takes longer than this.
COSTLY_SECONDS = 0.01


class Positions(NamedTuple):
    """Per queue, the task behind which to look first; and whether to look everywhere for the rest."""

    priorities: Sequence[int | None] = ()
    enqueued_at: Sequence[str | None] = ()
    ids: Sequence[str | None] = ()
    looks_everywhere: bool = True


EVERYWHERE = Positions()


class Bookmarks:
    """The last task claimed from each queue, and the time of the last look at everything.

    A claim that looks behind a bookmark does not see a task before it. That task is claimed all the
    same, because claims look everywhere

    * when they are short: they look in the same call for the tasks they did not find behind the
      bookmarks;
    * after a notification: every event that puts a task before a bookmark sends one (a better priority,
      a slow transaction's commit, a release, a retry, a queue resumed);
    * every ``EVERYWHERE_SECONDS``: no notification announces a scheduled task of a better priority that
      is due now, or the rollback of another worker's claim.

    So a worker with more work than children may take a task too late by a tenth of a second; the order
    behind the bookmark is exact. Only while looking everywhere is itself slow does the next such look
    wait for ten times as long as the last one took.
    """

    def __init__(self, queues: Sequence[str]) -> None:
        self._queues = queues
        self._last: dict[str, ClaimedTask] = {}
        self._has_news = True
        self._everywhere_at = 0.0
        # From then on claims may look everywhere again.
        self.rested_at = 0.0

    def note_news(self) -> None:
        """There may be a task before a bookmark now."""
        self._has_news = True

    def positions(self, now: float) -> Positions:
        is_rested = now >= self.rested_at
        is_time = self._has_news or now >= self._everywhere_at
        if not self._last or (is_rested and is_time):
            return EVERYWHERE
        last = [self._last.get(queue) for queue in self._queues]
        return Positions(
            [None if task is None else task.priority for task in last],
            [None if task is None else task.enqueued_at for task in last],
            [None if task is None else task.id for task in last],
            is_rested,
        )

    def note_claim(
        self,
        positions: Positions,
        claimed: Sequence[ClaimedTask],
        *,
        was_short: bool,
        span: tuple[float, float],
    ) -> bool:
        """A claim from these positions, within that span of time, got these tasks; True if it looked
        everywhere.
        """
        for task in claimed:
            self._last[task.queue_name] = task
        if not (positions is EVERYWHERE or (was_short and positions.looks_everywhere)):
            return False
        started, ended = span
        taken = ended - started
        self._has_news = False
        self._everywhere_at = ended + EVERYWHERE_SECONDS
        self.rested_at = ended + (REST_FACTOR * taken if taken > COSTLY_SECONDS else 0.0)
        return True
