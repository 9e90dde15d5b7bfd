"""The fork server: a process that has imported the application once and forks children from it.

The worker sends it one socket per child. By a double fork, the worker becomes the parent of each child. So
the worker notices immediately when a child ends, and the children survive the death of the fork server. The
fork server holds no sockets, no threads and no database connections.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import NoReturn

from horsies.worker import os_process, protocol
from horsies.worker.child.main import (
    EXIT_BOOT_FAILED,
    EXIT_BROKEN,
    EXIT_CLEAN,
    Program,
    exit_child,
    load_program,
    mark_as_child,
    run_child,
    warm_up_fork_server,
)
from horsies.worker.protocol import ChildBoot, FrameKind

logger = logging.getLogger("horsies.fork_server")

# The prefixes by which /proc names descriptors that lead outside the process, and kernel objects such as
# selectors and timers.
_NOT_TO_BE_SHARED = ("socket:", "pipe:", "anon_inode:")


def main(control_fd: int) -> NoReturn:
    """Entry point of a freshly started interpreter: the first frame names the application."""
    control = socket.socket(fileno=control_fd)
    received = protocol.receive_boot(control)
    if received is None:
        os._exit(EXIT_CLEAN)
    run_fork_server(control, *received)


def run_forked_fork_server(control: socket.socket, boot: ChildBoot, worker_pid: int) -> NoReturn:
    """Entry point after a plain fork of the worker, which has already loaded the application."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _blank_inherited_descriptors(control.fileno())
    run_fork_server(control, boot, worker_pid)


def run_fork_server(control: socket.socket, boot: ChildBoot, worker_pid: int) -> NoReturn:
    """Load the application, then fork a child for every socket received; never returns."""
    exit_code = EXIT_BROKEN
    try:
        mark_as_child(boot)
        with suppress(PermissionError):
            os.setsid()
        os_process.die_with_parent(worker_pid)
        _ignore_signals()
        exit_code = _load_and_serve(control, boot, worker_pid)
    except BaseException:
        logger.exception("The fork server failed.")
    finally:
        exit_child(exit_code)


def _ignore_signals() -> None:
    """A service manager may signal all of the worker's processes. The fork server ignores this signal,
    because it exits together with its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _load_and_serve(control: socket.socket, boot: ChildBoot, worker_pid: int) -> int:
    try:
        program = load_program(boot)
    except BaseException as error:
        logger.error("The fork server could not load the application.", exc_info=error)
        problem = f"{type(error).__name__}: {error}"
        control.sendall(protocol.encode_texts(FrameKind.BOOT_FAILED, problem))
        return EXIT_BOOT_FAILED
    _warn_about_unforkable_state(control)
    # The import may have changed the process's user, which clears the parent death signal; this call sets the
    # signal again.
    warm_up_fork_server(program, worker_pid)
    _ignore_signals()
    gc.collect()
    gc.freeze()
    control.sendall(
        protocol.encode_numbers(FrameKind.READY, os.getpid(), os_process.own_rss_bytes())
    )
    reserve = Reserve(control, boot, worker_pid, program)
    while (child_fd := _next_request(control)) is not None:
        reserve.hand_out(child_fd)
    return EXIT_CLEAN


def _next_request(control: socket.socket) -> int | None:
    """Return the next child's socket, or None if the worker has closed its end."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return descriptors[0] if descriptors else None


class Reserve:
    """Forked processes, each of which becomes a child when it receives a socket.

    A process becomes the worker's child when an intermediate process forks it and exits. The intermediate
    process costs as much as the child itself. So once the worker replaces children, each intermediate
    process forks several at once.
    """

    def __init__(
        self, control: socket.socket, boot: ChildBoot, worker_pid: int, program: Program
    ) -> None:
        self._control = control
        self._boot = boot
        self._worker_pid = worker_pid
        self._program = program
        # The initial children are forked one by one, so a worker that never replaces a child has no
        # waiting processes.
        self._singly = boot.forks_singly
        self._waiting: list[socket.socket] = []

    def hand_out(self, child_fd: int) -> None:
        """Make a child on `child_fd`: use a waiting process, or fork it together with others."""
        try:
            if not self._give_to_waiting(child_fd):
                self._fork_some(child_fd)
                self._give_to_waiting(child_fd)
        finally:
            # If no child was forked, this closes the last copy of the socket, and the pool requests a child
            # again after a delay. An immediate retry would add load to a system that is already full.
            os.close(child_fd)

    def _give_to_waiting(self, child_fd: int) -> bool:
        while self._waiting:
            with self._waiting.pop() as waiting, suppress(OSError):
                socket.send_fds(waiting, [b"F"], [child_fd])
                return True
        return False

    def _fork_some(self, foreign_fd: int) -> None:
        """Fork processes that wait for a socket, or fewer if the system refuses to fork."""
        count = self._boot.forks_ahead if self._singly <= 0 else 1
        self._singly -= count
        pairs: list[tuple[socket.socket, socket.socket]] = []
        try:
            for _ in range(count):
                pairs.append(socket.socketpair())
            intermediate_pid = os_process.fork()
        except OSError as error:
            _log_refusal(error)
            for one in itertools.chain(*pairs):
                one.close()
            return
        if intermediate_pid == 0:
            self._fork_children(pairs, foreign_fd)
        os.waitpid(intermediate_pid, 0)
        for own_end, their_end in pairs:
            their_end.close()
            self._waiting.append(own_end)

    def _fork_children(
        self, pairs: list[tuple[socket.socket, socket.socket]], foreign_fd: int
    ) -> NoReturn:
        """Run the intermediate process: fork the children and exit, which makes the worker their parent."""
        try:
            self._control.close()
            os.close(foreign_fd)
            for _, their_end in pairs:
                try:
                    child_pid = os.fork()
                except OSError as error:
                    _log_refusal(error)
                    break
                if child_pid == 0:
                    self._wait_for_socket(their_end, pairs)
        finally:
            os._exit(EXIT_CLEAN)

    def _wait_for_socket(
        self, own_end: socket.socket, pairs: list[tuple[socket.socket, socket.socket]]
    ) -> NoReturn:
        for other in (one for pair in pairs for one in pair if one is not own_end):
            other.close()
        # When the socket arrives, the intermediate process has exited, and the worker is this process's
        # parent.
        child_fd = _next_request(own_end)
        own_end.close()
        if child_fd is None:
            os._exit(EXIT_CLEAN)
        run_child(child_fd, self._boot, self._worker_pid, self._program)


def _log_refusal(error: OSError) -> None:
    logger.error(
        "The fork server could not fork a child process (%s); raise the limits on processes and open "
        "files if this continues.",
        error,
    )


def _warn_about_unforkable_state(control: socket.socket) -> None:
    threads = [thread.name for thread in threading.enumerate()]
    if len(threads) > 1:
        logger.warning(
            "Importing the app started threads (%s); they do not exist in child processes. "
            "Start them in an on_child_process_start hook, or use --start-method spawn.",
            ", ".join(threads[1:]),
        )
    own_fds = (0, 1, 2, control.fileno())
    if any(fd not in own_fds and _kind_of(fd).startswith("socket:") for fd in _open_descriptors()):
        logger.warning(
            "Importing the app opened network connections, which child processes would share. "
            "Open them in an on_child_process_start hook, or use --start-method spawn."
        )


def _kind_of(fd: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def _blank_inherited_descriptors(kept_fd: int) -> None:
    """Redirect inherited sockets, pipes and similar descriptors to /dev/null; files and devices stay open.

    If the descriptors were closed, their numbers could be reused, and copies of the worker's objects might
    later close descriptors of other owners.
    """
    null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _open_descriptors():
        if fd not in (1, 2, kept_fd, null_fd) and _kind_of(fd).startswith(_NOT_TO_BE_SHARED):
            with suppress(OSError):  # the descriptor's number may exceed a lowered limit
                os.dup2(null_fd, fd, inheritable=False)
    os.dup2(null_fd, 0)
    os.close(null_fd)


def _open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]
