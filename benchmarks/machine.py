"""Detects whether the machine is idle; other processes make figures meaningless."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

# The duration for which less than this share of all processors must be in use before a round
# begins.
QUIET_SECONDS = 1.5
BUSY_SHARE = 0.10
# Within that time, a checkpoint or an autovacuum of the server ends.
PATIENCE_SECONDS = 60.0

BUSY_MARK = "  [MACHINE WAS BUSY]"


class MachineBusyError(Exception):
    """Other processes kept using the processors."""


def used_share(idle_seconds: float, seconds: float, processors: int) -> float:
    """Return the share of the processors that was in use, given their total idle time."""
    return min(1.0, max(0.0, 1.0 - idle_seconds / (seconds * processors)))


def is_idle(share: float) -> bool:
    """Return whether the share of the processors in use counts as idle."""
    return share < BUSY_SHARE


@dataclass(slots=True)
class Machine:
    """Waits for idle processors before each round, or with ``accepts_busy`` records that they were busy."""

    accepts_busy: bool = False
    was_busy: bool = False
    idle_clock: Callable[[], float] = lambda: _idle_seconds()
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    processors: int = os.cpu_count() or 1

    def wait_until_idle(self) -> None:
        """Return once the machine is idle; raise MachineBusyError after a time limit."""
        gives_up_at = self.clock() + (0.0 if self.accepts_busy else PATIENCE_SECONDS)
        while not is_idle(share := self._share()):
            if self.clock() < gives_up_at:
                continue
            if not self.accepts_busy:
                raise MachineBusyError(
                    f"Other processes used {share:.0%} of the processors and did not stop within "
                    f"{PATIENCE_SECONDS:.0f} seconds; end them, or pass --busy to measure anyway."
                )
            self.was_busy = True
            return

    def _share(self) -> float:
        started, idle = self.clock(), self.idle_clock()
        self.sleep(QUIET_SECONDS)
        return used_share(self.idle_clock() - idle, self.clock() - started, self.processors)

    def take_mark(self) -> str:
        """Return the mark for figures measured on a busy machine and reset it; without a mark, return an
        empty text.
        """
        was_busy, self.was_busy = self.was_busy, False
        return BUSY_MARK if was_busy else ""


def _idle_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


MACHINE = Machine()
