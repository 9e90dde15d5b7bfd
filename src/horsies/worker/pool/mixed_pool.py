"""The children of a worker with async children: ordinary ones beside them, as one pool."""

from __future__ import annotations

import selectors
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from horsies.worker.pool.assignments import PoolEvent
from horsies.worker.pool.async_pool import AsyncPool, AsyncTask
from horsies.worker.pool.child_process import ChildProcess
from horsies.worker.pool.children import PoolSettings
from horsies.worker.pool.pool import SHUTDOWN_SECONDS, ChildPool, ChildSummary, NoIdleChildError
from horsies.worker.protocol import Assignment, ChildBoot, ProgressReport


class MixedPool:
    """A ``ChildPool`` and an ``AsyncPool`` of one worker; `settings.processes` may be 0."""

    def __init__(
        self,
        settings: PoolSettings,
        boot: ChildBoot,
        selector: selectors.BaseSelector,
        async_children: int,
        async_slots: int,
    ) -> None:
        self._settings = settings
        self._async_children = async_children
        self._ordinary = ordinary = ChildPool(settings, boot, selector)
        self._shared = AsyncPool(
            replace(settings, processes=async_children),
            async_slots,
            ordinary.launcher,
            selector,
            ordinary.unstored_progress,
        )
        ordinary.other_pids = self._async_pids

    @property
    def asynchronous(self) -> AsyncPool:
        """The async children, which tasks of ``async def`` functions are claimed for."""
        return self._shared

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Start all children and wait for them; see ``ChildPool.start``."""
        if not self._ordinary.start(should_stop):
            self._shared.begin_shutdown()
            self._end_async()
            return False
        try:
            self._shared.children.refill()
            while self._shared.ready_count < self._async_children:
                events = self.collect(1.0)
                if should_stop():
                    self.shutdown()
                    return False
                self._ordinary.raise_boot_failure(events)
        except BaseException:
            self.shutdown()
            raise
        return True

    @property
    def idle_count(self) -> int:
        """How many ordinary children are idle."""
        return self._ordinary.idle_count

    @property
    def idle_children(self) -> int:
        return self._ordinary.idle_count + self._shared.idle_count

    def _async_pids(self) -> list[int]:
        return [process.known_pid for process, _ in self._shared.processes()]

    def pids(self) -> list[int]:
        return [*self._ordinary.pids(), *self._async_pids()]

    @property
    def busy(self) -> Mapping[str, ChildProcess | AsyncTask]:
        """The tasks in children, by their ids."""
        # Typed as one mapping of both; neither is written through it.
        return ChainMap(self._shared.busy, self._ordinary.busy)  # type: ignore[arg-type]

    @property
    def deaths(self) -> Mapping[str, int]:
        return Counter(self._ordinary.deaths) + self._shared.children.deaths

    @property
    def started(self) -> int:
        return self._ordinary.started + self._shared.children.started

    def summaries(self) -> list[ChildSummary]:
        found = self._ordinary.summaries()
        return found + [
            ChildSummary.of(process, tasks) for process, tasks in self._shared.processes()
        ]

    def dispatch(self, assignment: Assignment, pid: int | None = None) -> int:
        """Give `assignment` to the child `pid`, or to an ordinary one."""
        if pid is None or self._shared.free_places(pid) is None:
            return self._ordinary.dispatch(assignment, pid)
        self._dispatch_async(pid, [assignment])
        return pid

    def dispatch_window(self, pid: int, given: Sequence[tuple[Assignment, float]]) -> int:
        """Give all of these assignments to the child `pid`, or none; an async child runs them at once."""
        if self._shared.free_places(pid) is None:
            return self._ordinary.dispatch_window(pid, given)
        self._dispatch_async(pid, [assignment for assignment, _ in given])
        return 0

    def _dispatch_async(self, pid: int, assignments: Sequence[Assignment]) -> None:
        if (self._shared.free_places(pid) or 0) < len(assignments):
            raise NoIdleChildError(
                f"Async child {pid} has no free slot; it has ended or is leaving."
            )
        for assignment in assignments:
            self._shared.dispatch(assignment, pid)

    def places(self, depth: int) -> tuple[list[int], list[int]]:
        return self._ordinary.places(depth)

    def window_space(self, depth: int) -> tuple[int, int]:
        return self._ordinary.window_space(depth)

    @property
    def held_tasks(self) -> Iterable[str]:
        return [*self._ordinary.held_tasks, *self._shared.busy]

    def return_unstarted(self) -> None:
        self._ordinary.return_unstarted()

    def stop_task(self, task_id: str, reason: str) -> bool:
        return self._shared.stop_task(task_id, reason) or self._ordinary.stop_task(task_id, reason)

    def collect(self, timeout_seconds: float | None) -> list[PoolEvent]:
        """Wait for events of any child, at most `timeout_seconds`, and return them."""
        if (deadline := self._shared.next_deadline()) is not None:
            left = max(0.0, deadline - time.monotonic())
            timeout_seconds = left if timeout_seconds is None else min(left, timeout_seconds)
        return [*self._ordinary.collect(timeout_seconds), *self._shared.collect()]

    @property
    def foreign_keys(self) -> list[tuple[selectors.SelectorKey, int]]:
        return [one for one in self._ordinary.foreign_keys if one[0].data is not self._shared]

    def next_deadline(self) -> float | None:
        times = (self._ordinary.next_deadline(), self._shared.next_deadline())
        return min((one for one in times if one is not None), default=None)

    def announce_stop(self) -> None:
        self._ordinary.announce_stop()
        self._shared.announce_stop()

    @property
    def unstored_progress(self) -> dict[str, ProgressReport]:
        return self._ordinary.unstored_progress

    def progress(self) -> Mapping[str, ProgressReport]:
        return self._ordinary.progress()

    def kill_task(self, task_id: str) -> None:
        self._ordinary.kill_task(task_id)
        self._shared.kill_task(task_id)

    def kill_all(self) -> None:
        self._ordinary.kill_all()
        for process in list(self._shared.children.children):
            self._shared.children.kill(process)

    def shutdown(self) -> list[PoolEvent]:
        """Have idle children exit, kill the others, and wait until no process is left."""
        self._shared.begin_shutdown()
        return [*self._ordinary.shutdown(), *self._end_async()]

    def _end_async(self) -> list[PoolEvent]:
        seconds = SHUTDOWN_SECONDS + self._settings.exit_seconds_of_hooks
        return self._shared.end_shutdown(time.monotonic() + seconds)


AnyPool = ChildPool | MixedPool
