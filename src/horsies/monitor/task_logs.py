"""The logs of a task's attempts for the command line, the dashboard and its API."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from horsies.db.statement import Script, one_or_none
from horsies.db.statements.monitor import read_task_detail
from horsies.db.statements.tasks import StoredLog, read_logs
from horsies.ids import stored_form
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker


class AttemptLog(NamedTuple):
    """The first lines of an attempt, the number of lines left out after them, and the last lines.

    A parked run of a durable function has several logs, one for each time that it ran in a process.
    """

    attempt: int
    stored_at: datetime
    first: Sequence[str]
    dropped: int
    last: Sequence[str]

    @property
    def lines(self) -> list[str]:
        """All lines, with a middle line that shows how many lines were left out."""
        left_out = [f"[{self.dropped:,} lines left out]"] if self.dropped else []
        return [*self.first, *left_out, *self.last]

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()


def attempt_log(stored: StoredLog) -> AttemptLog:
    """Split a stored text into lines."""
    lines = stored.body.removesuffix("\n").split("\n")
    cut = stored.cut_after if stored.dropped else len(lines)
    return AttemptLog(stored.attempt, stored.created_at, lines[:cut], stored.dropped, lines[cut:])


def logs_script(task_id: str, attempt: int | None = None) -> Script[list[AttemptLog] | None]:
    """Read the log lines of a task's attempts, oldest first; return None if the task does not exist."""
    if (stored := stored_form(task_id)) is None:
        return None
    if one_or_none((yield read_task_detail(stored, False))) is None:
        return None
    rows: list[StoredLog] = yield read_logs(stored, attempt)
    return [attempt_log(row) for row in rows]


def list_logs(
    broker: PostgresBroker, task_id: str, attempt: int | None = None
) -> BrokerResult[list[AttemptLog] | None]:
    """Run ``logs_script``."""
    return broker.perform(BrokerErrorCode.MONITORING_QUERY_FAILED, logs_script(task_id, attempt))
