"""The worker's ear: the connection that listens, kept in the loop's selector through every reconnect,
and replaced when it delivers nothing.
"""

from __future__ import annotations

import logging
import selectors
from dataclasses import dataclass

from horsies.db.errors import describe
from horsies.db.listen import Heard, Listener
from horsies.events import as_event
from horsies.worker.connection import TurnListener
from horsies.worker.liveness import ECHO_CHANNEL_PREFIX, PING_CHANNEL

# However often we call, an echo has at least this long to come back.
PATIENCE_SECONDS = 1.0
# A connection that delivers nothing is replaced, ever more rarely if that does not help.
FIRST_REST_SECONDS = 5.0
LAST_REST_SECONDS = 60.0


@dataclass(slots=True)
class EchoCheck:
    """What is known of the listening connection."""

    hears: bool = True
    # Whether the connection should be replaced.
    gives_up: bool = False
    # The oldest call whose echo is missing.
    _called_at: float | None = None
    _rests_until: float = 0.0
    _rest_seconds: float = FIRST_REST_SECONDS

    def note_call(self, now: float) -> None:
        """We called: an echo should come."""
        if self._called_at is None:
            self._called_at = now

    def note_delivery(self) -> None:
        """Something arrived; an echo or anything else, it proves the same."""
        self.hears = True
        self.gives_up = False
        self._called_at = None
        self._rests_until = 0.0
        self._rest_seconds = FIRST_REST_SECONDS

    def note_lost(self) -> None:
        """The connection is gone: echoes on their way to it never come."""
        self.gives_up = False
        self._called_at = None

    def judge(self, now: float) -> None:
        """Draw the conclusion from a missing echo, before the next call."""
        if self._called_at is None or now - self._called_at < PATIENCE_SECONDS:
            return
        self.hears = False
        if now >= self._rests_until:
            self.gives_up = True
            self._rests_until = now + self._rest_seconds
            self._rest_seconds = min(2 * self._rest_seconds, LAST_REST_SECONDS)


logger = logging.getLogger("horsies.worker")

CANCEL_CHANNEL = "horsies_cancel"
EAR = "notifications"


@dataclass(frozen=True, slots=True)
class News:
    """What was heard: that queues may have work, which tasks somebody wants cancelled, and whether
    anything at all may have been missed. Hints all of them: anybody may notify.
    """

    work: bool
    cancelled: frozenset[str]
    pings: tuple[str, ...] = ()
    gap: bool = False


SILENCE = News(False, frozenset())


class Notifications:
    """Hears notifications in the worker's own loop; nothing waits here."""

    def __init__(
        self,
        listener: Listener | TurnListener,
        selector: selectors.BaseSelector,
        poll_seconds: float,
    ) -> None:
        self._listener = listener
        self._inbox = listener.inbox
        self._selector = selector
        self._poll_seconds = poll_seconds
        self._registered = -1
        self._echo_check = EchoCheck()
        self._delivered = 0

    def open(self) -> None:
        """Connect and subscribe, raising what goes wrong: a worker does not start deaf."""
        self._listener.open()
        self.follow_socket()

    def seconds_until_retry(self) -> float | None:
        """Return how long until a lost connection should be tried again, None while it lives.

        0 as well when notifications came in beside the answer to another statement: the socket will
        not become readable for them.
        """
        return 0.0 if self._listener.has_heard() else self._listener.seconds_until_retry()

    def receive(self, ignore_pid: int | None = None) -> News:
        """Take what has arrived, but for what the server process ``deaf_to`` sent.

        After a reconnect everything may have been missed.
        """
        self._inbox.ignore_pid = ignore_pid
        was_down = self._listener.failure is not None
        heard = self._listener.receive()
        if self._listener.failure is not None and not was_down:
            reason = describe(self._listener.failure)
            logger.error(
                "notifications lost, polling meanwhile: %s",
                reason,
                extra=as_event("notifications_lost", silent=False),
            )
        if heard.gap and was_down and self._echo_check.hears:
            logger.info("notifications are back", extra=as_event("notifications_back"))
        self._note_deliveries()
        self.follow_socket()
        if not heard.notifications and not heard.gap:
            return SILENCE
        return _sorted_out(heard)

    def check(self, now: float) -> bool:
        """Tell whether notifications arrive, with the next call in mind: the echo of the last one should
        be here.
        """
        self._listener.look()
        self.follow_socket()
        self._note_deliveries()
        was_hearing = self._echo_check.hears
        self._echo_check.judge(now)
        if was_hearing and not self._echo_check.hears:
            logger.error(
                "notifications are silent; polling every %g s",
                self._poll_seconds,
                extra=as_event("notifications_lost", silent=True),
            )
        return self._echo_check.hears and self._listener.fileno() >= 0

    def is_connected(self) -> bool:
        """Tell whether the connection that listens, and holds our lock, is there at this moment."""
        is_connected = self._listener.is_connected()
        self.follow_socket()
        return is_connected

    def note_call(self, now: float) -> None:
        """A call went out. A connection that was given up is closed only now: its lock will be free for
        a moment, and we have just shown that we live.
        """
        self._echo_check.note_call(now)
        if self._echo_check.gives_up:
            self._listener.close()
            self.follow_socket()

    def _note_deliveries(self) -> None:
        if self._inbox.delivered == self._delivered:
            return
        self._delivered = self._inbox.delivered
        if not self._echo_check.hears:
            logger.info("notifications are heard again", extra=as_event("notifications_back"))
        self._echo_check.note_delivery()

    def close(self) -> None:
        """Stop listening for good."""
        self._listener.close()
        self.follow_socket()

    def follow_socket(self) -> None:
        """Wait for the socket that there is now, if there is one.

        At once: the number of one that libpq has closed may soon be that of a child's socket.
        """
        current = self._listener.fileno()
        if current == self._registered:
            return
        if self._registered >= 0:
            self._selector.unregister(self._registered)
            self._echo_check.note_lost()
        if current >= 0:
            self._selector.register(current, selectors.EVENT_READ, EAR)
        self._registered = current


def _sorted_out(heard: Heard) -> News:
    cancelled: set[str] = set()
    pings: list[str] = []
    work = False
    for channel, payload in heard.notifications:
        if channel == CANCEL_CHANNEL:
            cancelled.add(payload)
        elif channel == PING_CHANNEL:
            pings.append(payload)
        elif not channel.startswith(ECHO_CHANNEL_PREFIX):
            work = True
    return News(work, frozenset(cancelled), tuple(pings), heard.gap)
