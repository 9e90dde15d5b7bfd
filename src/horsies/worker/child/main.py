"""A child process: it takes one assignment at a time from its socket, runs it and reports.

It stands between the supervisor's socket and user code, and is built to survive user code: the
socket is out of the way, whatever a task changed is put back, and a process forked by a task can
never answer in its place. It opens no database connection of its own and ends when its parent does.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn, Protocol

from horsies.errors import TaskStopped
from horsies.tasks.invoke import stop_coroutine
from horsies.worker import os_process, protocol
from horsies.worker.child.logs import configure_logging, label_handlers, label_records, log_or_not
from horsies.worker.child.process_state import ProcessState
from horsies.worker.protocol import Assignment, ChildBoot, ChildReport, FrameKind

EXIT_CLEAN = 0
EXIT_BOOT_FAILED = 172
EXIT_HOOK_FAILED = 173
EXIT_BROKEN = 174

_RECEIVE_BYTES = 1 << 16
_KIND_ASSIGN = int(FrameKind.ASSIGN)
_KIND_STOP = int(FrameKind.STOP)
_REHEARSALS = 32
_REHEARSED = Assignment("0" * 36, 1, "rehearsal", 1, "[]", "{}", None)

logger = logging.getLogger("horsies.child")


class Program(Protocol):
    """The application as a child sees it."""

    def start_hooks(self) -> Sequence[Callable[[], object]]:
        """What to run once in this process before its first task, in order."""

    def execute(self, assignment: Assignment) -> ChildReport:
        """Run one assignment; everything user code does wrong becomes part of the report."""

    def rehearse(self, assignment: Assignment) -> ChildReport:
        """Do as if it ran an assignment, without user code."""

    def close(self) -> None:
        """Let go of what the application holds; the process is about to leave."""


def main(socket_fd: int) -> NoReturn:
    """Entry of a freshly started interpreter: the first frame on the socket says what to load."""
    with socket.socket(fileno=os.dup(socket_fd)) as connected:
        received = protocol.receive_boot(connected)
    if received is None:
        os._exit(EXIT_CLEAN)
    enter_service()
    run_child(socket_fd, *received)


def enter_service() -> None:
    """Make this process one that runs tasks, or forks those that do: they inherit it."""
    os.environ["HORSIES_CHILD_PROCESS"] = "1"
    os_process.work_in_the_background()


def run_child(
    socket_fd: int, boot: ChildBoot, worker_pid: int, program: Program | None = None
) -> NoReturn:
    """Be a child of `worker_pid` until it closes the socket; never returns.

    `program` is given when the process was forked from one that had loaded the application.
    """
    exit_code = EXIT_BROKEN
    try:
        with suppress(PermissionError):
            os.setsid()
        os_process.die_with_parent(worker_pid)
        connection = Connection(_move_out_of_the_way(socket_fd))
        connection.send(protocol.encode_numbers(FrameKind.HELLO, connection.owner_pid))
        exit_code = _boot_and_serve(connection, boot, program)
    except (BrokenPipeError, ConnectionResetError):
        exit_code = EXIT_CLEAN
    except BaseException:
        logger.exception("The child process broke down outside of a task.")
    finally:
        leave(exit_code)


def load_program(boot: ChildBoot) -> Program:
    """Set up logging and load the application that `boot` names, ready to execute."""
    configure_logging(boot.log_level, boot.log_format)
    with suppress(Exception):
        faulthandler.enable()
    for root in reversed(boot.sys_path_roots):
        if root not in sys.path:
            sys.path.insert(0, root)
    module_name, _, function_name = boot.program.partition(":")
    load: Callable[[ChildBoot], Program] = getattr(
        importlib.import_module(module_name), function_name
    )
    program = load(boot)
    label_handlers()
    return program


def leave(exit_code: int) -> NoReturn:
    """End this process at once, after writing out what is buffered.

    Exit handlers do not run: in a forked child most of them belong to the process it came from.
    """
    with suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(exit_code)


class Connection:
    """The child's end of its socket; only the process that opened it may use it."""

    __slots__ = ("_frames", "_poll", "_waiting", "owner_pid", "socket")

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.owner_pid = os.getpid()
        self._frames = protocol.FrameBuffer()
        self._waiting: list[bytes] = []
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def send(self, frame: bytes) -> None:
        """Write one frame. A process forked by a task ends here instead of answering for it."""
        if os.getpid() != self.owner_pid:
            os._exit(EXIT_CLEAN)
        self.socket.sendall(frame)

    def next_frame(self) -> bytes | None:
        """Wait for the next frame; None when the parent has closed its end."""
        while not self._waiting:
            # A process that sleeps in recv() is also woken when its peer reads what it sent before:
            # a second, useless wake-up per task. One that sleeps in poll() is not.
            self._poll.poll()
            data = self.socket.recv(_RECEIVE_BYTES)
            if not data:
                return None
            self._waiting = self._frames.feed(data)
        return self._waiting.pop(0)

    def stop_was_asked(self) -> bool:
        """Whether the parent's stop order, or its end, is what comes next on the socket."""
        if self._waiting:
            return self._waiting[0][4] == _KIND_STOP
        try:
            header = self.socket.recv(5, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return len(header) < 5 or header[4] == _KIND_STOP


class StopSwitch:
    """Turns SIGTERM into ``TaskStopped`` inside user code, and only there.

    The parent sends a stop frame first. A SIGTERM without one comes from a service manager that
    signals the whole group: the parent got it as well and decides what happens to running tasks.
    """

    __slots__ = ("_came_early", "_connection", "_is_armed", "has_stopped")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_armed = False
        self._came_early = False
        self.has_stopped = False

    def handle(self, _signal_number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if not self._is_armed:
            self._came_early = True
        elif self._connection.stop_was_asked():
            self._is_armed = False
            self.has_stopped = True
            stop_coroutine()
            raise TaskStopped

    def arm(self) -> None:
        """User code follows. A signal that came while the assignment was being read counts now."""
        self._is_armed = True
        if self._came_early:
            self._came_early = False
            self.handle(signal.SIGTERM, None)

    def disarm(self) -> None:
        """User code is over."""
        self._is_armed = False


def _boot_and_serve(connection: Connection, boot: ChildBoot, program: Program | None) -> int:
    switch = StopSwitch(connection)
    process_state = ProcessState(switch.handle)
    _prepare_process(connection)
    try:
        loaded = program or load_program(boot)
    except BaseException as error:
        return _report_boot_failure(connection, error)
    hooks = loaded.start_hooks()
    run_start_hooks(hooks, boot.hook_budget_seconds, connection)
    process_state.adopt()
    if hooks or program is None:
        gc.collect()
        gc.freeze()
    _rehearse(loaded, switch, process_state)
    rss_bytes = os_process.own_rss_bytes() if boot.samples_memory else 0
    connection.send(protocol.encode_numbers(FrameKind.READY, connection.owner_pid, rss_bytes))
    _serve(connection, loaded.execute, switch, process_state, boot.samples_memory)
    loaded.close()
    return EXIT_CLEAN


def _rehearse(program: Program, switch: StopSwitch, process_state: ProcessState) -> None:
    """Do everything a task needs before anybody waits for one.

    A forked process copies each page of memory the first time it writes there, and Python writes to all it
    uses: the first task took 0.8 ms, after a rehearsal it takes 0.2, and those that follow 0.1.
    """
    assignment = protocol.decode_assignment(protocol.encode_assignment(_REHEARSED))
    report = _run(program.rehearse, assignment, switch)
    if report is not None:
        protocol.encode_report(report)
    process_state.restore()


def rehearse_life(program: Program) -> None:
    """Live the life of a child on a socket of our own, without user code: for the process that forks them.

    What Python and the linker find out when code first runs, every child knows from then on; that
    saves each of them 0.4 ms.
    """
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(protocol.encode_assignment(_REHEARSED) * _REHEARSALS)
        ours.shutdown(socket.SHUT_WR)
        connection = Connection(_move_out_of_the_way(theirs.detach()))
        switch = StopSwitch(connection)
        process_state = ProcessState(switch.handle)
        with connection.socket:
            _serve(connection, program.rehearse, switch, process_state, samples_memory=False)


def _prepare_process(connection: Connection) -> None:
    ForkGuard(connection).install()
    if not os_process.IS_LINUX:
        watcher = threading.Thread(target=watch_parent, args=(connection.socket,), daemon=True)
        watcher.start()


class ForkGuard:
    """Makes an ordinary process of whatever a task forks: it loses the socket, and SIGTERM ends it.

    The signal is held back during the fork, or one sent right after it would meet our handler.
    """

    __slots__ = ("_connection", "_signal_mask")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._signal_mask: set[signal.Signals | int] = set()

    def install(self) -> None:
        """Watch every fork of this process from now on."""
        os.register_at_fork(
            before=self._hold_signal,
            after_in_parent=self._release_signal,
            after_in_child=self._disown,
        )

    def _hold_signal(self) -> None:
        self._signal_mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def _release_signal(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signal_mask)

    def _disown(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with suppress(OSError):
            self._connection.socket.close()
        self._release_signal()


def watch_parent(connected: socket.socket) -> None:
    """Kill this process group when the other end of the socket goes away, whatever user code does.

    The portable form of dying with the parent.
    """
    poll = select.poll()
    poll.register(connected, 0)
    while not poll.poll():
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _report_boot_failure(connection: Connection, error: BaseException) -> int:
    log_or_not(
        logger, logging.ERROR, "The child process could not load the application.", error=error
    )
    text = f"{type(error).__name__}: {error}"
    connection.send(protocol.encode_texts(FrameKind.BOOT_FAILED, text))
    return EXIT_BOOT_FAILED


def run_start_hooks(
    hooks: Sequence[Callable[[], object]], budget_seconds: float, connection: Connection
) -> None:
    """Run the application's start hooks in order; one that raises or overruns ends this process."""
    for hook in hooks:
        name = getattr(hook, "__qualname__", repr(hook))
        late = f"ran longer than {budget_seconds:g} s"
        timer = threading.Timer(budget_seconds, _fail_hook, (connection, name, late))
        timer.daemon = True
        timer.start()
        try:
            hook()
        except BaseException as error:
            log_or_not(logger, logging.DEBUG, "The hook's traceback:", error=error)
            _fail_hook(connection, name, f"raised {type(error).__name__}: {error}")
        finally:
            timer.cancel()
        timer.join()


def _fail_hook(connection: Connection, name: str, what: str) -> NoReturn:
    message = "Child process start hook %s %s; the worker stops."
    log_or_not(logger, logging.CRITICAL, message, name, what)
    with suppress(OSError):
        connection.send(protocol.encode_texts(FrameKind.HOOK_FAILED, name, what))
    leave(EXIT_HOOK_FAILED)


def _serve(
    connection: Connection,
    execute: Callable[[Assignment], ChildReport],
    switch: StopSwitch,
    process_state: ProcessState,
    samples_memory: bool,
) -> None:
    while True:
        frame = connection.next_frame()
        if frame is None or frame[4] != _KIND_ASSIGN:
            return
        assignment = protocol.decode_assignment(frame)
        started = time.perf_counter_ns()
        report = _run(execute, assignment, switch)
        if report is None:
            connection.send(protocol.encode_numbers(FrameKind.STOPPED, assignment.generation))
            return
        rss_bytes = os_process.own_rss_bytes() if samples_memory else 0
        run_microseconds = (time.perf_counter_ns() - started) // 1_000
        connection.send(protocol.encode_report(report, rss_bytes, run_microseconds))
        process_state.restore()


def _run(
    execute: Callable[[Assignment], ChildReport], assignment: Assignment, switch: StopSwitch
) -> ChildReport | None:
    """The report of one assignment, or None when it was stopped from outside."""
    label_records(assignment)
    try:
        switch.arm()
        report = execute(assignment)
        switch.disarm()
    except TaskStopped:
        return None
    finally:
        switch.disarm()
        label_records(None)
    # The exception may have come out as another: in a group, or as the cause of one raised from it.
    return None if switch.has_stopped and not report.ok else report


def _move_out_of_the_way(socket_fd: int) -> socket.socket:
    """Give the socket a high number, so that code which closes or reuses low ones misses it."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = 1000 if soft_limit == resource.RLIM_INFINITY else max(3, min(soft_limit, 1024) - 24)
    high_fd = fcntl.fcntl(socket_fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(socket_fd)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, high_fd)
    connected.setblocking(True)
    return connected
