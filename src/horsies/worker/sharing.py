"""The page and the pipe that a child shares with its worker, beside the socket between them.

The page is memory: a stop request, the progress of the running task, and how far an async child has come
with its assignments. The pipe decides which of its
assignments a child has begun: the parent writes one number, a permit, per assignment, and the child reads one
before it begins a task. Both have the reading end, and the kernel gives each number to one of them: a
number that the parent reads back belongs to a task that has not begun and never will.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import socket
import tempfile
from collections.abc import Iterable
from struct import Struct

from horsies.current_task import NOTE_CHARACTERS_MAX, attempt_token
from horsies.worker.protocol import Assignment, ProgressReport

# 64 bits: a child without max_tasks_per_child can run more than 2**32 tasks within weeks.
_NUMBER = Struct("!Q")
# More than a pipe holds.
_EVERYTHING = 1 << 20
_PROGRESS = Struct("=IIddI")
_PROGRESS_START, _BEGUN_START, _NOTE_START, _PAGE_BYTES = 8, 48, 64, 4096
_PROGRESS_END = _PROGRESS_START + _PROGRESS.size
_BEGUN_END = _BEGUN_START + _NUMBER.size
_HAS_MEMFD = hasattr(os, "memfd_create")
_PAGE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if _HAS_MEMFD else 0


class SharedPage:
    """The memory that a child shares with its worker: a stop request, the progress of its task, and the
    number of the last assignment that an async child has begun.

    Not frames: a task may report progress ten thousand times a second, from several threads and from
    processes it forks, and the worker reads the latest report whenever it has time. The worker takes no
    bytes here on trust. Numbers are written in one call, so that threads cannot mix theirs; a report that
    is read while it is written is read again.
    """

    __slots__ = ("_count", "_memory")

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _PAGE_BYTES)
        self._count = 0
        os.close(descriptor)

    @classmethod
    def create(cls) -> tuple[SharedPage, int]:
        """A new page, and a descriptor of it for the child."""
        made = _new_page_file()
        try:
            return cls(os.dup(made)), made
        except OSError:
            os.close(made)
            raise

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
        """An async child begins the assignment with this number; it has begun all before it."""
        self._memory[_BEGUN_START:_BEGUN_END] = _NUMBER.pack(number)

    def write_progress(self, token: int, done: float, total: float, note: bytes) -> None:
        if note:
            self._memory[_NOTE_START : _NOTE_START + len(note)] = note
        self._count = count = (self._count + 1) & 0xFFFFFFFF
        report = _PROGRESS.pack(token, count, done, total, len(note))
        self._memory[_PROGRESS_START:_PROGRESS_END] = report

    @property
    def raw_progress(self) -> bytes:
        """Differs whenever there is another report."""
        return self._memory[_PROGRESS_START:_PROGRESS_END]

    def read_progress(self, assignment: Assignment) -> ProgressReport | None:
        """The latest report about this attempt; None without one, and while one is being written."""
        raw = self.raw_progress
        token, _, done, total, size = _PROGRESS.unpack(raw)
        note = self._memory[_NOTE_START:][:size]
        task_id, generation = assignment.task_id, assignment.generation
        if token != attempt_token(task_id, generation) or raw != self.raw_progress:
            return None
        text = note.decode(errors="replace").replace("\0", "\ufffd")[:NOTE_CHARACTERS_MAX] or None
        finite_total = total if math.isfinite(total) else None
        if not math.isfinite(done):
            return None
        return ProgressReport(task_id, generation, done, finite_total, text)


def _new_page_file() -> int:
    """A descriptor of memory that no task can shorten: reading behind its end would kill the worker."""
    if not _HAS_MEMFD:
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), _PAGE_BYTES)
            return os.dup(file.fileno())
    made = os.memfd_create("horsies", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(made, _PAGE_BYTES)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, _PAGE_SEALS)
    except OSError:
        os.close(made)
        raise
    return made


class PermitError(Exception):
    """The pipe of a child's permits was closed or replaced by the code of a task."""


class PermitPipe:
    """The parent's side: both ends of the pipe."""

    __slots__ = ("_last", "_write_fd", "read_fd")

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._last = 0

    def grant(self, count: int) -> range:
        """Permit `count` more assignments; returns their numbers."""
        numbers = range(self._last + 1, self._last + 1 + count)
        self._last += count
        os.write(self._write_fd, b"".join(map(_NUMBER.pack, numbers)))
        return numbers

    def take_back(self) -> Iterable[int]:
        """Empty the pipe; returns the numbers of assignments that have not begun and never will."""
        try:
            data = os.read(self.read_fd, _EVERYTHING)
        except BlockingIOError:
            return ()
        whole = len(data) - len(data) % _NUMBER.size  # a task may have read a part of a number
        return [number for (number,) in _NUMBER.iter_unpack(data[:whole])]

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)


class Permits:
    """The child's side: reads one number before each task."""

    __slots__ = ("_ahead", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # The number of a later assignment: those before it were taken back.
        self._ahead: int | None = None

    def allows(self, number: int) -> bool:
        """Whether the task with this number may begin; False when the parent has taken it back."""
        held = self._ahead
        if held is None:
            try:
                data = os.read(self.fd, _NUMBER.size)
            except BlockingIOError:
                return False
            except OSError as error:
                raise PermitError(f"the pipe of permits cannot be read ({error})") from error
            if len(data) != _NUMBER.size:
                raise PermitError("the pipe of permits ends within a number")
            held = _NUMBER.unpack(data)[0]
        if held < number:
            raise PermitError(f"permit {held} came where {number} or a later one was expected")
        self._ahead = None if held == number else held
        return held == number


def send_descriptors(connected: socket.socket, page: int, permits: int | None) -> None:
    """Give a new child the page that it shares with the worker, and the pipe of its permits if it has one:
    the first byte it reads.
    """
    socket.send_fds(connected, [b"P"], [page] if permits is None else [page, permits])


def receive_descriptors(connected: socket.socket) -> tuple[SharedPage | None, int | None]:
    """Wait for the page and the pipe; no page when the worker is gone."""
    _, descriptors, _, _ = socket.recv_fds(connected, 1, 2)
    page = SharedPage(descriptors[0]) if descriptors else None
    return page, descriptors[1] if len(descriptors) > 1 else None
