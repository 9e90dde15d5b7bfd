"""The kinds of tasks that a worker claims separately, each with its own agenda, bookmarks and children.

A worker has one kind. A worker with async children has a second kind, the tasks of ``async def``
functions. Both kinds are claimed from the same queues, but through different indexes, so an empty claim
of one kind does not mean that there are no tasks of the other kind.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import ClaimedTask, LookAtKeys, look_at_keys
from horsies.db.statements.workers import store_lane_limits, store_task_rates
from horsies.tasks.blocked import Blocked
from horsies.worker.agenda import Agenda
from horsies.worker.keyed import PROMOTED_MAX, KeyRings
from horsies.worker.pool.children import FreePlaces
from horsies.worker.pool.window import Windows
from horsies.worker.tally import End
from horsies.worker.turn import Bookmarks

# The claim is limited, because during a claim of a thousand tasks the worker could not serve its other
# children for a tenth of a second.
ASYNC_CLAIMS_MAX = 256
# The claim recognises async tasks by the first characters of their options.
ASYNC_MARK = '{"async":true'


class Places(Protocol):
    """The children that run the tasks of one kind."""

    def are_free(self) -> bool:
        """Return whether any of these children can take a task. This must be cheap, because every step of the
        loop calls it.
        """
        ...

    def take(self, room: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return up to `room` children to claim tasks for, and the children that may take short tasks behind
        other tasks.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChildPlaces:
    """Children that run one task at a time and may hold short tasks in a window behind it."""

    free: FreePlaces
    windows: Windows

    def are_free(self) -> bool:
        depth = self.windows.depth
        return self.free.idle_count > 0 or (depth > 1 and self.free.window_space(depth)[0] > 0)

    def take(self, room: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.free.idle_and_behind(self.windows.depth)


@dataclass(frozen=True, slots=True)
class AsyncPlaces:
    """Async children, which run many tasks at a time."""

    free: FreePlaces

    def are_free(self) -> bool:
        return self.free.async_count > 0

    def take(self, room: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.free.next_async(min(room, self.free.async_count, ASYNC_CLAIMS_MAX)), ()


class TaskKind:
    """Decides when the claims of one kind of tasks are due, where they search first, and for which children.

    `is_async` restricts the claims to tasks of ``async def`` functions (True) or to other tasks (False);
    None allows both. `prefetch_max` is how many tasks may be claimed ahead of time.
    """

    def __init__(
        self,
        queues: Sequence[str],
        poll_seconds: float,
        places: Places,
        is_async: bool | None = None,
        prefetch_max: int = 0,
    ) -> None:
        self.agenda = Agenda(poll_seconds)
        self.bookmarks = Bookmarks(queues)
        self.rings = KeyRings(queues)
        self.places = places
        self.is_async = is_async
        self.prefetch_max = prefetch_max

    def note_news(self) -> None:
        """Note that there may be new tasks anywhere in the queues."""
        self.agenda.wake()
        self.bookmarks.note_news()
        if self.rings.by_queue:
            self.rings.note_news()

    def wants_tasks(self, prefetched: int) -> bool:
        """Return whether to claim: for free children, or ahead of time if ``prefetched`` is
        below the limit.
        """
        if not self.agenda.may_have_work:
            return False
        return prefetched < self.prefetch_max or self.places.are_free()

    def space(self, room: int, prefetched: int) -> int:
        """Return how many of `room` tasks the children of this kind can take now, besides the prefetched
        ones.
        """
        pids, ahead = self.places.take(room)
        return max(0, len(pids) + len(ahead) + self.prefetch_max - prefetched)

    def note_lanes(
        self, answers: Sequence[ClaimedTask], claimed: Sequence[ClaimedTask], now: float
    ) -> None:
        """Note how the claim by keys ended in each queue. Claim again if lanes have more tasks, or can soon
        start more tasks.
        """
        seen = self.rings.note_claim(answers, {task.queue_name for task in claimed}, now)
        self.rings.note_taken(claimed)
        if seen.has_more:
            self.agenda.wake()
        if seen.wait_seconds is not None:
            self.agenda.wake_at(now + seen.wait_seconds)

    def note_retries(self, ends: Iterable[End], now: float) -> None:
        """Look ahead when retries with keys become due, because the look-ahead moves them to their lanes.

        Otherwise a busy worker would look ahead only at its polls.
        """
        delays = [
            outcome.delay_seconds
            for outcome, task, _ in ends
            if task.lane is not None and outcome.delay_seconds is not None
        ]
        if delays:
            self.agenda.note_next_key(now, min(delays))

    def step_back(self, returned: Iterable[ClaimedTask]) -> None:
        """Make the next claim start with the returned tasks of this kind."""
        mine = [task for task in returned if self.takes(task)]
        self.bookmarks.step_back(mine)
        self.rings.step_back(mine)

    def takes(self, task: ClaimedTask) -> bool:
        if self.is_async is None:
            return True
        return (task.task_options or "").startswith(ASYNC_MARK) is self.is_async


def kinds_of(
    queues: Sequence[str],
    poll_seconds: float,
    free: FreePlaces,
    windows: Windows,
    prefetch_max: int,
) -> list[TaskKind]:
    """Return the kind of tasks for ordinary children, and a second kind if there are async children."""
    places = ChildPlaces(free, windows)
    if not free.has_async:
        return [TaskKind(queues, poll_seconds, places, None, prefetch_max)]
    return [
        TaskKind(queues, poll_seconds, places, False, prefetch_max),
        TaskKind(queues, poll_seconds, AsyncPlaces(free), True),
    ]


def look_at_keyed(pipeline: Pipeline, kinds: Sequence[TaskKind], blocked: Blocked) -> None:
    """Move due tasks with keys to their lanes, and find out when the next one is due.

    Keys are served only after their limits are stored.
    """
    limits = kinds[0].rings.limits
    if limits is not None and limits.unstored is not None:
        with blocked.failures.job("registering the limits of keys"):
            pipeline.run(
                [
                    blocked.lock_wait(),
                    store_lane_limits(limits.unstored, limits.queues),
                    store_task_rates(limits.rates, limits.queues),
                ]
            )
            limits.unstored = None
    queues = sorted({queue for kind in kinds for queue in kind.rings.queues})
    if not queues:
        return
    with blocked.failures.job("the search for tasks with keys"):
        ((found,),) = pipeline.run([(look_at_keys, LookAtKeys(queues, PROMOTED_MAX))])
        now = time.monotonic()
        for kind in kinds:
            kind.rings.note_search(queues, found.queues)
            if found.promoted:
                kind.rings.note_news()
                kind.agenda.wake()
            if found.seconds is not None:
                kind.agenda.note_next_key(now, found.seconds)


def shared_room(room: int, space: Sequence[int], held: Sequence[int]) -> list[int]:
    """Divide the tasks that a worker may still claim among the kinds.

    ``held`` is the number of tasks of each kind that the worker holds, and ``space`` the number that it can
    still take. Each further task is assigned to the kind with the fewest tasks, or to the first of several
    equal kinds. In this way, long-running tasks of one kind leave half of the limit to the other kind, if
    that kind has tasks when they start.
    """
    shares = [0] * len(space)
    for _ in range(min(room, sum(space))):
        kinds = [kind for kind, most in enumerate(space) if shares[kind] < most]
        shares[min(kinds, key=lambda kind: held[kind] + shares[kind])] += 1
    return shares
