"""The warm fork server: a process that has imported the application once and forks children from
it.

It stands between the supervisor and the children. The supervisor puts one socket per wanted child
into a queue; forked processes wait there, and whoever takes a socket becomes the child on it. They
are handed over to the worker by a double fork: the worker is their parent, hears at once how they
end, and loses nobody when the template dies. It holds no network connections and no threads.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple, NoReturn

from horsies.worker import process, wire
from horsies.worker.child import (
    EXIT_BOOT_FAILED,
    EXIT_BROKEN,
    EXIT_CLEAN,
    Program,
    enter_service,
    leave,
    load_program,
    rehearse_life,
    run_child,
)
from horsies.worker.wire import ChildBoot, FrameKind

logger = logging.getLogger("horsies.template")

_HANDOVER_SECONDS = 0.0005


class Line(NamedTuple):
    """One end of what connects the worker with its template: frames for it, and sockets for children."""

    control: socket.socket
    queue: socket.socket

    def filenos(self) -> tuple[int, int]:
        """The descriptors of both sockets."""
        return self.control.fileno(), self.queue.fileno()

    def close(self) -> None:
        """Close both sockets."""
        self.control.close()
        self.queue.close()


def make_line() -> tuple[Line, Line]:
    """The worker's end and the template's."""
    control = socket.socketpair()
    # In packets: a stream would wake all that wait there for each socket.
    queue = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Line(control[0], queue[0]), Line(control[1], queue[1])


def main(control_fd: int, queue_fd: int) -> NoReturn:
    """Entry of a freshly started interpreter: the first frame says what to load."""
    line = Line(socket.socket(fileno=control_fd), socket.socket(fileno=queue_fd))
    received = wire.receive_boot(line.control)
    if received is None:
        os._exit(EXIT_CLEAN)
    run_template(line, *received)


def run_forked_template(line: Line, boot: ChildBoot, worker_pid: int) -> NoReturn:
    """Entry after a plain fork of the worker, which has the application loaded already."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _blank_inherited_descriptors(line.filenos())
    run_template(line, boot, worker_pid)


def run_template(line: Line, boot: ChildBoot, worker_pid: int) -> NoReturn:
    """Load the application, then fork a child for every socket in the queue; never returns."""
    exit_code = EXIT_BROKEN
    try:
        enter_service()
        with suppress(PermissionError):
            os.setsid()
        process.die_with_parent(worker_pid)
        _ignore_signals()
        exit_code = _load_and_serve(line, boot, worker_pid)
    except BaseException:
        logger.exception("The fork server broke down.")
    finally:
        leave(exit_code)


def _ignore_signals() -> None:
    """A service manager may signal every process of the worker: the template ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _load_and_serve(line: Line, boot: ChildBoot, worker_pid: int) -> int:
    try:
        program = load_program(boot)
    except BaseException as error:
        logger.error("The fork server could not load the application.", exc_info=error)
        text = f"{type(error).__name__}: {error}"
        line.control.sendall(wire.encode_texts(FrameKind.BOOT_FAILED, text))
        return EXIT_BOOT_FAILED
    _warn_about_unforkable_state(line.filenos())
    rehearse_life(program)
    _ignore_signals()
    gc.collect()
    gc.freeze()
    ready = wire.encode_numbers(FrameKind.READY, os.getpid(), process.own_rss_bytes())
    line.control.sendall(ready)
    Reserve(line, boot, worker_pid, program).serve()
    return EXIT_CLEAN


class Reserve:
    """Forked processes that wait in the queue for the socket which makes a child of one of them.

    To become the worker's, a child needs a process in between that forks it and ends, which costs
    as much as the child itself. One such process therefore forks several.
    """

    def __init__(self, line: Line, boot: ChildBoot, worker_pid: int, program: Program) -> None:
        self._control, self._queue = line
        self._boot = boot
        self._worker_pid = worker_pid
        self._program = program

    def serve(self) -> None:
        """Fork whenever nobody waits any more, until the worker closes its end of the queue."""
        poll = select.poll()
        poll.register(self._queue, select.POLLIN)
        goes_ahead = False
        while not any(mask & select.POLLHUP for _, mask in poll.poll(0 if goes_ahead else None)):
            try:
                self._fork_some()
                goes_ahead = self._boot.forks_ahead > 1
            except OSError:
                logger.exception("No child could be forked.")
                self._refuse_one()
                goes_ahead = False

    def _fork_some(self) -> None:
        """Fork processes into the queue, and come back when each of them has taken a socket."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                between_pid = os.fork()
                if between_pid == 0:
                    ours.close()
                    self._fork_in_between(theirs)
            _, status = os.waitpid(between_pid, 0)
            if status != 0:
                raise OSError(f"the process in between ended with status {status}")
            ours.recv(1)

    def _refuse_one(self) -> None:
        """Take a socket out of the queue, if there is one: the supervisor sees its end and waits a while."""
        with suppress(BlockingIOError):
            if (child_fd := _next_socket(self._queue, socket.MSG_DONTWAIT)) is not None:
                os.close(child_fd)

    def _fork_in_between(self, mark: socket.socket) -> NoReturn:
        exit_code = EXIT_BROKEN
        try:
            self._control.close()
            between_pid = os.getpid()
            for _ in range(max(1, self._boot.forks_ahead)):
                if os.fork() == 0:
                    self._wait_in_queue(mark, between_pid)
                exit_code = EXIT_CLEAN
        finally:
            os._exit(exit_code)

    def _wait_in_queue(self, mark: socket.socket, between_pid: int) -> NoReturn:
        child_fd = _next_socket(self._queue)
        mark.close()
        self._queue.close()
        if child_fd is None:
            os._exit(EXIT_CLEAN)
        # Only in the rush of a start: later the process in between ended long ago.
        while os.getppid() == between_pid:
            time.sleep(_HANDOVER_SECONDS)
        run_child(child_fd, self._boot, self._worker_pid, self._program)


def _next_socket(queue: socket.socket, flags: int = 0) -> int | None:
    """Wait for the socket of a wanted child; None when the worker has closed its end."""
    _, descriptors, _, _ = socket.recv_fds(queue, 1, 1, flags)
    return descriptors[0] if descriptors else None


def _warn_about_unforkable_state(own_fds: Collection[int]) -> None:
    threads = [thread.name for thread in threading.enumerate()]
    if len(threads) > 1:
        logger.warning(
            "Importing the app started threads (%s); they do not exist in child processes. "
            "Start them in an on_child_process_start hook, or use --start-method spawn.",
            ", ".join(threads[1:]),
        )
    if _count_open_sockets(own_fds) > 0:
        logger.warning(
            "Importing the app opened network connections, which child processes would share. "
            "Open them in an on_child_process_start hook, or use --start-method spawn."
        )


def _count_open_sockets(own_fds: Collection[int]) -> int:
    count = 0
    for fd in _open_descriptors():
        with suppress(OSError):
            is_socket = os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
            count += is_socket and fd > 2 and fd not in own_fds
    return count


def _blank_inherited_descriptors(kept_fds: Collection[int]) -> None:
    """Point every inherited descriptor at /dev/null.

    Closing them would free their numbers while objects of the worker, copied by the fork, still
    mean to close them one day.
    """
    null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _open_descriptors():
        if fd in (1, 2, *kept_fds, null_fd):
            continue
        with suppress(OSError):
            os.dup2(null_fd, fd, inheritable=False)
    os.dup2(null_fd, 0)
    os.close(null_fd)


def _open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]
