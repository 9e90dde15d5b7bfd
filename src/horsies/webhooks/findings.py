"""The built-in task that compares the checks' findings with the findings already sent to webhooks. If a
webhook subscribes to findings, one worker sends the task once a minute. The task runs the cheap checks
of `horsies doctor` in a child, because they may take seconds, and every tenth time also the slow checks.
A finding stays open until its check runs again without reporting it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from horsies.config.app import AppConfig
from horsies.config.webhooks import FINDING_EVENTS
from horsies.current_task import running_task
from horsies.db.statement import Script
from horsies.db.statements.webhooks import record_findings
from horsies.errors import TaskFailed
from horsies.findings import Level
from horsies.monitor.diagnose.doctor import CHEAP_IDS, SLOW_IDS, CheckReport, run_doctor
from horsies.result import Err
from horsies.tasks.broker import BrokerErrorCode, PostgresBroker
from horsies.tasks.definition import (
    FINDINGS_TASK,
    DecoratorOptions,
    TaskDefinition,
    define_builtin,
)

UNREADABLE = "FINDINGS_UNREADABLE"
# The time limit of all checks of one kind is 15 seconds.
_TIMEOUT_MS = 45_000
SLOW_MINUTES = 10


def findings_task(
    config: AppConfig, get_broker: Callable[[], PostgresBroker]
) -> TaskDefinition | None:
    """Return the task, on the queue of the first webhook that subscribes to findings, or None without
    such a webhook.
    """
    hook = next((one for one in config.webhooks if FINDING_EVENTS & set(one.on)), None)
    if hook is None:
        return None

    def look() -> int:
        task = running_task()
        due_at = None if task is None else task.enqueued_at
        return look_for_findings(get_broker(), due_at or datetime.now(UTC))

    options = DecoratorOptions(hook.queue_name, None, None, None, _TIMEOUT_MS, {}, on_stop="fail")
    return define_builtin(config, look, FINDINGS_TASK, options)


def look_for_findings(broker: PostgresBroker, due_at: datetime) -> int:
    """Run the due checks, store the differences, and return the number of events."""
    return sum(_look(broker, ids) for ids in due_checks(due_at))


def due_checks(due_at: datetime) -> list[Collection[str]]:
    """Return the checks to run this minute. Slow checks run separately, because they may use up the time
    limit.
    """
    minute = int(due_at.timestamp() // 60)
    return [CHEAP_IDS] if minute % SLOW_MINUTES else [CHEAP_IDS, SLOW_IDS]


def _look(broker: PostgresBroker, ids: Collection[str]) -> int:
    reports = run_doctor(broker, ids)
    if isinstance(reports, Err):
        raise TaskFailed(UNREADABLE, reports.value.message)
    code = BrokerErrorCode.MONITORING_QUERY_FAILED
    stored = broker.perform(code, _recording(reports.value))
    if isinstance(stored, Err):
        raise TaskFailed(UNREADABLE, stored.value.message)
    return stored.value


def _recording(reports: Sequence[CheckReport]) -> Script[int]:
    found, checks = urgent(reports)
    rows = yield record_findings(json.dumps(found), checks)
    return int(rows[0].announced)


def urgent(reports: Sequence[CheckReport]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the findings that the overview lists, and the ids of the checks that could read their
    facts.
    """
    found = [
        {
            "check_id": report.id,
            "code": one.code,
            "subject": str(one.subject),
            "level": one.level.value,
            "sentence": one.sentence,
            "remedy": one.remedy,
        }
        for report in reports
        for one in report.findings
        if one.urgency is not None and one.level is not Level.UNKNOWN
    ]
    return found, [report.id for report in reports if report.level is not Level.UNKNOWN]
