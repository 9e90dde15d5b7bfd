"""Faults at the boundaries of protocol messages: an error in place of a message, a cut, silence, unusual
packets.

A fault is identified by its number among the messages of its direction since it was armed.
Notifications, which arrive at any time, and messages that open or close a session do not count, so a
repeated conversation has the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum


class Direction(Enum):
    """The direction of a message: questions are sent to the server, answers to the client."""

    QUESTION = "question"
    ANSWER = "answer"


class Action(Enum):
    """The fault that replaces a message."""

    # The server rejects a question; all earlier messages of the transaction are rolled back.
    ERROR = "error"
    # The server ends the session instead of answering, possibly instead of confirming a commit.
    FATAL = "fatal"
    CLOSE = "close"
    # No further message passes in this direction.
    STALL = "stall"
    # The message is delivered late.
    DELAY = "delay"


@dataclass(frozen=True)
class Fault:
    direction: Direction
    at: int
    action: Action
    state: str = "40001"


class Cut(Exception):
    """Closes both sides after the client has received these last bytes."""

    def __init__(self, farewell: bytes = b"") -> None:
        self.farewell = farewell


_UNCOUNTED = {Direction.QUESTION: b"Xp", Direction.ANSWER: b"ASN"}
_DELAY_SECONDS = 0.01


@dataclass
class Faults:
    """The next fault of a proxy, which happens once."""

    # The size of a packet in bytes; with 0, messages are collected until the sender waits for an
    # answer.
    packet_bytes: int | None = None
    counts: dict[Direction, int] = field(default_factory=dict)
    has_happened: bool = False
    _fault: Fault | None = None
    # The SQLSTATE of the next error that passes.
    _rewritten: str | None = None
    # The last BEGIN or COMMIT, until a statement follows the COMMIT.
    _bracket: bytes | None = None
    _released: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, fault: Fault | None = None) -> None:
        """Count messages from now on, and cause this fault at the message with its number."""
        with self._lock:
            self._released = threading.Event()
            self.counts = dict.fromkeys(Direction, 0)
            self._fault, self._rewritten, self.has_happened = fault, None, False

    def disarm(self) -> None:
        """Let all messages pass, and cut stalled connections."""
        with self._lock:
            self._fault = None
            self._released.set()

    def passed(self, direction: Direction, message: bytes, flush: Callable[[], None]) -> bytes:
        """Return the bytes to pass on instead of the message; ``flush`` first sends earlier messages."""
        with self._lock:
            fault = self._due(direction, message)
            if fault is not None:
                self._rewritten = fault.state if fault.action is Action.ERROR else None
            elif self._rewritten and direction is Direction.ANSWER and message[:1] == b"E":
                state, self._rewritten = self._rewritten, None
                return error_response("ERROR", state)
            released = self._released
        if fault is None:
            return message
        flush()
        return _in_place_of(message, fault, released)

    def _due(self, direction: Direction, message: bytes) -> Fault | None:
        if message[:1] in _UNCOUNTED[direction] or not self.counts:
            return None
        number, self.counts[direction] = self.counts[direction], self.counts[direction] + 1
        if direction is Direction.QUESTION and message[:1] in b"PQ":
            self._bracket = _bracket_after(message, self._bracket)
        fault = self._fault
        if fault is None or (fault.direction, fault.at) != (direction, number):
            return None
        if fault.action is Action.ERROR and message[:1] in b"SH" and self._bracket:
            return None  # Only a Sync that commits can fail.
        self._fault, self.has_happened = None, True
        return fault

    def packets(self, data: bytes) -> Iterator[bytes]:
        """Split consecutive bytes into packets."""
        size = self.packet_bytes or len(data) or 1
        for start in range(0, len(data), size):
            yield data[start : start + size]

    def is_held(self, data: bytes) -> bool:
        """Return whether to wait before sending, because the last message requests no answer."""
        return self.packet_bytes == 0 and data[-5:] not in (b"S\0\0\0\4", b"H\0\0\0\4")


def _bracket_after(message: bytes, before: bytes | None) -> bytes | None:
    query = message[5:].split(b"\0")[message[:1] == b"P"]
    if query.startswith((b"BEGIN", b"COMMIT")):
        return query
    return None if before == b"COMMIT" else before


def _in_place_of(message: bytes, fault: Fault, released: threading.Event) -> bytes:
    match fault.action:
        case Action.ERROR:
            return _refused(message)
        case Action.FATAL:
            raise Cut(error_response("FATAL", fault.state))
        case Action.CLOSE:
            raise Cut
        case Action.STALL:
            released.wait()
            raise Cut
        case Action.DELAY:
            released.wait(_DELAY_SECONDS)
            return message


def _refused(message: bytes) -> bytes:
    """Return a message that fails in the server, which then skips the rest of the group."""
    if message[:1] == b"Q":
        return _framed(b"Q", b"a syntax error\0")
    unknown_portal = _framed(b"E", b"test_unknown\0" + bytes(4))
    return unknown_portal + (message if message[:1] == b"S" else b"")


def error_response(severity: str, state: str) -> bytes:
    fields = f"S{severity}\0V{severity}\0C{state}\0Minjected by the test\0\0"
    return _framed(b"E", fields.encode())


def _framed(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4, "big") + body
