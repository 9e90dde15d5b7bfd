"""Handles the children's frames: reports, notices, and bytes that are not frames."""

from __future__ import annotations

import logging
import selectors
import time

from horsies.captured_log import CapturedLog
from horsies.logs import as_event
from horsies.worker import protocol
from horsies.worker.pool.assignments import Assignments
from horsies.worker.pool.child_process import BUSY, ChildProcess, Held
from horsies.worker.pool.children import Children
from horsies.worker.pool.events import Reported, Stopped
from horsies.worker.protocol import FrameKind, ProtocolError

logger = logging.getLogger("horsies.pool")

# The most reads in a row from one child: enough to empty a full socket, but few enough that a child that
# keeps sending does not delay the others.
_DRAIN_READS = 16
_KIND_REPORT = int(FrameKind.REPORT)


class Inbox:
    """Reads the children's sockets and acts on their frames."""

    __slots__ = ("_assignments", "_children", "_selector")

    def __init__(
        self, children: Children, assignments: Assignments, selector: selectors.BaseSelector
    ) -> None:
        self._children = children
        self._assignments = assignments
        self._selector = selector

    def receive(self, child: ChildProcess) -> bool:
        """Read once from a child and handle the frames; False if there was nothing to read."""
        data = child.receive()
        if data is None:
            return False
        if not data:
            self._children.note_closed(child)
            return False
        try:
            for frame in child.frames.feed(data):
                (self._take_report if frame[4] == _KIND_REPORT else self._take_notice)(child, frame)
            if child.frames.has_foreign_bytes and not child.is_tainted:
                act = "wrote to the socket between the child and its worker"
                self._assignments.taint(child, act)
                self._children.release(child)
        except ProtocolError as error:
            child.verdict = f"killed because it sent a malformed frame ({error})"
            child.close_socket(self._selector)
            self._children.kill(child)
            return False
        return True

    def drain(self, child: ChildProcess) -> bool:
        """Handle the frames that a child has sent; True if the child sends faster than its frames are
        read.
        """
        return all(child.socket_is_open and self.receive(child) for _ in range(_DRAIN_READS))

    def _take_report(self, child: ChildProcess, frame: bytes) -> None:
        report, rss_bytes, run_microseconds = protocol.decode_report(frame)
        held = child.held.get(report.task_id)
        if held is None or not held.assigned_at:  # a queued assignment cannot have begun
            raise ProtocolError("a report about a task it does not have")
        if report.generation != held.assignment.generation:
            raise ProtocolError("a report about another claim of its task")
        self._assignments.events.append(Reported(report, child.known_pid, run_microseconds / 1e6))
        child.rss_bytes = rss_bytes
        self._end(held)

    def _end(self, held: Held) -> None:
        child = held.child
        child.tasks_done += 1
        self._assignments.remove(held)
        if self._children.delay.deaths:
            self._children.delay.reset(child.ready_at)
        if child.permits is not None and child.held and child.must_retire():
            self._assignments.return_tasks(self._assignments.take_back(child))
        if held.stop_reason is not None and not child.is_async:
            # A stopped child exits. If its task ended before the stop, the stop frame is still on its
            # way.
            if child.state is BUSY:
                self._children.retire(child)
        else:
            self._children.release(child)

    def _take_notice(self, child: ChildProcess, frame: bytes) -> None:
        children = self._children
        match frame[4]:
            case FrameKind.HELLO:
                children.note_hello(child, protocol.decode_numbers(frame)[0])
            case FrameKind.READY:
                children.note_ready(child, protocol.decode_numbers(frame)[1])
            case FrameKind.TASK_STOPPED:
                self._take_stopped(child, *protocol.decode_stopped(frame))
            case FrameKind.TASK_UNSTARTED:
                self._assignments.note_unstarted(child, *protocol.decode_numbers(frame))
                children.release(child)
            case FrameKind.PROGRESS:
                self._take_progress(child, frame)
            case FrameKind.LOOP_BLOCKED:
                _log_blockage(child, *protocol.decode_texts(frame, 4))
            case FrameKind.HOOK_FAILED:
                name, problem = protocol.decode_texts(frame, 2)
                child.failed_hook = (name, problem)
            case FrameKind.BOOT_FAILED:
                problem = protocol.decode_texts(frame, 1)[0]
                child.verdict = f"could not load the application: {problem}"
            case kind:
                raise ProtocolError(f"kind {kind} does not come from a child")

    def _take_stopped(self, child: ChildProcess, task_id: str, log: CapturedLog | None) -> None:
        held = child.held.get(task_id)
        if held is None or held.stop_reason is None:
            raise ProtocolError("stopped out of turn")
        seconds = time.monotonic() - held.assigned_at
        stopped = Stopped(
            held.assignment, child.known_pid, False, held.stop_reason, seconds, log=log
        )
        self._assignments.events.append(stopped)
        self._end(held)

    def _take_progress(self, child: ChildProcess, frame: bytes) -> None:
        report = protocol.decode_progress(frame)
        held = child.held.get(report.task_id)
        if held is not None and held.assignment.generation == report.generation:
            self._assignments.progress[report.task_id] = report


def _log_blockage(
    child: ChildProcess, task_name: str, seconds: str, line: str, others: str
) -> None:
    logger.warning(
        "%s has blocked the event loop of async child %s for %s s, and with it %s other task(s), at %s; "
        "await instead, or use asyncio.to_thread",
        f"task {task_name!r}" if task_name else "code outside of a single task",
        child.pid,
        seconds,
        others,
        line,
        extra=as_event("loop_blocked", task_name=task_name or None, child_pid=child.pid),
    )
