"""The children of a pool: the life of each from launch to reaping, and the events on the way.

The pool moves frames and holds the hot path. This module decides when a child is started, kept as a
spare, retired, stopped, killed and reaped.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import assert_never

from horsies.worker import os_process, protocol
from horsies.worker.child.main import EXIT_HOOK_FAILED
from horsies.worker.pool.assignments import Assignments, Died, HookFailed, Stopped, TakenBack
from horsies.worker.pool.child_process import (
    ChildProcess,
    ChildState,
    RecycleLimits,
    RestartDelay,
)
from horsies.worker.pool.launcher import Launcher, StartMethod, default_start_method
from horsies.worker.pool.window import split_unstarted
from horsies.worker.protocol import (
    LAST_NUMBER,
    Assignment,
    FrameKind,
    ProtocolError,
)
from horsies.worker.sharing import PermitPipe, SharedPage, send_descriptors

logger = logging.getLogger("horsies.pool")

MEGABYTE = 1024 * 1024
_EARLY_DEATH_SECONDS = 1.0
_CLOSED_GRACE_SECONDS = 0.5
_EXIT_GRACE_SECONDS = 5.0
# More than a socket holds: a child that sends without end does not hold up the others.
_DRAIN_READS = 16
_KIND_REPORT = int(FrameKind.REPORT)

TakeFrame = Callable[[ChildProcess, bytes], None]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The number of children, where they come from, and the limits of their life."""

    processes: int
    start_method: StartMethod = field(default_factory=default_start_method)
    max_tasks_per_child: int = 0
    max_memory_per_child_mb: int | None = None
    stop_grace_seconds: float = 5.0
    boot_timeout_seconds: float = 60.0
    # How much longer a child may take to start and to exit, for the hooks of the application.
    boot_seconds_of_hooks: float = 0.0
    exit_seconds_of_hooks: float = 0.0
    # Whether a child may hold more than one assignment.
    has_windows: bool = False
    # Whether tasks are stopped at their timeout_ms.
    has_time_limits: bool = True

    @property
    def exit_grace_seconds(self) -> float:
        return _EXIT_GRACE_SECONDS + self.exit_seconds_of_hooks


class Children(Assignments):
    """All children of one pool. Exactly `processes` of them are usable, plus at most one spare."""

    def __init__(
        self,
        settings: PoolSettings,
        launcher: Launcher,
        selector: selectors.BaseSelector,
        take_report: TakeFrame,
        take_notice: TakeFrame,
    ) -> None:
        super().__init__(selector)
        self._take_report = take_report
        self._take_notice = take_notice
        self.children: dict[ChildProcess, None] = {}
        self.idle: list[ChildProcess] = []
        self.unwatched: set[ChildProcess] = set()
        self.is_closing = False
        self.needs_children = True
        self.delay = RestartDelay()
        # How many became ready, and how many ended otherwise than by their retirement, by cause.
        self.started = 0
        self.deaths: Counter[str] = Counter()
        self._settings = settings
        memory_mb = settings.max_memory_per_child_mb or 0
        self._limits = RecycleLimits(settings.max_tasks_per_child, memory_mb * MEGABYTE)
        self._launcher = launcher
        self._spare: ChildProcess | None = None

    def refill(self) -> None:
        """Bring the number of usable children back to `processes`, with the spare first."""
        if not self.needs_children or self.is_closing:
            return
        count = sum(1 for child in self.children if child.is_regular())
        while count < self._settings.processes:
            if (spare := self._spare) is not None:
                self._spare = None
                spare.is_spare = False
                if spare.state is ChildState.SPARE:
                    self.make_idle(spare)
            elif self._is_full():
                self.needs_children = False
                return
            elif not self._launch(is_spare=False):
                return
            count += 1
        wants_spare = self._spare is None and self._count_near_limit() > 0 and not self._is_full()
        self.needs_children = wants_spare and not self._launch(is_spare=True)

    def _is_full(self) -> bool:
        """Whether as many children exit as may be usable: another starts when one of them has ended.

        Without this bound, stop hooks slower than the tasks would use up the processes of the host.
        """
        return len(self.children) > 2 * self._settings.processes

    def _count_near_limit(self) -> int:
        return sum(1 for one in self.children if one.is_regular() and one.is_near_limit())

    def _launch(self, *, is_spare: bool) -> bool:
        if time.monotonic() < self.delay.not_before:
            return False
        try:
            own_end, page, permits, pid = self._start_process()
        except OSError as error:
            logger.warning("Starting a child failed (%s); trying again.", error)
            self.delay.note_early_death()
            return False
        child = ChildProcess(own_end, self._limits, is_spare, page, permits)
        self.children[child] = None
        self._selector.register(child.socket, selectors.EVENT_READ, child)
        boot_seconds = self._settings.boot_timeout_seconds + self._settings.boot_seconds_of_hooks
        self.deadlines[child] = time.monotonic() + boot_seconds
        if pid is not None:
            self._watch_exit(child, pid)
        if is_spare:
            self._spare = child
        return True

    def _start_process(
        self,
    ) -> tuple[socket.socket, SharedPage, PermitPipe | None, int | None]:
        page, page_fd = SharedPage.create()
        permits = None
        try:
            permits = PermitPipe() if self._settings.has_windows else None
            own_end, child_end = socket.socketpair()
            with child_end:
                try:
                    pid = self._launcher.launch(own_end, child_end)
                    send_descriptors(own_end, page_fd, permits.read_fd if permits else None)
                except OSError:
                    own_end.close()
                    raise
        except OSError:
            if permits is not None:
                permits.close()
            raise
        finally:
            os.close(page_fd)
        return own_end, page, permits, pid

    def _watch_exit(self, child: ChildProcess, pid: int) -> None:
        if not child.watch_exit(pid, self._selector):
            self.unwatched.add(child)

    def receive(self, child: ChildProcess) -> bool:
        """Handle one read's worth of frames; False when there was nothing to read."""
        data = child.receive()
        if data is None:
            return False
        if not data:
            self.note_closed(child)
            return False
        try:
            for frame in child.frames.feed(data):
                (self._take_report if frame[4] == _KIND_REPORT else self._take_notice)(child, frame)
            if child.frames.has_foreign_bytes:
                self.taint(child, "wrote to the socket between the child and its worker")
        except ProtocolError as error:
            child.verdict = f"killed because it sent a malformed frame ({error})"
            child.close_socket(self._selector)
            self.kill(child)
            return False
        return True

    def drain(self, child: ChildProcess) -> bool:
        """Handle the frames that a child has sent; True if it sends faster than they are read."""
        return all(child.socket_is_open and self.receive(child) for _ in range(_DRAIN_READS))

    def note_hello(self, child: ChildProcess, pid: int) -> None:
        """A child sent its pid; from now on its end is noticed."""
        if child.pid is None:
            self._watch_exit(child, pid)
            if child.was_killed:
                child.kill()
        elif child.pid != pid:
            raise ProtocolError("a child that claims another pid")

    def note_ready(self, child: ChildProcess, rss_bytes: int) -> None:
        if child.was_killed:
            return
        if child.state is not ChildState.BOOTING or child.pid is None:
            raise ProtocolError("ready out of turn")
        child.ready_at = time.monotonic()
        child.rss_bytes = rss_bytes
        self.started += 1
        self.deadlines.pop(child, None)
        if not child.is_spare:
            self.make_idle(child)
            return
        child.state = ChildState.SPARE
        retiring = next((one for one in self.idle if self._retires_now(one)), None)
        if retiring is not None:
            self.retire(retiring)

    def make_idle(self, child: ChildProcess) -> None:
        child.state = ChildState.IDLE
        self.idle.append(child)

    def note_free(self, child: ChildProcess) -> None:
        """A child has no assignment any more."""
        if child.is_near_limit():
            self.recycle(child)
        else:
            self.make_idle(child)

    def recycle(self, child: ChildProcess) -> None:
        """A child near one of its limits has finished a task: retire it now or a little later."""
        self.needs_children = True
        if self._retires_now(child):
            self.retire(child)
        else:
            self.make_idle(child)

    def _retires_now(self, child: ChildProcess) -> bool:
        """Whether a child must retire, or may and others near their limits need a spare as well."""
        if child.must_retire():
            return True
        if self._spare is None or self._spare.state is not ChildState.SPARE:
            return False
        return child.may_retire() and self._count_near_limit() > 1

    def retire(self, child: ChildProcess) -> None:
        self._take_out(child, ChildState.EXITING, self._settings.exit_grace_seconds)
        with suppress(OSError):
            child.socket.shutdown(socket.SHUT_WR)

    def find_front(self, child: ChildProcess) -> None:
        """Find out which task runs: with no permits left, and all reports read, it is the front."""
        self.return_unstarted(child)
        self.drain(child)

    def stop(self, child: ChildProcess, reason: str) -> None:
        """Raise ``TaskStopped`` in the task a child is running; kill it when that does not help."""
        front = child.assignment
        self.find_front(child)
        if child.assignment is not front or child.state is not ChildState.BUSY:
            return
        child.stop_reason = reason
        child.page.request_stop()
        child.state = ChildState.STOPPING
        self.deadlines[child] = time.monotonic() + self._settings.stop_grace_seconds
        # The frame shows the child that the signal comes from its parent. A child that has not read
        # its assignment yet finds the frame behind it and has nothing to interrupt.
        child.send(protocol.encode_numbers(FrameKind.STOP), self._selector)
        if child.pid is not None:
            os_process.terminate(child.pid)

    def note_stopped(self, child: ChildProcess) -> None:
        # Checked first: the task of a child that is killed for this has to be with it.
        if child.assignment is None or child.stop_reason is None:
            raise ProtocolError("stopped out of turn")
        assignment = self.release(child)
        assert assignment is not None
        seconds = time.monotonic() - child.assigned_at
        self.events.append(Stopped(assignment, child.known_pid, False, child.stop_reason, seconds))
        self.retire(child)

    def note_closed(self, child: ChildProcess) -> None:
        """The child's end of the socket is closed: it is ending, or user code closed it."""
        child.close_socket(self._selector)
        self._return(self.take_back(child))
        if child.pid is None:
            # It never sent its pid; only its socket was known.
            self._remove(child)
            self.delay.note_early_death()
            if child.verdict is not None or not child.was_killed:
                self.events.append(Died(None, 0, child.verdict or "ended before it sent its pid"))
        elif child.state not in (ChildState.EXITING, ChildState.KILLED):
            self._take_out(child, ChildState.CLOSED, _CLOSED_GRACE_SECONDS)

    def kill(self, child: ChildProcess) -> None:
        """Kill a child and its process group; it is reaped when its end is noticed.

        One that has not sent its pid yet is killed as soon as it does.
        """
        self._return(self.take_back(child))
        self._take_out(child, ChildState.KILLED, _EXIT_GRACE_SECONDS)
        child.kill()

    def abandon_all(self) -> None:
        """Forget children that even SIGKILL does not end, so that the worker can exit."""
        for child in list(self.children):
            logger.error("Child %s does not end even after SIGKILL; abandoning it.", child.pid)
            self._remove(child)

    def enforce_deadlines(self, now: float) -> None:
        """Stop overdue tasks; kill children that do not boot, stop or exit in time."""
        for child in [child for child, deadline in self.deadlines.items() if deadline <= now]:
            self.deadlines.pop(child, None)
            match child.state:
                case ChildState.BUSY:
                    self._look_at_front(child, now)
                case ChildState.BOOTING:
                    self._give_up_booting(child)
                case ChildState.CLOSED:
                    child.verdict = child.verdict or "killed because it closed its socket"
                    self.kill(child)
                case ChildState.STOPPING | ChildState.EXITING:
                    self.kill(child)
                case ChildState.KILLED:
                    if child.pid is None:
                        self._remove(child)
                case ChildState.IDLE | ChildState.SPARE:
                    pass
                case _:
                    assert_never(child.state)

    def _look_at_front(self, child: ChildProcess, now: float) -> None:
        """Stop an overdue task, or take back those behind a slow one."""
        assignment = child.assignment
        assert assignment is not None
        limit_ms = assignment.timeout_ms
        if limit_ms is None or now < child.assigned_at + limit_ms / 1000:
            self._relieve(child)
            return
        tasks_done = child.tasks_done
        self.stop(child, "timeout")
        if child.state is ChildState.IDLE and child.tasks_done == tasks_done:
            child.verdict = "killed because it did not begin a task within its timeout_ms"
            self.kill(child)

    def _give_up_booting(self, child: ChildProcess) -> None:
        timeout_seconds = self._settings.boot_timeout_seconds + self._settings.boot_seconds_of_hooks
        child.verdict = f"killed because it was not ready within {timeout_seconds:g} s"
        if child.pid is None:
            # The fork server does not respond; its end closes the child's socket as well.
            self._launcher.kill()
        self.kill(child)

    def reap(self, child: ChildProcess) -> None:
        """A child has ended: collect its status, kill its remaining processes, add the event."""
        if child not in self.children or child.pid is None:
            return
        os_process.kill_group(child.pid)
        exit_code = os_process.reap(child.pid)
        if exit_code is None:
            return
        self._return(self.take_back(child))
        # There are others than the front if a task read their permits, or if reports could not be read.
        begun, unstarted = split_unstarted(child.line, range(child.page.begun + 1, LAST_NUMBER))
        self._return(unstarted)
        for one in child.line:
            self.lined.pop(one.assignment.task_id, None)
        started = child.has_begun
        assignment = self.release(child)
        self._remove(child)
        self._note_death(child, assignment, exit_code, started=started)
        description = child.verdict or os_process.describe_exit(exit_code)
        self.events += [Died(one.assignment, child.known_pid, description) for one in begun]

    def _note_death(
        self,
        child: ChildProcess,
        assignment: Assignment | None,
        exit_code: int,
        *,
        started: bool,
    ) -> None:
        description = child.verdict or os_process.describe_exit(exit_code)
        pid = child.known_pid
        if assignment is not None or child.was_killed or not child.was_retired:
            self.deaths[os_process.describe_exit(exit_code)] += 1
        if assignment is not None:
            seconds = time.monotonic() - child.assigned_at
            if child.stop_reason is not None and not started:
                self.events.append(TakenBack((assignment,)))
            elif child.stop_reason is not None:
                stopped = Stopped(assignment, pid, child.was_killed, child.stop_reason, seconds)
                self.events.append(stopped)
            else:
                self.events.append(Died(assignment, pid, description, started, seconds))
        elif exit_code == EXIT_HOOK_FAILED and child.ready_at is None:
            name, problem = child.failed_hook or ("unknown", "failed")
            self.delay.note_early_death()
            self.events.append(HookFailed(name, problem))
        elif not child.was_retired:
            # A child that dies of its task is replaced at once; one that dies while idle may wait.
            lived = 0.0 if child.ready_at is None else time.monotonic() - child.ready_at
            if lived < _EARLY_DEATH_SECONDS:
                self.delay.note_early_death()
            else:
                self.delay.reset()
            self.events.append(Died(None, pid, description))

    def _take_out(
        self, child: ChildProcess, state: ChildState, grace_seconds: float | None
    ) -> None:
        if child.state is ChildState.IDLE:
            self.idle.remove(child)
        if child is self._spare:
            self._spare = None
            child.is_spare = False
        child.was_retired = child.was_retired or state is ChildState.EXITING
        child.state = state
        self.needs_children = True
        self.deadlines.pop(child, None)
        if grace_seconds is not None:
            self.deadlines[child] = time.monotonic() + grace_seconds

    def _remove(self, child: ChildProcess) -> None:
        self._take_out(child, ChildState.KILLED, None)
        child.close(self._selector)
        self.children.pop(child, None)
        self.unwatched.discard(child)
