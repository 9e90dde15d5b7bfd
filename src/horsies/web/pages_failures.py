"""The pages for failures: all groups among the newest attempts, and one group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from horsies.database_url import mask_url
from horsies.db.statements.lookup import FailureGroup
from horsies.monitor.failures import (
    FAILURES_MAX,
    Failures,
    counts_by_part,
    failure_script,
    failures_script,
    over_time,
    reason_text,
    release_text,
)
from horsies.monitor.queries import checked_fingerprint
from horsies.web.charts import Chart, Column, column_chart, sparkline
from horsies.web.filters import refuse_unknown, texts_of
from horsies.web.masking import visible
from horsies.web.pages import within_time
from horsies.web.reading import NotFound, TookTooLong
from horsies.web.rendering import Page, Route, View
from horsies.web.words import duration

SPARK_COLUMNS = 24
# A group whose newest failure is older is quiet; the doctor judges the same time.
GOING_ON = timedelta(minutes=10)


async def failures(view: View) -> Page:
    """Show the failures among the newest attempts, grouped by fingerprint."""
    refuse_unknown(view, {"task_name"})
    names = texts_of(view, "task_name")
    read = await within_time(view, failures_script(names))
    problem, found = (read, Failures([])) if isinstance(read, TookTooLong) else (None, read)
    now = datetime.now(UTC)
    groups = [
        {**group_words(group, now), "counts": spark_counts(found.groups, group, now)}
        for group in found.groups
    ]
    context = {
        "found": found,
        "groups": groups,
        "problem": problem,
        "names": names,
        "sparkline": sparkline,
    }
    return Page("failures.html", "Failures", context, live_seconds=10.0)


def group_words(group: FailureGroup, now: datetime) -> dict[str, Any]:
    """Return a group, its description, and the query that lists its tasks."""
    by_code = {"task_name": group.task_name, "error_code": group.error_code or ""}
    chosen = {"fingerprint": group.fingerprint} if group.fingerprint else by_code
    return {
        "group": group,
        "message": mask_url(group.message or ""),
        "query": urlencode(chosen),
        "reason": reason_text(group),
        "goes_on": now - group.last_at < GOING_ON,
        "releases": release_text(group),
    }


def spark_counts(groups: Sequence[FailureGroup], group: FailureGroup, now: datetime) -> list[float]:
    """Count a group's failures in equal parts of the time from the first failure of any group until now."""
    first = min(min(one.times) for one in groups)
    seconds = max(now.timestamp() - first, 1e-3)
    return [float(one) for one in counts_by_part(group.times, first, seconds, SPARK_COLUMNS)]


async def failure(view: View) -> Page:
    """Show one group: its reason, an example, its releases and its failures over time."""
    refuse_unknown(view, ())
    group, now = await group_of(view), datetime.now(UTC)
    slots = over_time(group, now)
    columns = [Column(slot.at, [float(slot.failures)]) for slot in slots]
    step = duration((slots[1].at - slots[0].at).total_seconds())
    chart = column_chart(Chart("failure", f"Failed attempts per {step}", ["failed"], columns))
    context = {**group_words(group, now), "chart": chart, "is_cut": group.total >= FAILURES_MAX}
    title = visible(f"Failure of {group.task_name}: {reason_text(group)}")
    return Page("failure.html", title, context, live_seconds=10.0)


async def group_of(view: View) -> FailureGroup:
    """Read the group named in the path; raise 404 if it does not exist."""
    asked = view.params["fingerprint"]
    try:
        fingerprint = checked_fingerprint(asked)
    except ValueError as problem:
        raise NotFound(str(problem), code="FAILURE_NOT_FOUND") from problem
    group = await view.read(failure_script(fingerprint))
    if group is None:
        sentence = f"No failure on record has the fingerprint {fingerprint}."
        raise NotFound(sentence, code="FAILURE_NOT_FOUND")
    return group


ROUTES: tuple[Route, ...] = (
    Route("GET", "/failures", None, failures),
    Route("GET", "/failures/{fingerprint}", None, failure),
)
