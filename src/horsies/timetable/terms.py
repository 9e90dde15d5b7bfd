"""What a cron field is made of: terms, and the values they stand for.

A term says how values are chosen (all, listed, a range, every n-th); the field it stands in says of
what. Stands before the line producer -> SQL -> turn -> child -> report -> result: a scheduler reads
it to know when to be a producer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, assert_never

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, Field

from horsies.validation import FROZEN_MODEL


class Weekday(StrEnum):
    """A day of the week, Monday first."""

    MONDAY = "monday"
    TUESDAY = "tuesday"
    WEDNESDAY = "wednesday"
    THURSDAY = "thursday"
    FRIDAY = "friday"
    SATURDAY = "saturday"
    SUNDAY = "sunday"


class Month(StrEnum):
    """A month of the year."""

    JANUARY = "january"
    FEBRUARY = "february"
    MARCH = "march"
    APRIL = "april"
    MAY = "may"
    JUNE = "june"
    JULY = "july"
    AUGUST = "august"
    SEPTEMBER = "september"
    OCTOBER = "october"
    NOVEMBER = "november"
    DECEMBER = "december"


E = TypeVar("E", Weekday, Month)


class CronEvery(BaseModel):
    """Every value of the field."""

    model_config = FROZEN_MODEL
    kind: Literal["every"] = "every"


class CronStep(BaseModel):
    """Every n-th value, from the first of the field: `CronStep(step=15)` is minute 0, 15, 30, 45."""

    model_config = FROZEN_MODEL
    kind: Literal["step"] = "step"
    step: int = Field(ge=1)


class CronValues(BaseModel):
    """The listed values: `CronValues(values=[0, 30])`."""

    model_config = FROZEN_MODEL
    kind: Literal["values"] = "values"
    values: list[int] = Field(min_length=1)


class CronRange(BaseModel):
    """From start to end, both included: `CronRange(start=9, end=17)`."""

    model_config = FROZEN_MODEL
    kind: Literal["range"] = "range"
    start: int
    end: int
    step: int = Field(default=1, ge=1)


class CronEnumValues(BaseModel, Generic[E]):
    """The listed weekdays or months: `CronEnumValues(values=[Weekday.MONDAY])`."""

    model_config = FROZEN_MODEL
    kind: Literal["enum_values"] = "enum_values"
    values: list[E] = Field(min_length=1)


class CronEnumRange(BaseModel, Generic[E]):
    """From start to end, both included: `CronEnumRange(start=Month.MARCH, end=Month.MAY)`."""

    model_config = FROZEN_MODEL
    kind: Literal["enum_range"] = "enum_range"
    start: E
    end: E
    step: int = Field(default=1, ge=1)


class CronEnumStep(BaseModel, Generic[E]):
    """Every n-th weekday from Monday, or month from January: `CronEnumStep[Month](step=3)`."""

    model_config = FROZEN_MODEL
    kind: Literal["enum_step"] = "enum_step"
    step: int = Field(ge=1)


NumericTerm: TypeAlias = Annotated[
    CronEvery | CronStep | CronValues | CronRange, Field(discriminator="kind")
]
WeekdayTerm: TypeAlias = Annotated[
    CronEvery | CronEnumValues[Weekday] | CronEnumRange[Weekday] | CronEnumStep[Weekday],
    Field(discriminator="kind"),
]
MonthTerm: TypeAlias = Annotated[
    CronEvery | CronEnumValues[Month] | CronEnumRange[Month] | CronEnumStep[Month],
    Field(discriminator="kind"),
]
AnyTerm: TypeAlias = (
    CronEvery
    | CronStep
    | CronValues
    | CronRange
    | CronEnumValues[Any]
    | CronEnumRange[Any]
    | CronEnumStep[Any]
)


@dataclass(frozen=True, slots=True)
class Domain:
    """The values a field can have, from low to high; weekdays and months count from 1 by name."""

    name: str
    low: int
    high: int
    names: tuple[Weekday | Month, ...] = ()

    @property
    def span(self) -> int:
        """The largest step that still reaches a second value."""
        return self.high - self.low

    def number(self, value: Any) -> int:
        """Return the place of a weekday or month in its order; numbers are their own."""
        return self.names.index(value) + 1 if isinstance(value, Weekday | Month) else int(value)

    def shown(self, number: int) -> str:
        """Return the value as its user wrote it."""
        return self.names[number - 1].value if self.names else str(number)


MINUTES = Domain("minute", 0, 59)
HOURS = Domain("hour", 0, 23)
MONTH_DAYS = Domain("day of month", 1, 31)
WEEKDAYS = Domain("day of week", 1, 7, tuple(Weekday))
MONTHS = Domain("month", 1, 12, tuple(Month))


def values_of(terms: Sequence[AnyTerm], domain: Domain) -> tuple[int, ...]:
    """Return the united values of all terms in ascending order, as numbers of the domain."""
    united = {value for term in terms for value in _values(term, domain)}
    return tuple(sorted(united))


def _values(term: AnyTerm, domain: Domain) -> Sequence[int]:
    match term:
        case CronEvery():
            return range(domain.low, domain.high + 1)
        case CronStep(step=step) | CronEnumStep(step=step):
            return range(domain.low, domain.high + 1, step)
        case CronValues(values=values) | CronEnumValues(values=values):
            return [domain.number(value) for value in values]
        case CronRange(start=start, end=end, step=step):
            return range(start, end + 1, step)
        case CronEnumRange(start=start, end=end, step=step):
            return range(domain.number(start), domain.number(end) + 1, step)
        case _:
            assert_never(term)


def term_problems(terms: Sequence[AnyTerm], domain: Domain) -> Iterator[str]:
    """Say what is wrong with the terms of one field, a sentence each."""
    if not terms:
        yield f"{domain.name} needs at least one term"
    for term in terms:
        yield from _step_problems(term, domain)
        yield from _bound_problems(term, domain)


def _step_problems(term: AnyTerm, domain: Domain) -> Iterator[str]:
    step = getattr(term, "step", 1)
    if step > domain.span:
        yield f"{domain.name} step {step} is larger than {domain.span}, so it never takes one"


def _bound_problems(term: AnyTerm, domain: Domain) -> Iterator[str]:
    match term:
        case CronValues(values=values):
            for value in values:
                yield from _outside(value, domain)
        case CronRange(start=start, end=end):
            yield from _outside(start, domain)
            yield from _outside(end, domain)
            yield from _backwards(start, end, domain)
        case CronEnumRange(start=start, end=end):
            yield from _backwards(domain.number(start), domain.number(end), domain)
        case _:
            return


def _outside(value: int, domain: Domain) -> Iterator[str]:
    if not domain.low <= value <= domain.high:
        yield f"{domain.name} {value} is not between {domain.low} and {domain.high}"


def _backwards(start: int, end: int, domain: Domain) -> Iterator[str]:
    if start > end:
        yield (
            f"{domain.name} range {domain.shown(start)} to {domain.shown(end)} ends before it "
            "starts; write two ranges to wrap around"
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
