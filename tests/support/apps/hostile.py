"""Harmful functions that a task calls in its own process, by name: they affect its descriptors, signals,
limits and event loop. Functions that do not end the process return, so that other tasks follow in the
same child. ``KINDS`` are for any child, ``LOOP_KINDS`` for coroutines in a child that runs several of
them.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from horsies.worker import protocol
from horsies.worker.protocol import FrameKind

# Code that closes all descriptors usually stops at this number.
LAST_DESCRIPTOR = 1100
# The lifetime of a process that a task leaves behind.
LEFTOVER_SECONDS = 60
KEPT: list[object] = []

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME = 1, 4, 15
_CATCHABLE = signal.valid_signals() - {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
}


def descriptors() -> Iterator[int]:
    """Return the open descriptors behind the standard streams."""
    for fd in range(3, LAST_DESCRIPTOR):
        with suppress(OSError):
            os.fstat(fd)
            yield fd


@contextmanager
def without_waiting(fd: int) -> Iterator[None]:
    """Make reads and writes non-blocking inside the block; restore the flags afterwards."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def each(act: Callable[[int], object]) -> None:
    for fd in list(descriptors()):
        with suppress(OSError, ValueError):
            act(fd)


@contextmanager
def as_socket(fd: int) -> Iterator[socket.socket]:
    """Return the same open socket with another descriptor number."""
    with socket.socket(fileno=os.dup(fd)) as connected:
        yield connected


# Descriptors with changed flags and options


def make_blocking() -> None:
    each(lambda fd: os.set_blocking(fd, True))


def make_nonblocking() -> None:
    each(lambda fd: os.set_blocking(fd, False))


def make_streams_nonblocking() -> None:
    """The worker shares the open files of standard output and standard error."""
    for fd in (1, 2):
        with suppress(OSError):
            os.set_blocking(fd, False)


def ask_for_signals() -> None:
    """Make the kernel send SIGIO whenever data arrives."""

    def ask(fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC)

    each(ask)


def shrink_buffers() -> None:
    def shrink(fd: int) -> None:
        with suppress(OSError, AttributeError):
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 4096)
        with as_socket(fd) as connected:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connected.setsockopt(socket.SOL_SOCKET, option, 1)

    each(shrink)


def set_socket_timeouts() -> None:
    """Set a timeout of a millisecond for every send and receive."""

    def limit(fd: int) -> None:
        with as_socket(fd) as connected:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 1_000))

    each(limit)


def lock_files() -> None:
    each(lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))


def move_positions() -> None:
    each(lambda fd: os.lseek(fd, 1 << 20, os.SEEK_SET))


def truncate_files() -> None:
    each(lambda fd: os.ftruncate(fd, 0))


# Sockets that are shut down, closed, copied or replaced


def shut_down(how: int) -> None:
    def shut(fd: int) -> None:
        with as_socket(fd) as connected:
            connected.shutdown(how)

    each(shut)


def shut_reading() -> None:
    shut_down(socket.SHUT_RD)


def shut_writing() -> None:
    shut_down(socket.SHUT_WR)


def shut_sockets() -> None:
    shut_down(socket.SHUT_RDWR)


def close_descriptors() -> None:
    os.closerange(3, LAST_DESCRIPTOR)


def copy_descriptors() -> None:
    each(lambda fd: KEPT.append(os.dup(fd)))


def replace_descriptors() -> None:
    """Replace each descriptor with an open /dev/null."""
    null_fd = os.open(os.devnull, os.O_RDWR)
    each(lambda fd: fd == null_fd or os.dup2(null_fd, fd))


# Unexpected bytes on the connection


def write_bytes(data: bytes) -> None:
    def write(fd: int) -> None:
        with without_waiting(fd):
            os.write(fd, data)

    each(write)


def write_garbage() -> None:
    write_bytes(b"\xff" * 64)


def write_zeros() -> None:
    write_bytes(bytes(4096))


def write_half_header() -> None:
    write_bytes(bytes(3))


def write_half_frame() -> None:
    """Write the beginning of a report whose header announces a megabyte."""
    write_bytes(struct.pack("!IB", 1 << 20, FrameKind.REPORT) + b"begin")


def write_foreign_frame() -> None:
    """Write a whole READY frame of the protocol, which a child sends only once, before its first task."""
    write_bytes(protocol.encode_numbers(FrameKind.READY, os.getpid(), 1))


def read_bytes(count: int) -> None:
    def read(fd: int) -> None:
        with without_waiting(fd):
            os.read(fd, count)

    each(read)


def read_a_part() -> None:
    read_bytes(5)


def read_a_number() -> None:
    read_bytes(8)


def read_two_numbers() -> None:
    read_bytes(16)


def read_everything() -> None:
    read_bytes(1 << 20)


# Signals and the process


def mask_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def ignore_signals() -> None:
    for number in _CATCHABLE:
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)


def survive_the_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def forbid_inspection() -> None:
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def rename_process() -> None:
    """Set a process name that looks like the end of the name in /proc/PID/stat, followed by a zombie's
    state.
    """
    _libc.prctl(_PR_SET_NAME, b"x) Z 1 1 (", 0, 0, 0)


# Limits of the process


def limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))


def limit_memory_softly() -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, hard))


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def limit_processor_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))


# Threads and processes that outlive their task


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(LEFTOVER_SECONDS,), daemon=True).start()


def leave_process() -> None:
    """Fork as a C library does: without Python's hooks, and with every descriptor left open."""
    _fork_away(lambda: time.sleep(LEFTOVER_SECONDS))


def leave_detached_process() -> None:
    """Leave a process in its own session, started by an intermediate process that ends."""

    def detach() -> None:
        os.setsid()
        if _libc.fork() == 0:
            time.sleep(LEFTOVER_SECONDS)

    _fork_away(detach)


def leave_reader() -> None:
    """Leave a process that reads the data that the worker sends to this process."""

    def take() -> None:
        read_until = time.monotonic() + LEFTOVER_SECONDS
        while time.monotonic() < read_until:
            read_everything()
            time.sleep(0.001)

    _fork_away(take)


def _fork_away(act: Callable[[], None]) -> None:
    if _libc.fork() == 0:
        try:
            act()
        finally:
            os._exit(0)


# The end of the process


def exit_at_once() -> None:
    os._exit(3)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def become_another_program() -> None:
    os.execvp("sleep", ["sleep", str(LEFTOVER_SECONDS)])


def stop_itself() -> None:
    """This task ends only by a time limit or a manual stop."""
    os.kill(os.getpid(), signal.SIGSTOP)


# The event loop of coroutines


async def remove_readers() -> None:
    loop = asyncio.get_running_loop()
    each(loop.remove_reader)


async def remove_readers_later() -> None:
    """Remove the readers after this task, and possibly after all others."""
    loop = asyncio.get_running_loop()
    loop.call_later(0.3, each, loop.remove_reader)


async def remove_writers() -> None:
    each(asyncio.get_running_loop().remove_writer)


async def cancel_all_tasks() -> None:
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()


async def stop_loop() -> None:
    asyncio.get_running_loop().stop()


KINDS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        make_blocking,
        make_nonblocking,
        make_streams_nonblocking,
        ask_for_signals,
        shrink_buffers,
        set_socket_timeouts,
        lock_files,
        move_positions,
        truncate_files,
        shut_reading,
        shut_writing,
        shut_sockets,
        close_descriptors,
        copy_descriptors,
        replace_descriptors,
        write_garbage,
        write_zeros,
        write_half_header,
        write_half_frame,
        write_foreign_frame,
        read_a_part,
        read_a_number,
        read_two_numbers,
        read_everything,
        mask_signals,
        ignore_signals,
        survive_the_parent,
        forbid_inspection,
        rename_process,
        limit_descriptors,
        limit_memory,
        limit_memory_softly,
        limit_files,
        limit_processor_time,
        leave_thread,
        leave_process,
        leave_detached_process,
        leave_reader,
        exit_at_once,
        kill_itself,
        become_another_program,
        stop_itself,
    )
}
LOOP_KINDS = {
    function.__name__: function
    for function in (
        remove_readers,
        remove_readers_later,
        remove_writers,
        cancel_all_tasks,
        stop_loop,
    )
}
