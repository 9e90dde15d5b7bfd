"""Keeps the lines that a running task logs, as the log of its attempt."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from horsies.captured_log import CapturedLog
from horsies.current_task import CurrentTask, attempt_token, running_task
from horsies.logs import CaptureFormatter, report_unwritten
from horsies.worker.log_area import LogArea
from horsies.worker.protocol import Assignment, ChildBoot
from horsies.worker.sharing import SharedPage


class CaptureHandler(logging.Handler):
    """Writes the log records of running tasks to their areas.

    A process that a task forks shares the memory, but not the write position, so it writes nothing.
    """

    def __init__(self, level: str, areas: Mapping[CurrentTask, LogArea]) -> None:
        super().__init__(level)
        self.setFormatter(CaptureFormatter())
        self._areas = areas
        self._owner_pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record. If it cannot be formatted, report that in the way of the standard library."""
        task = running_task()
        area = None if task is None else self._areas.get(task)
        if area is None or os.getpid() != self._owner_pid:
            return
        try:
            area.write(self.format(record))
        except Exception:  # formatting runs code of the application
            report_unwritten(self, record)


class Capture:
    """The log areas of one child: one for each task that it can run at the same time."""

    __slots__ = ("_areas", "_free")

    def __init__(self, free: list[LogArea], level: str) -> None:
        self._free = free
        self._areas: dict[CurrentTask, LogArea] = {}
        logging.getLogger().addHandler(CaptureHandler(level, self._areas))

    @classmethod
    def of(cls, boot: ChildBoot, page: SharedPage | None) -> Capture | None:
        """Return the areas of a child; None if the application keeps no logs."""
        areas = [] if page is None else page.log_areas(boot.log_limits)
        return cls(areas, boot.captured_level) if areas else None

    def begin(
        self, task: CurrentTask, assignment: Assignment, companions: Sequence[CurrentTask] = ()
    ) -> None:
        """Keep what this task logs from now on. The tasks that share its call share its area."""
        if self._free:
            area = self._areas[task] = self._free.pop()
            self._areas.update(dict.fromkeys(companions, area))
            area.begin(attempt_token(assignment.task_id, assignment.generation))

    def end(self, task: CurrentTask, companions: Sequence[CurrentTask] = ()) -> CapturedLog | None:
        """Return what the task and the tasks of its call have logged, and free its area."""
        for one in companions:
            self._areas.pop(one, None)
        if (area := self._areas.pop(task, None)) is None:
            return None
        self._free.append(area)
        return area.take()
