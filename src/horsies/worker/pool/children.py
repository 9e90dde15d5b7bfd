"""Who is in the pool: the life of every child from launch to burial.

The pool moves frames and keeps the hot path; the roster decides when a child is started, parked as
a spare, retired, asked to stop, killed and buried, and writes down the events that follow from it.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never

from horsies.worker import os_process, protocol
from horsies.worker.child.main import EXIT_HOOK_FAILED
from horsies.worker.pool.child_process import ChildProcess, ChildState, RecycleLimits
from horsies.worker.pool.events import Died, HookFailed, PoolEvent, Stopped
from horsies.worker.pool.launcher import Launcher, RestartDelay
from horsies.worker.protocol import Assignment, FrameKind, ProtocolError

logger = logging.getLogger("horsies.pool")

_EARLY_DEATH_SECONDS = 1.0
_CLOSED_GRACE_SECONDS = 0.5
_LEAVE_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ChildrenSettings:
    """How many children there are and how long each step of their life may take."""

    processes: int
    limits: RecycleLimits
    stop_grace_seconds: float
    boot_timeout_seconds: float


class Children:
    """All children of one pool. Exactly `processes` of them are usable, plus at most one spare."""

    def __init__(
        self, settings: ChildrenSettings, launcher: Launcher, selector: selectors.BaseSelector
    ) -> None:
        self.children: dict[ChildProcess, None] = {}
        self.idle: list[ChildProcess] = []
        self.busy: dict[str, ChildProcess] = {}
        self.deadlines: dict[ChildProcess, float] = {}
        self.unwatched: set[ChildProcess] = set()
        self.events: list[PoolEvent] = []
        self.is_closing = False
        self.needs_children = True
        self.delay = RestartDelay()
        self._settings = settings
        self._launcher = launcher
        self._selector = selector
        self._spare: ChildProcess | None = None

    def refill(self) -> None:
        """Bring the number of usable children back to what was ordered, the spare first."""
        if not self.needs_children or self.is_closing:
            return
        occupied = sum(1 for child in self.children if child.holds_a_place())
        while occupied < self._settings.processes:
            if self._spare is not None:
                self._promote(self._spare)
            elif not self._launch(is_spare=False):
                return
            occupied += 1
        self.needs_children = self._wants_spare() and not self._launch(is_spare=True)

    def welcome(self, child: ChildProcess, pid: int) -> None:
        """A child says which process it is; from now on its end is noticed."""
        if child.pid is None:
            self._watch_exit(child, pid)
            if child.was_killed:
                child.kill()
        elif child.pid != pid:
            raise ProtocolError("a child that claims another pid")

    def note_ready(self, child: ChildProcess, rss_bytes: int) -> None:
        """A child has booted: it goes to work, or stands by as the spare."""
        if child.was_killed:
            return
        if child.state is not ChildState.BOOTING or child.pid is None:
            raise ProtocolError("ready out of turn")
        child.ready_at = time.monotonic()
        child.rss_bytes = rss_bytes
        self.deadlines.pop(child, None)
        if child.is_spare:
            child.state = ChildState.SPARE
            self._relieve_an_idle_child()
        else:
            self.make_idle(child)

    def make_idle(self, child: ChildProcess) -> None:
        """The child waits for its next assignment."""
        child.state = ChildState.IDLE
        self.idle.append(child)

    def release(self, child: ChildProcess) -> Assignment | None:
        """Take the assignment off a child."""
        assignment = child.assignment
        child.assignment = None
        if assignment is not None and self.busy.get(assignment.task_id) is child:
            del self.busy[assignment.task_id]
        self.deadlines.pop(child, None)
        return assignment

    def recycle(self, child: ChildProcess) -> None:
        """A child near one of its limits has finished a task: it leaves, or goes on a little."""
        self.needs_children = True
        if self._leaves_now(child):
            self.retire(child)
        else:
            self.make_idle(child)

    def retire(self, child: ChildProcess) -> None:
        """Tell a child without an assignment to leave."""
        self._step_aside(child, ChildState.LEAVING, _LEAVE_GRACE_SECONDS)
        with suppress(OSError):
            child.socket.shutdown(socket.SHUT_WR)

    def ask_to_stop(self, child: ChildProcess, reason: str) -> None:
        """Raise ``TaskStopped`` in the task a child is running; kill it when that does not help."""
        child.stop_reason = reason
        child.state = ChildState.ASKED
        self.deadlines[child] = time.monotonic() + self._settings.stop_grace_seconds
        # The frame tells the child that the signal comes from us. One that has not even read its
        # assignment yet finds the frame behind it and has nothing to interrupt.
        child.send(protocol.encode_numbers(FrameKind.STOP), self._selector)
        if child.pid is not None:
            os_process.ask(child.pid)

    def note_stopped(self, child: ChildProcess) -> None:
        """A child obeyed the order to stop and is leaving."""
        assignment = self.release(child)
        if assignment is None or child.stop_reason is None:
            raise ProtocolError("stopped out of turn")
        self.events.append(Stopped(assignment, child.known_pid, False, child.stop_reason))
        self.retire(child)

    def note_closed(self, child: ChildProcess) -> None:
        """The child's end of the socket is closed: it is ending, or user code closed it."""
        child.close_socket(self._selector)
        if child.pid is None:
            # It never said which process it is; nothing but the socket was known of it.
            self._remove(child)
            self.delay.note_early_death()
            if child.verdict is not None or not child.was_killed:
                self.events.append(Died(None, 0, child.verdict or "ended before it said hello"))
        elif child.state not in (ChildState.LEAVING, ChildState.KILLED):
            self._step_aside(child, ChildState.CLOSED, _CLOSED_GRACE_SECONDS)

    def kill(self, child: ChildProcess) -> None:
        """Kill a child and everything it started; it is buried when its end is noticed.

        One that has not said hello yet is killed as soon as it does.
        """
        self._step_aside(child, ChildState.KILLED, _LEAVE_GRACE_SECONDS)
        child.kill()

    def abandon_all(self) -> None:
        """Forget children that even SIGKILL does not end, so that the worker can."""
        for child in list(self.children):
            logger.error("Child %s does not end; it is left behind.", child.pid)
            child.close(self._selector)
            self._remove(child)

    def meet_deadlines(self, now: float) -> None:
        """Stop overdue tasks; kill children that do not boot, stop or leave in time."""
        for child in [child for child, deadline in self.deadlines.items() if deadline <= now]:
            self.deadlines.pop(child, None)
            match child.state:
                case ChildState.BUSY:
                    self.ask_to_stop(child, "timeout")
                case ChildState.BOOTING:
                    self._give_up_booting(child)
                case ChildState.CLOSED:
                    child.verdict = child.verdict or "killed because it closed its socket"
                    self.kill(child)
                case ChildState.ASKED | ChildState.LEAVING:
                    self.kill(child)
                case ChildState.KILLED:
                    self._forget_if_unknown(child)
                case ChildState.IDLE | ChildState.SPARE:
                    pass
                case _:
                    assert_never(child.state)

    def reap(self, child: ChildProcess) -> None:
        """A child has ended: collect its status, kill what it left running, tell what it cost."""
        if child not in self.children or child.pid is None:
            return
        os_process.kill_group(child.pid)
        exit_code = os_process.reap(child.pid)
        if exit_code is None:
            return
        child.close(self._selector)
        assignment = self.release(child)
        self._remove(child)
        self._note_death(child, assignment, exit_code)

    def _note_death(
        self, child: ChildProcess, assignment: Assignment | None, exit_code: int
    ) -> None:
        description = child.verdict or os_process.describe_exit(exit_code)
        pid = child.known_pid
        if assignment is not None:
            if child.stop_reason is not None:
                self.events.append(Stopped(assignment, pid, child.was_killed, child.stop_reason))
            else:
                self.events.append(Died(assignment, pid, description, child.has_started()))
        elif exit_code == EXIT_HOOK_FAILED and child.ready_at is None:
            name, what = child.failed_hook or ("unknown", "failed")
            self.delay.note_early_death()
            self.events.append(HookFailed(name, what))
        elif not child.was_retired:
            self._note_idle_death(child)
            self.events.append(Died(None, pid, description))

    def _note_idle_death(self, child: ChildProcess) -> None:
        """A child that dies of its task is replaced at once; one that dies by itself may wait."""
        lived = 0.0 if child.ready_at is None else time.monotonic() - child.ready_at
        if lived < _EARLY_DEATH_SECONDS:
            self.delay.note_early_death()
        else:
            self.delay.reset()

    def _launch(self, *, is_spare: bool) -> bool:
        if time.monotonic() < self.delay.not_before:
            return False
        try:
            own_end, pid = self._start_process()
        except OSError as error:
            logger.warning("No child could be started (%s); it is tried again.", error)
            self.delay.note_early_death()
            return False
        self._enter(ChildProcess(own_end, self._settings.limits, is_spare=is_spare), pid)
        return True

    def _start_process(self) -> tuple[socket.socket, int | None]:
        own_end, child_end = socket.socketpair()
        with child_end:
            try:
                return own_end, self._launcher.launch(own_end, child_end)
            except OSError:
                own_end.close()
                raise

    def _enter(self, child: ChildProcess, pid: int | None) -> None:
        self.children[child] = None
        self._selector.register(child.socket, selectors.EVENT_READ, child)
        self.deadlines[child] = time.monotonic() + self._settings.boot_timeout_seconds
        if pid is not None:
            self._watch_exit(child, pid)
        if child.is_spare:
            self._spare = child

    def _watch_exit(self, child: ChildProcess, pid: int) -> None:
        if not child.watch_exit(pid, self._selector):
            self.unwatched.add(child)

    def _wants_spare(self) -> bool:
        if self._spare is not None:
            return False
        return any(child.holds_a_place() and child.is_near_limit() for child in self.children)

    def _promote(self, spare: ChildProcess) -> None:
        self._spare = None
        spare.is_spare = False
        if spare.state is ChildState.SPARE:
            self.make_idle(spare)

    def _leaves_now(self, child: ChildProcess) -> bool:
        """Whether a child leaves: it must, or it may and others near their limits need a spare as well."""
        if child.must_leave():
            return True
        if self._spare is None or self._spare.state is not ChildState.SPARE:
            return False
        near = sum(1 for one in self.children if one.holds_a_place() and one.is_near_limit())
        return child.may_leave() and near > 1

    def _relieve_an_idle_child(self) -> None:
        for child in self.idle:
            if self._leaves_now(child):
                self.retire(child)
                return

    def _step_aside(
        self, child: ChildProcess, state: ChildState, grace_seconds: float | None
    ) -> None:
        """Take a child out of service."""
        if child.state is ChildState.IDLE:
            self.idle.remove(child)
        if child is self._spare:
            self._spare = None
            child.is_spare = False
        child.was_retired = child.was_retired or state is ChildState.LEAVING
        child.state = state
        self.needs_children = True
        self.deadlines.pop(child, None)
        if grace_seconds is not None:
            self.deadlines[child] = time.monotonic() + grace_seconds

    def _remove(self, child: ChildProcess) -> None:
        self._step_aside(child, ChildState.KILLED, None)
        self.children.pop(child, None)
        self.unwatched.discard(child)

    def _give_up_booting(self, child: ChildProcess) -> None:
        timeout_seconds = self._settings.boot_timeout_seconds
        child.verdict = f"killed because it was not ready within {timeout_seconds:g} s"
        if child.pid is None:
            # Whoever should have forked it does not answer; its end closes the socket as well.
            self._launcher.kill()
        self.kill(child)

    def _forget_if_unknown(self, child: ChildProcess) -> None:
        if child.pid is None:
            child.close_socket(self._selector)
            self._remove(child)
