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
from horsies.worker.pool.child_process import RecycleLimits, Slot, SlotState
from horsies.worker.pool.events import Died, HookFailed, PoolEvent, Stopped
from horsies.worker.pool.launcher import Launcher, RestartDelay
from horsies.worker.protocol import Assignment, FrameKind, WireError

logger = logging.getLogger("horsies.pool")

_EARLY_DEATH_SECONDS = 1.0
_CLOSED_GRACE_SECONDS = 0.5
_LEAVE_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RosterSettings:
    """How many children there are and how long each step of their life may take."""

    processes: int
    limits: RecycleLimits
    stop_grace_seconds: float
    boot_timeout_seconds: float


class Roster:
    """All children of one pool. Exactly `processes` of them are usable, plus at most one spare."""

    def __init__(
        self, settings: RosterSettings, launcher: Launcher, selector: selectors.BaseSelector
    ) -> None:
        self.slots: dict[Slot, None] = {}
        self.idle: list[Slot] = []
        self.busy: dict[str, Slot] = {}
        self.deadlines: dict[Slot, float] = {}
        self.unwatched: set[Slot] = set()
        self.events: list[PoolEvent] = []
        self.is_closing = False
        self.needs_children = True
        self.delay = RestartDelay()
        self._settings = settings
        self._launcher = launcher
        self._selector = selector
        self._spare: Slot | None = None

    def refill(self) -> None:
        """Bring the number of usable children back to what was ordered, the spare first."""
        if not self.needs_children or self.is_closing:
            return
        occupied = sum(1 for slot in self.slots if slot.holds_a_place())
        while occupied < self._settings.processes:
            if self._spare is not None:
                self._promote(self._spare)
            elif not self._launch(is_spare=False):
                return
            occupied += 1
        self.needs_children = self._wants_spare() and not self._launch(is_spare=True)

    def welcome(self, slot: Slot, pid: int) -> None:
        """A child says which process it is; from now on its end is noticed."""
        if slot.pid is None:
            self._watch_exit(slot, pid)
            if slot.was_killed:
                slot.kill()
        elif slot.pid != pid:
            raise WireError("a child that claims another pid")

    def note_ready(self, slot: Slot, rss_bytes: int) -> None:
        """A child has booted: it goes to work, or stands by as the spare."""
        if slot.was_killed:
            return
        if slot.state is not SlotState.BOOTING or slot.pid is None:
            raise WireError("ready out of turn")
        slot.ready_at = time.monotonic()
        slot.rss_bytes = rss_bytes
        self.deadlines.pop(slot, None)
        if slot.is_spare:
            slot.state = SlotState.SPARE
            self._relieve_an_idle_child()
        else:
            self.make_idle(slot)

    def make_idle(self, slot: Slot) -> None:
        """The child waits for its next assignment."""
        slot.state = SlotState.IDLE
        self.idle.append(slot)

    def release(self, slot: Slot) -> Assignment | None:
        """Take the assignment off a child."""
        assignment = slot.assignment
        slot.assignment = None
        if assignment is not None and self.busy.get(assignment.task_id) is slot:
            del self.busy[assignment.task_id]
        self.deadlines.pop(slot, None)
        return assignment

    def recycle(self, slot: Slot) -> None:
        """A child near one of its limits has finished a task: it leaves, or goes on a little."""
        self.needs_children = True
        if self._leaves_now(slot):
            self.retire(slot)
        else:
            self.make_idle(slot)

    def retire(self, slot: Slot) -> None:
        """Tell a child without an assignment to leave."""
        self._step_aside(slot, SlotState.LEAVING, _LEAVE_GRACE_SECONDS)
        with suppress(OSError):
            slot.socket.shutdown(socket.SHUT_WR)

    def ask_to_stop(self, slot: Slot, reason: str) -> None:
        """Raise ``TaskStopped`` in the task a child is running; kill it when that does not help."""
        slot.stop_reason = reason
        slot.state = SlotState.ASKED
        self.deadlines[slot] = time.monotonic() + self._settings.stop_grace_seconds
        # The frame tells the child that the signal comes from us. One that has not even read its
        # assignment yet finds the frame behind it and has nothing to interrupt.
        slot.send(protocol.encode_numbers(FrameKind.STOP), self._selector)
        if slot.pid is not None:
            os_process.ask(slot.pid)

    def note_stopped(self, slot: Slot) -> None:
        """A child obeyed the order to stop and is leaving."""
        assignment = self.release(slot)
        if assignment is None or slot.stop_reason is None:
            raise WireError("stopped out of turn")
        self.events.append(Stopped(assignment, slot.known_pid, False, slot.stop_reason))
        self.retire(slot)

    def note_closed(self, slot: Slot) -> None:
        """The child's end of the socket is closed: it is ending, or user code closed it."""
        slot.close_socket(self._selector)
        if slot.pid is None:
            # It never said which process it is; nothing but the socket was known of it.
            self._strike_off(slot)
            self.delay.note_early_death()
            if slot.verdict is not None or not slot.was_killed:
                self.events.append(Died(None, 0, slot.verdict or "ended before it said hello"))
        elif slot.state not in (SlotState.LEAVING, SlotState.KILLED):
            self._step_aside(slot, SlotState.CLOSED, _CLOSED_GRACE_SECONDS)

    def kill(self, slot: Slot) -> None:
        """Kill a child and everything it started; it is buried when its end is noticed.

        One that has not said hello yet is killed as soon as it does.
        """
        self._step_aside(slot, SlotState.KILLED, _LEAVE_GRACE_SECONDS)
        slot.kill()

    def abandon_all(self) -> None:
        """Forget children that even SIGKILL does not end, so that the worker can."""
        for slot in list(self.slots):
            logger.error("Child %s does not end; it is left behind.", slot.pid)
            slot.close(self._selector)
            self._strike_off(slot)

    def meet_deadlines(self, now: float) -> None:
        """Stop overdue tasks; kill children that do not boot, stop or leave in time."""
        for slot in [slot for slot, deadline in self.deadlines.items() if deadline <= now]:
            self.deadlines.pop(slot, None)
            match slot.state:
                case SlotState.BUSY:
                    self.ask_to_stop(slot, "timeout")
                case SlotState.BOOTING:
                    self._give_up_booting(slot)
                case SlotState.CLOSED:
                    slot.verdict = slot.verdict or "killed because it closed its socket"
                    self.kill(slot)
                case SlotState.ASKED | SlotState.LEAVING:
                    self.kill(slot)
                case SlotState.KILLED:
                    self._forget_if_unknown(slot)
                case SlotState.IDLE | SlotState.SPARE:
                    pass
                case _:
                    assert_never(slot.state)

    def bury(self, slot: Slot) -> None:
        """A child has ended: collect its status, kill what it left running, tell what it cost."""
        if slot not in self.slots or slot.pid is None:
            return
        os_process.kill_group(slot.pid)
        exit_code = os_process.reap(slot.pid)
        if exit_code is None:
            return
        slot.close(self._selector)
        assignment = self.release(slot)
        self._strike_off(slot)
        self._note_death(slot, assignment, exit_code)

    def _note_death(self, slot: Slot, assignment: Assignment | None, exit_code: int) -> None:
        description = slot.verdict or os_process.describe_exit(exit_code)
        pid = slot.known_pid
        if assignment is not None:
            if slot.stop_reason is not None:
                self.events.append(Stopped(assignment, pid, slot.was_killed, slot.stop_reason))
            else:
                self.events.append(Died(assignment, pid, description, slot.has_started()))
        elif exit_code == EXIT_HOOK_FAILED and slot.ready_at is None:
            name, what = slot.failed_hook or ("unknown", "failed")
            self.delay.note_early_death()
            self.events.append(HookFailed(name, what))
        elif not slot.was_retired:
            self._note_idle_death(slot)
            self.events.append(Died(None, pid, description))

    def _note_idle_death(self, slot: Slot) -> None:
        """A child that dies of its task is replaced at once; one that dies by itself may wait."""
        lived = 0.0 if slot.ready_at is None else time.monotonic() - slot.ready_at
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
        self._enter(Slot(own_end, self._settings.limits, is_spare=is_spare), pid)
        return True

    def _start_process(self) -> tuple[socket.socket, int | None]:
        own_end, child_end = socket.socketpair()
        with child_end:
            try:
                return own_end, self._launcher.launch(own_end, child_end)
            except OSError:
                own_end.close()
                raise

    def _enter(self, slot: Slot, pid: int | None) -> None:
        self.slots[slot] = None
        self._selector.register(slot.socket, selectors.EVENT_READ, slot)
        self.deadlines[slot] = time.monotonic() + self._settings.boot_timeout_seconds
        if pid is not None:
            self._watch_exit(slot, pid)
        if slot.is_spare:
            self._spare = slot

    def _watch_exit(self, slot: Slot, pid: int) -> None:
        if not slot.watch_exit(pid, self._selector):
            self.unwatched.add(slot)

    def _wants_spare(self) -> bool:
        if self._spare is not None:
            return False
        return any(slot.holds_a_place() and slot.is_near_limit() for slot in self.slots)

    def _promote(self, spare: Slot) -> None:
        self._spare = None
        spare.is_spare = False
        if spare.state is SlotState.SPARE:
            self.make_idle(spare)

    def _leaves_now(self, slot: Slot) -> bool:
        """Whether a child leaves: it must, or it may and others near their limits need a spare as well."""
        if slot.must_leave():
            return True
        if self._spare is None or self._spare.state is not SlotState.SPARE:
            return False
        near = sum(1 for one in self.slots if one.holds_a_place() and one.is_near_limit())
        return slot.may_leave() and near > 1

    def _relieve_an_idle_child(self) -> None:
        for slot in self.idle:
            if self._leaves_now(slot):
                self.retire(slot)
                return

    def _step_aside(self, slot: Slot, state: SlotState, grace_seconds: float | None) -> None:
        """Take a child out of service."""
        if slot.state is SlotState.IDLE:
            self.idle.remove(slot)
        if slot is self._spare:
            self._spare = None
            slot.is_spare = False
        slot.was_retired = slot.was_retired or state is SlotState.LEAVING
        slot.state = state
        self.needs_children = True
        self.deadlines.pop(slot, None)
        if grace_seconds is not None:
            self.deadlines[slot] = time.monotonic() + grace_seconds

    def _strike_off(self, slot: Slot) -> None:
        self._step_aside(slot, SlotState.KILLED, None)
        self.slots.pop(slot, None)
        self.unwatched.discard(slot)

    def _give_up_booting(self, slot: Slot) -> None:
        timeout_seconds = self._settings.boot_timeout_seconds
        slot.verdict = f"killed because it was not ready within {timeout_seconds:g} s"
        if slot.pid is None:
            # Whoever should have forked it does not answer; its end closes the socket as well.
            self._launcher.kill()
        self.kill(slot)

    def _forget_if_unknown(self, slot: Slot) -> None:
        if slot.pid is None:
            slot.close_socket(self._selector)
            self._strike_off(slot)
