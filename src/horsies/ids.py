"""Identifiers: UUIDv7 text, made by the producer before anything is stored.

The time prefix keeps neighbours in time neighbours in the index; the caller knowing the id before
the INSERT is what makes a send whose COMMIT was in doubt safe to replay.
"""

from __future__ import annotations

import hashlib
import os
import time
from datetime import datetime
from uuid import UUID

# Two fixed bits (10) and two random ones.
_VARIANTS = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}


def new_id() -> str:
    """Return a fresh UUIDv7 (48 bits of milliseconds, 74 random bits) as text."""
    # Written out by hand: a batch needs thousands, and a UUID object is five times the work.
    moment = f"{time.time_ns() // 1_000_000:012x}"
    noise = os.urandom(10).hex()
    variant = _VARIANTS[noise[19]]
    return f"{moment[:8]}-{moment[8:]}-7{noise[:3]}-{variant}{noise[3:6]}-{noise[6:18]}"


def fixed_id(moment: datetime, seed: str) -> str:
    """Return the id that this moment and this text always make: a UUIDv7 without chance in it."""
    milliseconds = f"{first_id_at(moment)[:13]}-7"
    noise = hashlib.sha256(seed.encode()).hexdigest()
    return f"{milliseconds}{noise[:3]}-{_VARIANTS[noise[19]]}{noise[3:6]}-{noise[6:18]}"


def first_id_at(moment: datetime) -> str:
    """Return the smallest id that ``new_id`` can make at this moment: where to begin in the index."""
    milliseconds = min(max(int(moment.timestamp() * 1000), 0), (1 << 48) - 1)
    return str(UUID(int=milliseconds << 80))


def stored_form(task_id: object) -> str | None:
    """Return an id the way the database writes it, or None when it is no UUID.

    People paste ids in capitals or without hyphens; a bad one never reaches the database.
    """
    try:
        return str(UUID(task_id)) if isinstance(task_id, str) else None
    except ValueError:
        return None
