"""The pool of child processes: gives assignments to idle children and collects the results.

The death of one child costs one assignment, and the child is replaced. The pool does no database I/O,
and everything happens inside ``collect``: there are no threads and no other timers.
"""

from __future__ import annotations

import logging
import resource
import selectors
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from horsies.worker import os_process, protocol
from horsies.worker.pool.assignments import Died, HookFailed, PoolEvent, Reported
from horsies.worker.pool.child_process import ChildProcess, ChildState, ExitWatch, Held
from horsies.worker.pool.children import MEGABYTE, Children, PoolSettings
from horsies.worker.pool.launcher import Guard, Launcher, make_launcher
from horsies.worker.pool.stuck import StuckWatch, see_child
from horsies.worker.pool.window import fill_order
from horsies.worker.protocol import Assignment, ChildBoot, FrameKind, ProgressReport, ProtocolError
from horsies.worker.sharing import PAGE_BYTES

logger = logging.getLogger("horsies.pool")

_ORPHAN_CHECK_SECONDS = 1.0
_EXIT_POLL_SECONDS = 0.05
SHUTDOWN_SECONDS = 15.0
_BASELINE_WARNING = 0.8
_FORKS_AHEAD = 8


class ChildBootError(Exception):
    """The children cannot start."""


class NoIdleChildError(Exception):
    """An assignment was dispatched although no child, or not the named one, was idle."""


class ChildSummary(NamedTuple):
    """One child: its resident memory, how many tasks it has ended, when it was ready, and its task."""

    pid: int
    rss_mb: float
    done: int
    since: datetime | None
    task_id: str | None
    # How many tasks an async child runs; None for others.
    tasks: int | None = None

    @classmethod
    def of(cls, child: ChildProcess, tasks: int | None = None) -> ChildSummary:
        clock, at, task = time.time() - time.monotonic(), child.ready_at, child.assignment
        return cls(
            child.known_pid,
            os_process.rss_megabytes([child.known_pid]),
            child.tasks_done,
            None if at is None else datetime.fromtimestamp(clock + at, UTC),
            None if task is None else task.task_id,
            tasks,
        )


class ChildPool:
    """A fixed number of child processes, each with its own socket, for one task at a time.

    `selector` may hold other descriptors as well: ``foreign_keys`` lists those that were ready at the
    last ``collect``.
    """

    def __init__(
        self, settings: PoolSettings, boot: ChildBoot, selector: selectors.BaseSelector
    ) -> None:
        memory_mb = settings.max_memory_per_child_mb
        recycles = memory_mb is not None or settings.max_tasks_per_child > 0
        self._guard = Guard()
        boot = replace(
            boot,
            samples_memory=memory_mb is not None,
            forks_singly=settings.processes,
            forks_ahead=_FORKS_AHEAD if recycles else 1,
            guard_mark=self._guard.mark,
        )
        self._settings = settings
        self._selector = selector
        self._launcher = make_launcher(settings.start_method, boot, selector)
        take_frames = (self._take_report, self._take_notice)
        self._children = Children(settings, self._launcher, selector, *take_frames)
        self._stuck = StuckWatch(self._children, see_child)
        self._orphans_checked_at = 0.0
        self.foreign_keys: list[tuple[selectors.SelectorKey, int]] = []
        # The children of another pool of this worker.
        self.other_pids: Callable[[], Iterable[int]] = tuple

    @property
    def asynchronous(self) -> None:
        """A worker without async children has no pool of them."""
        return None

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Start all children and wait until every one of them is ready.

        False when `should_stop`, called after every event, returned True before. Raises
        ``ChildBootError`` when the application does not load, a hook fails, or a fresh child is
        already larger than the memory limit. No process is left behind in either case.
        """
        try:
            _check_file_size_limit()
            self._guard.attend()
            self._launcher.start()
            self._children.refill()
            while len(self._children.idle) < self._settings.processes:
                events = self.collect(1.0)
                # First: a signal to the whole group may have ended children that were starting.
                if should_stop():
                    self.shutdown()
                    return False
                self.raise_boot_failure(events)
            self._check_baseline()
        except BaseException:
            self.shutdown()
            raise
        return True

    @property
    def launcher(self) -> Launcher:
        return self._launcher

    @property
    def idle_count(self) -> int:
        return len(self._children.idle)

    @property
    def idle_children(self) -> int:
        return len(self._children.idle)

    def pids(self) -> list[int]:
        # A copy in one step of the interpreter: the thread for metrics calls this as well.
        return [child.pid for child in list(self._children.children) if child.pid is not None]

    def next_idle_pids(self, count: int) -> list[int]:
        """The children that get the next `count` assignments, in that order."""
        if count <= 0:
            return []
        return [child.known_pid for child in self._children.idle[: -count - 1 : -1]]

    @property
    def busy(self) -> Mapping[str, ChildProcess]:
        """The children that run a task, by its id."""
        return self._children.busy

    @property
    def deaths(self) -> Mapping[str, int]:
        """How many children were killed or ended by themselves since the start, by cause."""
        return self._children.deaths

    @property
    def started(self) -> int:
        """How many children have become ready since the start."""
        return self._children.started

    def summaries(self) -> list[ChildSummary]:
        """Describe the children that have sent their pid."""
        known = (child for child in self._children.children if child.pid is not None)
        return [ChildSummary.of(child) for child in known]

    def dispatch(self, assignment: Assignment, pid: int | None = None) -> int:
        """Give `assignment` to the next idle child, or to the idle child `pid`; returns its pid.

        A child that has died unnoticed takes the assignment too: ``Died`` follows, with ``started``
        False when the child cannot have read it.
        """
        child = self._take_idle(pid)
        if assignment.timeout_ms is not None and not self._settings.has_time_limits:
            assignment = assignment._replace(timeout_ms=None)
        child.given += 1
        child.front = Held(child.given, assignment, 0.0)
        child.assignment = assignment
        child.assigned_at = now = time.monotonic()
        child.state = ChildState.BUSY
        self._children.busy[assignment.task_id] = child
        if assignment.timeout_ms is not None:
            self._children.deadlines[child] = now + assignment.timeout_ms / 1000
        child.send(protocol.encode_assignment(assignment, child.given), self._selector)
        return child.known_pid

    def dispatch_window(self, pid: int, given: Sequence[tuple[Assignment, float]]) -> int:
        """Give assignments to the child `pid`, which runs them in order behind those that it holds; return
        how many of them wait behind another one.

        Each comes with its patience: those behind it are taken back when it runs for longer.
        """
        for child in self._children.children:
            if child.pid != pid or child.permits is None:
                continue
            is_idle = child.state is ChildState.IDLE
            if is_idle:
                self._children.idle.remove(child)
            elif not child.window_room(1):
                break
            self._children.hold(child, given)
            return len(given) - is_idle
        raise NoIdleChildError(f"Child {pid} takes no more assignments; it has ended or is busy.")

    def places(self, depth: int) -> tuple[list[int], list[int]]:
        """The idle children that get the next assignments, and the children that get those behind: each
        may hold `depth` of them.
        """
        idle = self.next_idle_pids(self.idle_count)
        if depth <= 1 or not self._settings.has_windows:
            return idle, []
        rooms = [
            (child.known_pid, max(1, child.held_count), room)
            for child in (*reversed(self._children.idle), *self._children.busy.values())
            if (room := child.window_room(depth))
        ]
        return idle, fill_order(rooms)

    def window_space(self, depth: int) -> tuple[int, int]:
        """How many more tasks children could hold in windows of `depth`, and how many altogether."""
        free = room = 0
        for child in self._children.children:
            if most := child.window_room(depth):
                room += most
                free += most - child.held_count
        return free, room

    @property
    def held_tasks(self) -> Iterable[str]:
        """The tasks that children run, and those in line behind them."""
        return [*self._children.busy, *self._children.lined]

    def return_unstarted(self) -> None:
        """Take back everything that no child has begun; ``collect`` returns the events."""
        for child in set(self._children.lined.values()) | set(self._children.busy.values()):
            self._children.find_front(child)

    def stop_task(self, task_id: str, reason: str) -> bool:
        """Stop the task, and kill its child when the grace period is over.

        ``Stopped`` follows, ``TakenBack`` when the task had not begun, or ``Reported`` when it was faster.
        False when no child has it.
        """
        if task_id in self._children.lined and self._children.withdraw(task_id):
            return True
        child = self._children.busy.get(task_id)
        if child is None:
            return False
        if child.state is ChildState.BUSY:
            self._children.stop(child, reason)
        return True

    def collect(self, timeout_seconds: float | None) -> list[PoolEvent]:
        """Wait for events, at most `timeout_seconds`, and return them."""
        ended: list[ChildProcess] = []
        foreign: list[tuple[selectors.SelectorKey, int]] = []
        for key, mask in self._selector.select(self._bounded(timeout_seconds)):
            data = key.data
            if type(data) is ChildProcess:
                if mask & selectors.EVENT_WRITE and data.socket_is_open:
                    data.flush(self._selector)
                if mask & selectors.EVENT_READ and data.socket_is_open:
                    self._children.receive(data)
            elif type(data) is ExitWatch:
                ended.append(data.child)
            elif data is self._launcher:
                self._launcher.attend()
            else:
                foreign.append((key, mask))
        self.foreign_keys = foreign
        for child in ended:
            self._reap(child)
        self._look_after_children()
        events = self._children.events
        self._children.events = []
        return events

    def announce_stop(self) -> None:
        """Let the running tasks see that the worker is shutting down."""
        for child in self._children.children:
            child.page.request_stop()

    @property
    def unstored_progress(self) -> dict[str, ProgressReport]:
        """Reports of progress by task; the caller removes those that it has stored."""
        return self._children.progress

    def progress(self) -> Mapping[str, ProgressReport]:
        """``unstored_progress`` with the latest reports of the running tasks."""
        for child in self._children.busy.values():
            if child.page.raw_progress != child.seen_progress:
                self._children.note_progress(child)
        return self._children.progress

    def kill_task(self, task_id: str) -> None:
        """Kill the child that runs the task, if one does; ``collect`` returns the event."""
        if task_id in self._children.lined and self._children.withdraw(task_id):
            return
        if (child := self._children.busy.get(task_id)) is not None:
            self._children.find_front(child)
            if task_id in self._children.busy:
                self._children.kill(child)

    def kill_all(self) -> None:
        """Kill every child and its process group at once; ``collect`` returns the events."""
        for child in list(self._children.children):
            self._children.kill(child)

    def shutdown(self) -> list[PoolEvent]:
        """Have idle children exit, kill the others, and wait until no process is left.

        Returns the events, the assignments of killed children included.
        """
        self._children.is_closing = True
        self._launcher.close()
        for child in list(self._children.children):
            if child.state in (ChildState.IDLE, ChildState.SPARE):
                self._children.retire(child)
            elif child.state is not ChildState.EXITING:
                self._children.kill(child)
        events: list[PoolEvent] = []
        deadline = time.monotonic() + SHUTDOWN_SECONDS + self._settings.exit_seconds_of_hooks
        while self._children.children and time.monotonic() < deadline:
            events += self.collect(_EXIT_POLL_SECONDS)
        self._children.abandon_all()
        self._guard.close()
        os_process.reap_orphans({*self.other_pids()})
        return events

    def _take_idle(self, pid: int | None) -> ChildProcess:
        idle = self._children.idle
        if pid is None:
            if not idle:
                raise NoIdleChildError("No child is idle; look at idle_count before dispatching.")
            return idle.pop()
        for child in idle:
            if child.pid == pid:
                idle.remove(child)
                return child
        raise NoIdleChildError(f"Child {pid} is not idle; it has ended or is busy.")

    def next_deadline(self) -> float | None:
        """When ``collect`` must act even if nothing happens, on the monotonic clock."""
        children = self._children
        deadline = min(children.deadlines.values()) if children.deadlines else None
        if (look_at := self._stuck.next_look) is not None:
            deadline = look_at if deadline is None else min(deadline, look_at)
        if not children.needs_children or children.is_closing:
            return deadline
        launch_at = children.delay.not_before
        return launch_at if deadline is None else min(deadline, launch_at)

    def _bounded(self, timeout_seconds: float | None) -> float | None:
        if self._children.events:  # a stop has read reports or taken tasks back
            return 0.0
        deadline = self.next_deadline()
        now = time.monotonic()
        if self._children.unwatched:
            deadline = min(deadline or now + 1.0, now + _EXIT_POLL_SECONDS)
        if deadline is None:
            return timeout_seconds
        left = max(0.0, deadline - now)
        return left if timeout_seconds is None else min(left, timeout_seconds)

    def _take_report(self, child: ChildProcess, frame: bytes) -> None:
        report, rss_bytes, run_microseconds = protocol.decode_report(frame)
        assignment = child.assignment
        if assignment is None or report.task_id != assignment.task_id:
            raise ProtocolError("a report about a task it does not have")
        if report.generation != assignment.generation:
            raise ProtocolError("a report about another claim of its task")
        children = self._children
        children.events.append(Reported(report, child.known_pid, run_microseconds / 1e6))
        children.release(child)
        children.delay.reset(child.ready_at)
        child.tasks_done += 1
        child.rss_bytes = rss_bytes
        if child.line:
            self._take_next(child)
        elif child.state is ChildState.BUSY:
            if child.is_near_limit():
                children.recycle(child)
            else:
                children.make_idle(child)
        elif child.state is ChildState.STOPPING:
            # It finished before the stop frame reached it; the frame is still on its way.
            children.retire(child)

    def _take_next(self, child: ChildProcess) -> None:
        """The child goes on with the next assignment that it holds."""
        self._children.advance(child, time.monotonic())
        if child.state is ChildState.BUSY and child.is_near_limit():
            self._children.needs_children = True
            if child.must_retire():
                self._children.return_unstarted(child)

    def _take_notice(self, child: ChildProcess, frame: bytes) -> None:
        kind = frame[4]
        if kind == FrameKind.HELLO:
            self._children.note_hello(child, protocol.decode_numbers(frame)[0])
        elif kind == FrameKind.READY:
            self._children.note_ready(child, protocol.decode_numbers(frame)[1])
        elif kind == FrameKind.STOPPED:
            self._children.note_stopped(child)
        elif kind == FrameKind.TASK_UNSTARTED:
            self._children.note_unstarted(child, *protocol.decode_numbers(frame))
        elif kind == FrameKind.HOOK_FAILED:
            name, problem = protocol.decode_texts(frame, 2)
            child.failed_hook = (name, problem)
        elif kind == FrameKind.BOOT_FAILED:
            child.verdict = f"could not load the application: {protocol.decode_texts(frame, 1)[0]}"
        else:
            raise ProtocolError(f"kind {kind} does not come from a child")

    def _reap(self, child: ChildProcess) -> None:
        """A child has ended; handle the frames it sent before."""
        while self._children.drain(child):
            pass
        self._children.reap(child)

    def _look_after_children(self) -> None:
        children = self._children
        now = time.monotonic()
        for child in tuple(children.unwatched):
            if os_process.has_ended(child.known_pid):
                self._reap(child)
        if children.deadlines:
            children.enforce_deadlines(now)
        self._stuck.attend(now)
        if children.needs_children:
            children.refill()
        if now - self._orphans_checked_at > _ORPHAN_CHECK_SECONDS:
            self._orphans_checked_at = now
            if not children.is_closing:
                self._guard.attend()
            os_process.reap_orphans({*self.pids(), *self.other_pids()})

    def raise_boot_failure(self, events: Iterable[PoolEvent]) -> None:
        """Raise ``ChildBootError`` if the events or the launcher say that a child could not start."""
        if (failure := self._launcher.failure) is not None:
            raise ChildBootError(f"The application could not be loaded: {failure}")
        for event in events:
            if isinstance(event, HookFailed):
                raise ChildBootError(f"Child process start hook {event.name} {event.description}.")
            if isinstance(event, Died):
                raise ChildBootError(f"A child process did not start: {event.description}.")

    def _check_baseline(self) -> None:
        limit_mb = self._settings.max_memory_per_child_mb
        if limit_mb is None:
            return
        baseline_mb = max((one.rss_bytes for one in self._children.children), default=0) / MEGABYTE
        if limit_mb <= baseline_mb:
            raise ChildBootError(
                f"A fresh child process already uses {baseline_mb:.0f} MB, which is not below "
                f"max_memory_per_child_mb={limit_mb}; raise the limit."
            )
        if baseline_mb >= limit_mb * _BASELINE_WARNING:
            logger.warning(
                "A fresh child process uses %.0f MB of max_memory_per_child_mb=%d; "
                "children will be replaced often.",
                baseline_mb,
                limit_mb,
            )


def _check_file_size_limit() -> None:
    """The memory that a worker shares with a child counts as a file: without it no child ever starts."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < PAGE_BYTES:
        raise ChildBootError(
            f"The limit on the size of files (RLIMIT_FSIZE, `ulimit -f`) is {limit} bytes, and the memory "
            f"that a worker shares with each child needs {PAGE_BYTES}; raise the limit."
        )
