"""Compares the clock of a worker's host with the clock of the database. Horsies decides everything by the
database's clock, but logs, spans and the ids of tasks contain the host's time.
"""

from __future__ import annotations

import logging
from datetime import datetime

from horsies.words import lasting

logger = logging.getLogger("horsies.worker")

# The difference from which times in logs of several hosts can no longer be compared.
WARN_SECONDS = 5.0
# The difference below which the clock counts as right again; a difference of about five seconds is not logged
# again and again.
RIGHT_SECONDS = 2.5


class HostClock:
    """The offset of the database's clock from this host's, measured at each heartbeat."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0
        self._is_wrong = False

    def note(self, database_now: datetime, host_now: float, taken_seconds: float) -> None:
        """Set the database's time, which was requested ``taken_seconds`` ago; on average it was read
        halfway through that time. Log a large difference once, until it has ended.
        """
        self.ahead_seconds = database_now.timestamp() - (host_now - taken_seconds / 2)
        limit = RIGHT_SECONDS if self._is_wrong else WARN_SECONDS
        is_wrong = abs(self.ahead_seconds) - taken_seconds / 2 >= limit
        if is_wrong and not self._is_wrong:
            logger.warning(
                "the clock of this host is %s %s the database's, so times in logs and in the ids of "
                "tasks are wrong; synchronise both clocks by NTP",
                lasting(abs(self.ahead_seconds)),
                "behind" if self.ahead_seconds > 0 else "ahead of",
            )
        self._is_wrong = is_wrong
