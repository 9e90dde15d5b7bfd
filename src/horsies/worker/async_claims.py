"""Claims for async children: when to claim tasks of ``async def`` functions, how many, and where to look.

They come from the same queues as other tasks, by an index of their own. An empty claim of one kind says
nothing about the other kind, so each has its agenda and its bookmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from horsies.db.statements.turn import ClaimedTask
from horsies.worker.agenda import Agenda
from horsies.worker.known_tasks import Exclusions
from horsies.worker.pool.async_pool import AsyncPool
from horsies.worker.turn import Bookmarks, TurnRequest

# A claim of a thousand tasks would keep the worker from its other children for a tenth of a second.
CLAIMS_MAX = 256
# The claim finds async tasks by these first characters of their options.
ASYNC_MARK = '{"async":true'


class AsyncClaims:
    """The agenda of the async children of one worker."""

    def __init__(self, pool: AsyncPool, queues: Sequence[str], poll_seconds: float) -> None:
        self._pool = pool
        self.agenda = Agenda(poll_seconds)
        self.bookmarks = Bookmarks(queues)

    def note_news(self) -> None:
        self.agenda.wake()
        self.bookmarks.note_news()

    def step_back(self, returned: Sequence[ClaimedTask]) -> Sequence[ClaimedTask]:
        """The next claim begins with the async ones among these tasks; return the others."""
        mine: list[ClaimedTask] = []
        others: list[ClaimedTask] = []
        for one in returned:
            is_mine = (one.task_options or "").startswith(ASYNC_MARK)
            (mine if is_mine else others).append(one)
        self.bookmarks.step_back(mine)
        return others

    def count(self, room: int, *, ends_nodes: bool = False) -> int:
        """How many tasks to claim now."""
        if room <= 0 or not (self.agenda.may_have_work or ends_nodes):
            return 0
        return min(room, self._pool.places, CLAIMS_MAX)

    def request(self, count: int, exclusions: Exclusions, now: float) -> TurnRequest:
        """The claim of `count` tasks."""
        return TurnRequest(
            pids=self._pool.next_pids(count),
            positions=self.bookmarks.positions(now),
            unknown_names=exclusions.names,
            refused_by=exclusions.refused_by,
            is_async=True,
        )

    def last_look(self, other: Agenda) -> datetime | None:
        """The last look ahead of both agendas; None if one of them wants to see every due task."""
        looks = (self.agenda.last_look, other.last_look)
        return None if None in looks else other.last_look
