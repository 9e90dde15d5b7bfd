"""An async child: runs several coroutines concurrently on one event loop, one for each assignment.

Every assignment runs in its own context, with its own ``current_task()``, log labels and headers. The
parent decides how many assignments run here. To stop one, it sends a frame, which cancels the coroutine.
The parent also enforces time limits: it kills the process if a coroutine does not end.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from socket import socket
from typing import Any, Protocol

from horsies.captured_log import CapturedLog
from horsies.codec.results import encode_task_error
from horsies.current_task import CurrentTask, running_task, set_running_task_here
from horsies.error_codes import OperationalErrorCode
from horsies.task_result import TaskError, exception_text
from horsies.tasks.invoke import kept_event_loop
from horsies.worker import os_process, protocol
from horsies.worker.child.log_capture import Capture
from horsies.worker.child.loop_watch import Blockage, LoopWatch, keep_awake
from horsies.worker.child.process_state import ProcessState, log_safely
from horsies.worker.protocol import (
    LAST_NUMBER,
    Assignment,
    ChildReport,
    FrameKind,
    ProtocolError,
)

# How often a task's progress is sent to the parent, which stores it with about the same frequency.
PROGRESS_SECONDS = 0.3

_RECEIVE_BYTES = 1 << 18
_ATTEND_SECONDS = 0.25
# The attributes of an asyncio loop that another thread uses to wake the loop.
_WAKE_UP = ("_ssock", "_read_from_self")
_KIND_ASSIGN = int(FrameKind.ASSIGN)
_KIND_STOP_TASK = int(FrameKind.STOP_TASK)

logger = logging.getLogger("horsies.child")

Execute = Callable[[Assignment], Coroutine[Any, Any, ChildReport]]


class _Page(Protocol):
    @property
    def stop_requested(self) -> bool: ...

    def note_begun(self, number: int) -> None: ...


class _Parent(Protocol):
    """The child's end of the socket to its worker."""

    socket: socket
    owner_pid: int

    @property
    def page(self) -> _Page | None: ...

    def marked(self, frame: bytes) -> bytes: ...

    def waiting_frames(self) -> list[bytes]: ...

    def feed(self, data: bytes) -> list[bytes]: ...

    def missing_before(self, number: int) -> tuple[int, int] | None: ...


def serve_coroutines(
    parent: _Parent,
    execute: Execute,
    process_state: ProcessState,
    samples_memory: bool,
    capture: Capture | None = None,
) -> None:
    """Run assignments until the parent closes the socket and the last assignment has ended.

    The application's asynchronous hooks use the same loop. No coroutine of this module runs on that loop,
    so task code that cancels every asyncio task, stops the loop or exits does not end other tasks.
    """
    loop = kept_event_loop()
    server = _Server(loop, parent, execute, process_state, samples_memory, capture)
    server.begin()
    os.register_at_fork(after_in_child=functools.partial(_leave, loop))
    while not server.is_done:
        fault: BaseException | None = None
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            fault = error
        if os.getpid() != parent.owner_pid:
            os._exit(0)
        if fault is not None:
            text = "A callback, or a task that a coroutine started, raised %s."
            log_safely(logger, logging.ERROR, text, type(fault).__name__, error=fault)
    server.end()


def _leave(loop: asyncio.AbstractEventLoop) -> None:
    """Stop the copy of the loop in a process that a coroutine forked, at its next ``await``, because it would
    repeat the steps of other tasks.
    """
    for handle in tuple(getattr(loop, "_ready", ())):
        handle.cancel()
    loop.stop()


class _Running:
    """A running assignment: its coroutine, its latest progress, and whether the parent has stopped it.

    ``CurrentTask`` uses it in place of the memory that other children share with the worker.
    """

    __slots__ = (
        "_outbox",
        "_page",
        "assignment",
        "context",
        "current",
        "has_begun",
        "is_over",
        "is_stopped",
        "number",
        "started_ns",
        "task",
    )

    def __init__(
        self, assignment: Assignment, number: int, outbox: _Outbox, page: _Page | None
    ) -> None:
        self.assignment = assignment
        self.number = number
        self.context = contextvars.copy_context()
        self.current: CurrentTask | None = None
        self.task: _AssignmentTask | None = None
        # False until the coroutine has run its first step.
        self.has_begun = False
        self.started_ns = time.perf_counter_ns()
        self.is_stopped = False
        self.is_over = False
        self._outbox = outbox
        self._page = page

    @property
    def stop_requested(self) -> bool:
        return self.is_stopped or (self._page is not None and self._page.stop_requested)

    def write_progress(self, _token: int, done: float, total: float, note: bytes) -> None:
        if not self.is_over:  # an asyncio task started by the coroutine may outlive it
            task_id, generation = self.assignment.task_id, self.assignment.generation
            frame = protocol.encode_progress(task_id, generation, done, total, note.decode())
            self._outbox.note_progress(task_id, frame)

    def stop(self) -> None:
        self.is_stopped = True
        if self.task is not None:
            self.task.stop()


class _AssignmentTask(asyncio.Task[ChildReport]):
    """The asyncio task of an assignment. Code of other assignments cannot cancel it, even by cancelling
    all tasks of the event loop.
    """

    running: _Running | None = None
    # True while the outcome is being recorded in the task's transaction, after the task's code has ended. A
    # stop must not interrupt this.
    is_finishing = False
    # True while the task's own code commits the outcome that it has recorded: a stop by the worker is
    # deferred, but other cancellations are not.
    _defers_stops = False
    _has_deferred_stop = False

    def stop(self) -> None:
        """Cancel the task because the worker stops it."""
        if self._defers_stops:
            self._has_deferred_stop = True
        else:
            self.cancel()

    def suspend_stops(self) -> None:
        self._defers_stops = True

    def resume_stops(self) -> None:
        self._defers_stops = False
        if self._has_deferred_stop:
            self._has_deferred_stop = False
            self.cancel()

    def cancel(self, msg: Any | None = None) -> bool:
        running, caller = self.running, running_task()
        if self.is_finishing:
            return False
        is_stopped = running is not None and running.is_stopped and not self._defers_stops
        if running is None or caller is None or is_stopped:
            return super().cancel(msg)
        if caller.id == running.assignment.task_id:
            return super().cancel(msg)
        text = (
            "Task %r tried to cancel task %r, which shares its event loop; the cancellation is "
            "ignored."
        )
        log_safely(logger, logging.WARNING, text, caller.name, running.assignment.task_name)
        return False


class _Server:
    """The assignments that run in this process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        parent: _Parent,
        execute: Execute,
        process_state: ProcessState,
        samples_memory: bool,
        capture: Capture | None,
    ) -> None:
        self._loop = loop
        self._capture = capture
        self._parent = parent
        self._execute = execute
        self._process_state = process_state
        self._samples_memory = samples_memory
        self._outbox = _Outbox(loop, parent)
        self._watch = LoopWatch(loop, self._note_blockage)
        self._running: dict[str, _Running] = {}
        self._last_taken = 0
        self._last_begun = 0
        self._is_closed = False
        self._has_timer = False

    @property
    def is_done(self) -> bool:
        """Return whether the parent has closed its end and no frame is left that could be sent."""
        outbox = self._outbox
        return outbox.is_broken or (self._is_closed and not self._running and outbox.is_empty)

    def begin(self) -> None:
        self._parent.socket.setblocking(False)
        self._listen()
        for frame in self._parent.waiting_frames():
            self._take(frame)

    def end(self) -> None:
        self._loop.remove_reader(self._parent.socket)
        self._watch.close()
        self._parent.socket.setblocking(True)

    def _listen(self) -> None:
        """Make the loop call ``_receive``, and restore that callback and the loop's own wake-ups if a
        coroutine has removed them.
        """
        if self._is_closed:
            return
        with suppress(OSError):
            self._loop.add_reader(self._parent.socket, self._receive)
        keep_awake(self._loop)
        own_end, read = (getattr(self._loop, name, None) for name in _WAKE_UP)
        if own_end is not None and read is not None:
            with suppress(OSError):
                self._loop.add_reader(own_end, read)

    def _attend(self) -> None:
        """Regularly undo changes that tasks may have made to the loop, while there are tasks."""
        self._has_timer = bool(self._running)
        if self._has_timer:
            self._listen()
            self._loop.call_later(_ATTEND_SECONDS, self._attend)

    def _receive(self) -> None:
        try:
            data = self._parent.socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            self._loop.stop()
            return
        try:
            for frame in self._parent.feed(data):
                self._take(frame)
        except ProtocolError as error:
            text = "A task has read or changed what the worker sent to this child (%s); it takes no more."
            log_safely(logger, logging.ERROR, text, error)
            self._note_unstarted(self._last_taken + 1, LAST_NUMBER)
            self._close()
            self._loop.stop()

    def _close(self) -> None:
        """Take no more assignments, and exit when the started assignments have ended."""
        self._loop.remove_reader(self._parent.socket)
        self._is_closed = True

    def _take(self, frame: bytes) -> None:
        if frame[4] == _KIND_ASSIGN:
            number, _ = protocol.assignment_number(frame)
            if (missing := self._parent.missing_before(number)) is not None:
                self._note_unstarted(*missing)
            # All assignments are decoded first, so that an invalid assignment is reported as never started.
            assignment = protocol.decode_assignment(frame)
            self._last_taken = number
            self._start(assignment, number)
        elif frame[4] == _KIND_STOP_TASK:
            task_id, generation = protocol.decode_texts(frame, 2)
            running = self._running.get(task_id)
            if running is not None and running.assignment.generation == int(generation):
                running.stop()

    def _note_unstarted(self, first: int, last: int) -> None:
        """Report to the parent that the assignments with these numbers will never start in this process."""
        self._outbox.send(protocol.encode_numbers(FrameKind.TASK_UNSTARTED, first, last))

    def _start(self, assignment: Assignment, number: int) -> None:
        running = _Running(assignment, number, self._outbox, self._parent.page)
        self._running[assignment.task_id] = running
        self._watch.resume()
        if not self._has_timer:
            self._has_timer = True
            self._loop.call_later(_ATTEND_SECONDS, self._attend)
        running.current = current = CurrentTask(assignment, time.time(), running)
        if self._capture is not None:
            self._capture.begin(current, assignment)
        running.context.run(set_running_task_here, current)
        # loop.create_task() is not used, because the application's task factory may reject a context or start
        # the task immediately.
        running.task = task = _AssignmentTask(
            self._run(running), loop=self._loop, name=assignment.task_name, context=running.context
        )
        task.running = running
        task.add_done_callback(functools.partial(self._finish, running))

    async def _run(self, running: _Running) -> ChildReport:
        running.has_begun = True
        # a restarted coroutine can have a lower number than coroutines that started before it
        if running.number > self._last_begun:
            self._last_begun = running.number
            if (page := self._parent.page) is not None:
                page.note_begun(running.number)
        return await self._execute(running.assignment)

    def _finish(self, running: _Running, task: asyncio.Task[ChildReport]) -> None:
        """Report the end of an assignment: its outcome, that it was stopped, or that it never started."""
        assignment = running.assignment
        running.is_over = True
        del self._running[assignment.task_id]
        log = None
        if self._capture is not None and running.current is not None:
            log = self._capture.end(running.current)
        if not (running.has_begun or running.is_stopped):
            # Other code cancelled the coroutine before its first step.
            self._start(assignment, running.number)
            return
        self._outbox.send_progress(assignment.task_id)
        try:
            frame = self._end_frame(running, task, log)
        except (
            BaseException
        ) as error:  # without a frame, the parent would wait for the task forever
            text = "The end of task %r cannot be reported."
            log_safely(logger, logging.ERROR, text, assignment.task_name, error=error)
            problem = f"could not report its end: {type(error).__name__}: {exception_text(error)}"
            frame = protocol.encode_report(_unreported(assignment, problem))
        self._outbox.send(frame)
        if not (self._process_state.restore_limits() or self._is_closed):
            self._close()
        if not self._running:
            # Restore the process state only when no task is running, because all tasks of the process
            # share it.
            self._process_state.restore()
            self._watch.pause()
            self._listen()
            if self._is_closed:
                self._loop.stop()

    def _end_frame(
        self, running: _Running, task: asyncio.Task[ChildReport], log: CapturedLog | None
    ) -> bytes:
        assignment = running.assignment
        report = None if task.cancelled() else task.result()
        if running.is_stopped and (report is None or not report.ok):
            if not running.has_begun:
                number = running.number
                return protocol.encode_numbers(FrameKind.TASK_UNSTARTED, number, number)
            return protocol.encode_stopped(assignment, log)
        rss_bytes = os_process.own_rss_bytes() if self._samples_memory else 0
        run_microseconds = (time.perf_counter_ns() - running.started_ns) // 1_000
        report = report or _unreported(assignment, "was cancelled by other code of its process")
        if log is not None:
            report = report._replace(log=log)
        return protocol.encode_report(report, rss_bytes, run_microseconds)

    def _note_blockage(self, blockage: Blockage) -> None:
        """Report to the parent that the event loop is blocked. The parent writes the log line, even if
        the application has changed the child's logging. Called in the watch's thread.
        """
        others = len(self._running) - 1
        task = blockage.task
        about = ("", "") if task is None else (task.id, task.name)
        texts = (f"{blockage.seconds:.1f}", blockage.line, str(max(0, others)))
        self._outbox.send(protocol.encode_texts(FrameKind.LOOP_BLOCKED, *about, *texts))


def _unreported(assignment: Assignment, problem: str) -> ChildReport:
    """Return the error for an assignment that ended without a report."""
    code = OperationalErrorCode.UNHANDLED_EXCEPTION
    message = f"Task {assignment.task_name!r} {problem}."
    result = encode_task_error(TaskError(error_code=code, message=message))
    return ChildReport(
        assignment.task_id, assignment.generation, False, result, code.value, message
    )


class _Outbox:
    """Sends frames to the parent without waiting; the rest of a large result is sent when the socket accepts
    it. The thread of the loop watch sends frames through this object as well.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, parent: _Parent) -> None:
        self._loop = loop
        self._socket = parent.socket
        self._marked = parent.marked
        self._owner_pid = parent.owner_pid
        self._lock = threading.Lock()
        self._rest = bytearray()
        self.is_broken = False
        # The latest progress of each task since the last batch; the next batch sends it.
        self._progress: dict[str, bytes] = {}
        self._has_timer = False

    def send(self, frame: bytes) -> None:
        """Write one frame. A process that a task has forked exits here instead of sending a report in the
        task's name.
        """
        if os.getpid() != self._owner_pid:
            os._exit(0)
        with self._lock:
            is_waiting = bool(self._rest)
            self._rest += self._marked(frame)
            if is_waiting:
                return
            self._write()
            if self._rest:
                self._loop.call_soon_threadsafe(self._wait_for_room)

    def _write(self) -> None:
        try:
            del self._rest[: self._socket.send(self._rest)]
        except BlockingIOError:
            return
        except OSError:  # the parent has ended
            self.is_broken = True
            self._rest.clear()
            self._loop.call_soon_threadsafe(self._loop.stop)

    @property
    def is_empty(self) -> bool:
        return not self._rest

    def _wait_for_room(self) -> None:
        self._loop.add_writer(self._socket, self._continue)

    def _continue(self) -> None:
        with self._lock:
            self._write()
            if not self._rest:
                self._loop.remove_writer(self._socket)
                self._loop.stop()

    def note_progress(self, task_id: str, frame: bytes) -> None:
        """Send this progress with the next batch; any thread may call this at any rate."""
        self._progress[task_id] = frame
        if not self._has_timer:
            self._has_timer = True
            self._loop.call_soon_threadsafe(
                self._loop.call_later, PROGRESS_SECONDS, self._send_all_progress
            )

    def send_progress(self, task_id: str) -> None:
        if (frame := self._progress.pop(task_id, None)) is not None:
            self.send(frame)

    def _send_all_progress(self) -> None:
        self._has_timer = False
        for task_id in list(self._progress):
            self.send_progress(task_id)
