"""The overview's attention list, and the reports of the slower checks. Slower checks run once for all
viewers; cheap checks run for every view.
"""

from __future__ import annotations

import asyncio
from typing import cast
from weakref import WeakKeyDictionary

from horsies.findings import Finding, Level
from horsies.monitor.diagnose.attention import (
    Attention,
    findings_of,
    findings_script,
    needs_attention,
)
from horsies.monitor.diagnose.slow import PATIENCE_SECONDS, VIEWED_SECONDS, SlowChecks
from horsies.monitor.facts import Facts
from horsies.tasks.broker import PostgresBroker
from horsies.web.reading import TookTooLong
from horsies.web.rendering import View

_SLOW: WeakKeyDictionary[PostgresBroker, SlowChecks] = WeakKeyDictionary()
# The current runs, because an event loop keeps no reference to its tasks.
_RUNS: set[asyncio.Task[None]] = set()


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


async def slow_checks(broker: PostgresBroker, max_age: float = VIEWED_SECONDS) -> SlowChecks:
    """Return the newest reports of the slower checks; run the checks first if the reports are too old."""
    slow = _SLOW.setdefault(broker, SlowChecks())
    if slow.is_due(max_age):
        run = asyncio.create_task(asyncio.to_thread(slow.refresh, broker))
        _RUNS.add(run)
        run.add_done_callback(_RUNS.discard)
        await asyncio.wait([run], timeout=PATIENCE_SECONDS)
    return slow
