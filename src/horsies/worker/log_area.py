"""Keeps the log lines of a running attempt in memory that the child shares with the worker.

For a log call, the child only copies the line into that memory: it sends no frame, makes no system call, and
does not wait for the worker. The child sends the lines with its report. If the child is killed before that,
the worker reads the lines from this memory.

The first half of an area contains the first lines. The second half is a ring that keeps the last lines after
the first half is full. The worker validates the data, because task code can write to the memory.
"""

from __future__ import annotations

import mmap
from struct import Struct

from horsies.captured_log import COUNT_MAX, LINE_BYTES_MAX, CapturedLog, LogLimits

# The header: the attempt's token, the bytes in the head, the total of bytes written to the ring, and the
# total of lines.
_HEADER = Struct("=QIQI")
_CUT = b" [...]\n"


def area_bytes(limits: LogLimits) -> int:
    """The size of one area; 0 if nothing is kept."""
    return _HEADER.size + 2 * _half(limits) if limits.max_bytes else 0


def _half(limits: LogLimits) -> int:
    return max(limits.max_bytes // 2, 1)


class LogArea:
    """The memory for one attempt's lines: the child writes them, and the worker reads them if the child
    dies.
    """

    __slots__ = (
        "_half",
        "_head",
        "_head_lines",
        "_lines",
        "_memory",
        "_most",
        "_ring",
        "_start",
        "_token",
    )

    def __init__(self, memory: mmap.mmap, start: int, limits: LogLimits) -> None:
        self._memory = memory
        self._start = start
        self._half = _half(limits)
        self._most = max(limits.max_lines // 2, 1)
        self._token = self._head = self._ring = self._head_lines = self._lines = 0

    def begin(self, token: int) -> None:
        """Forget the lines of the previous attempt; the next lines belong to the attempt with this token."""
        self._token = token
        self._head = self._ring = self._head_lines = self._lines = 0
        self._write_header()

    def write(self, line: str) -> None:
        """Add one log record, which may have several lines; a very long record is truncated."""
        data = line.encode(errors="backslashreplace").replace(b"\0", b"?") + b"\n"
        longest = min(LINE_BYTES_MAX, self._half)
        if len(data) > longest:
            data = data[: longest - len(_CUT)].decode(errors="ignore").encode() + _CUT
        lines = data.count(b"\n")
        if (
            not self._ring
            and self._head + len(data) <= self._half
            and self._head_lines + lines <= self._most
        ):
            self._put(self._head, data)
            self._head += len(data)
            self._head_lines += lines
        else:
            self._put_in_ring(data)
        self._lines = min(self._lines + lines, COUNT_MAX)
        self._write_header()

    def _put(self, place: int, data: bytes) -> None:
        start = self._start + _HEADER.size + place
        self._memory[start : start + len(data)] = data

    def _put_in_ring(self, data: bytes) -> None:
        place = self._ring % self._half
        room = self._half - place
        self._put(self._half + place, data[:room])
        if len(data) > room:
            self._put(self._half, data[room:])
        self._ring += len(data)

    def _write_header(self) -> None:
        header = _HEADER.pack(self._token, self._head, self._ring, self._lines)
        self._memory[self._start : self._start + _HEADER.size] = header

    def take(self) -> CapturedLog | None:
        """Return the attempt's lines for its report; None if it has logged nothing."""
        return self.read(self._token) if self._lines else None

    def read(self, token: int) -> CapturedLog | None:
        """Return the lines of the attempt with this token; None if the area has no lines of that attempt."""
        start = self._start
        found, head, ring, lines = _HEADER.unpack(self._memory[start : start + _HEADER.size])
        if found != token or not lines or head > self._half:
            return None
        first = start + _HEADER.size
        kept = self._memory[first : first + head].replace(b"\0", b"?").decode(errors="replace")
        last = self._last_lines(ring).replace(b"\0", b"?").decode(errors="replace")
        cut_after = kept.count("\n")
        dropped = lines - cut_after - last.count("\n")
        return CapturedLog(kept + last, min(max(0, dropped), COUNT_MAX), cut_after)

    def _last_lines(self, written: int) -> bytes:
        """Return the complete lines that the ring still has, oldest first."""
        first, half = self._start + _HEADER.size + self._half, self._half
        ring = self._memory[first : first + half]
        data = ring[:written]
        if written > half:
            place = written % half
            data = (ring[place:] + ring[:place]).partition(b"\n")[2]
        lines = data.split(b"\n")
        return b"\n".join(lines[-self._most - 1 :]) if len(lines) > self._most + 1 else data
