"""Watch: decides which other workers are lost, only by this worker's own uninterrupted observation.

Pure: ``heartbeat.py`` reads the rows of neighbours and silent workers every few seconds and passes them on.
Silence counts from the moment at which this worker first observed it, on its own monotonic clock; the first
poll after a start, a lost connection or a pause restarts the measurement. Outages and locks interrupt the
observation too, and the server's clock is not used. So neither an outage, a lock nor a wrong clock can make a
live worker count as lost. ``docs/internals/liveness.md`` describes the whole protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from horsies.config.app import AppConfig
from horsies.db.statements.workers import WatchedWorker

# An observer polls at least this many times within ``lost_seconds``.
LOOKS_PER_LIMIT = 4
# A suspected worker is polled this often.
SUSPICION_SECONDS = 1.0
# A heartbeat is late after this many times the longest interval between two heartbeats.
LATE_FACTOR = 1.25
# A worker without tasks reconnects with growing delays. It may be silent for this many times the longest
# of these delays.
RETURN_FACTOR = 2.0


class WatchLimits(NamedTuple):
    """The seconds of observed silence after which a worker is declared lost.

    ``lost`` applies if the worker's lock is free and it has tasks in flight, and ``idle`` if the lock is
    free and it has no tasks. ``held`` applies if a session still holds the lock: the process is frozen,
    or the server has not noticed a lost connection. After ``own`` seconds without a heartbeat, a worker
    stops its own tasks.
    """

    lost: float
    idle: float
    held: float
    own: float = math.inf

    @classmethod
    def of(cls, config: AppConfig) -> WatchLimits:
        recovery = config.recovery
        stale_ms = max(recovery.claimed_stale_threshold_ms, recovery.running_stale_threshold_ms)
        return_ms = RETURN_FACTOR * config.resilience.db_retry_max_ms
        own_ms = recovery.stop_tasks_after_silence_ms
        return cls(
            min(recovery.worker_lost_after_ms, stale_ms) / 1000,
            max(stale_ms, return_ms) / 1000,
            stale_ms / 1000,
            math.inf if own_ms is None else own_ms / 1000,
        )

    @property
    def look_seconds(self) -> float:
        """The longest time between two polls of an observer."""
        return self.lost / LOOKS_PER_LIMIT

    @property
    def late_seconds(self) -> float:
        """The age from which a heartbeat is late. Every observer checks a worker with a late heartbeat, not
        only its neighbours.
        """
        return LATE_FACTOR * self.look_seconds

    @property
    def lock_seconds(self) -> float:
        """How long a worker may wait for a lock, so that its next heartbeat is sent well before it counts as
        silent.
        """
        return min(self.held / 3, self.own / LOOKS_PER_LIMIT)

    @property
    def statement_seconds(self) -> float:
        """The longest time that a worker's statement may take; during the statement the worker sends no
        heartbeat.
        """
        return self.own / 2

    @property
    def suspicion_seconds(self) -> float:
        """The time between two polls while a worker is suspected."""
        return min(SUSPICION_SECONDS, self.look_seconds)

    @property
    def gap_seconds(self) -> float:
        """If more time than this passes between the results of two polls, the observation has a gap."""
        return self.lost / 2


class Verdict(NamedTuple):
    """A worker that was found lost, with the time of its last heartbeat.

    ``needs_free_lock`` and ``needs_tasks`` are conditions that must still hold when its row is closed.
    """

    worker_id: str
    sign: str
    needs_free_lock: bool
    needs_tasks: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Silence:
    """The last known heartbeat and lock state of a worker, and when this observer first saw both of them."""

    sign: str
    lock_is_free: bool
    since: float


class Watch:
    """Measures how long each other worker has been silent while this worker observed it.

    `is_gone` returns whether a worker's process has provably ended; for a worker on another host it
    returns False.
    """

    def __init__(self, limits: WatchLimits, is_gone: Callable[[WatchedWorker], bool]) -> None:
        self._limits = limits
        self.late_seconds = limits.late_seconds
        self._is_gone = is_gone
        self._silences: dict[str, _Silence] = {}
        self._looked_at = 0.0
        # Whether at least one of the suspected workers does not hold its lock.
        self.has_suspects = False

    def note_gap(self) -> None:
        """Restart the measurement of silence now, because this worker could not observe other workers for
        some time.
        """
        self._silences = {}
        self.has_suspects = False

    def note_look(
        self, workers: Sequence[WatchedWorker], asked_at: float, answered_at: float
    ) -> list[Verdict]:
        """Poll the other workers once and return those that are lost.

        Only the time between the result of one poll and the start of a later poll counts as silence.
        """
        has_gap = answered_at - self._looked_at > self._limits.gap_seconds
        known = {} if has_gap else self._silences
        self._looked_at = answered_at
        self._silences = {}
        verdicts = []
        for worker in workers:
            silence = known.get(worker.worker_id)
            if silence is None or (worker.sign, worker.lock_is_free) != (
                silence.sign,
                silence.lock_is_free,
            ):
                silence = _Silence(worker.sign, worker.lock_is_free, answered_at)
            self._silences[worker.worker_id] = silence
            if verdict := self._judge(worker, asked_at - silence.since):
                verdicts.append(verdict)
        self.has_suspects = any(silence.lock_is_free for silence in self._silences.values())
        return verdicts

    def _judge(self, worker: WatchedWorker, silent_seconds: float) -> Verdict | None:
        limits = self._limits
        if not worker.lock_is_free:
            if silent_seconds < limits.held:
                return None
            needs_tasks, reason = False, f"silent for {silent_seconds:.0f} s with its lock held"
        elif self._is_gone(worker):
            needs_tasks, reason = False, "its process has ended"
        elif silent_seconds >= limits.lost:
            needs_tasks = silent_seconds < limits.idle
            reason = f"not connected for {silent_seconds:.0f} s"
        else:
            return None
        return Verdict(worker.worker_id, worker.sign, worker.lock_is_free, needs_tasks, reason)
