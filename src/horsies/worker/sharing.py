"""The page and the permits that a child shares with its worker, in addition to the socket between them.

The page is shared memory with a stop request, the running task's progress, and the number of the last
assignment that the child has started.

Permits decide which of its assignments a child may start. The parent writes one number per assignment into a
socket pair, and the child reads one number before it starts a task. Both processes have the reading end, and
the kernel gives each number to only one process. So if the parent reads a number back, the task has not
started and never will.

A task's code can reach every descriptor of its process. Worker and child share the reading end, including its
flags, so neither process may read it in a way that could block. If a task reads a number, the child misses
that number and reports the assignment as not started.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from struct import Struct

from horsies.captured_log import CapturedLog, LogLimits
from horsies.current_task import NOTE_CHARACTERS_MAX, attempt_token
from horsies.worker.log_area import LogArea, area_bytes
from horsies.worker.protocol import Assignment, ProgressReport

# Numbers have 64 bits, because a child without max_tasks_per_child can run more than 2**32 tasks within
# weeks.
_NUMBER = Struct("!Q")
# The first byte of a permit, so that a permit that is read in parts is not mistaken for a different permit.
_PERMIT = 0xA5 << 56
# How far ahead of an assignment the next permit may be, if the permits in between were taken back.
_AHEAD_MAX = 1 << 32
# A number of bytes that exceeds the capacity of a socket.
_EVERYTHING = 1 << 20
_PROGRESS = Struct("=IIddI")
_PROGRESS_START, _BEGUN_START, _NOTE_START, PAGE_BYTES = 8, 48, 64, 4096
_MARK_START, _MARK_BYTES = PAGE_BYTES - 8, 8
_PROGRESS_END = _PROGRESS_START + _PROGRESS.size
_BEGUN_END = _BEGUN_START + _NUMBER.size
_HAS_MEMFD = hasattr(os, "memfd_create")
_PAGE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if _HAS_MEMFD else 0


class SharedPage:
    """The memory that a child shares with its worker: a stop request, the task's progress, how many
    assignments the child has started, and the mark with which its frames start.

    Progress is not sent in frames, because a task may report it ten thousand times a second, from several
    threads and from processes that it forks. The worker reads only the latest report, when it has time, and
    validates all data that it reads here. The numbers of a report are written in one call, so that reports of
    several threads cannot mix; a report that is read while it is being written is read again.
    """

    __slots__ = ("_count", "_memory")

    def __init__(self, descriptor: int) -> None:
        # The size of the page, including the areas for the logs of attempts if there are any.
        self._memory = mmap.mmap(descriptor, 0)
        self._count = 0
        os.close(descriptor)

    @classmethod
    def create(cls, log_bytes: int = 0) -> tuple[SharedPage, int]:
        """Create a page with this much memory for logs, and a descriptor for the child."""
        made = _new_page_file(PAGE_BYTES + log_bytes)
        try:
            page = cls(os.dup(made))
        except OSError:
            os.close(made)
            raise
        page._memory[_MARK_START:PAGE_BYTES] = os.urandom(_MARK_BYTES)
        return page, made

    @classmethod
    def open_unseen(cls, descriptor: int) -> SharedPage:
        """Open the page in a child, without leaving a descriptor that a task could write to. ``mmap`` keeps a
        copy of the descriptor under the lowest free number, and closes only that copy.
        """
        os.close(lowest := os.dup(descriptor))
        inode = os.fstat(descriptor).st_ino
        page = cls(descriptor)
        with suppress(OSError):
            if os.fstat(lowest).st_ino == inode:
                null_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                os.dup2(null_fd, lowest, inheritable=False)
                os.close(null_fd)
        return page

    @property
    def mark(self) -> bytes:
        """The random bytes before each of the child's frames, which distinguish it from bytes written
        by a task.
        """
        return self._memory[_MARK_START:PAGE_BYTES]

    @property
    def stop_requested(self) -> bool:
        return self._memory[0] != 0

    def request_stop(self) -> None:
        self._memory[0] = 1

    @property
    def begun(self) -> int:
        number: int = _NUMBER.unpack(self._memory[_BEGUN_START:_BEGUN_END])[0]
        return number

    def note_begun(self, number: int) -> None:
        """Note that the child starts the assignment with this number. Assignments with lower numbers have
        already started or never will.
        """
        self._memory[_BEGUN_START:_BEGUN_END] = _NUMBER.pack(number)

    def write_progress(self, token: int, done: float, total: float, note: bytes) -> None:
        if note:
            self._memory[_NOTE_START : _NOTE_START + len(note)] = note
        self._count = count = (self._count + 1) & 0xFFFFFFFF
        report = _PROGRESS.pack(token, count, done, total, len(note))
        self._memory[_PROGRESS_START:_PROGRESS_END] = report

    @property
    def raw_progress(self) -> bytes:
        """The raw bytes of the latest report, which differ from those of every other report."""
        return self._memory[_PROGRESS_START:_PROGRESS_END]

    def read_progress(self, assignment: Assignment) -> ProgressReport | None:
        """Return the latest report about this attempt; None if there is none, or while a report is being
        written.
        """
        raw = self.raw_progress
        token, _, done, total, size = _PROGRESS.unpack(raw)
        note = self._memory[_NOTE_START:_MARK_START][:size]
        task_id, generation = assignment.task_id, assignment.generation
        if token != attempt_token(task_id, generation) or raw != self.raw_progress:
            return None
        text = note.decode(errors="replace").replace("\0", "\ufffd")[:NOTE_CHARACTERS_MAX] or None
        finite_total = total if math.isfinite(total) else None
        if not math.isfinite(done):
            return None
        return ProgressReport(task_id, generation, done, finite_total, text)

    def log_areas(self, limits: LogLimits) -> list[LogArea]:
        """Return the log areas, one for each attempt that the child can run at the same time."""
        if not (size := area_bytes(limits)):
            return []
        starts = range(PAGE_BYTES, len(self._memory) - size + 1, size)
        return [LogArea(self._memory, start, limits) for start in starts]

    def read_log(self, assignment: Assignment, limits: LogLimits) -> CapturedLog | None:
        """Return the log of an attempt whose child has ended."""
        token = attempt_token(assignment.task_id, assignment.generation)
        logs = (area.read(token) for area in self.log_areas(limits))
        return next((log for log in logs if log is not None), None)


def _new_page_file(size: int) -> int:
    """Return a descriptor for memory that no task can shorten: reading beyond the end of shortened memory
    would kill the worker.
    """
    if not _HAS_MEMFD:
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), size)
            return os.dup(file.fileno())
    made = os.memfd_create("horsies", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(made, size)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, _PAGE_SEALS)
    except OSError:
        os.close(made)
        raise
    return made


class PermitError(Exception):
    """Task code has closed, replaced or partly read a child's socket for permits."""


class PermitPipe:
    """The parent's side of the permits, with both ends of the socket pair."""

    __slots__ = ("_reading", "_writing")

    def __init__(self) -> None:
        self._writing, self._reading = socket.socketpair()

    @property
    def read_fd(self) -> int:
        return self._reading.fileno()

    def grant(self, numbers: Iterable[int]) -> None:
        """Permit the assignments with these numbers.

        If a task has shut down the socket, the child finds no permits and reports the assignments as not
        started.
        """
        permits = b"".join([_NUMBER.pack(_PERMIT + number) for number in numbers])
        with suppress(OSError):
            self._writing.send(permits, socket.MSG_DONTWAIT)

    def take_back(self) -> Iterable[int]:
        """Take back all permits, and return the numbers of their assignments, which have not started and now
        never will.
        """
        try:
            data = self._reading.recv(_EVERYTHING, socket.MSG_DONTWAIT)
        except OSError:
            return ()
        # A task may have read a part of the first number.
        whole = _NUMBER.iter_unpack(data[len(data) % _NUMBER.size :])
        return [permit - _PERMIT for (permit,) in whole]

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


class Permits:
    """The child's side of the permits, which reads one number before each task."""

    __slots__ = ("_ahead", "_reading")

    def __init__(self, fd: int) -> None:
        self._reading = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
        # A number that was already read and belongs to a later assignment; the permits of the assignments
        # before it were taken back.
        self._ahead: int | None = None

    def allows(self, number: int) -> bool:
        """Return whether the task with this number may start; False if its permit was taken back."""
        held = self._ahead
        if held is None:
            try:
                data = self._reading.recv(_NUMBER.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                raise PermitError(f"the permits cannot be read ({error})") from error
            if len(data) != _NUMBER.size:
                raise PermitError("the permits end within a number")
            held = _NUMBER.unpack(data)[0] - _PERMIT
        if not number <= held < number + _AHEAD_MAX:
            raise PermitError(f"permit {held} came where {number} or a later number was expected")
        self._ahead = None if held == number else held
        return held == number

    def close(self) -> None:
        self._reading.close()


def send_descriptors(connected: socket.socket, page: int, permits: int | None) -> None:
    """Send the first byte to a new child, and with it the descriptors of the shared page and of its
    permits, if it has any.
    """
    socket.send_fds(connected, [b"P"], [page] if permits is None else [page, permits])


def receive_descriptors(connected: socket.socket) -> tuple[SharedPage | None, int | None]:
    """Wait for the page and the permits; the page is None if the worker has ended."""
    _, descriptors, _, _ = socket.recv_fds(connected, 1, 2)
    page = SharedPage.open_unseen(descriptors[0]) if descriptors else None
    return page, descriptors[1] if len(descriptors) > 1 else None
