"""Identifiers: UUIDv7 text, created by the producer before the INSERT.

The time prefix keeps rows of the same time close together in the index. A process's ids increase, so
tasks enqueued at the same time keep their order in the queue. The producer knows the id before the
INSERT, so it can safely repeat a send whose COMMIT is in doubt.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from datetime import datetime
from uuid import UUID

_TAIL_MAX = (1 << 48) - 1
# Two fixed bits (10) and two random bits, indexed by a random digit.
_VARIANTS = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}


class _Sequence:
    """The sequence of this process's ids, each greater than the previous one (RFC 9562, section 6.2).

    The first id of a millisecond is random. Each further id adds a random step to the last 48 bits, so
    ids cannot be guessed from each other. If the clock steps back or the 48 bits are used up, the
    sequence continues from its latest time.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start a new sequence with an unlocked lock and new random numbers, as a forked process must."""
        self._lock = threading.Lock()
        self._steps = random.Random()
        self._latest = 0
        self._noise = ""
        self._prefix = ""
        self._tail = 0

    def next(self) -> str:
        with self._lock:
            now = time.time_ns() // 1_000_000
            if now > self._latest:
                self._begin(now)
            else:
                self._tail += self._steps.getrandbits(31) + 1
                if self._tail > _TAIL_MAX:
                    self._begin(self._latest + 1)
            return f"{self._prefix}{self._tail:012x}"

    def _begin(self, milliseconds: int) -> None:
        # Formatted directly: a batch needs thousands of ids, and creating a UUID object takes five
        # times as long.
        if not self._noise:  # one system call for a hundred ids
            self._noise = os.urandom(1000).hex()
        time_text, noise = f"{milliseconds:012x}", self._noise[-20:]
        self._noise = self._noise[:-20]
        variant = _VARIANTS[noise[6]]
        self._latest = milliseconds
        self._prefix = f"{time_text[:8]}-{time_text[8:]}-7{noise[:3]}-{variant}{noise[3:6]}-"
        # Half of the range is reserved for the steps, enough for several hundred thousand ids.
        self._tail = int(noise[7:19], 16) >> 1


_sequence = _Sequence()
os.register_at_fork(after_in_child=_sequence.restart)


def new_id() -> str:
    """Return a new UUIDv7 as text, greater than all earlier ids of this process."""
    return _sequence.next()


def fixed_id(at: datetime, seed: str) -> str:
    """Return a UUIDv7 that depends only on this time and text."""
    milliseconds = f"{first_id_at(at)[:13]}-7"
    noise = hashlib.sha256(seed.encode()).hexdigest()
    return f"{milliseconds}{noise[:3]}-{_VARIANTS[noise[19]]}{noise[3:6]}-{noise[6:18]}"


def first_id_at(at: datetime) -> str:
    """Return the smallest id that ``new_id`` can return at this time, as the start of an index search."""
    milliseconds = min(max(int(at.timestamp() * 1000), 0), (1 << 48) - 1)
    return str(UUID(int=milliseconds << 80))


def stored_form(task_id: object) -> str | None:
    """Return an id as the database writes it, or None if it is not a UUID. Pasted ids may have capitals
    or lack hyphens, and a column may return UUID objects. Invalid ids are rejected without a query.
    """
    try:
        return str(UUID(str(task_id))) if isinstance(task_id, str | UUID) else None
    except ValueError:
        return None
