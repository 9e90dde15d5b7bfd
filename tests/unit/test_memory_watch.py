"""The memory limit of a task costs the tasks that have none nothing: their memory is never read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from horsies.worker.pool.memory import MemoryWatch


def test_the_memory_of_a_child_is_not_read_for_a_task_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(_: Any) -> float:
        raise AssertionError("the memory was read")

    monkeypatch.setattr("horsies.worker.pool.memory.os_process.rss_megabytes", read)
    child = SimpleNamespace(is_async=False, tasks_done=3, known_pid=1)
    held = SimpleNamespace(child=child, assignment=SimpleNamespace(task_name="nap"))
    watch = MemoryWatch(cast("Any", None), cast("Any", None), {"hungry": 300})
    assert watch.admits(cast("Any", child), "nap")
    watch.note_start(cast("Any", held))
    assert watch.next_look is None
    watch.attend(now=1e9)
