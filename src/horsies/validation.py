"""What all configuration models share: frozen pydantic settings and collected problems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from pydantic import ConfigDict

from horsies.errors import ConfigurationError, ErrorCode, ValidationReport, raise_collected

# Pydantic quotes the offending input by default, and the input may be an address with a password.
FROZEN_MODEL = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


# A hundred years: more seconds than that, infinitely many above all, break clocks and calendars.
SECONDS_MAX = 100 * 366 * 86_400


Problem: TypeAlias = tuple[ErrorCode, str]


def raise_problems(phase: str, problems: Iterable[Problem]) -> None:
    """Raise the mistakes of one model together; nothing when there are none."""
    report = ValidationReport(phase)
    for code, message in problems:
        report.add(ConfigurationError(message, code=code))
    raise_collected(report)
