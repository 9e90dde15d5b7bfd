"""The page `/doctor` and its JSON: the cheap checks for every view, all checks on request. The page also
shows the overview's newest reports of the slower checks, so that it has every finding of the overview.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.responses import Response

from horsies.findings import Finding, Level
from horsies.monitor.diagnose.attention import page_of
from horsies.monitor.diagnose.doctor import (
    CHEAP_IDS,
    CHECKS,
    CheckReport,
    doctor_document,
    doctor_script,
    run_doctor,
    worst,
)
from horsies.monitor.facts import Facts
from horsies.result import Err
from horsies.web.answers import answer_document
from horsies.web.attention import slow_checks
from horsies.web.reading import TookTooLong, Unavailable
from horsies.web.rendering import Page, Route, View

LIVE_SECONDS = 10.0
# The maximum number of findings per check on the page, because thousands of queues may have the
# same finding, and of lines of evidence per finding.
FINDINGS_MAX = 50
EVIDENCE_MAX = 10
_PLACES = {check.id: place for place, check in enumerate(CHECKS)}
# The CSS class and the symbol of each level.
SIGNS = {
    Level.RED: ("status-failed", "✗"),
    Level.YELLOW: ("status-paused", "!"),
    Level.UNKNOWN: ("status-off", "?"),
    Level.GREEN: ("status-ok", "✓"),
}


async def _reports(view: View) -> list[CheckReport]:
    broker, ids = view.site.broker, None
    if not view.query.get("full"):
        try:
            return await view.read(doctor_script(Facts(broker.config.schema_name)))
        except TookTooLong:
            # Run the checks one at a time, because a single check may be able to read its facts.
            ids = CHEAP_IDS
    done = await asyncio.to_thread(run_doctor, broker, ids)
    if isinstance(done, Err):
        raise Unavailable(done.err_value.message, retryable=done.err_value.retryable)
    return done.ok_value


async def doctor_page(view: View) -> Page:
    """Show the findings, most serious first; `?full=1` runs every check now."""
    is_full, slow_at = bool(view.query.get("full")), None
    reports = await _reports(view)
    if not is_full:
        slow = await slow_checks(view.site.broker)
        reports, slow_at = sorted([*reports, *slow.reports], key=_place), slow.ended_at
    more = {one.id: len(one.findings) - FINDINGS_MAX for one in reports}
    context = {
        "reports": reports,
        "findings": _worst_first(reports),
        "more": {name: count for name, count in more.items() if count > 0},
        "level": worst(report.level for report in reports),
        "signs": SIGNS,
        "evidence_max": EVIDENCE_MAX,
        "page_of": page_of,
        "is_full": is_full,
        "slow_at": slow_at,
    }
    return Page("doctor.html", "Doctor", context, live_seconds=None if is_full else LIVE_SECONDS)


def _place(report: CheckReport) -> int:
    return _PLACES.get(report.id, len(_PLACES))


def _worst_first(reports: Iterable[CheckReport]) -> list[tuple[CheckReport, Finding]]:
    found = [(report, finding) for report in reports for finding in report.findings[:FINDINGS_MAX]]
    return sorted(found, key=lambda pair: list(SIGNS).index(pair[1].level))


async def doctor_api(view: View) -> Response:
    """Return the reports in the format of `horsies doctor --json`."""
    return answer_document(doctor_document(await _reports(view)))


ROUTES = (Route("GET", "/doctor", None, doctor_page), Route("GET", "/api/doctor", None, doctor_api))
