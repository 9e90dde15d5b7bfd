"""The journal of a soak run: an append-only file outside the database, one JSON object per line.

Every process of the run writes to it with a single `write` per line, which O_APPEND keeps whole. Times are
of the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

JOURNAL_VARIABLE = "HORSIES_SOAK_JOURNAL"
# Names the incarnation of the worker that a process belongs to; children inherit it.
WORKER_VARIABLE = "HORSIES_SOAK_WORKER"
# The way of a pooled worker past its pooler.
SESSION_VARIABLE = "HORSIES_SOAK_SESSION_URL"
# Identifies every process that a run has started.
RUN_VARIABLE = "HORSIES_SOAK_RUN"

What: TypeAlias = Literal["sent", "started", "begin", "end", "crowded", "process", "fault"]
Entry: TypeAlias = dict[str, Any]


def write(what: What, **fields: Any) -> None:
    """Add one line; it has left this process when the call returns."""
    line = json.dumps({"what": what, "at": time.monotonic(), **fields})
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = os.open(os.environ[JOURNAL_VARIABLE], flags, mode=0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> Iterator[Entry]:
    """All lines, in the order in which they were written."""
    with path.open() as lines:
        yield from map(json.loads, lines)
