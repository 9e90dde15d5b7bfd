"""Watches an event loop from a thread, and finds out which task blocks it.

A coroutine that computes or waits without ``await`` blocks all other coroutines of its loop. While tasks run,
the thread schedules a callback on the loop a few times a second, and reads the loop's stack if the callback
does not run.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

from horsies.current_task import CurrentTask, running_task

# How long a loop may be blocked before the block is reported.
BLOCKED_SECONDS = 1.0
# The minimum time between two reports about the same task.
REPEAT_SECONDS = 60.0
_LOOK_SECONDS = 0.25
_EVENTS_FILE = asyncio.events.__file__


class Blockage(NamedTuple):
    """A loop that has not run for `seconds`, with the responsible task, if known, and the line that the task
    is executing.
    """

    task: CurrentTask | None
    seconds: float
    line: str


class LoopWatch:
    """Watches a loop from a thread, which starts with the first task and sleeps while there are no tasks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[Blockage], None]) -> None:
        self._loop = loop
        self._report = report
        self._loop_thread = threading.get_ident()
        self._has_tasks = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._ran_at = 0.0
        self._reported_at: dict[str | None, float] = {}

    def resume(self) -> None:
        """Start watching the loop, because it now has tasks."""
        if self._has_tasks.is_set():
            return
        self._ran_at = time.monotonic()
        self._has_tasks.set()
        if self._thread is None:
            thread = threading.Thread(target=self._watch, name="horsies-loop-watch", daemon=True)
            with suppress(RuntimeError):  # without a thread, tasks run without the watch
                thread.start()
                self._thread = thread

    def pause(self) -> None:
        self._has_tasks.clear()

    def close(self) -> None:
        self._is_closed = True
        self._has_tasks.set()

    def _watch(self) -> None:
        stuck: asyncio.Task[object] | None = None
        while self._has_tasks.wait() and not self._is_closed:
            asked_at = time.monotonic()
            self._ask()
            time.sleep(_LOOK_SECONDS)
            while self._ran_at < asked_at and not self._is_closed:
                # Many short steps of different tasks can delay the loop too. So a task counts as
                # responsible only if two checks in a row find it running.
                found, stuck = stuck, asyncio.current_task(self._loop)
                self._look(time.monotonic() - asked_at, stuck if stuck is found else None)
                self._ask()
                time.sleep(_LOOK_SECONDS)

    def _ask(self) -> None:
        # If a task has made the loop's wake-up socket blocking, the loop hangs in it; another wake-up lets
        # the loop continue.
        keep_awake(self._loop)
        self._loop.call_soon_threadsafe(self._note_run)

    def _note_run(self) -> None:
        self._ran_at = time.monotonic()

    def _look(self, seconds: float, stuck: asyncio.Task[object] | None) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        if seconds < BLOCKED_SECONDS or frame is None or not self._has_tasks.is_set():
            return
        task = None if stuck is None else _owner_of(stuck)
        name = None if task is None else task.name
        now = time.monotonic()
        if now - self._reported_at.get(name, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        self._reported_at[name] = now
        self._report(Blockage(task, seconds, _line_of(frame)))


def keep_awake(loop: asyncio.AbstractEventLoop) -> None:
    """Repair the socket with which an asyncio loop wakes itself, if a task has made it blocking."""
    wake_up = getattr(loop, "_ssock", None)
    if wake_up is not None:
        with suppress(OSError):
            os.set_blocking(wake_up.fileno(), False)


def _owner_of(stuck: asyncio.Task[object]) -> CurrentTask | None:
    """Return the application's task whose code is running, in its own coroutine or in a coroutine that it
    started.
    """
    for one in gc.get_referents(stuck):  # Task.get_context() is new in Python 3.12
        if isinstance(one, contextvars.Context):
            return one.copy().run(running_task)
    return None


def _line_of(frame: FrameType) -> str:
    """Return the current line of the application's coroutine, and also the innermost line if that is in
    other code.
    """
    frames = [frame]
    while (outer := frames[-1].f_back) is not None and outer.f_code.co_filename != _EVENTS_FILE:
        frames.append(outer)
    own = next((one for one in reversed(frames) if not _is_ours(one)), frame)
    return _text_of(own) if own is frame else f"{_text_of(own)}, inside {_text_of(frame)}"


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("horsies.")


def _text_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
