"""The base of configuration models, and errors for all mistakes of one object at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict

from horsies.errors import ConfigurationError, ErrorCode, ValidationReport, raise_collected

# Pydantic quotes the offending input by default, and the input may be an address with a password.
FROZEN_MODEL = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

# A hundred years: larger numbers of seconds, infinity included, overflow clocks and calendars.
SECONDS_MAX = 100 * 366 * 86_400

Problem: TypeAlias = tuple[ErrorCode, str]
# A condition that must not hold, and the problem when it does: a sentence that starts with a field.
Check: TypeAlias = tuple[bool, ErrorCode, str]


class FrozenModel(BaseModel):
    """An immutable model that refuses unknown fields and never quotes its input in errors."""

    model_config = FROZEN_MODEL


def raise_problems(phase: str, problems: Iterable[Problem]) -> None:
    """Raise all problems of one object as one error; do nothing when there are none."""
    report = ValidationReport(phase)
    for code, message in problems:
        report.add(ConfigurationError(message, code=code))
    raise_collected(report)


def raise_failed(model: str, checks: Iterable[Check]) -> None:
    """Raise the problems of all checks whose condition holds, as `<model>.<sentence>`."""
    problems = ((code, f"{model}.{sentence}") for wrong, code, sentence in checks if wrong)
    raise_problems(model, problems)
