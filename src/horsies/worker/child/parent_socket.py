"""A child's end of the socket to its worker: frames, permits, and the number of started tasks."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress

from horsies.worker import protocol
from horsies.worker.protocol import FrameBuffer, FrameKind, ProtocolError
from horsies.worker.sharing import Permits, SharedPage

_RECEIVE_BYTES = 1 << 16
_KIND_ASSIGN = int(FrameKind.ASSIGN)
_KIND_STOP = int(FrameKind.STOP)
# The size of a frame above which the socket gets its original send buffer back.
_LARGE_FRAME_BYTES = 1 << 12


class ParentSocket:
    """The child's end of the socket, usable only in the process that opened it.

    It works even if task code has made the socket blocking or set timeouts on it.
    """

    __slots__ = (
        "_buffer_bytes",
        "_frames",
        "_mark",
        "_poll",
        "_received",
        "_unstarted",
        "_waiting",
        "owner_pid",
        "page",
        "permits",
        "socket",
    )

    def __init__(self, connected: socket.socket, page: SharedPage | None = None) -> None:
        self.socket = connected
        self.page = page
        self.permits: Permits | None = None
        self.owner_pid = os.getpid()
        self._mark = b"" if page is None else page.mark
        # The number of the latest assignment received.
        self._received = 0
        # The kernel doubles the requested value.
        self._buffer_bytes = connected.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
        # The lowest and the highest number of the latest assignments that never start in this child.
        self._unstarted: tuple[int, int] | None = None
        self._frames = FrameBuffer()
        self._waiting: list[bytes] = []
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def marked(self, frame: bytes) -> bytes:
        """Return the bytes to send for `frame`."""
        return self._mark + frame

    def send(self, frame: bytes) -> None:
        """Write one frame. A process that a task has forked exits here instead of sending a report in the
        task's name.
        """
        if os.getpid() != self.owner_pid:
            os._exit(0)
        data = self._mark + frame
        if len(data) > _LARGE_FRAME_BYTES:
            with suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._buffer_bytes)
        sent = self._send_some(data)
        while sent < len(data):
            sent += self._send_some(memoryview(data)[sent:])

    def send_all(self, frames: Sequence[bytes]) -> None:
        """Write several frames at once."""
        first, *others = frames
        self.send(first + b"".join(map(self.marked, others)))

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            room = select.poll()
            room.register(self.socket, select.POLLOUT)
            room.poll()
            return 0

    def next_frame(self) -> bytes | None:
        """Wait for the next frame; None if the parent has closed its end."""
        while not self._waiting:
            self._send_unstarted()
            # poll() is used because a process that sleeps in recv() also wakes up when its peer reads the
            # last frame: a second, useless wake-up per task.
            self._poll.poll()
            try:
                data = self.socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:  # left-over code of a task has read the data
                continue
            if not data:
                return None
            self._waiting = self._frames.feed(data)
        return self._waiting.pop(0)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete with `data` from the socket."""
        return self._frames.feed(data)

    def waiting_frames(self) -> list[bytes]:
        """Return the complete frames that arrived together with the last frame."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def may_begin(self, frame: bytes) -> bool:
        """Return whether the assignment in `frame` may start; False if its permit is missing. Either the
        parent has taken the permit back, or other code in this process has read it. Only the parent can
        distinguish the two cases, so every skipped assignment is reported to it before a later assignment
        starts. An assignment whose frame never arrived is skipped as well.
        """
        number, needs_permit = protocol.assignment_number(frame)
        if (missing := self.missing_before(number)) is not None:
            self._pass_over(*missing)
        if needs_permit and (self.permits is None or not self.permits.allows(number)):
            self._pass_over(number, number)
            return False
        self._send_unstarted()
        if self.page is not None:
            self.page.note_begun(number)
        return True

    def batch_frames(self, first: int, last: int) -> list[bytes] | None:
        """Wait for the assignments with these numbers, and note that they start.

        Assignments that never arrived are reported as skipped. Return None if the parent has closed its
        end or stops this process.
        """
        frames: list[bytes] = []
        number = first - 1
        while number < last:
            frame = self.next_frame()
            if frame is None or frame[4] != _KIND_ASSIGN:
                return None
            number, _ = protocol.assignment_number(frame)
            if (missing := self.missing_before(number)) is not None:
                self._pass_over(*missing)
            frames.append(frame)
        self._send_unstarted()
        if self.page is not None:
            self.page.note_begun(last)
        return frames

    def missing_before(self, number: int) -> tuple[int, int] | None:
        """Note that an assignment has arrived. Return the first and last missing numbers between the
        previous assignment and this one, or None.
        """
        expected, self._received = self._received + 1, number
        if number < expected:
            raise ProtocolError(f"assignment {number} came where {expected} was expected")
        return None if number == expected else (expected, number - 1)

    def _pass_over(self, first: int, last: int) -> None:
        self._unstarted = (first if self._unstarted is None else self._unstarted[0], last)

    def _send_unstarted(self) -> None:
        if self._unstarted is not None:
            self.send(protocol.encode_numbers(FrameKind.TASK_UNSTARTED, *self._unstarted))
            self._unstarted = None

    def has_stop_request(self) -> bool:
        """Return whether the socket contains the parent's stop frame or an end-of-file, possibly behind
        further assignments.
        """
        try:
            while data := self.socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT):
                self._waiting += self._frames.feed(data)
        except BlockingIOError:
            return any(frame[4] == _KIND_STOP for frame in self._waiting)
        except ProtocolError:  # the task has read part of the parent's data
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Close this process's copies of the descriptors."""
        with suppress(OSError):
            self.socket.close()
        if self.permits is not None:
            with suppress(OSError):
                self.permits.close()
