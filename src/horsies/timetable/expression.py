"""Classic cron expressions: five fields of text become typed terms.

The cronsim library reads the text. A list like `1,15` is taken apart at its commas, because only the
single parts tell a step (`*/4`), which goes on through a repeated hour, from the same hours listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from cronsim import CronSim, CronSimError

from horsies.timetable.terms import (
    CronEnumRange,
    CronEnumStep,
    CronEnumValues,
    CronEvery,
    CronRange,
    CronStep,
    CronValues,
    Month,
    MonthTerm,
    NumericTerm,
    Weekday,
    WeekdayTerm,
)

Choice: TypeAlias = Literal["either", "both"]

_FIELDS = ("minutes", "hours", "days", "months", "weekdays")
_SOME_MOMENT = datetime(2000, 1, 1, tzinfo=UTC)


class ExpressionProblem(Exception):
    """Why a text is no cron expression; ``problems`` has a sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class ExpressionFields:
    """The five fields of an expression as terms."""

    minute: list[NumericTerm]
    hour: list[NumericTerm]
    day_of_month: list[NumericTerm]
    month: list[MonthTerm]
    day_of_week: list[WeekdayTerm]


def read_expression(expression: str) -> ExpressionFields:
    """Return the fields of a classic expression, or raise an ExpressionProblem with all mistakes."""
    texts = expression.split()
    if len(texts) != len(_FIELDS):
        raise ExpressionProblem(
            [f"a cron expression has 5 fields separated by spaces, this one has {len(texts)}"]
        )
    problems: list[str] = []
    parts = [list(_read_field(position, text, problems)) for position, text in enumerate(texts)]
    if problems:
        raise ExpressionProblem(problems)
    minute, hour, day_of_month, month, day_of_week = parts
    return ExpressionFields(
        _numeric_terms(minute),
        _numeric_terms(hour),
        _numeric_terms(day_of_month),
        _month_terms(month),
        _weekday_terms(day_of_week),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """What stands between two commas, and the values cronsim reads in it."""

    text: str
    values: tuple[int, ...]


def _read_field(position: int, text: str, problems: list[str]) -> Iterable[_Part]:
    for part in text.split(","):
        fields = ["*"] * len(_FIELDS)
        fields[position] = part or "?"
        try:
            found: set[Any] = getattr(CronSim(" ".join(fields), _SOME_MOMENT), _FIELDS[position])
        except CronSimError as error:
            problems.append(f"{str(error).lower()} {part!r}")
            continue
        if not all(isinstance(value, int) and value >= 0 for value in found):
            problems.append(f"{part!r} is an extension of cron that has no typed form")
            continue
        yield _Part(part, tuple(sorted(found)))


def _numeric_terms(parts: Sequence[_Part]) -> list[NumericTerm]:
    terms: list[NumericTerm] = []
    listed: list[int] = []
    for part in parts:
        if part.text == "*":
            return [CronEvery()]
        if part.text.startswith("*"):
            terms.append(CronStep(step=_step(part)))
        elif len(part.values) == 1:
            listed += part.values
        else:
            first, second, *_ = part.values
            terms.append(CronRange(start=first, end=part.values[-1], step=second - first))
    return [*terms, CronValues(values=sorted(set(listed)))] if listed else terms


def _step(part: _Part) -> int:
    return int(part.text.partition("/")[2])


def _month_terms(parts: Sequence[_Part]) -> list[MonthTerm]:
    months = tuple(Month)
    terms: list[MonthTerm] = []
    listed: list[Month] = []
    for part in parts:
        if part.text == "*":
            return [CronEvery()]
        names = [months[number - 1] for number in part.values]
        if part.text.startswith("*"):
            terms.append(CronEnumStep[Month](step=_step(part)))
        elif len(names) == 1:
            listed += names
        else:
            step = part.values[1] - part.values[0]
            terms.append(CronEnumRange[Month](start=names[0], end=names[-1], step=step))
    return [*terms, CronEnumValues[Month](values=listed)] if listed else terms


def _weekday_terms(parts: Sequence[_Part]) -> list[WeekdayTerm]:
    """Cron counts from Sunday, 0 or 7, and we from Monday: a range or step may not be one any more."""
    if any(part.text == "*" for part in parts):
        return [CronEvery()]
    days = tuple(Weekday)
    numbers = sorted({(number - 1) % 7 for part in parts for number in part.values})
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and len(numbers) == last - first + 1:
        return [CronEnumRange[Weekday](start=days[first], end=days[last])]
    return [CronEnumValues[Weekday](values=[days[number] for number in numbers])]
