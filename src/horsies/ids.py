"""Identifiers: UUIDv7 text, made by the producer before the INSERT.

The time prefix keeps rows of the same time close together in the index. Because the producer has the
id before the INSERT, it can safely repeat a send whose COMMIT is in doubt.
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
    # Built by hand: a batch needs thousands, and a UUID object takes five times as long.
    now = f"{time.time_ns() // 1_000_000:012x}"
    noise = os.urandom(10).hex()
    variant = _VARIANTS[noise[19]]
    return f"{now[:8]}-{now[8:]}-7{noise[:3]}-{variant}{noise[3:6]}-{noise[6:18]}"


def fixed_id(at: datetime, seed: str) -> str:
    """Return a UUIDv7 that is always the same for this time and text."""
    milliseconds = f"{first_id_at(at)[:13]}-7"
    noise = hashlib.sha256(seed.encode()).hexdigest()
    return f"{milliseconds}{noise[:3]}-{_VARIANTS[noise[19]]}{noise[3:6]}-{noise[6:18]}"


def first_id_at(at: datetime) -> str:
    """Return the smallest id that ``new_id`` can make at this time, to begin a search in the index."""
    milliseconds = min(max(int(at.timestamp() * 1000), 0), (1 << 48) - 1)
    return str(UUID(int=milliseconds << 80))


def stored_form(task_id: object) -> str | None:
    """Return an id in the form of the database, or None when it is not a UUID.

    Pasted ids may have capitals or lack hyphens; an invalid one never reaches the database.
    """
    try:
        return str(UUID(task_id)) if isinstance(task_id, str) else None
    except ValueError:
        return None
