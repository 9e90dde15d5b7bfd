"""The warm fork server: a process that has imported the application once and forks children from
it.

It stands between the supervisor, which sends it one socket per wanted child, and the children,
which are handed over to the worker by a double fork: the worker is their parent, hears at once how
they end, and loses nobody when the template dies. It holds no sockets, no threads and no database
connections.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import NoReturn

from horsies.worker import process, wire
from horsies.worker.child import (
    EXIT_BOOT_FAILED,
    EXIT_BROKEN,
    EXIT_CLEAN,
    Program,
    leave,
    load_program,
    run_child,
)
from horsies.worker.childlog import configure_logging
from horsies.worker.wire import ChildBoot, FrameKind

logger = logging.getLogger("horsies.template")


def main(control_fd: int) -> NoReturn:
    """Entry of a freshly started interpreter: the first frame says what to load."""
    control = socket.socket(fileno=control_fd)
    received = wire.receive_boot(control)
    if received is None:
        os._exit(EXIT_CLEAN)
    run_template(control, *received)


def run_forked_template(control: socket.socket, boot: ChildBoot, worker_pid: int) -> NoReturn:
    """Entry after a plain fork of the worker, which has the application loaded already."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _blank_inherited_descriptors(control.fileno())
    run_template(control, boot, worker_pid)


def run_template(control: socket.socket, boot: ChildBoot, worker_pid: int) -> NoReturn:
    """Load the application, then fork a child for every socket received; never returns."""
    exit_code = EXIT_BROKEN
    try:
        os.environ["HORSIES_CHILD_PROCESS"] = "1"
        with suppress(PermissionError):
            os.setsid()
        process.die_with_parent(worker_pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A service manager may signal every process of the worker: the template ends with its
        # parent.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        configure_logging(boot.log_level, boot.log_format)
        exit_code = _load_and_serve(control, boot, worker_pid)
    except BaseException:
        logger.exception("The fork server broke down.")
    finally:
        leave(exit_code)


def _load_and_serve(control: socket.socket, boot: ChildBoot, worker_pid: int) -> int:
    try:
        program = load_program(boot)
    except BaseException as error:
        logger.error("The fork server could not load the application.", exc_info=error)
        text = f"{type(error).__name__}: {error}"
        control.sendall(wire.encode_texts(FrameKind.BOOT_FAILED, text))
        return EXIT_BOOT_FAILED
    _warn_about_unforkable_state(control)
    gc.collect()
    gc.freeze()
    control.sendall(wire.encode_numbers(FrameKind.READY, os.getpid(), process.own_rss_bytes()))
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not request:
            return EXIT_CLEAN
        for child_fd in descriptors:
            _fork_child(control, child_fd, boot, worker_pid, program)


def _fork_child(
    control: socket.socket, child_fd: int, boot: ChildBoot, worker_pid: int, program: Program
) -> None:
    """Fork twice: the process in between ends at once, so that the worker becomes the parent."""
    try:
        between_pid = os.fork()
        if between_pid == 0:
            _fork_again(control, child_fd, boot, worker_pid, program)
        os.waitpid(between_pid, 0)
    except OSError:
        logger.exception("No child could be forked.")
    finally:
        # Without a child this closes the last copy: the supervisor sees the end of the socket.
        os.close(child_fd)


def _fork_again(
    control: socket.socket, child_fd: int, boot: ChildBoot, worker_pid: int, program: Program
) -> NoReturn:
    try:
        if os.fork() == 0:
            control.close()
            process.wait_for_parent(worker_pid)
            run_child(child_fd, boot, worker_pid, program)
    finally:
        os._exit(EXIT_CLEAN)


def _warn_about_unforkable_state(control: socket.socket) -> None:
    threads = [thread.name for thread in threading.enumerate()]
    if len(threads) > 1:
        logger.warning(
            "Importing the app started threads (%s); they do not exist in child processes. "
            "Start them in an on_child_process_start hook, or use --start-method spawn.",
            ", ".join(threads[1:]),
        )
    if _count_open_sockets(control.fileno()) > 0:
        logger.warning(
            "Importing the app opened network connections, which child processes would share. "
            "Open them in an on_child_process_start hook, or use --start-method spawn."
        )


def _count_open_sockets(own_fd: int) -> int:
    count = 0
    for fd in _open_descriptors():
        with suppress(OSError):
            is_socket = os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
            count += is_socket and fd > 2 and fd != own_fd
    return count


def _blank_inherited_descriptors(kept_fd: int) -> None:
    """Point every inherited descriptor at /dev/null.

    Closing them would free their numbers while objects of the worker, copied by the fork, still
    mean to close them one day.
    """
    null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _open_descriptors():
        if fd in (1, 2, kept_fd, null_fd):
            continue
        with suppress(OSError):
            os.dup2(null_fd, fd, inheritable=False)
    os.dup2(null_fd, 0)
    os.close(null_fd)


def _open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]
