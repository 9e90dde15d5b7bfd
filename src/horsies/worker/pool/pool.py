"""The pool of child processes: gives assignments to children, reads their frames and collects the results.

When a child dies, only the tasks that it had started are lost, and the child is replaced. The pool does no
database I/O, and does all its work inside ``collect``, without threads or other timers.
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

from horsies.captured_log import CapturedLog
from horsies.logs import as_event
from horsies.words import megabytes
from horsies.worker import os_process, protocol
from horsies.worker.pool.assignments import Assignments
from horsies.worker.pool.child_process import BUSY, IDLE, ChildProcess, ChildState, ExitWatch, Held
from horsies.worker.pool.children import MEGABYTE, Children, FreePlaces, PoolSettings
from horsies.worker.pool.events import Died, HookFailed, PoolEvent, Reported, Stopped
from horsies.worker.pool.launcher import Guard, make_launcher
from horsies.worker.pool.memory import MemoryWatch, fresh_megabytes
from horsies.worker.pool.stops import Stops
from horsies.worker.pool.stuck import StuckWatch
from horsies.worker.protocol import Assignment, ChildBoot, FrameKind, ProgressReport, ProtocolError
from horsies.worker.sharing import PAGE_BYTES

logger = logging.getLogger("horsies.pool")

_ORPHAN_CHECK_SECONDS = 1.0
_EXIT_POLL_SECONDS = 0.05
_SHUTDOWN_SECONDS = 15.0
_BASELINE_WARNING = 0.8
_FORKS_AHEAD = 8
# The maximum number of consecutive reads from one child: enough to empty a full socket, but few enough that a
# child that keeps sending does not delay other children.
_DRAIN_READS = 16
_KIND_REPORT = int(FrameKind.REPORT)
_READABLE = selectors.EVENT_READ


class ChildBootError(Exception):
    """The children cannot start."""


class NoIdleChildError(Exception):
    """An assignment was dispatched although no child, or not the requested child, was idle."""


class ChildSummary(NamedTuple):
    """The state of one child: its resident memory, how many tasks it has run, when it became ready, and
    its current task.
    """

    pid: int
    rss_mb: float
    done: int
    since: datetime | None
    task_id: str | None
    # How many tasks an async child is running; None for other children.
    tasks: int | None = None

    @classmethod
    def of(cls, child: ChildProcess) -> ChildSummary:
        is_async = child.is_async
        clock, at, front = time.time() - time.monotonic(), child.ready_at, child.front
        return cls(
            child.known_pid,
            os_process.rss_megabytes([child.known_pid]),
            child.tasks_done,
            None if at is None else datetime.fromtimestamp(clock + at, UTC),
            None if is_async or front is None else front.assignment.task_id,
            len(child.held) if is_async else None,
        )


class ChildPool:
    """A fixed number of child processes, each with its own socket: children that run one task at a
    time, and async children with several slots for coroutines.

    `selector` may watch other descriptors as well; ``foreign_keys`` lists those of them that were ready
    at the last ``collect``.
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
            forks_singly=settings.processes + settings.async_children,
            forks_ahead=_FORKS_AHEAD if recycles else 1,
            guard_mark=self._guard.mark,
            log_limits=settings.log_limits,
        )
        self._settings = settings
        self._selector = selector
        self.launcher = make_launcher(settings.start_method, boot, selector)
        self._assignments = Assignments(selector, has_time_limits=settings.has_time_limits)
        self._children = Children(settings, self.launcher, selector, self._assignments)
        self._frames = FrameReader(self._children, self._assignments, selector)
        parts = (self._children, self._assignments, self._frames.drain, selector)
        self._stops = Stops(*parts, settings.stop_grace_seconds)
        self._stuck = StuckWatch(self._children)
        limits = settings.memory_limits
        self._memory = MemoryWatch(self._children, self._stops, limits) if limits else None
        self._orphans_checked_at = 0.0
        self.places = FreePlaces(self._children, self._assignments, settings)
        self.foreign_keys: list[tuple[selectors.SelectorKey, int]] = []
        # The assignments that run or run next, by task id.
        self.busy: Mapping[str, Held] = self._assignments.busy
        # The latest progress reports by task id; the caller removes the reports that it has stored.
        self.unstored_progress: dict[str, ProgressReport] = self._assignments.progress

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Start all children and wait until every one of them is ready.

        `should_stop` is called after every event; if it returns True before the children are ready, return
        False. Raises ``ChildBootError`` if the application does not load, a hook fails, or a fresh child is
        already larger than the memory limit of children or of a task. In all these cases, all processes are
        ended first.
        """
        wanted = self._settings.processes + self._settings.async_children
        try:
            _check_file_size_limit(max(kind.log_bytes for kind in self._settings.kinds()))
            self._guard.attend()
            self.launcher.start()
            self._children.refill()
            while sum(one.state is IDLE for one in self._children.all) < wanted:
                events = self.collect(1.0)
                # The stop is checked first, because a signal to the whole process group may have ended
                # children that were starting.
                if should_stop():
                    self.shutdown()
                    return False
                self._raise_boot_failure(events)
            if (limit_mb := self._settings.max_memory_per_child_mb) is not None:
                used_bytes = max((one.rss_bytes for one in self._children.all), default=0)
                _check_baseline(used_bytes / MEGABYTE, limit_mb)
            if self._memory is not None and (
                problem := self._memory.note_fresh(fresh_megabytes(self._children))
            ):
                raise ChildBootError(problem)
        except BaseException:
            self.shutdown()
            raise
        return True

    @property
    def idle_children(self) -> int:
        # The children are copied, atomically under the interpreter lock, because the metrics thread calls
        # this method too.
        return sum(one.state is IDLE for one in list(self._children.all))

    def pids(self) -> list[int]:
        return [child.pid for child in list(self._children.all) if child.pid is not None]

    @property
    def started(self) -> int:
        """How many children have become ready since the start."""
        return self._children.started

    @property
    def deaths(self) -> Mapping[str, int]:
        """How many children have been killed or have ended by themselves since the start, by cause."""
        return self._children.deaths

    def summaries(self) -> list[ChildSummary]:
        """Describe the children that have sent their pid."""
        return [ChildSummary.of(child) for child in self._children.all if child.pid is not None]

    def dispatch(
        self,
        assignment: Assignment,
        pid: int | None = None,
        companions: Sequence[Assignment] = (),
    ) -> int:
        """Give `assignment` to the next idle child, or to the child `pid`, and return the child's pid.

        The child runs it in one call with its `companions`, if it has any. If the child has died unnoticed
        and cannot have started the assignment, a ``TakenBack`` event follows.
        """
        idle = self._children.idle
        # A turn assigns its tasks in the order of ``FreePlaces``, so `pid` is nearly always the last idle
        # child.
        if idle and (pid is None or idle[-1].pid == pid):
            child = idle[-1]
        elif pid is not None:
            child = self._find(pid)
        else:
            raise NoIdleChildError("No child is idle; check places.idle_count before dispatching.")
        if child.state is not IDLE and (not child.is_async or not child.free_slots()):
            raise NoIdleChildError(f"Child {pid} has no free slot; it is busy or exiting.")
        if self._memory is not None and not self._memory.admits(child, assignment.task_name):
            self._children.retire(child)
            raise NoIdleChildError(f"Child {pid} is replaced; its memory is short.")
        if not child.is_async:
            idle.remove(child)
        if companions:
            held = self._assignments.give_batch(child, [assignment, *companions])
        else:
            held = self._assignments.give(child, assignment)
        if self._memory is not None:
            self._memory.note_start(held)
        return child.known_pid if pid is None else pid

    def dispatch_window(self, pid: int, given: Sequence[tuple[Assignment, float]]) -> int:
        """Give all of these assignments to the child `pid`, or none of them. Return how many of them wait
        behind another assignment.

        Each assignment has a patience in seconds: if it runs for longer, the assignments behind it are taken
        back. An async child runs all its assignments at the same time.
        """
        child = self._find(pid)
        if child.is_async and child.free_slots() >= len(given):
            for assignment, _ in given:
                self._assignments.give(child, assignment)
            return 0
        is_idle = child.state is IDLE and child.permits is not None
        if child.is_async or not (is_idle or child.window_room(1)):
            raise NoIdleChildError(
                f"Child {pid} takes no more assignments; it has ended or is busy."
            )
        if is_idle:
            self._children.idle.remove(child)
        self._assignments.give_window(child, given)
        return len(given) - is_idle

    def _find(self, pid: int) -> ChildProcess:
        for child in self._children.all:
            if child.pid == pid:
                return child
        raise NoIdleChildError(f"Child {pid} has ended.")

    @property
    def held_tasks(self) -> Iterable[str]:
        """Return the tasks that children run, and the tasks in line behind them."""
        return [*self.busy, *self._assignments.lined]

    def return_unstarted(self) -> None:
        """Take back all assignments that no child has started; ``collect`` returns the events."""
        for child in {
            one.child for one in (*self.busy.values(), *self._assignments.lined.values())
        }:
            self._stops.find_front(child)

    def stop_task(self, task_id: str, reason: str) -> bool:
        """Stop the task, and kill its child when the grace period is over.

        A ``Stopped`` event follows, or ``TakenBack`` if the task had not started, or ``Reported`` if it
        ended first. Return False if no child has the task.
        """
        if (held := self._assignments.lined.get(task_id)) is not None and self._stops.withdraw(
            held
        ):
            return True
        if (held := self.busy.get(task_id)) is None:
            return False
        self._stops.stop(held, reason)
        return True

    def kill_task(self, task_id: str) -> None:
        """Kill the child that runs the task, if there is one; ``collect`` returns the event."""
        if (held := self._assignments.lined.get(task_id)) is not None and self._stops.withdraw(
            held
        ):
            return
        if (held := self.busy.get(task_id)) is not None:
            self._stops.find_front(held.child)
            if self.busy.get(task_id) is held:
                self._children.kill(held.child)

    def drop_task(self, task_id: str, reason: str) -> None:
        """End a task that this worker no longer owns: cancel its coroutine, kill its child, or stop its batch
        when the worker owns no task of the batch any more.
        """
        held = self.busy.get(task_id)
        if held is not None and (held.child.is_async or held.is_batched):
            self._stops.stop(held, reason)
        else:
            self.kill_task(task_id)

    def collect(self, timeout_seconds: float | None) -> list[PoolEvent]:
        """Wait for events, at most `timeout_seconds`, and return them."""
        ended: list[ChildProcess] = []
        foreign: list[tuple[selectors.SelectorKey, int]] = []
        for key, mask in self._selector.select(self._bounded(timeout_seconds)):
            data = key.data
            if type(data) is ChildProcess:
                if mask != _READABLE and data.socket_is_open:
                    data.flush(self._selector)
                if mask & _READABLE and data.socket_is_open:
                    self._frames.receive(data)
            elif type(data) is ExitWatch:
                ended.append(data.child)
            elif data is self.launcher:
                self.launcher.attend()
            else:
                foreign.append((key, mask))
        self.foreign_keys = foreign
        self._look_after_children(ended)
        events = self._assignments.events
        self._assignments.events = []
        return events

    def announce_stop(self) -> None:
        """Set the flag that shows running tasks that the worker is shutting down."""
        for child in self._children.all:
            child.page.request_stop()

    def progress(self) -> Mapping[str, ProgressReport]:
        """Return ``unstored_progress`` with the latest reports of the running tasks."""
        for held in self.busy.values():
            if held.child.page.raw_progress != held.child.seen_progress:
                self._assignments.note_progress(held)
        return self.unstored_progress

    def kill_all(self) -> None:
        """Kill every child and its process group immediately; ``collect`` returns the events."""
        for child in list(self._children.all):
            self._children.kill(child)

    def shutdown(self) -> list[PoolEvent]:
        """Make idle children exit, kill all other children, and wait until no process is left.

        Returns the events, including the assignments of killed children.
        """
        self._children.is_closing = True
        self.launcher.close()
        for child in list(self._children.all):
            if child.state in (IDLE, ChildState.SPARE):
                self._children.retire(child)
            elif child.state is not ChildState.EXITING:
                self._children.kill(child)
        events: list[PoolEvent] = []
        deadline = time.monotonic() + _SHUTDOWN_SECONDS + self._settings.exit_seconds_of_hooks
        while self._children.all and time.monotonic() < deadline:
            events += self.collect(_EXIT_POLL_SECONDS)
        self._children.abandon_all()
        self._guard.close()
        os_process.reap_orphans(set())
        return events

    def next_deadline(self) -> float | None:
        """Return when ``collect`` must act even without an event, on the monotonic clock."""
        children, deadlines = self._children, self._assignments.deadlines
        deadline = deadlines.next_at if deadlines.targets else None
        if (look_at := self._stuck.next_look) is not None:
            deadline = look_at if deadline is None else min(deadline, look_at)
        if self._memory is not None and (look_at := self._memory.next_look) is not None:
            deadline = look_at if deadline is None else min(deadline, look_at)
        if children.needs_children and not children.is_closing:
            launch_at = children.delay.not_before
            deadline = launch_at if deadline is None else min(deadline, launch_at)
        if children.unwatched:
            poll_at = time.monotonic() + _EXIT_POLL_SECONDS
            deadline = poll_at if deadline is None else min(deadline, poll_at)
        return deadline

    def _bounded(self, timeout_seconds: float | None) -> float | None:
        if self._assignments.events:  # a stop may have read reports or taken tasks back
            return 0.0
        if (deadline := self.next_deadline()) is None:
            return timeout_seconds
        left = max(0.0, deadline - time.monotonic())
        return left if timeout_seconds is None else min(left, timeout_seconds)

    def _look_after_children(self, ended: list[ChildProcess]) -> None:
        children = self._children
        now = time.monotonic()
        if children.unwatched:
            unwatched = tuple(children.unwatched)
            ended += [one for one in unwatched if os_process.has_ended(one.known_pid)]
        for child in ended:
            # First read the frames that the child sent before it ended.
            while self._frames.drain(child):
                pass
            children.reap(child)
        if self._assignments.deadlines.targets:
            self._enforce_deadlines(now)
        if now >= self._stuck.look_at:
            self._stuck.attend(now)
        if self._memory is not None:
            self._memory.attend(now)
        if children.needs_children:
            children.refill()
        if now - self._orphans_checked_at > _ORPHAN_CHECK_SECONDS:
            self._orphans_checked_at = now
            if not children.is_closing:
                self._guard.attend()
            os_process.reap_orphans({*self.pids()})

    def _enforce_deadlines(self, now: float) -> None:
        while (target := self._assignments.deadlines.pop_due(now)) is not None:
            held = target if isinstance(target, Held) else target.front
            if held is not None and held.child.state is BUSY:
                self._stops.enforce(held, now)
            elif not isinstance(target, Held):
                self._children.enforce_deadline(target)

    def _raise_boot_failure(self, events: Iterable[PoolEvent]) -> None:
        """Raise ``ChildBootError`` if the events or the launcher show that a child could not start."""
        if (failure := self.launcher.failure) is not None:
            raise ChildBootError(f"The application could not be loaded: {failure}")
        for event in events:
            if isinstance(event, HookFailed):
                raise ChildBootError(f"Child process start hook {event.name} {event.description}.")
            if isinstance(event, Died):
                raise ChildBootError(f"A child process did not start: {event.description}.")


def _check_baseline(baseline_mb: float, limit_mb: int) -> None:
    """Reject a memory limit that a fresh child exceeds, and warn about a limit that it almost reaches."""
    if limit_mb <= baseline_mb:
        raise ChildBootError(
            f"A fresh child process already uses {megabytes(baseline_mb)}, which is not below "
            f"max_memory_per_child_mb={limit_mb}; raise the limit."
        )
    if baseline_mb >= limit_mb * _BASELINE_WARNING:
        logger.warning(
            "A fresh child process uses %s of max_memory_per_child_mb=%d; "
            "children will be replaced often.",
            megabytes(baseline_mb),
            limit_mb,
        )


def _check_file_size_limit(log_bytes: int) -> None:
    """Check the limit on file sizes. The memory that a worker shares with a child counts as a file, so no
    child could start if the limit is too low.
    """
    needed = PAGE_BYTES + log_bytes
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ChildBootError(
            f"The limit on the size of files (RLIMIT_FSIZE, `ulimit -f`) is {limit} bytes, and the memory "
            f"that a worker shares with each child needs {needed}; raise the limit."
        )


logger = logging.getLogger("horsies.pool")


class FrameReader:
    """Reads the children's sockets and acts on their frames."""

    __slots__ = ("_assignments", "_children", "_selector")

    def __init__(
        self, children: Children, assignments: Assignments, selector: selectors.BaseSelector
    ) -> None:
        self._children = children
        self._assignments = assignments
        self._selector = selector

    def receive(self, child: ChildProcess) -> bool:
        """Read once from a child and handle the frames; return False if there was nothing to read."""
        data = child.receive()
        if data is None:
            return False
        if not data:
            self._children.note_closed(child)
            return False
        try:
            for frame in child.frames.feed(data):
                (self._take_report if frame[4] == _KIND_REPORT else self._take_notice)(child, frame)
            if child.frames.has_foreign_bytes and not child.is_tainted:
                act = "wrote to the socket between the child and its worker"
                self._assignments.taint(child, act)
                self._children.release(child)
        except ProtocolError as error:
            child.verdict = f"killed because it sent a malformed frame ({error})"
            child.close_socket(self._selector)
            self._children.kill(child)
            return False
        return True

    def drain(self, child: ChildProcess) -> bool:
        """Handle the frames that a child has sent; return True if the child sends faster than its frames are
        read.
        """
        return all(child.socket_is_open and self.receive(child) for _ in range(_DRAIN_READS))

    def _take_report(self, child: ChildProcess, frame: bytes) -> None:
        report, rss_bytes, run_microseconds = protocol.decode_report(frame)
        held = child.held.get(report.task_id)
        if held is None or not held.assigned_at:  # a queued assignment cannot have begun
            raise ProtocolError("a report about a task that the child does not have")
        if report.generation != held.assignment.generation:
            raise ProtocolError("a report about another claim of the child's task")
        self._assignments.events.append(Reported(report, child.known_pid, run_microseconds / 1e6))
        child.rss_bytes = rss_bytes
        self._end(held)

    def _end(self, held: Held) -> None:
        child = held.child
        child.tasks_done += 1
        self._assignments.remove(held)
        children = self._children
        if children.delay.deaths:
            children.delay.reset(child.ready_at)
        if child.permits is not None and child.held and child.must_retire():
            self._assignments.return_tasks(self._assignments.take_back(child))
        if held.stop_reason is not None and not child.is_async:
            # A stopped child exits. If its task ended before the stop, the stop frame is still in flight.
            if child.state is BUSY:
                children.retire(child)
        else:
            children.release(child)

    def _take_notice(self, child: ChildProcess, frame: bytes) -> None:
        children = self._children
        match frame[4]:
            case FrameKind.HELLO:
                children.note_hello(child, protocol.decode_numbers(frame)[0])
            case FrameKind.READY:
                children.note_ready(child, protocol.decode_numbers(frame)[1])
            case FrameKind.TASK_STOPPED:
                self._take_stopped(child, *protocol.decode_stopped(frame))
            case FrameKind.TASK_UNSTARTED:
                self._assignments.note_unstarted(child, *protocol.decode_numbers(frame))
                children.release(child)
            case FrameKind.PROGRESS:
                self._take_progress(child, frame)
            case FrameKind.LOOP_BLOCKED:
                _log_blockage(child, *protocol.decode_texts(frame, 5))
            case FrameKind.HOOK_FAILED:
                name, problem = protocol.decode_texts(frame, 2)
                child.failed_hook = (name, problem)
            case FrameKind.BOOT_FAILED:
                problem = protocol.decode_texts(frame, 1)[0]
                child.verdict = f"could not load the application: {problem}"
            case kind:
                raise ProtocolError(f"kind {kind} does not come from a child")

    def _take_stopped(self, child: ChildProcess, task_id: str, log: CapturedLog | None) -> None:
        held = child.held.get(task_id)
        if held is None or held.stop_reason is None:
            raise ProtocolError("stopped out of turn")
        seconds = time.monotonic() - held.assigned_at
        stopped = Stopped(
            held.assignment, child.known_pid, False, held.stop_reason, seconds, log=log
        )
        self._assignments.events.append(stopped)
        self._end(held)

    def _take_progress(self, child: ChildProcess, frame: bytes) -> None:
        report = protocol.decode_progress(frame)
        held = child.held.get(report.task_id)
        if held is not None and held.assignment.generation == report.generation:
            self._assignments.progress[report.task_id] = report


def _log_blockage(
    child: ChildProcess, task_id: str, task_name: str, seconds: str, line: str, others: str
) -> None:
    event = as_event(
        "loop_blocked", task_id=task_id or None, task_name=task_name or None, child_pid=child.pid
    )
    logger.warning(
        "%s has blocked the event loop of async child %s for %s s, and with it %s other task(s), at %s; "
        "await instead, or use asyncio.to_thread",
        f"task {task_name!r}" if task_name else "code outside of a single task",
        child.pid,
        seconds,
        others,
        line,
        extra=event,
    )
