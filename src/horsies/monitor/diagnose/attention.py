"""The overview's attention list: the urgent findings of all checks, each with a link to its page.

Cheap checks run for every view; the findings of slower checks are shared between views.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote

from horsies.db.statement import Script
from horsies.db.statements.dashboard import OpenRuns, RowEstimate, count_open_runs, estimate_rows
from horsies.db.statements.durable import ParkedCount, count_parked
from horsies.findings import Finding, Urgency
from horsies.monitor.diagnose.doctor import CheckReport, doctor_script
from horsies.monitor.facts import Facts
from horsies.monitor.overview import Overview, QueueOverview, arrivals_script, overview_script

SHOWN_MAX = 12
RUNS_MOST = 1_000
NONE_PARKED = ParkedCount(0, 0)
_EVIDENCE_MAX = 3
# The paths of the subjects' pages without the keys; findings about other subjects are on the
# doctor's page.
_PAGES = {
    "queue": "/queues/",
    "worker": "/workers/",
    "task": "/tasks/",
    "run": "/workflows/",
    "schedule": "/schedules/",
    "task name": "/failures?task_name=",
}
# The privilege needed for the button next to a finding.
_VERBS = {"QUEUE_PAUSED": "pause_queue"}


@dataclass(frozen=True, slots=True)
class Attention:
    """One line of the attention list: ``link`` is the path of a page, and ``verb`` is the privilege
    needed to act on the subject.
    """

    urgency: Urgency
    code: str
    subject: str
    sentence: str
    link: str
    verb: str | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """The overview, the arrival rate per minute, the open runs by status, the parked runs of durable
    functions, and the number of stored rows.
    """

    overview: Overview
    arrivals: Mapping[str, float] = field(default_factory=dict)
    open_runs: Mapping[str, int] = field(default_factory=dict)
    estimate: RowEstimate | None = None
    parked: ParkedCount = NONE_PARKED


def figures_script(
    configured: Mapping[str, int | None], facts: Facts | None = None
) -> Script[Figures]:
    """Read the overview and its figures; every statement reads a bounded number of rows."""
    overview = yield from overview_script(configured, facts)
    arrivals = yield from arrivals_script()
    runs: list[OpenRuns] = yield count_open_runs(RUNS_MOST)
    (parked,) = yield count_parked(RUNS_MOST)
    (estimate,) = yield estimate_rows()
    return Figures(overview, arrivals, dict(runs), estimate, parked)


def findings_script(facts: Facts) -> Script[list[Finding]]:
    """Return the findings of the cheap checks."""
    return findings_of((yield from doctor_script(facts)))


def findings_of(reports: Iterable[CheckReport]) -> list[Finding]:
    return [one for report in reports for one in report.findings]


def needs_attention(findings: Iterable[Finding]) -> list[Attention]:
    """Return lines for the urgent findings, most serious and oldest first; a page shows ``SHOWN_MAX``."""
    never = datetime.max.replace(tzinfo=UTC)
    found = [(one.urgency, one.since or never, one) for one in findings if one.urgency is not None]
    found.sort(key=lambda entry: (entry[0], entry[1], str(entry[2].subject)))
    return [_line(urgency, one) for urgency, _, one in found]


def _line(urgency: Urgency, one: Finding) -> Attention:
    evidence = "; ".join(one.evidence[:_EVIDENCE_MAX])
    sentence = f"{one.sentence.removesuffix('.')}: {evidence}." if evidence else one.sentence
    link = page_of(one) or f"/doctor#{one.code}"
    return Attention(urgency, one.code, str(one.subject), sentence, link, _VERBS.get(one.code))


def page_of(one: Finding) -> str | None:
    """Return the path of the page about a finding's subject; None if no page is about it."""
    page = _PAGES.get(one.subject.kind)
    if page is None:
        return None
    suffix = "/explain" if one.code in ("QUEUE_STUCK", "QUEUE_STALLED") else ""
    return page + quote(one.subject.key, safe="") + suffix


def seconds_to_empty(queue: QueueOverview, arrivals: float) -> float | None:
    """Estimate when the due tasks will be finished; return None while tasks arrive at least at the rate
    of completion.
    """
    if not queue.due:
        return 0.0
    rate = queue.done_per_minute + queue.failed_per_minute - arrivals
    return None if rate <= 0 else queue.due / rate * 60
