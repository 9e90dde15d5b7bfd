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

    A process that a task forks writes nothing, because it shares the memory but not the write position.
    """

    def __init__(self, level: str, areas: Mapping[CurrentTask, LogArea]) -> None:
        super().__init__(level)
        self.setFormatter(CaptureFormatter())
        self._areas = areas
        self._owner_pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record. If the record cannot be formatted, report this like the standard library does."""
        task = running_task()
        area = None if task is None else self._areas.get(task)
        if area is None or os.getpid() != self._owner_pid:
            return
        try:
            area.write(self.format(record))
        except Exception:  # formatting a record runs code of the application
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
        """Keep the lines that this task logs from now on. Tasks of the same call share an area."""
        if self._free:
            area = self._areas[task] = self._free.pop()
            self._areas.update(dict.fromkeys(companions, area))
            area.begin(attempt_token(assignment.task_id, assignment.generation))

    def end(self, task: CurrentTask, companions: Sequence[CurrentTask] = ()) -> CapturedLog | None:
        """Return the lines that the tasks of this call have logged, and free their area."""
        for one in companions:
            self._areas.pop(one, None)
        if (area := self._areas.pop(task, None)) is None:
            return None
        self._free.append(area)
        return area.take()
