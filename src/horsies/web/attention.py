"""The overview's attention list: cheap checks run for every view, slower ones in one run that all
viewers share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

from horsies.findings import Finding, Level
from horsies.monitor.diagnose.attention import (
    Attention,
    findings_of,
    findings_script,
    needs_attention,
)
from horsies.monitor.diagnose.doctor import SLOW_IDS, run_doctor
from horsies.monitor.facts import Facts
from horsies.result import Ok
from horsies.tasks.broker import PostgresBroker
from horsies.web.reading import TookTooLong
from horsies.web.rendering import View

# How often the slower checks run while the page is being viewed, and how long a view waits for them.
SLOW_SECONDS = 60.0
PATIENCE_SECONDS = 1.0


@dataclass
class _Slow:
    """The findings of the slower checks, and their run in progress."""

    findings: Sequence[Finding] = ()
    asked_at: float | None = None
    run: asyncio.Task[None] | None = None


_SLOW: WeakKeyDictionary[PostgresBroker, _Slow] = WeakKeyDictionary()


async def attention(view: View, facts: Facts) -> list[Attention]:
    """Return the attention list: every finding that `horsies doctor` calls red, and other urgent ones."""
    try:
        found = await view.read(findings_script(facts))
    except TookTooLong as problem:
        found = [_not_read(problem)]
    return needs_attention([*found, *await _slow_findings(view.site.broker)])


def _not_read(problem: TookTooLong) -> Finding:
    remedy = problem.members.get("remedy")
    return Finding(problem.code, problem.sentence, Level.RED, remedy=cast("str | None", remedy))


async def _slow_findings(broker: PostgresBroker) -> Sequence[Finding]:
    slow = _SLOW.setdefault(broker, _Slow())
    if slow.asked_at is None or time.monotonic() - slow.asked_at >= SLOW_SECONDS:
        slow.asked_at = time.monotonic()
        slow.run = asyncio.create_task(_refresh(broker, slow))
        await asyncio.wait([slow.run], timeout=PATIENCE_SECONDS)
    return slow.findings


async def _refresh(broker: PostgresBroker, slow: _Slow) -> None:
    """Run the checks in a thread; if the database cannot be reached, keep the last findings."""
    done = await asyncio.to_thread(run_doctor, broker, SLOW_IDS)
    if isinstance(done, Ok):
        slow.findings = findings_of(done.ok_value)
