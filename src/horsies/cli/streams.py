"""The standard streams of a command: missing streams, closed terminals, and pipes without a reader."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def usable_streams() -> Iterator[None]:
    """Let a command write to its streams, even if their reader is gone."""
    _open_missing_streams()
    for name in ("stdout", "stderr"):
        setattr(sys, name, _outliving_its_reader(getattr(sys, name)))
    if isinstance(sys.stdout, io.TextIOWrapper):  # Stored text may not fit the encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        _leave_closed_terminal()


def has_reader() -> bool:
    """Return whether standard output still has a reader, judged by the last write."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not (isinstance(raw, PipeOutput) and raw.reader_left)


class PipeOutput(io.FileIO):
    """A pipe to a program that may end early, such as ``head``.

    The command then continues without output: a bulk change completes, and the exit code reports its
    outcome, not the closed pipe.
    """

    reader_left = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.reader_left = True
            _discard(self.fileno())
            return memoryview(data).nbytes


def _outliving_its_reader(stream: Any) -> Any:
    """Wrap a pipe so that it drops its output once its reader is gone; return other streams unchanged."""
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return stream
    if not is_pipe or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(PipeOutput(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _open_missing_streams() -> None:
    """Open /dev/null in place of standard streams that the caller has closed. Otherwise a socket could
    get descriptor 2, and a task that writes to standard error would write to the socket.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null_fd = os.open(os.devnull, os.O_RDWR)
            if null_fd != number:
                os.dup2(null_fd, number)
                os.close(null_fd)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _leave_closed_terminal() -> None:
    """Replace output streams to a closed terminal with /dev/null.

    Otherwise Python's last flush fails and the exit code is 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            number = stream.fileno()
            if error.errno == errno.EIO and stat.S_ISCHR(os.fstat(number).st_mode):
                _discard(number)


def _discard(number: int) -> None:
    """Point a descriptor to /dev/null."""
    null_fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_fd, number)
    os.close(null_fd)
