"""Calls that block an event loop or occupy a child process: refused, or reported once."""

from __future__ import annotations

import asyncio
import logging

from horsies.current_task import running_task

_sends = logging.getLogger("horsies.send")
_waits = logging.getLogger("horsies.wait")
_reported: set[str] = set()


def is_loop_running() -> bool:
    """Check for a running event loop, which a blocking call would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def would_block(method: str) -> str:
    """Return the sentence for a wait that is refused."""
    return f"{method}() would block the running event loop; write `await handle.{method}_async()`."


def warn_of_blocked_loop(task_name: str) -> None:
    """Log, once per task, that a send holds up the event loop it was called in."""
    if is_loop_running() and task_name not in _reported:
        _reported.add(task_name)
        _sends.warning(
            "a send of task %r blocks the running event loop; write `await %s.send_async(...)`",
            *(task_name, task_name.rpartition(".")[2]),
        )


def warn_of_nested_wait(task_id: str) -> None:
    """Log, once per waiting task, that its child process cannot run other tasks meanwhile."""
    running = running_task()
    if running is not None and f"wait {running.name}" not in _reported:
        _reported.add(f"wait {running.name}")
        _waits.warning(
            "task %r waits for task %s and occupies its child process meanwhile; when all children wait, "
            "none is left to run it: use a workflow, or send the second task at the end of the first",
            *(running.name, task_id),
        )
