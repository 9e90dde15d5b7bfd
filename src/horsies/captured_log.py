"""The log of an attempt: the lines that its code has logged, within limits, in the form in which a child
sends them and the database stores them.
"""

from __future__ import annotations

from typing import NamedTuple

LINE_BYTES_MAX = 8_192
# The largest `max_bytes` and `max_lines` that an application may configure.
LOG_BYTES_MAX = 1 << 20
LOG_LINES_MAX = 100_000
# The database columns are 32-bit integers.
COUNT_MAX = 2**31 - 1


class CapturedLog(NamedTuple):
    """The lines that were kept, as one text, and how many lines were dropped from the middle.

    The dropped lines came directly after line `cut_after`.
    """

    body: str
    dropped: int = 0
    cut_after: int = 0

    @classmethod
    def checked(cls, sent: object) -> CapturedLog:
        """Read the log that a child has sent as JSON; ValueError if it is malformed."""
        match sent:
            case [str() as body, int() as dropped, int() as cut_after]:
                is_short = len(body) <= 2 * LOG_BYTES_MAX
                if is_short and 0 <= dropped <= COUNT_MAX and 0 <= cut_after <= COUNT_MAX:
                    return cls(body.replace("\0", "\ufffd"), dropped, cut_after)
        raise ValueError("not a log")


class LogLimits(NamedTuple):
    """The most bytes and lines that are kept of one attempt; half of the space is for the attempt's first
    lines, the other half for its last lines. With 0 bytes, nothing is kept.
    """

    max_bytes: int = 0
    max_lines: int = 0


KEEP_NOTHING = LogLimits()
