"""Launchers, which start new child processes: from the fork server, or as fresh interpreters. A launcher
takes the child's end of a socket; the pool uses the other end and the process behind it.
"""

from __future__ import annotations

import gc
import logging
import os
import selectors
import socket
import time
from enum import StrEnum

from horsies.worker import os_process, protocol
from horsies.worker.child import guard
from horsies.worker.child.fork_server import run_forked_fork_server
from horsies.worker.pool.child_process import RestartDelay
from horsies.worker.protocol import ChildBoot, FrameBuffer, FrameKind, ProtocolError

logger = logging.getLogger("horsies.pool")


class StartMethod(StrEnum):
    """How children are started; ``fork`` and ``forkserver`` need Linux."""

    FORK = "fork"
    FORKSERVER = "forkserver"
    SPAWN = "spawn"


def default_start_method() -> StartMethod:
    return StartMethod.FORKSERVER if os_process.IS_LINUX else StartMethod.SPAWN


class SpawnLauncher:
    """Every child is a fresh interpreter that imports the application itself."""

    def __init__(self, boot: ChildBoot) -> None:
        self.failure: str | None = None
        self.boot = boot

    def launch(self, own_end: socket.socket, child_end: socket.socket) -> int | None:
        """Start a child on `child_end` and return its pid, or raise ``OSError``."""
        own_end.sendall(protocol.encode_boot(self.boot, os.getpid()))
        return os_process.start_interpreter(
            "horsies.worker.child.main",
            child_end.fileno(),
            keeps_input=self.boot.shares_terminal,
        )

    def _do_nothing(self) -> None:
        return None

    start = attend = kill = close = _do_nothing


class ForkServerLauncher:
    """Children are forked by the fork server, which is restarted if it dies.

    `failure` is the reason why the application could not be loaded.
    """

    def __init__(
        self, boot: ChildBoot, selector: selectors.BaseSelector, *, forks_worker: bool
    ) -> None:
        self.failure: str | None = None
        self.pid: int | None = None
        self.boot = boot
        self._selector = selector
        self._forks_worker = forks_worker
        self._control: socket.socket | None = None
        self._exit_fd: int | None = None
        self._frames = FrameBuffer()
        self._delay = RestartDelay()

    def start(self) -> None:
        """Start the fork server. It can already receive requests while it imports the application."""
        os_process.adopt_orphans()
        control, server_end = socket.socketpair()
        with server_end:
            try:
                self.pid = self._start_process(control, server_end)
            except OSError:
                control.close()
                raise
        control.setblocking(False)
        self._control = control
        self._frames = FrameBuffer()
        self._selector.register(control, selectors.EVENT_READ, self)
        self._exit_fd = os_process.open_process(self.pid)
        if self._exit_fd is not None:
            self._selector.register(self._exit_fd, selectors.EVENT_READ, self)

    def _start_process(self, control: socket.socket, server_end: socket.socket) -> int:
        worker_pid = os.getpid()
        if not self._forks_worker:
            control.sendall(protocol.encode_boot(self.boot, worker_pid))
            entry_module = "horsies.worker.child.fork_server"
            return os_process.start_interpreter(entry_module, server_end.fileno())
        # Only the first fork server may be forked from the worker, because the worker opens sockets
        # afterwards.
        self._forks_worker = False
        # The objects are frozen to keep the memory pages shared: otherwise a later garbage collection would
        # copy every page that it visits.
        gc.collect()
        gc.freeze()
        pid = os_process.fork()
        if pid == 0:
            try:
                control.close()
                run_forked_fork_server(server_end, self.boot, worker_pid)
            finally:
                os._exit(1)
        return pid

    def launch(self, own_end: socket.socket, child_end: socket.socket) -> int | None:
        """Request a child from the fork server; the child's pid arrives in its first frame."""
        if self._control is None:
            if self.pid is not None or time.monotonic() < self._delay.not_before:
                raise BlockingIOError("the fork server is about to be restarted")
            self.start()
        assert self._control is not None
        socket.send_fds(self._control, [b"F"], [child_end.fileno()])
        return None

    def attend(self) -> None:
        """Read the fork server's frames, and restart it if it has ended."""
        if self._control is not None:
            self._read(self._control)
        if self.pid is None or (exit_code := os_process.reap(self.pid)) is None:
            return
        self._forget()
        self._delay.note_early_death()
        ended = os_process.describe_exit(exit_code)
        logger.error("The fork server ended (%s); restarting it.", ended)
        if time.monotonic() < self._delay.not_before:
            return
        try:
            self.start()
        except OSError as error:
            # The next launch of a child tries to start the fork server again.
            logger.error("The fork server could not be started: %s", error)
            self._delay.note_early_death()

    def kill(self) -> None:
        if self.pid is not None:
            os_process.kill_group(self.pid)

    def close(self) -> None:
        """Kill the fork server and the processes that importing the application started; wait for them."""
        pid = self.pid
        self.kill()
        self._forget()
        if pid is not None:
            os_process.wait_for_exit(pid)
            os_process.end_session(pid)

    def _read(self, control: socket.socket) -> None:
        try:
            data = control.recv(1 << 16)
            for frame in self._frames.feed(data):
                if frame[4] == FrameKind.READY:
                    self.failure = None
                    self._delay.reset()
                elif frame[4] == FrameKind.BOOT_FAILED:
                    self.failure = protocol.decode_texts(frame, 1)[0]
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self.kill()
            return
        if not data:
            # The selector would report a closed socket forever, so only the end of the process is watched
            # from now on.
            self._selector.unregister(control)
            control.close()
            self._control = None
            self.kill()

    def _forget(self) -> None:
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
        if self._exit_fd is not None:
            self._selector.unregister(self._exit_fd)
            os.close(self._exit_fd)
        self._control = self._exit_fd = self.pid = None


class Guard:
    """The guard, a process that kills tasks' processes if this worker is killed.

    Children must start with the guard's `mark`, which is 0 if no guard can run.
    """

    def __init__(self) -> None:
        self.mark = os_process.new_mark()
        self._pid: int | None = None
        self._delay = RestartDelay()
        if self.mark == 0 and os_process.IS_LINUX:
            logger.warning(
                "RLIMIT_RTTIME is limited or cannot be set: if this worker is killed, programs "
                "started by tasks keep running. Remove the limit (LimitRTTIME= in systemd, rttime in "
                "limits.conf)."
            )

    def attend(self) -> None:
        """Start the guard if it is not running."""
        if self.mark == 0 or time.monotonic() < self._delay.not_before:
            return
        if self._pid is not None:
            exit_code = os_process.reap(self._pid)
            if exit_code is None:
                return
            ended = os_process.describe_exit(exit_code)
            logger.error("The guard process ended (%s); restarting it.", ended)
        self._delay.note_early_death()
        try:
            self._pid = os_process.start_script(guard.__file__, str(os.getpid()), str(self.mark))
        except OSError as error:
            self._pid = None
            logger.warning("Starting the guard process failed (%s); trying again.", error)

    def close(self) -> None:
        """End the guard, because this worker is shutting down cleanly and has no children left."""
        if self._pid is not None:
            os_process.kill_group(self._pid)
            os_process.wait_for_exit(self._pid)
            self._pid = None


Launcher = SpawnLauncher | ForkServerLauncher


def make_launcher(
    method: StartMethod, boot: ChildBoot, selector: selectors.BaseSelector
) -> Launcher:
    if method is StartMethod.SPAWN:
        return SpawnLauncher(boot)
    if not os_process.IS_LINUX:
        raise ValueError(f"start method {method.value!r} needs Linux; use 'spawn'")
    return ForkServerLauncher(boot, selector, forks_worker=method is StartMethod.FORK)
