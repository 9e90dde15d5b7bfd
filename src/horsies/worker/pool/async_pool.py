"""The async children of a worker: each runs several coroutines at a time, up to its slots.

``Children`` starts, watches and reaps the processes and takes them for idle; the tasks in them are kept
here. A child that dies costs all tasks that had begun in it; the others come back. One that has done its
share of tasks, or has grown too large, takes no more, is replaced, and exits after its last task.
"""

from __future__ import annotations

import heapq
import logging
import selectors
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from horsies.logs import as_event
from horsies.worker import os_process, protocol
from horsies.worker.pool.assignments import Died, PoolEvent, Reported, Stopped, TakenBack
from horsies.worker.pool.child_process import ChildProcess, ChildState, ExitWatch, RecycleLimits
from horsies.worker.pool.children import MEGABYTE, Children, PoolSettings
from horsies.worker.pool.launcher import Launcher
from horsies.worker.pool.stuck import STUCK_SECONDS, Sign, StuckWatch
from horsies.worker.protocol import Assignment, FrameKind, ProgressReport, ProtocolError

logger = logging.getLogger("horsies.pool")

_EXIT_POLL_SECONDS = 0.05
# How many ended tasks may be left among the deadlines before they are swept.
_ENDED_MAX = 1_000


@dataclass(slots=True, eq=False)
class AsyncTask:
    """One task in an async child."""

    assignment: Assignment
    child: AsyncChild
    assigned_at: float
    # The place of the assignment among those of its child, which begins them in this order.
    number: int
    stop_reason: str | None = None
    # The end of the grace period of a task that was stopped.
    killed_at: float = 0.0

    @property
    def pid(self) -> int | None:
        return self.child.process.pid


@dataclass(slots=True, eq=False)
class AsyncChild:
    """The tasks of one child, and the number of tasks after which it takes no more (0: any number)."""

    process: ChildProcess
    task_limit: int
    tasks: dict[str, AsyncTask] = field(default_factory=dict)
    stopping: int = 0
    # How many assignments it was given.
    given: int = 0
    # Whether it has not begun its latest tasks for seconds: its event loop is blocked or receives nothing.
    is_deaf: bool = False

    def free_places(self, slots: int) -> int:
        """How many tasks it may take; none while it stops one, which may end in its death."""
        process = self.process
        if process.state is not ChildState.IDLE or process.is_draining or self.stopping:
            return 0
        if process.is_tainted or self.is_deaf:
            return 0
        free = slots - len(self.tasks)
        if self.task_limit:
            free = min(free, self.task_limit - process.tasks_done - len(self.tasks))
        return max(0, free)


class AsyncPool:
    """A fixed number of async children, with a selector of their own inside the worker's."""

    def __init__(
        self,
        settings: PoolSettings,
        slots: int,
        launcher: Launcher,
        selector: selectors.BaseSelector,
        progress: dict[str, ProgressReport],
    ) -> None:
        memory_mb = settings.max_memory_per_child_mb or 0
        # Every slot has its share: a child of 250 slots is not replaced after 100 tasks.
        self._limits = RecycleLimits(settings.max_tasks_per_child * slots, memory_mb * MEGABYTE)
        self._settings = replace(
            settings, max_tasks_per_child=0, max_memory_per_child_mb=None, has_windows=False
        )
        self._slots = slots
        self._outer_selector = selector
        self._selector = selectors.DefaultSelector()
        selector.register(self._selector, selectors.EVENT_READ, self)
        take_frames = (self._take_report, self._take_notice)
        self._children = Children(self._settings, launcher, self._selector, *take_frames)
        # By the pid of a child that has been ready.
        self._by_pid: dict[int, AsyncChild] = {}
        self._stuck = StuckWatch(self._children, partial(_see_child, self._by_pid))
        self._progress = progress
        self._events: list[PoolEvent] = []
        # When to stop a task, or to kill the child of one that does not stop; ended tasks stay inside.
        self._deadlines: list[tuple[float, int, AsyncTask]] = []
        self._deadlines_made = 0
        self.busy: dict[str, AsyncTask] = {}

    @property
    def children(self) -> Children:
        return self._children

    @property
    def ready_count(self) -> int:
        return len(self._children.idle)

    @property
    def idle_count(self) -> int:
        """How many children are ready and have no task."""
        return sum(not child.tasks for child in list(self._by_pid.values()))

    @property
    def places(self) -> int:
        """How many tasks may be dispatched now."""
        return sum(child.free_places(self._slots) for child in self._by_pid.values())

    def processes(self) -> list[tuple[ChildProcess, int]]:
        """Every child that has sent its pid, with the number of its tasks."""
        found = [one for one in list(self._children.children) if one.pid is not None]
        known = self._by_pid
        return [(one, len(known[one.pid].tasks) if one.pid in known else 0) for one in found]

    def next_pids(self, count: int) -> list[int]:
        """The children of the next `count` assignments: the least loaded one first, over and over."""
        free = {pid: child.free_places(self._slots) for pid, child in self._by_pid.items()}
        pids: list[int] = []
        while free and len(pids) < count:
            pid = max(free, key=free.__getitem__)
            if not free[pid]:
                break
            free[pid] -= 1
            pids.append(pid)
        return pids

    def free_places(self, pid: int) -> int | None:
        """How many tasks the child `pid` may take; None for other processes."""
        child = self._by_pid.get(pid)
        return None if child is None else child.free_places(self._slots)

    def dispatch(self, assignment: Assignment, pid: int) -> None:
        """Give `assignment` to the child `pid`, which has a place for it."""
        child = self._by_pid[pid]
        child.given += 1
        task = AsyncTask(assignment, child, time.monotonic(), child.given)
        child.tasks[assignment.task_id] = self.busy[assignment.task_id] = task
        if assignment.timeout_ms is not None:
            self._set_deadline(task, task.assigned_at + assignment.timeout_ms / 1000)
        child.process.send(protocol.encode_assignment(assignment, task.number), self._selector)

    def stop_task(self, task_id: str, reason: str) -> bool:
        """Cancel the coroutine of a task, and kill its child when the grace period is over."""
        task = self.busy.get(task_id)
        if task is None:
            return False
        if task.stop_reason is None:
            self._stop(task, reason)
        return True

    def _stop(self, task: AsyncTask, reason: str) -> None:
        task.stop_reason = reason
        task.child.stopping += 1
        texts = (task.assignment.task_id, str(task.assignment.generation))
        frame = protocol.encode_texts(FrameKind.STOP_TASK, *texts)
        task.child.process.send(frame, self._selector)
        task.killed_at = time.monotonic() + self._settings.stop_grace_seconds
        self._set_deadline(task, task.killed_at)

    def kill_task(self, task_id: str) -> None:
        """Kill the child that runs the task, and with it the other tasks there."""
        if (task := self.busy.get(task_id)) is not None:
            self._children.kill(task.child.process)

    def announce_stop(self) -> None:
        for process in self._children.children:
            process.page.request_stop()

    def next_deadline(self) -> float | None:
        """When ``collect`` must act even if nothing happens, on the monotonic clock."""
        children = self._children
        times = list(children.deadlines.values())
        if self._deadlines:
            times.append(self._deadlines[0][0])
        if children.needs_children and not children.is_closing:
            times.append(children.delay.not_before)
        if children.unwatched:
            times.append(time.monotonic() + _EXIT_POLL_SECONDS)
        if (look_at := self._stuck.next_look) is not None:
            times.append(look_at)
        return min(times, default=None)

    def collect(self) -> list[PoolEvent]:
        """Handle everything that has happened, without waiting, and return the events."""
        ended: list[ChildProcess] = []
        for key, mask in self._selector.select(0):
            data = key.data
            if type(data) is ExitWatch:
                ended.append(data.child)
                continue
            if mask & selectors.EVENT_WRITE and data.socket_is_open:
                data.flush(self._selector)
            if mask & selectors.EVENT_READ and data.socket_is_open:
                self._children.receive(data)
        children = self._children
        unwatched = tuple(children.unwatched)
        ended += [one for one in unwatched if os_process.has_ended(one.known_pid)]
        for process in ended:
            self._reap(process)
        self._enforce_deadlines(now := time.monotonic())
        self._stuck.attend(now)
        for child in self._by_pid.values():
            child.is_deaf = self._stuck.is_suspected(child.process)
        if children.needs_children:
            children.refill()
        events = [*self._events, *children.events]
        self._events, children.events = [], []
        return events

    def begin_shutdown(self) -> None:
        """Have children without tasks exit, and kill the others."""
        self._children.is_closing = True
        self._outer_selector.unregister(self._selector)
        for process in list(self._children.children):
            child = self._by_pid.get(process.pid or 0)
            if process.state is ChildState.IDLE and not (child and child.tasks):
                self._children.retire(process)
            elif process.state is not ChildState.EXITING:
                self._children.kill(process)

    def end_shutdown(self, deadline: float) -> list[PoolEvent]:
        """Wait until no process is left; returns the events."""
        events: list[PoolEvent] = []
        while self._children.children and time.monotonic() < deadline:
            if not (found := self.collect()):
                self._selector.select(_EXIT_POLL_SECONDS)
            events += found
        self._children.abandon_all()
        self._selector.close()
        return events

    def _set_deadline(self, task: AsyncTask, at: float) -> None:
        if len(self._deadlines) > 2 * len(self.busy) + _ENDED_MAX:
            self._deadlines = [one for one in self._deadlines if self._is_running(one[2])]
            heapq.heapify(self._deadlines)
        self._deadlines_made += 1
        heapq.heappush(self._deadlines, (at, self._deadlines_made, task))

    def _is_running(self, task: AsyncTask) -> bool:
        # Not by `busy`: a task that another worker recovered may run in two children, as two attempts.
        return task.child.tasks.get(task.assignment.task_id) is task

    def _enforce_deadlines(self, now: float) -> None:
        """Stop overdue tasks; kill the children of tasks that were stopped and go on."""
        if self._children.deadlines:
            self._children.enforce_deadlines(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            task = heapq.heappop(self._deadlines)[2]
            if not self._is_running(task):
                continue
            if task.stop_reason is None:
                self._stop(task, "timeout")
                continue
            if now < task.killed_at:
                continue  # its time limit passed after a stop for another reason
            process, seconds = task.child.process, self._settings.stop_grace_seconds
            process.verdict = process.verdict or (
                f"killed because task {task.assignment.task_name!r} in it did not end within "
                f"{seconds:g} s after it was stopped"
            )
            self._children.kill(process)

    def _take_report(self, process: ChildProcess, frame: bytes) -> None:
        report, rss_bytes, run_microseconds = protocol.decode_report(frame)
        self._end(process, report.task_id, report.generation)
        self._events.append(Reported(report, process.known_pid, run_microseconds / 1e6))
        process.rss_bytes = rss_bytes
        self._after_end(process)

    def _take_notice(self, process: ChildProcess, frame: bytes) -> None:
        children = self._children
        match frame[4]:
            case FrameKind.HELLO:
                children.note_hello(process, protocol.decode_numbers(frame)[0])
            case FrameKind.READY:
                children.note_ready(process, protocol.decode_numbers(frame)[1])
                self._note_ready(process)
            case FrameKind.TASK_STOPPED:
                task_id, _generation = protocol.decode_texts(frame, 2)
                self._take_stopped(process, task_id)
            case FrameKind.TASK_UNSTARTED:
                self._take_unstarted(process, *protocol.decode_numbers(frame))
            case FrameKind.PROGRESS:
                self._take_progress(process, protocol.decode_progress(frame))
            case FrameKind.LOOP_BLOCKED:
                _log_blockage(process, *protocol.decode_texts(frame, 4))
            case FrameKind.HOOK_FAILED:
                name, problem = protocol.decode_texts(frame, 2)
                process.failed_hook = (name, problem)
            case FrameKind.BOOT_FAILED:
                problem = protocol.decode_texts(frame, 1)[0]
                process.verdict = f"could not load the application: {problem}"
            case kind:
                raise ProtocolError(f"kind {kind} does not come from an async child")

    def _note_ready(self, process: ChildProcess) -> None:
        if process.state is not ChildState.IDLE:
            return
        process.send(protocol.encode_numbers(FrameKind.SHARE), self._selector)
        child = AsyncChild(process, self._limits.early_task_limit())
        self._by_pid[process.known_pid] = child

    def _take_unstarted(self, process: ChildProcess, first: int, last: int) -> None:
        """Assignments were stopped before they began, or their messages never arrived."""
        if (child := self._by_pid.get(process.known_pid)) is None:
            raise ProtocolError("unstarted out of turn")
        missed = [task for task in child.tasks.values() if first <= task.number <= last]
        for task in missed:
            self._forget(task)
        if any(task.stop_reason is None for task in missed):
            self._children.taint(process, "read the messages of other tasks")
        if missed:
            self._events.append(TakenBack([task.assignment for task in missed]))
        self._after_end(process)

    def _take_stopped(self, process: ChildProcess, task_id: str) -> None:
        child = self._by_pid.get(process.known_pid)
        task = None if child is None else child.tasks.get(task_id)
        if task is None or task.stop_reason is None:
            raise ProtocolError("stopped out of turn")
        self._end(process, task_id, task.assignment.generation)
        assignment, seconds = task.assignment, time.monotonic() - task.assigned_at
        self._events.append(
            Stopped(assignment, process.known_pid, False, task.stop_reason, seconds)
        )
        self._after_end(process)

    def _take_progress(self, process: ChildProcess, report: ProgressReport) -> None:
        task = self.busy.get(report.task_id)
        if (
            task is not None
            and task.child.process is process
            and task.assignment.generation == report.generation
        ):
            self._progress[report.task_id] = report

    def _end(self, process: ChildProcess, task_id: str, generation: int) -> None:
        child = self._by_pid.get(process.known_pid)
        task = None if child is None else child.tasks.get(task_id)
        if child is None or task is None or task.assignment.generation != generation:
            raise ProtocolError("a report about a task it does not have")
        self._forget(task)
        process.tasks_done += 1
        self._children.delay.reset(process.ready_at)

    def _forget(self, task: AsyncTask) -> None:
        task_id = task.assignment.task_id
        del task.child.tasks[task_id]
        if self.busy.get(task_id) is task:
            del self.busy[task_id]
        if task.stop_reason is not None:
            task.child.stopping -= 1

    def _after_end(self, process: ChildProcess) -> None:
        """Replace a child that is at its limit; let it exit when its last task has ended."""
        child = self._by_pid[process.known_pid]
        memory, tasks = self._limits.max_rss_bytes, child.task_limit
        if not process.is_draining:
            is_spent = 0 < tasks <= process.tasks_done + len(child.tasks) or process.is_tainted
            process.is_draining = is_spent or 0 < memory <= process.rss_bytes
            self._children.needs_children |= process.is_draining
        if process.is_draining and not child.tasks and process.state is ChildState.IDLE:
            self._children.retire(process)

    def _reap(self, process: ChildProcess) -> None:
        """A child has ended; handle the frames it sent before, then the tasks that it had."""
        children = self._children
        while children.drain(process):
            pass
        children.reap(process)
        if process in children.children or process.pid is None:
            return
        child = self._by_pid.pop(process.pid, None)
        if child is None or not child.tasks:
            return
        # Instead of the death of a child that seemed idle, the deaths of its tasks.
        deaths = [
            one for one in children.events if isinstance(one, Died) and one.pid == process.pid
        ]
        children.events = [one for one in children.events if one not in deaths]
        description = deaths[0].description if deaths else process.verdict or "ended"
        if process.page.begun:
            children.delay.reset()  # it died of one of its tasks
        self._events += self._ends_by_death(child, description)

    def _ends_by_death(self, child: AsyncChild, description: str) -> Iterator[PoolEvent]:
        process, now = child.process, time.monotonic()
        last_begun = process.page.begun
        unstarted: list[Assignment] = []
        for task in list(child.tasks.values()):
            self._forget(task)
            seconds = now - task.assigned_at
            if task.number > last_begun:
                unstarted.append(task.assignment)
            elif task.stop_reason is not None:
                yield Stopped(
                    task.assignment,
                    process.known_pid,
                    process.was_killed,
                    task.stop_reason,
                    seconds,
                )
            else:
                yield Died(task.assignment, process.known_pid, description, True, seconds)
        if unstarted:
            yield TakenBack(unstarted)


def _see_child(known: Mapping[int, AsyncChild], process: ChildProcess) -> Sign | None:
    """What is wrong with an async child, if anything.

    One that does not begin its latest tasks is killed only when it runs no others: a coroutine may be
    blocking its event loop.
    """
    child = known.get(process.pid or 0)
    if child is None:
        return None
    if (size := process.frames.pending_bytes) > 0:
        problem = f"sent a malformed frame (incomplete, and nothing more for {STUCK_SECONDS:g} s)"
        return ("frame", process.tasks_done, size), problem
    begun = process.page.begun
    waiting = sum(task.number > begun for task in child.tasks.values())
    if not waiting:
        return None
    is_idle = waiting == len(child.tasks)
    problem = f"did not begin a task within {STUCK_SECONDS:g} s" if is_idle else ""
    return ("begin", begun, is_idle), problem


def _log_blockage(
    process: ChildProcess, task_name: str, seconds: str, line: str, others: str
) -> None:
    logger.warning(
        "%s has blocked the event loop of async child %s for %s s, and with it %s other task(s), at %s; "
        "await instead, or use asyncio.to_thread",
        f"task {task_name!r}" if task_name else "code outside of a single task",
        process.pid,
        seconds,
        others,
        line,
        extra=as_event("loop_blocked", task_name=task_name or None, child_pid=process.pid),
    )
