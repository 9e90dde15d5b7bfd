"""The reports of the slower checks of the doctor, which the viewers of pages and the scrapers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic

from horsies.findings import Finding, Level
from horsies.monitor.diagnose.attention import findings_of
from horsies.monitor.diagnose.doctor import SLOW_IDS, CheckReport, run_doctor
from horsies.result import Ok
from horsies.tasks.broker import PostgresBroker

# The age at which a page that is viewed and a scraper need new reports. Scrapers ask day and night.
VIEWED_SECONDS = 60.0
SCRAPED_SECONDS = 300.0
# After a run, the checks rest for this many times its duration, up to the interval of scrapers. With 5,000
# open runs they take 0.3 s of an idle server, and up to 9 s of a busy one: too much for every minute of a
# page that is open all day.
_REST = 50
# The time that a page or a scraper waits for the first reports.
PATIENCE_SECONDS = 1.0
# The id of the report about checks that could not run.
NOT_RUN = "slow-checks"


@dataclass
class SlowChecks:
    """The newest reports of one database, and the time when they ended."""

    reports: Sequence[CheckReport] = ()
    ended_at: datetime | None = None
    asked_at: float | None = None
    # The least number of seconds between two runs.
    rest_seconds: float = 0.0

    def is_due(self, max_age: float) -> bool:
        """Whether the reports are older than this many seconds, and the checks have rested; then the caller
        runs ``refresh`` in a thread, and other callers do not run it for the same time.
        """
        now = monotonic()
        if self.asked_at is not None and now - self.asked_at < max(max_age, self.rest_seconds):
            return False
        self.asked_at = now
        return True

    def refresh(self, broker: PostgresBroker) -> None:
        """Run the checks. If the database cannot be reached, add a red report to the last reports, and let
        the next caller run the checks again.
        """
        started = monotonic()
        done = run_doctor(broker, SLOW_IDS)
        seconds = monotonic() - started
        if isinstance(done, Ok):
            self.reports, self.ended_at = done.ok_value, datetime.now(UTC)
            # Checks that could not run, for example because of a lock, run again soon.
            is_complete = all(one.level is not Level.UNKNOWN for one in findings_of(self.reports))
            self.rest_seconds = min(_REST * seconds, SCRAPED_SECONDS) if is_complete else 0.0
            return
        sentence = f"The slow checks could not run: {done.err_value.message}"
        found = Finding("NOT_CHECKED", sentence, Level.RED)
        kept = [one for one in self.reports if one.id != NOT_RUN]
        self.reports = [*kept, CheckReport(NOT_RUN, "a run of the slow checks", (found,))]
        self.asked_at = None
