"""A worker's notifications: their channels, their meaning, whether they are delivered, and wake-ups.

Pure: ``connection.py`` receives them. Every notification is only a hint, because any client can send one.

A send wakes a few of many workers. A woken worker must either make a claim that leaves no due task in the
queue, or pass the wake-up on. It passes the wake-up on if its children stay busy, if it excludes tasks that
it does not know, or while it shuts down. So no task waits because unsuitable workers were woken;
``db/functions/10_notify.sql`` chooses the workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from horsies.config.app import QUEUE_CHANNEL_PREFIX
from horsies.worker.agenda import NEVER

CANCEL_CHANNEL = "horsies_cancel"
PING_CHANNEL = "horsies_worker_ping"
PAUSE_CHANNEL = "horsies_pause"
# Workers notify themselves and each other here, to learn whether notifications are delivered.
ECHO_CHANNEL = "horsies_echo"
# A send wakes only a few of many workers, each on the worker's own channel; the payload is the name of
# the queue.
WAKE_CHANNEL_PREFIX = "horsies_wake_"
# A prefix of the queue's name in a payload: the new tasks of the queue have keys.
KEYED_HINT = "@"

# After how many heartbeats without any notification a worker notifies all workers (a call). The first number
# is for the worker that called last, the second for all other workers. The interval of heartbeats varies by a
# tenth, so the numbers must differ by two.
CALLER_PATIENCE = 1
LISTENER_PATIENCE = 3
# The minimum time to wait for an echo, even if a worker notifies itself more often.
PATIENCE_SECONDS = 1.0
# A connection that delivers no notifications is replaced, at growing intervals if the new connection does not
# deliver them either.
FIRST_REST_SECONDS = 5.0
LAST_REST_SECONDS = 60.0

# How long a busy worker waits before it passes a wake-up on: a short task ends within this time and frees its
# child for the next task.
PASS_SECONDS = 0.005
# How long a worker waits before it tries again to pass a wake-up on. If no other worker waits for tasks,
# all workers are busy, and each of them claims again when a task ends.
REST_SECONDS = 1.0


def worker_channels(queues: Iterable[str]) -> list[str]:
    of_queues = (f"{QUEUE_CHANNEL_PREFIX}{queue}" for queue in queues)
    return [*of_queues, CANCEL_CHANNEL, PAUSE_CHANNEL, PING_CHANNEL]


def own_channels(worker_id: str) -> list[str]:
    """Return the channels that belong to one worker alone; its log does not list them."""
    return [ECHO_CHANNEL, f"{WAKE_CHANNEL_PREFIX}{worker_id}"]


class NotificationBatch(NamedTuple):
    """Notifications received in one batch, sorted by meaning.

    `work` means that a queue may have tasks. `cancelled` names tasks that may have been cancelled. `gap`
    means that any number of notifications may have been missed. `paused` means that a queue or a run was
    paused. `woken` names queues with new tasks for which only a few workers were woken. `keyed` names queues
    whose tasks have keys.
    """

    work: bool
    cancelled: frozenset[str]
    pings: tuple[str, ...] = ()
    gap: bool = False
    paused: bool = False
    woken: frozenset[str] = frozenset()
    keyed: frozenset[str] = frozenset()


NOTHING_RECEIVED = NotificationBatch(False, frozenset())


def sort_notifications(
    notifications: Sequence[tuple[str, str]], *, gap: bool = False
) -> NotificationBatch:
    if not notifications and not gap:
        return NOTHING_RECEIVED
    cancelled: set[str] = set()
    woken: set[str] = set()
    keyed: set[str] = set()
    pings: list[str] = []
    work = paused = False
    for channel, payload in notifications:
        if channel == CANCEL_CHANNEL:
            cancelled.add(payload)
        elif channel == PING_CHANNEL:
            pings.append(payload)
        elif channel == PAUSE_CHANNEL:
            paused = True
        elif channel.startswith(WAKE_CHANNEL_PREFIX):
            queue = payload.removeprefix(KEYED_HINT)
            woken.add(queue)
            if queue != payload:
                keyed.add(queue)
        elif channel != ECHO_CHANNEL:
            work = True
            if payload == KEYED_HINT:
                keyed.add(channel.removeprefix(QUEUE_CHANNEL_PREFIX))
    return NotificationBatch(
        work, frozenset(cancelled), tuple(pings), gap, paused, frozenset(woken), frozenset(keyed)
    )


@dataclass(slots=True)
class EchoCheck:
    """Decides by the echoes of the worker's own calls whether notifications are delivered.

    A worker that has received any notification since its last heartbeat does not call: among many workers,
    one call proves delivery to all of them. Every call wakes all listening sessions, so a call with each
    heartbeat would make the server's work grow with the square of the number of workers. For the same reason,
    the worker that called last also makes the next call, and all other workers wait for longer. Otherwise
    every worker whose heartbeat is due before a call arrives would call too.
    """

    is_receiving: bool = True
    needs_new_connection: bool = False
    # The number of heartbeats since the last notification, and whether this worker was the last to call.
    _quiet: int = LISTENER_PATIENCE
    _is_caller: bool = False
    # Whether the last heartbeat included a call.
    _has_called: bool = False
    # When the worker sent the oldest call whose echo is missing.
    _called_at: float | None = None
    _rests_until: float = 0.0
    _rest_seconds: float = FIRST_REST_SECONDS

    @property
    def wants_call(self) -> bool:
        """Whether the next heartbeat should notify all workers."""
        return self._quiet >= (CALLER_PATIENCE if self._is_caller else LISTENER_PATIENCE)

    def note_call(self, now: float) -> None:
        """Note that the worker has called, so an echo should arrive."""
        self._is_caller = self._has_called = True
        if self._called_at is None:
            self._called_at = now

    def note_heartbeat(self) -> None:
        """Note a heartbeat: any notification from now on proves delivery when the next heartbeat is due.

        A worker that received a notification other than its own echo leaves the calls to others.
        """
        if not self._quiet and not self._has_called:
            self._is_caller = False
        self._quiet += 1
        self._has_called = False

    def note_delivery(self) -> None:
        """Note a notification. Any notification proves delivery, not only an echo."""
        self.is_receiving = True
        self.needs_new_connection = False
        self._quiet = 0
        self._called_at = None
        self._rests_until = 0.0
        self._rest_seconds = FIRST_REST_SECONDS

    def note_lost(self) -> None:
        """Note that the connection was lost, together with any echoes in flight."""
        self.needs_new_connection = False
        self._quiet = LISTENER_PATIENCE
        self._called_at = None

    def judge(self, now: float) -> None:
        """Conclude from a missing echo that notifications are not delivered. Must be called before the worker
        calls again.
        """
        if self._called_at is None or now - self._called_at < PATIENCE_SECONDS:
            return
        self.is_receiving = False
        if now >= self._rests_until:
            self.needs_new_connection = True
            self._rests_until = now + self._rest_seconds
            self._rest_seconds = min(2 * self._rest_seconds, LAST_REST_SECONDS)


@dataclass(slots=True)
class WakeUps:
    """The wake-ups that this worker has not served yet, and whether sends may wake it."""

    # Whether this worker can immediately start a task from any of its queues.
    waits: bool = False
    # Whether the workers table lists this worker as waiting.
    is_stored: bool = False
    # When to pass on unserved wake-ups, and the queues that they concern.
    pass_at: float = NEVER
    owed: set[str] = field(default_factory=set)
    _rests_until: float = 0.0

    @property
    def must_store(self) -> bool:
        """Whether this worker waits for tasks but the workers table does not show it, so that no send would
        wake the worker.
        """
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
        """Note that this many other workers were woken instead, and that the workers table no longer lists
        this worker as waiting.
        """
        self.note_served()
        self.is_stored = False
        self._rests_until = now if woken else now + REST_SECONDS
