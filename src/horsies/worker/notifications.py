"""A worker's notifications: their channels, their meaning, and whether any are delivered.

Pure: ``connection.py`` receives them. Every notification is only a hint, because any client may send one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from horsies.config.app import QUEUE_CHANNEL_PREFIX

CANCEL_CHANNEL = "horsies_cancel"
PING_CHANNEL = "horsies_worker_ping"
PAUSE_CHANNEL = "horsies_pause"
# Workers notify themselves and each other here, to learn whether notifications are delivered.
ECHO_CHANNEL = "horsies_echo"
# A send wakes a few of many workers, each on its own channel; the payload is the queue.
WAKE_CHANNEL_PREFIX = "horsies_wake_"
# Says that tasks of the queue have keys; before the name of the queue where the payload is that name.
KEYED_HINT = "@"

# After how many heartbeats without any notification a worker calls: the one that called last, and the
# others. Its heartbeats vary by a tenth, so the difference must be two.
CALLER_PATIENCE = 1
LISTENER_PATIENCE = 3
# The minimum time to wait for an echo, however often a worker notifies itself.
PATIENCE_SECONDS = 1.0
# A connection that delivers nothing is replaced, at growing intervals if that does not help.
FIRST_REST_SECONDS = 5.0
LAST_REST_SECONDS = 60.0


def worker_channels(queues: Iterable[str]) -> list[str]:
    of_queues = (f"{QUEUE_CHANNEL_PREFIX}{queue}" for queue in queues)
    return [*of_queues, CANCEL_CHANNEL, PAUSE_CHANNEL, PING_CHANNEL]


def own_channels(worker_id: str) -> list[str]:
    """The channels for the worker itself, which its log does not list."""
    return [ECHO_CHANNEL, f"{WAKE_CHANNEL_PREFIX}{worker_id}"]


class NotificationBatch(NamedTuple):
    """Notifications received at once, sorted by meaning.

    `work` says that a queue may have tasks. `cancelled` names tasks that may have been cancelled. `gap`
    says that any number of notifications may have been missed. `paused` says that a queue or a run was
    paused. `woken` names queues for whose tasks only a few workers were woken, `keyed`
    queues whose tasks have keys.
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
    """Whether notifications are delivered, judged by the echoes of the worker's own calls.

    A worker that has received any notification since its last heartbeat does not call: among many
    workers, one call proves delivery to all of them. Every call wakes all listening sessions, so a call
    with each heartbeat would make the server's work grow with the square of the number of workers. For
    the same reason the worker that called last calls next, and the others have more patience:
    otherwise all workers whose heartbeat is due before a call arrives would repeat it.
    """

    is_receiving: bool = True
    needs_new_connection: bool = False
    # The heartbeats since anything arrived, and whether a call is due after one of them or after several.
    _quiet: int = LISTENER_PATIENCE
    _is_caller: bool = False
    # Whether the last heartbeat was a call.
    _has_called: bool = False
    # When the worker sent the oldest notification whose echo is missing.
    _called_at: float | None = None
    _rests_until: float = 0.0
    _rest_seconds: float = FIRST_REST_SECONDS

    @property
    def wants_call(self) -> bool:
        """Whether the next heartbeat should notify all workers."""
        return self._quiet >= (CALLER_PATIENCE if self._is_caller else LISTENER_PATIENCE)

    def note_call(self, now: float) -> None:
        """Note that the worker notified itself: an echo should arrive."""
        self._is_caller = self._has_called = True
        if self._called_at is None:
            self._called_at = now

    def note_heartbeat(self) -> None:
        """Note a heartbeat: anything that arrives from now on proves delivery at the next one. Whoever
        received something that was not its own echo leaves the calls to others.
        """
        if not self._quiet and not self._has_called:
            self._is_caller = False
        self._quiet += 1
        self._has_called = False

    def note_delivery(self) -> None:
        """Note a notification; any notification proves delivery, as an echo does."""
        self.is_receiving = True
        self.needs_new_connection = False
        self._quiet = 0
        self._called_at = None
        self._rests_until = 0.0
        self._rest_seconds = FIRST_REST_SECONDS

    def note_lost(self) -> None:
        """Note that the connection is gone, along with the echoes that were on their way."""
        self.needs_new_connection = False
        self._quiet = LISTENER_PATIENCE
        self._called_at = None

    def judge(self, now: float) -> None:
        """Conclude from a missing echo that nothing is delivered; call this before the worker notifies
        itself again.
        """
        if self._called_at is None or now - self._called_at < PATIENCE_SECONDS:
            return
        self.is_receiving = False
        if now >= self._rests_until:
            self.needs_new_connection = True
            self._rests_until = now + self._rest_seconds
            self._rest_seconds = min(2 * self._rest_seconds, LAST_REST_SECONDS)
