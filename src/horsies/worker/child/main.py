"""A child process: takes assignments from its socket, runs one at a time and reports its outcome. User code
must not break it: the socket has a high descriptor number, the process-wide state is restored after each
task, and a process that a task forks cannot report in place of the child. A child opens no database
connection unless a task sends other tasks or takes a transaction. It exits together with its parent.
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
from typing import NoReturn, Protocol

from horsies.codec.results import encode_task_error
from horsies.current_task import CurrentTask, current_task, set_running_batch, set_running_task
from horsies.error_codes import OperationalErrorCode
from horsies.errors import TaskStopped
from horsies.logs import set_worker_name
from horsies.task_result import TaskError
from horsies.worker import os_process, protocol
from horsies.worker.child.async_main import serve_coroutines
from horsies.worker.child.log_capture import Capture
from horsies.worker.child.parent_socket import ParentSocket
from horsies.worker.child.process_state import (
    ProcessState,
    StopSwitch,
    configure_logging,
    label_handlers,
    log_safely,
)
from horsies.worker.protocol import Assignment, ChildBoot, ChildReport, FrameKind
from horsies.worker.sharing import Permits, receive_descriptors

EXIT_CLEAN = 0
EXIT_BOOT_FAILED = 172
EXIT_HOOK_FAILED = 173
EXIT_BROKEN = 174

_KIND_ASSIGN = int(FrameKind.ASSIGN)
_KIND_SHARE = int(FrameKind.SHARE)
_KIND_BATCH = int(FrameKind.BATCH)
_LIMITED = "Task %r permanently lowered a limit of its process; the process ends."
_WARM_UPS = 32
_WARM_UP = Assignment("0" * 36, 1, "warm_up", 1, "[]", "{}", None)

logger = logging.getLogger("horsies.child")


class Program(Protocol):
    """The functions of the application that a child calls."""

    def start_hooks(self) -> Sequence[Callable[[], object]]:
        """The functions to run once in this process before its first task, in order."""

    def stop_hooks(self) -> Sequence[Callable[[], object]]:
        """The functions to run once after the last task, in order."""

    def execute(self, assignment: Assignment) -> ChildReport:
        """Run one assignment; every failure of user code becomes part of the report."""

    def execute_batch(self, assignments: Sequence[Assignment]) -> Sequence[ChildReport]:
        """Run assignments of one batched task in one call, and return a report for each assignment, in
        order.
        """

    async def execute_async(self, assignment: Assignment) -> ChildReport:
        """Like ``execute``, but on the running event loop and in the assignment's own context."""

    def warm_up(self, assignment: Assignment) -> ChildReport:
        """Run a no-op task through the normal path."""

    def close(self) -> None:
        """Close the application's connections; the process is about to exit."""


def main(socket_fd: int) -> NoReturn:
    """Entry point of a freshly started interpreter: the first frame on the socket names the application."""
    with socket.socket(fileno=os.dup(socket_fd)) as connected:
        received = protocol.receive_boot(connected)
    if received is None:
        os._exit(EXIT_CLEAN)
    mark_as_child(received[0])
    run_child(socket_fd, *received)


def mark_as_child(boot: ChildBoot) -> None:
    """Mark this process as a child that runs tasks, or as the fork server, whose children
    inherit the marks.
    """
    os.environ["HORSIES_CHILD_PROCESS"] = "1"
    os_process.set_mark(boot.guard_mark)
    os_process.schedule_as_batch()


def run_child(
    socket_fd: int, boot: ChildBoot, worker_pid: int, program: Program | None = None
) -> NoReturn:
    """Serve as a child of `worker_pid` until the worker closes the socket; never returns.

    `program` is the loaded application if the process was forked from the fork server.
    """
    exit_code = EXIT_BROKEN
    try:
        if not boot.shares_terminal:
            with suppress(PermissionError):
                os.setsid()
        os_process.die_with_parent(worker_pid)
        connected = _as_socket(_move_to_high_number(socket_fd))
        page, permits_fd = receive_descriptors(connected)
        parent = ParentSocket(connected, page)
        if permits_fd is not None:
            parent.permits = Permits(_move_to_high_number(permits_fd))
        parent.send(protocol.encode_numbers(FrameKind.HELLO, parent.owner_pid))
        exit_code = _boot_and_serve(parent, boot, worker_pid, program)
    except (BrokenPipeError, ConnectionResetError):
        exit_code = EXIT_CLEAN
    except BaseException:
        logger.exception("The child process failed outside of a task.")
    finally:
        exit_child(exit_code)


def load_program(boot: ChildBoot) -> Program:
    """Set up logging, and return the application that `boot` names, loaded and ready to execute tasks."""
    set_worker_name(boot.worker_name)
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


def exit_child(exit_code: int) -> NoReturn:
    """End this process immediately, after flushing its streams.

    Exit handlers do not run, because most exit handlers of a forked child belong to the process from which it
    was forked.
    """
    with suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(exit_code)


def _boot_and_serve(
    parent: ParentSocket, boot: ChildBoot, worker_pid: int, program: Program | None
) -> int:
    switch = StopSwitch(parent)
    process_state = ProcessState(switch.handle, worker_pid)
    ForkGuard(parent).install()
    if not os_process.IS_LINUX:
        threading.Thread(target=watch_parent, args=(parent.socket,), daemon=True).start()
    try:
        loaded = program or load_program(boot)
    except BaseException as error:
        message = "The child process could not load the application."
        log_safely(logger, logging.ERROR, message, error=error)
        problem = f"{type(error).__name__}: {error}"
        parent.send(protocol.encode_texts(FrameKind.BOOT_FAILED, problem))
        return EXIT_BOOT_FAILED
    hooks = loaded.start_hooks()
    run_start_hooks(hooks, boot.hook_budget_seconds, parent)
    process_state.adopt()
    if hooks or program is None:
        gc.collect()
        gc.freeze()
    _warm_up(loaded, switch, process_state)
    rss_bytes = os_process.own_rss_bytes() if boot.samples_memory else 0
    parent.send(protocol.encode_numbers(FrameKind.READY, parent.owner_pid, rss_bytes))
    capture = Capture.of(boot, parent.page)
    batches = _Batches(loaded, parent, switch, process_state, boot.samples_memory, capture)
    while (
        last := _serve(parent, loaded.execute, switch, process_state, boot.samples_memory, capture)
    ) is not None and last[4] == _KIND_BATCH:
        if not batches.serve(last):
            last = None
            break
    if last is not None and last[4] == _KIND_SHARE:
        serve_coroutines(parent, loaded.execute_async, process_state, boot.samples_memory, capture)
    run_stop_hooks(loaded.stop_hooks(), boot.hook_budget_seconds)
    loaded.close()
    return EXIT_CLEAN


def _warm_up(program: Program, switch: StopSwitch, process_state: ProcessState) -> None:
    """Run a no-op task along the normal path before the child reports that it is ready.

    A forked process copies each page of memory the first time it writes there, and Python writes to every
    page it uses. The first task took 0.8 ms without a warm-up and takes 0.2 ms with it; later tasks take
    0.1 ms.
    """
    assignment = protocol.decode_assignment(protocol.encode_assignment(_WARM_UP))
    report = _run(program.warm_up, assignment, switch)
    if report is not None:
        protocol.encode_report(report)
    process_state.restore()


def warm_up_fork_server(program: Program, worker_pid: int) -> None:
    """Warm up before forking, by serving no-op assignments over a local socket pair.

    Python and the linker resolve names when code first runs. If this happens before the fork, every child
    saves 0.4 ms.
    """
    ours, theirs = socket.socketpair()
    with ours:
        numbers = range(1, 1 + _WARM_UPS)
        ours.sendall(b"".join(protocol.encode_assignment(_WARM_UP, one) for one in numbers))
        ours.shutdown(socket.SHUT_WR)
        parent = ParentSocket(_as_socket(_move_to_high_number(theirs.detach())))
        switch = StopSwitch(parent)
        process_state = ProcessState(switch.handle, worker_pid)
        with parent.socket:
            _serve(parent, program.warm_up, switch, process_state, samples_memory=False)


class ForkGuard:
    """Turns a process that a task forks into an ordinary process: its copy of the socket is closed, and
    SIGTERM ends it.

    SIGTERM is blocked during the fork. Otherwise a signal sent right after the fork would run the handler
    that stops a task.
    """

    __slots__ = ("_parent", "_signal_mask")

    def __init__(self, parent: ParentSocket) -> None:
        self._parent = parent
        self._signal_mask: set[signal.Signals | int] = set()

    def install(self) -> None:
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
        self._parent.close()
        self._release_signal()


def watch_parent(connected: socket.socket) -> None:
    """Kill this process and its process group when the parent's end of the socket closes, even during user
    code. This is the portable replacement for the kernel's parent death signal.
    """
    poll = select.poll()
    poll.register(connected, 0)
    while not poll.poll():
        pass
    own_pid = os.getpid()
    (os.killpg if os.getpgrp() == own_pid else os.kill)(own_pid, signal.SIGKILL)


def run_start_hooks(
    hooks: Sequence[Callable[[], object]], budget_seconds: float, parent: ParentSocket
) -> None:
    """Run the application's start hooks in order; a hook that raises or takes too long ends this process."""
    for hook in hooks:
        name = getattr(hook, "__qualname__", repr(hook))
        late = f"ran longer than {budget_seconds:g} s"
        timer = threading.Timer(budget_seconds, _fail_hook, (parent, name, late))
        timer.daemon = True
        timer.start()
        try:
            hook()
        except BaseException as error:
            log_safely(logger, logging.DEBUG, "The hook's traceback:", error=error)
            _fail_hook(parent, name, f"raised {type(error).__name__}: {error}")
        finally:
            timer.cancel()
        timer.join()


def run_stop_hooks(hooks: Sequence[Callable[[], object]], budget_seconds: float) -> None:
    """Run the application's stop hooks in order; a hook that takes too long ends this process."""
    for hook in hooks:
        name = getattr(hook, "__qualname__", repr(hook))
        timer = threading.Timer(budget_seconds, _leave_hook, (name, budget_seconds))
        timer.daemon = True
        timer.start()
        try:
            hook()
        except BaseException as error:
            message = "Child process stop hook %s raised %s."
            log_safely(logger, logging.ERROR, message, name, type(error).__name__, error=error)
        finally:
            timer.cancel()


def _leave_hook(name: str, budget_seconds: float) -> NoReturn:
    message = "Child process stop hook %s ran longer than %g s; the process ends without it."
    log_safely(logger, logging.ERROR, message, name, budget_seconds)
    exit_child(EXIT_CLEAN)


def _fail_hook(parent: ParentSocket, name: str, problem: str) -> NoReturn:
    message = "Child process start hook %s %s; the worker stops."
    log_safely(logger, logging.CRITICAL, message, name, problem)
    with suppress(OSError):
        parent.send(protocol.encode_texts(FrameKind.HOOK_FAILED, name, problem))
    exit_child(EXIT_HOOK_FAILED)


def _serve(
    parent: ParentSocket,
    execute: Callable[[Assignment], ChildReport],
    switch: StopSwitch,
    process_state: ProcessState,
    samples_memory: bool,
    capture: Capture | None = None,
) -> bytes | None:
    """Run assignments until a frame of another kind arrives, and return that frame; None if this process
    must exit.
    """
    while True:
        frame = parent.next_frame()
        if frame is None or frame[4] != _KIND_ASSIGN:
            return frame
        if not parent.may_begin(frame):
            continue
        assignment = protocol.decode_assignment(frame)
        started = time.perf_counter_ns()
        task = CurrentTask(assignment, time.time(), parent.page)
        if capture is not None:
            capture.begin(task, assignment)
        report = _run(execute, assignment, switch, task)
        log = None if capture is None else capture.end(task)
        if report is None:
            parent.send(protocol.encode_stopped(assignment, log))
            return None
        if log is not None:
            report = report._replace(log=log)
        rss_bytes = os_process.own_rss_bytes() if samples_memory else 0
        run_microseconds = (time.perf_counter_ns() - started) // 1_000
        parent.send(protocol.encode_report(report, rss_bytes, run_microseconds))
        if not process_state.restore():
            log_safely(logger, logging.WARNING, _LIMITED, assignment.task_name)
            return None


class _Batches:
    """Runs batches; one call executes all assignments of a batch."""

    def __init__(
        self,
        program: Program,
        parent: ParentSocket,
        switch: StopSwitch,
        process_state: ProcessState,
        samples_memory: bool,
        capture: Capture | None,
    ) -> None:
        self._program = program
        self._parent = parent
        self._switch = switch
        self._process_state = process_state
        self._samples_memory = samples_memory
        self._capture = capture

    def serve(self, frame: bytes) -> bool:
        """Run the batch that `frame` announces; return False if this process must exit."""
        parent, capture = self._parent, self._capture
        frames = parent.batch_frames(*protocol.decode_numbers(frame))
        if frames is None:
            return False
        assignments = [protocol.decode_assignment(one) for one in frames]
        started, now = time.perf_counter_ns(), time.time()
        tasks = tuple(CurrentTask(one, now, parent.page) for one in assignments)
        if capture is not None:
            capture.begin(tasks[0], assignments[0], tasks[1:])
        reports, first_id = self._run(assignments, tasks)
        log = None if capture is None else capture.end(tasks[0], tasks[1:])
        logs = {first_id: log}
        rss_bytes = os_process.own_rss_bytes() if self._samples_memory else 0
        microseconds = (time.perf_counter_ns() - started) // 1_000
        parent.send_all(
            [
                protocol.encode_stopped(one, logs.get(one.task_id))
                if report is None
                else protocol.encode_report(
                    report._replace(log=logs.get(one.task_id)), rss_bytes, microseconds
                )
                for one, report in zip(assignments, reports, strict=True)
            ]
        )
        if None in reports:
            return False
        if not self._process_state.restore():
            log_safely(logger, logging.WARNING, _LIMITED, assignments[0].task_name)
            return False
        return True

    def _run(
        self, assignments: Sequence[Assignment], tasks: tuple[CurrentTask, ...]
    ) -> tuple[Sequence[ChildReport | None], str]:
        """Return a report for each assignment (None if the parent stopped it), and the id of the first task
        in the call.
        """
        switch = self._switch
        set_running_batch(tasks)
        try:
            switch.arm()
            reports = self._program.execute_batch(assignments)
            switch.disarm()
        except TaskStopped:
            reports = [] if switch.has_stopped else [_own_stop(one) for one in assignments]
        finally:
            switch.disarm()
            first_id = current_task().id
            set_running_batch(())
        if not switch.has_stopped:
            return reports, first_id
        # If the call had returned an outcome before the stop, this outcome counts.
        done = {report.task_id: report for report in reports if report.ok}
        return [done.get(one.task_id) for one in assignments], first_id


def _run(
    execute: Callable[[Assignment], ChildReport],
    assignment: Assignment,
    switch: StopSwitch,
    task: CurrentTask | None = None,
) -> ChildReport | None:
    """Return the report of one assignment, or None if the parent stopped it."""
    set_running_task(task or CurrentTask(assignment, time.time()))
    try:
        switch.arm()
        report = execute(assignment)
        switch.disarm()
    except TaskStopped:
        if switch.has_stopped:
            return None
        report = _own_stop(assignment)
    finally:
        switch.disarm()
        set_running_task(None)
    # User code may have turned TaskStopped into another exception, such as an exception group or a chained
    # exception.
    return None if switch.has_stopped and not report.ok else report


def _own_stop(assignment: Assignment) -> ChildReport:
    """Return the error of a task that raised TaskStopped itself. The parent did not stop this task, so it
    expects an outcome.
    """
    message = (
        f"Task {assignment.task_name!r} raised TaskStopped, which only its worker raises; "
        "return, raise TaskFailed to fail, or RetryLater to run again."
    )
    log_safely(logger, logging.ERROR, "%s", message)
    code = OperationalErrorCode.UNHANDLED_EXCEPTION
    result = encode_task_error(TaskError(error_code=code, message=message))
    return ChildReport(
        assignment.task_id, assignment.generation, False, result, code.value, message
    )


def _move_to_high_number(fd: int) -> int:
    """Move a descriptor to a high number, to protect it from code that closes or reuses low numbers."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = 1000 if soft_limit == resource.RLIM_INFINITY else max(3, min(soft_limit, 1024) - 24)
    high_fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
    os.close(fd)
    return high_fd


def _as_socket(fd: int) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
    connected.setblocking(True)
    return connected
