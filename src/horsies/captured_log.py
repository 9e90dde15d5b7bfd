"""The log of an attempt: the lines that its code logged, within limits, in the form that a child sends
and the database stores.
"""

from __future__ import annotations

from typing import NamedTuple

LINE_BYTES_MAX = 8_192
# The maximum values of `max_bytes` and `max_lines`.
LOG_BYTES_MAX = 1 << 20
LOG_LINES_MAX = 100_000
# The database columns are 32-bit integers.
COUNT_MAX = 2**31 - 1


class CapturedLog(NamedTuple):
    """The kept lines as one text, and the number of lines dropped from the middle. The dropped lines
    came directly after line `cut_after`.
    """

    body: str
    dropped: int = 0
    cut_after: int = 0

    @classmethod
    def checked(cls, sent: object) -> CapturedLog:
        """Parse the log that a child sent as JSON; raise ValueError if it is malformed."""
        match sent:
            case [str() as body, int() as dropped, int() as cut_after]:
                is_short = len(body) <= 2 * LOG_BYTES_MAX
                if is_short and 0 <= dropped <= COUNT_MAX and 0 <= cut_after <= COUNT_MAX:
                    return cls(body.replace("\0", "\ufffd"), dropped, cut_after)
        raise ValueError("not a log")


class LogLimits(NamedTuple):
    """The maximum numbers of bytes and lines to keep per attempt. Half of the space is for the first
    lines, the other half for the last lines. With 0 bytes, no line is kept.
    """

    max_bytes: int = 0
    max_lines: int = 0


KEEP_NOTHING = LogLimits()
