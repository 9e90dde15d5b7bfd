"""How the supervisor gets a new child process: from the fork server, or as a fresh interpreter.

It stands beside the pool, on the parent's side. Both ways take the child's end of a socket; from
then on the pool sees only that socket and the process behind it.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from enum import StrEnum
from typing import Protocol

from horsies.worker import os_process, protocol
from horsies.worker.child.fork_server import run_forked_fork_server
from horsies.worker.protocol import ChildBoot, FrameKind, ProtocolError

logger = logging.getLogger("horsies.pool")

_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0


class StartMethod(StrEnum):
    """Where children come from; ``fork`` and ``forkserver`` need Linux."""

    FORK = "fork"
    FORKSERVER = "forkserver"
    SPAWN = "spawn"


def default_start_method() -> StartMethod:
    """The fork server where children can be handed over to the worker, else fresh interpreters."""
    return StartMethod.FORKSERVER if os_process.IS_LINUX else StartMethod.SPAWN


class RestartDelay:
    """No wait after a first early death, then 0.1 s doubling to 5 s until something lives."""

    __slots__ = ("_deaths", "not_before")

    def __init__(self) -> None:
        self._deaths = 0
        self.not_before = 0.0

    def note_early_death(self) -> None:
        """Something died while starting or right after."""
        self._deaths += 1
        if self._deaths > 1:
            delay = _FIRST_DELAY_SECONDS * 2 ** min(self._deaths - 2, 10)
            self.not_before = time.monotonic() + min(delay, _LONGEST_DELAY_SECONDS)

    def reset(self) -> None:
        """Something lived."""
        self._deaths = 0
        self.not_before = 0.0


class Launcher(Protocol):
    """One way of starting children."""

    failure: str | None

    def start(self) -> None:
        """Get ready to launch."""

    def launch(self, own_end: socket.socket, child_end: socket.socket) -> int | None:
        """Start a child on `child_end`; its pid where it is known at once.

        Raises ``OSError`` when no child can be started now.
        """

    def attend(self) -> None:
        """Something the launcher registered with the selector is ready."""

    def kill(self) -> None:
        """End what stands behind the launcher, because it does not answer."""

    def close(self) -> None:
        """Let go of everything and wait until it is gone."""


def make_launcher(
    method: StartMethod, boot: ChildBoot, selector: selectors.BaseSelector
) -> Launcher:
    """The launcher for `method`."""
    if method is StartMethod.SPAWN:
        return SpawnLauncher(boot)
    if not os_process.IS_LINUX:
        raise ValueError(f"start method {method.value!r} needs Linux; use 'spawn'")
    return ForkServerLauncher(boot, selector, forks_worker=method is StartMethod.FORK)


class SpawnLauncher:
    """Every child is a fresh interpreter that imports the application itself."""

    def __init__(self, boot: ChildBoot) -> None:
        self.failure: str | None = None
        self._boot = boot

    def start(self) -> None:
        """Nothing to prepare."""

    def launch(self, own_end: socket.socket, child_end: socket.socket) -> int | None:
        """Start an interpreter; what to load waits for it on its socket."""
        own_end.sendall(protocol.encode_boot(self._boot, os.getpid()))
        return os_process.start_interpreter("horsies.worker.child.main", child_end.fileno())

    def attend(self) -> None:
        """Nothing is registered."""

    def kill(self) -> None:
        """Nothing stands behind this launcher."""

    def close(self) -> None:
        """Nothing to let go of."""


class ForkServerLauncher:
    """Children are forked by a template process, which is started again when it dies."""

    def __init__(
        self, boot: ChildBoot, selector: selectors.BaseSelector, *, forks_worker: bool
    ) -> None:
        self.failure: str | None = None
        self.pid: int | None = None
        self._boot = boot
        self._selector = selector
        self._forks_worker = forks_worker
        self._control: socket.socket | None = None
        self._exit_fd: int | None = None
        self._frames = protocol.FrameBuffer()
        self._delay = RestartDelay()

    def start(self) -> None:
        """Start the template. It imports the application while requests already queue up."""
        os_process.adopt_orphans()
        control, server_end = socket.socketpair()
        with server_end:
            try:
                self.pid = self._start_process(control, server_end)
            except OSError:
                control.close()
                raise
        self._watch(control, self.pid)

    def launch(self, own_end: socket.socket, child_end: socket.socket) -> int | None:
        """Ask the template for a child; its pid arrives with its first frame."""
        if self._control is None:
            if self.pid is not None or time.monotonic() < self._delay.not_before:
                raise BlockingIOError("the fork server is waiting to be started again")
            self.start()
        assert self._control is not None
        socket.send_fds(self._control, [b"F"], [child_end.fileno()])
        return None

    def attend(self) -> None:
        """Read what the template says, and notice its end."""
        if self._control is not None:
            self._read(self._control)
        if self.pid is not None and (exit_code := os_process.reap(self.pid)) is not None:
            self._forget()
            self._delay.note_early_death()
            ended = os_process.describe_exit(exit_code)
            logger.error("The fork server ended (%s); it is started again.", ended)
            self._start_again()

    def _start_again(self) -> None:
        if time.monotonic() < self._delay.not_before:
            return
        try:
            self.start()
        except OSError as error:
            # The next child that is wanted tries it once more.
            logger.error("The fork server could not be started: %s", error)
            self._delay.note_early_death()

    def kill(self) -> None:
        """End the template; its end is noticed by ``attend``."""
        if self.pid is not None:
            os_process.kill_group(self.pid)

    def close(self) -> None:
        """End the template and what importing the application started; wait for them."""
        pid = self.pid
        self.kill()
        self._forget()
        if pid is not None:
            os_process.wait_for_exit(pid)
            os_process.end_session(pid)

    def _start_process(self, control: socket.socket, server_end: socket.socket) -> int:
        if self._forks_worker:
            # Only the first template may come from the worker: later the worker holds sockets.
            self._forks_worker = False
            return self._fork_fork_server(control, server_end)
        control.sendall(protocol.encode_boot(self._boot, os.getpid()))
        return os_process.start_interpreter("horsies.worker.child.fork_server", server_end.fileno())

    def _fork_fork_server(self, control: socket.socket, server_end: socket.socket) -> int:
        worker_pid = os.getpid()
        pid = os_process.fork()
        if pid == 0:
            try:
                control.close()
                run_forked_fork_server(server_end, self._boot, worker_pid)
            finally:
                os._exit(1)
        return pid

    def _watch(self, control: socket.socket, pid: int) -> None:
        control.setblocking(False)
        self._control = control
        self._frames = protocol.FrameBuffer()
        self._selector.register(control, selectors.EVENT_READ, self)
        self._exit_fd = os_process.open_process(pid)
        if self._exit_fd is not None:
            self._selector.register(self._exit_fd, selectors.EVENT_READ, self)

    def _read(self, control: socket.socket) -> None:
        try:
            data = control.recv(1 << 16)
            for frame in self._frames.feed(data):
                self._hear(frame)
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            self.kill()
            return
        if not data:
            # Ready for ever once closed: from here on only the process itself is of interest.
            self._selector.unregister(control)
            control.close()
            self._control = None
            self.kill()

    def _hear(self, frame: bytes) -> None:
        if frame[4] == FrameKind.READY:
            self.failure = None
            self._delay.reset()
        elif frame[4] == FrameKind.BOOT_FAILED:
            self.failure = protocol.decode_texts(frame, 1)[0]

    def _forget(self) -> None:
        if self._control is not None:
            self._selector.unregister(self._control)
            self._control.close()
        if self._exit_fd is not None:
            self._selector.unregister(self._exit_fd)
            os.close(self._exit_fd)
        self._control = self._exit_fd = self.pid = None
