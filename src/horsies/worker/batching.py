"""The pace: whether the rest of a batch is worth a moment's wait before the next turn.

A turn costs about 0.7 ms however little it carries. When tasks are shorter than that, the children
given work by one turn report within a fraction of a millisecond of each other, and a turn taken at
the first report carries one outcome instead of all: with two children that halves throughput. When
tasks are longer, a turn for those that have ended is done while the others run, and there is no wait:
with tasks of 3 ms and eight children, waiting cost a quarter of the throughput.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# What counts as short, measured by the child: what a turn costs.
BRISK_SECONDS = 0.0007
# How long a batch is waited for: after its hand-out, and after the last report of any child.
PATIENCE_SECONDS = 0.002
SILENCE_SECONDS = 0.001
# Weight of the newest observation; a change of load is noticed within a few dozen tasks, also when the last
# of the old ones took an hour.
_WEIGHT = 0.1
_LONG_SECONDS = 0.05


@dataclass(slots=True)
class Pace:
    """How long tasks run, and who of the last batch is still out."""

    typical_seconds: float = BRISK_SECONDS
    handed_out_at: float = 0.0
    heard_at: float = 0.0
    outstanding: set[str] = field(default_factory=set)

    def note_hand_out(self, task_ids: Iterable[str], now: float) -> None:
        """A turn gave these tasks to children."""
        self.outstanding = set(task_ids)
        self.handed_out_at = now

    def note_end(self, task_id: str, run_seconds: float, now: float) -> None:
        """A task of any batch has ended.

        Of any: children that have come out of step end up in a batch each, and only waiting for one
        another brings them together again.
        """
        self.outstanding.discard(task_id)
        self.heard_at = now
        run_seconds = min(run_seconds, _LONG_SECONDS)
        self.typical_seconds += _WEIGHT * (run_seconds - self.typical_seconds)

    def linger_seconds(self, now: float) -> float:
        """How long to wait for more reports of the last batch before taking a turn."""
        if not self.outstanding or self.typical_seconds > BRISK_SECONDS:
            return 0.0
        until = min(self.handed_out_at + PATIENCE_SECONDS, self.heard_at + SILENCE_SECONDS)
        return max(0.0, until - now)
