"""A pool's children: the life of each process from launch to reaping, and their free places.

This module decides when a child of either kind is started, kept as a spare, retired, killed and reaped.
When a child with one place is near its limits, a spare replaces it. When an async child is near its
limits, it takes no more tasks, is replaced, and exits after its last task. ``FreePlaces`` lists the
children that can take the next assignments.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter

from horsies.captured_log import KEEP_NOTHING, LogLimits
from horsies.worker import os_process, protocol
from horsies.worker.child.main import EXIT_HOOK_FAILED
from horsies.worker.pool.assignments import Assignments
from horsies.worker.pool.child_process import (
    BUSY,
    IDLE,
    WITH_ROOM,
    ChildKind,
    ChildProcess,
    ChildState,
    RecycleLimits,
    RestartDelay,
)
from horsies.worker.pool.events import Died, HookFailed
from horsies.worker.pool.launcher import Launcher, StartMethod, default_start_method
from horsies.worker.pool.window import fill_order
from horsies.worker.protocol import FrameKind, ProtocolError
from horsies.worker.sharing import PermitPipe, SharedPage, send_descriptors

logger = logging.getLogger("horsies.pool")

MEGABYTE = 1024 * 1024
_EARLY_DEATH_SECONDS = 1.0
_CLOSED_GRACE_SECONDS = 0.5
_EXIT_GRACE_SECONDS = 5.0
# An idle child has sent its pid.
_PID = attrgetter("pid")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The settings of a pool: how many children there are, how they are started, and when they are
    replaced.
    """

    processes: int
    start_method: StartMethod = field(default_factory=default_start_method)
    max_tasks_per_child: int = 0
    max_memory_per_child_mb: int | None = None
    stop_grace_seconds: float = 5.0
    boot_timeout_seconds: float = 60.0
    # How many more seconds a child may take to start and to exit because of the application's hooks.
    boot_seconds_of_hooks: float = 0.0
    exit_seconds_of_hooks: float = 0.0
    # Whether a child may hold more than one assignment.
    has_windows: bool = False
    # Whether tasks are stopped at their timeout_ms.
    has_time_limits: bool = True
    # By task name: the maximum memory, in megabytes, that a child may use while it runs the task.
    memory_limits: Mapping[str, int] = field(default_factory=dict)
    # How many additional async children there are, and how many tasks each of them runs at a time.
    async_children: int = 0
    async_slots: int = 0
    # The limits for the part of an attempt's log that is kept.
    log_limits: LogLimits = KEEP_NOTHING

    @property
    def exit_grace_seconds(self) -> float:
        return _EXIT_GRACE_SECONDS + self.exit_seconds_of_hooks

    def kinds(self) -> list[ChildKind]:
        """Return the kinds of children. An async child runs up to `max_tasks_per_child` tasks per slot."""
        tasks, rss_bytes = self.max_tasks_per_child, (self.max_memory_per_child_mb or 0) * MEGABYTE
        slots = self.async_slots
        single, shared = RecycleLimits(tasks, rss_bytes), RecycleLimits(tasks * slots, rss_bytes)
        logs = self.log_limits
        return [
            ChildKind(self.processes, 1, single, False, self.has_windows, logs),
            ChildKind(self.async_children, slots, shared, True, log_limits=logs),
        ]


class Children:
    """All children of one pool. Each kind has `processes` usable children, and at most one spare."""

    def __init__(
        self,
        settings: PoolSettings,
        launcher: Launcher,
        selector: selectors.BaseSelector,
        assignments: Assignments,
    ) -> None:
        self.all: dict[ChildProcess, None] = {}
        # The idle children with one place, in the order in which they became idle.
        self.idle: list[ChildProcess] = []
        self.unwatched: set[ChildProcess] = set()
        self.is_closing = False
        self.needs_children = True
        self.delay = RestartDelay()
        # How many children have become ready, and how many have ended for other causes than retirement,
        # by cause.
        self.started = 0
        self.deaths: Counter[str] = Counter()
        self._settings = settings
        self._kinds = settings.kinds()
        self._launcher = launcher
        self._selector = selector
        self._assignments = assignments
        self._spare: ChildProcess | None = None

    def refill(self) -> None:
        """Bring the number of usable children back to `processes`, using the spare first."""
        if self.needs_children and not self.is_closing:
            lacking = [kind for kind in self._kinds if self._lacks_children(kind)]
            self.needs_children = bool(lacking)

    def _lacks_children(self, kind: ChildKind) -> bool:
        """Start the missing children; return True if some of them could not be started."""
        count = sum(1 for child in self.all if child.kind is kind and child.is_regular())
        while count < kind.processes:
            if (spare := self._spare) is not None and spare.kind is kind:
                self._spare = None
                spare.is_spare = False
                if spare.state is ChildState.SPARE:
                    self._make_idle(spare)
            elif self._is_full(kind):
                return False
            elif not self._launch(kind, is_spare=False):
                return True
            count += 1
        wants_spare = self._spare is None and not kind.is_async and self._count_near_limit() > 0
        return wants_spare and not self._is_full(kind) and not self._launch(kind, is_spare=True)

    def _is_full(self, kind: ChildKind) -> bool:
        """Return whether the number of exiting children has reached `processes`. If so, the next child starts
        only after an exiting child has ended. Otherwise stop hooks that take longer than the tasks would use
        up the host's processes.
        """
        return sum(child.kind is kind for child in self.all) > 2 * kind.processes

    def _count_near_limit(self) -> int:
        regular = (one for one in self.all if not one.is_async and one.is_regular())
        return sum(one.is_near_limit() for one in regular)

    def _launch(self, kind: ChildKind, *, is_spare: bool) -> bool:
        if time.monotonic() < self.delay.not_before:
            return False
        try:
            own_end, page, permits, pid = self._start_process(kind)
        except OSError as error:
            logger.warning("Starting a child failed (%s); trying again.", error)
            self.delay.note_early_death()
            return False
        child = ChildProcess(own_end, kind, is_spare, page, permits)
        self.all[child] = None
        self._selector.register(child.socket, selectors.EVENT_READ, child)
        boot_seconds = self._settings.boot_timeout_seconds + self._settings.boot_seconds_of_hooks
        self._assignments.deadlines.set(child, time.monotonic() + boot_seconds)
        if pid is not None:
            self._watch_exit(child, pid)
        if is_spare:
            self._spare = child
        return True

    def _start_process(
        self, kind: ChildKind
    ) -> tuple[socket.socket, SharedPage, PermitPipe | None, int | None]:
        page, page_fd = SharedPage.create(kind.log_bytes)
        permits = None
        try:
            permits = PermitPipe() if kind.has_windows else None
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

    def note_hello(self, child: ChildProcess, pid: int) -> None:
        """Note the pid that a child has sent, and watch for the end of the child."""
        if child.pid is None:
            self._watch_exit(child, pid)
            if child.was_killed:
                child.kill()
        elif child.pid != pid:
            raise ProtocolError("a pid that is not the child's")

    def note_ready(self, child: ChildProcess, rss_bytes: int) -> None:
        if child.was_killed:
            return
        if child.state is not ChildState.BOOTING or child.pid is None:
            raise ProtocolError("ready out of turn")
        child.ready_at = time.monotonic()
        child.rss_bytes = rss_bytes
        self.started += 1
        self._assignments.deadlines.clear(child)
        if child.is_async:
            child.send(protocol.encode_numbers(FrameKind.SHARE), self._selector)
        if not child.is_spare:
            self._make_idle(child)
            return
        child.state = ChildState.SPARE
        retiring = next((one for one in self.idle if self._retires_now(one)), None)
        if retiring is not None:
            self.retire(retiring)

    def _make_idle(self, child: ChildProcess) -> None:
        child.state = IDLE
        if not child.is_async:
            self.idle.append(child)

    def release(self, child: ChildProcess) -> None:
        """Note that tasks of a child have ended or were taken back. If it has no more tasks, it becomes
        idle or exits.
        """
        leaves = False
        if child.is_async:
            if not child.is_draining and child.is_spent():
                child.is_draining = self.needs_children = True
            leaves = child.is_draining
        elif (child.has_limits or child.is_tainted) and child.is_near_limit():
            self.needs_children = True
            leaves = not child.held and self._retires_now(child)
        if child.held or child.state not in WITH_ROOM:
            return
        if leaves:
            self.retire(child)
        elif child.state is BUSY:
            self._make_idle(child)

    def _retires_now(self, child: ChildProcess) -> bool:
        """Return whether to retire a child: either it must retire, or it may retire and other children near
        their limits also need the spare.
        """
        if child.must_retire():
            return True
        if self._spare is None or self._spare.state is not ChildState.SPARE:
            return False
        return child.may_retire() and self._count_near_limit() > 1

    def retire(self, child: ChildProcess) -> None:
        self._take_out(child, ChildState.EXITING, self._settings.exit_grace_seconds)
        with suppress(OSError):
            child.socket.shutdown(socket.SHUT_WR)

    def note_closed(self, child: ChildProcess) -> None:
        """Handle a closed socket of a child: either the child is exiting, or user code has closed the
        socket.
        """
        child.close_socket(self._selector)
        self._return_unstarted(child)
        if child.pid is None:
            # The child never sent its pid; only its socket was known.
            self._remove(child)
            self.delay.note_early_death()
            if child.verdict is not None or not child.was_killed:
                description = child.verdict or "ended before it sent its pid"
                self._assignments.events.append(Died(None, 0, description))
        elif child.state not in (ChildState.EXITING, ChildState.KILLED):
            self._take_out(child, ChildState.CLOSED, _CLOSED_GRACE_SECONDS)

    def kill(self, child: ChildProcess) -> None:
        """Kill a child and its process group; the child is reaped when the pool notices its end. A child
        without a known pid is killed as soon as it has sent its pid.
        """
        self._return_unstarted(child)
        self._take_out(child, ChildState.KILLED, _EXIT_GRACE_SECONDS)
        child.kill()

    def _return_unstarted(self, child: ChildProcess) -> None:
        self._assignments.return_tasks(self._assignments.take_back(child))

    def abandon_all(self) -> None:
        """Abandon children that not even SIGKILL ends, so that the worker can exit."""
        for child in list(self.all):
            logger.error("Child %s does not end even after SIGKILL; abandoning it.", child.pid)
            self._remove(child)

    def enforce_deadline(self, child: ChildProcess) -> None:
        """Kill a child that did not boot or exit in time."""
        match child.state:
            case ChildState.BOOTING:
                self._give_up_booting(child)
            case ChildState.CLOSED:
                child.verdict = child.verdict or "killed because it closed its socket"
                self.kill(child)
            case ChildState.EXITING:
                self.kill(child)
            case ChildState.KILLED if child.pid is None:
                self._remove(child)

    def _give_up_booting(self, child: ChildProcess) -> None:
        timeout_seconds = self._settings.boot_timeout_seconds + self._settings.boot_seconds_of_hooks
        child.verdict = f"killed because it was not ready within {timeout_seconds:g} s"
        if child.pid is None:
            # The fork server does not respond; when it ends, the child's socket closes as well.
            self._launcher.kill()
        self.kill(child)

    def reap(self, child: ChildProcess) -> None:
        """Handle the end of a child: collect its exit status, kill its remaining processes, and add the
        events.
        """
        if child not in self.all or child.pid is None:
            return
        os_process.kill_group(child.pid)
        exit_code = os_process.reap(child.pid)
        if exit_code is None:
            return
        had_tasks = bool(child.held)
        ended = os_process.describe_exit(exit_code)
        has_begun = self._assignments.note_end_by_death(child, child.verdict or ended)
        self._remove(child)
        if had_tasks or child.was_killed or not child.was_retired:
            self.deaths[ended] += 1
        if has_begun:
            # the child died because of one of its tasks and is replaced immediately
            self.delay.reset(child.ready_at)
        elif not child.was_retired:
            self._note_early_death(child)
        if not had_tasks:
            self._note_idle_death(child, exit_code, child.verdict or ended)

    def _note_early_death(self, child: ChildProcess) -> None:
        lived = 0.0 if child.ready_at is None else time.monotonic() - child.ready_at
        if lived < _EARLY_DEATH_SECONDS:
            self.delay.note_early_death()
        else:
            self.delay.reset()

    def _note_idle_death(self, child: ChildProcess, exit_code: int, description: str) -> None:
        events = self._assignments.events
        if exit_code == EXIT_HOOK_FAILED and child.ready_at is None:
            events.append(HookFailed(*(child.failed_hook or ("unknown", "failed"))))
        elif not child.was_retired:
            events.append(Died(None, child.known_pid, description))

    def _take_out(
        self, child: ChildProcess, state: ChildState, grace_seconds: float | None
    ) -> None:
        if child in self.idle:
            self.idle.remove(child)
        if child is self._spare:
            self._spare = None
            child.is_spare = False
        child.was_retired = child.was_retired or state is ChildState.EXITING
        child.state = state
        self.needs_children = True
        if grace_seconds is None:
            self._assignments.deadlines.clear(child)
        else:
            self._assignments.deadlines.set(child, time.monotonic() + grace_seconds)

    def _remove(self, child: ChildProcess) -> None:
        self._take_out(child, ChildState.KILLED, None)
        child.close(self._selector)
        self._assignments.deadlines.sweep()
        self.all.pop(child, None)
        self.unwatched.discard(child)


class FreePlaces:
    """The children's free places, in the order in which they are filled."""

    def __init__(
        self, children: Children, assignments: Assignments, settings: PoolSettings
    ) -> None:
        self._children = children
        self._assignments = assignments
        self._busy = assignments.busy
        self._has_windows = settings.has_windows
        self.has_async = settings.async_children > 0

    @property
    def idle_count(self) -> int:
        """How many children that run one task at a time are idle."""
        return len(self._children.idle)

    @property
    def companions(self) -> int:
        """How many tasks run in batches, without the first task of each batch; they take no places."""
        return self._assignments.companions

    def idle(self, count: int) -> list[int]:
        """Return the children with one place that get the next `count` assignments, in order."""
        if count <= 0:
            return []
        return list(map(_PID, self._children.idle[: -count - 1 : -1]))

    def idle_and_behind(self, depth: int) -> tuple[list[int], list[int]]:
        """Return the idle children, which get the next assignments, and the children with a window of up
        to `depth`, which get the assignments after those.
        """
        idle = list(map(_PID, reversed(self._children.idle)))
        if depth <= 1 or not self._has_windows:
            return idle, []
        busy = (one.child for one in self._busy.values())
        rooms = [
            (child.known_pid, max(1, len(child.held)), room)
            for child in (*reversed(self._children.idle), *busy)
            if (room := child.window_room(depth))
        ]
        return idle, fill_order(rooms)

    def window_space(self, depth: int) -> tuple[int, int]:
        """Return how many more tasks fit into windows of `depth`, and how many tasks such windows hold in
        total.
        """
        free = room = 0
        for child in self._children.all:
            if most := child.window_room(depth):
                room += most
                free += most - len(child.held)
        return free, room

    @property
    def async_count(self) -> int:
        """How many tasks the async children can take now."""
        return sum(self._free_slots().values())

    def next_async(self, count: int) -> list[int]:
        """Return the async children for the next `count` assignments; each assignment goes to the least
        loaded child.
        """
        free = self._free_slots()
        pids: list[int] = []
        while len(pids) < count and any(free.values()):
            pid = max(free, key=free.__getitem__)
            free[pid] -= 1
            pids.append(pid)
        return pids

    def _free_slots(self) -> dict[int, int]:
        """Return the free slots of the async children, by pid."""
        shared = (one for one in self._children.all if one.is_async and one.pid is not None)
        return {child.known_pid: child.free_slots() for child in shared}
