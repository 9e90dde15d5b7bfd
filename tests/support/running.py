"""Makes a task the running task of this process, for sends and starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from horsies.current_task import CurrentTask, set_running_task
from horsies.worker.protocol import Assignment


@contextmanager
def running_with_headers(headers: Mapping[str, str]) -> Iterator[None]:
    stored = f"1\x000\x00default\x00{json.dumps({'headers': dict(headers)})}\x00" + "\n" * 7
    assignment = Assignment("id-1", 1, "outer", 1, "[]", "{}", None, None, stored)
    set_running_task(CurrentTask(assignment, 0.0))
    try:
        yield
    finally:
        set_running_task(None)
