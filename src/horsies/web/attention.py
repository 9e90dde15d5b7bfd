"""The overview's attention list, and the reports of the slower checks. Slower checks run once for all
viewers; cheap checks run for every view.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast
from weakref import WeakKeyDictionary

from horsies.findings import Finding, Level
from horsies.monitor.diagnose.attention import (
    Attention,
    findings_of,
    findings_script,
    needs_attention,
)
from horsies.monitor.diagnose.doctor import SLOW_IDS, CheckReport, run_doctor
from horsies.monitor.facts import Facts
from horsies.result import Ok
from horsies.tasks.broker import PostgresBroker
from horsies.web.reading import TookTooLong
from horsies.web.rendering import View

# The interval of the slower checks while a page with them is viewed, and the time that a view waits
# for them.
SLOW_SECONDS = 60.0
PATIENCE_SECONDS = 1.0


@dataclass
class SlowChecks:
    """The newest reports of the slower checks, their time, and the current run."""

    reports: Sequence[CheckReport] = ()
    ended_at: datetime | None = None
    asked_at: float | None = None
    run: asyncio.Task[None] | None = None


_SLOW: WeakKeyDictionary[PostgresBroker, SlowChecks] = WeakKeyDictionary()


async def attention(view: View, facts: Facts) -> list[Attention]:
    """Return the attention list: all red findings of `horsies doctor`, and other urgent findings."""
    try:
        found = await view.read(findings_script(facts))
    except TookTooLong as problem:
        found = [_not_read(problem)]
    slow = await slow_checks(view.site.broker)
    return needs_attention([*found, *findings_of(slow.reports)])


def _not_read(problem: TookTooLong) -> Finding:
    remedy = problem.members.get("remedy")
    return Finding(problem.code, problem.sentence, Level.RED, remedy=cast("str | None", remedy))


async def slow_checks(broker: PostgresBroker) -> SlowChecks:
    """Return the newest reports of the slower checks; run the checks first if the reports are too old."""
    slow = _SLOW.setdefault(broker, SlowChecks())
    if slow.asked_at is None or time.monotonic() - slow.asked_at >= SLOW_SECONDS:
        slow.asked_at = time.monotonic()
        slow.run = asyncio.create_task(_refresh(broker, slow))
        await asyncio.wait([slow.run], timeout=PATIENCE_SECONDS)
    return slow


async def _refresh(broker: PostgresBroker, slow: SlowChecks) -> None:
    """Run the checks in a thread; keep the last reports if the database cannot be reached."""
    done = await asyncio.to_thread(run_doctor, broker, SLOW_IDS)
    if isinstance(done, Ok):
        slow.reports, slow.ended_at = done.ok_value, datetime.now(UTC)
