"""Cron terms: the values of a cron field, as typed terms or parsed from a classic expression. A term
selects values from the field's domain: all values, listed values, a range, or every n-th value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, assert_never

from cronsim import CronSim, CronSimError
from pydantic import Field

from horsies.validation import FrozenModel


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


class CronEvery(FrozenModel):
    """Every value of the field."""

    kind: Literal["every"] = "every"
    """Marks the kind of term in stored JSON."""


class CronStep(FrozenModel):
    """Every n-th value, starting with the field's first value: `CronStep(step=15)` is minute 0, 15, 30,
    45.
    """

    kind: Literal["step"] = "step"
    """Marks the kind of term in stored JSON."""
    step: int = Field(ge=1)
    """The step: every n-th value matches, counted from the field's first value."""


class CronValues(FrozenModel):
    """The listed values: `CronValues(values=[0, 30])`."""

    kind: Literal["values"] = "values"
    """Marks the kind of term in stored JSON."""
    values: list[int] = Field(min_length=1)
    """The values that match."""


class CronRange(FrozenModel):
    """All values from start to end, both included: `CronRange(start=9, end=17)`."""

    kind: Literal["range"] = "range"
    """Marks the kind of term in stored JSON."""
    start: int
    """The first value."""
    end: int
    """The last value, which is included."""
    step: int = Field(default=1, ge=1)
    """The step: every n-th value matches, counted from ``start``."""


class CronEnumValues(FrozenModel, Generic[E]):
    """The listed weekdays or months: `CronEnumValues(values=[Weekday.MONDAY])`."""

    kind: Literal["enum_values"] = "enum_values"
    """Marks the kind of term in stored JSON."""
    values: list[E] = Field(min_length=1)
    """The months or weekdays that match."""


class CronEnumRange(FrozenModel, Generic[E]):
    """All values from start to end, both included: `CronEnumRange(start=Month.MARCH, end=Month.MAY)`."""

    kind: Literal["enum_range"] = "enum_range"
    """Marks the kind of term in stored JSON."""
    start: E
    """The first month or weekday."""
    end: E
    """The last month or weekday, which is included."""
    step: int = Field(default=1, ge=1)
    """The step: every n-th month or weekday matches, counted from ``start``."""


class CronEnumStep(FrozenModel, Generic[E]):
    """Every n-th weekday from Monday, or month from January: `CronEnumStep[Month]` with `step=3`."""

    kind: Literal["enum_step"] = "enum_step"
    """Marks the kind of term in stored JSON."""
    step: int = Field(ge=1)
    """The step: every n-th month or weekday matches, counted from the first."""


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
    """The values of a field, from low to high; weekdays and months are numbered from 1."""

    name: str
    low: int
    high: int
    names: tuple[Weekday | Month, ...] = ()

    def number(self, value: Any) -> int:
        """Return the number of a weekday or month; return a number unchanged."""
        return self.names.index(value) + 1 if isinstance(value, Weekday | Month) else int(value)

    def shown(self, number: int) -> str:
        return self.names[number - 1].value if self.names else str(number)


MINUTES = Domain("minute", 0, 59)
HOURS = Domain("hour", 0, 23)
MONTH_DAYS = Domain("day of month", 1, 31)
WEEKDAYS = Domain("day of week", 1, 7, tuple(Weekday))
MONTHS = Domain("month", 1, 12, tuple(Month))


def values_of(terms: Sequence[AnyTerm], domain: Domain) -> tuple[int, ...]:
    """Return the values of all terms in ascending order, as numbers in the domain."""
    return tuple(sorted({value for term in terms for value in _values(term, domain)}))


def _values(term: AnyTerm, domain: Domain) -> Sequence[int]:
    match term:
        case CronEvery():
            return range(domain.low, domain.high + 1)
        case CronStep(step=step) | CronEnumStep(step=step):
            return range(domain.low, domain.high + 1, step)
        case CronValues(values=values) | CronEnumValues(values=values):
            return [domain.number(value) for value in values]
        case (
            CronRange(start=start, end=end, step=step)
            | CronEnumRange(start=start, end=end, step=step)
        ):
            return range(domain.number(start), domain.number(end) + 1, step)
        case _:
            assert_never(term)


def term_problems(terms: Sequence[AnyTerm], domain: Domain) -> Iterator[str]:
    """Yield the problems of one field's terms, one sentence each."""
    if not terms:
        yield f"{domain.name} needs at least one term"
    for term in terms:
        step, span = getattr(term, "step", 1), domain.high - domain.low
        if step > span:
            yield f"{domain.name} step {step} is larger than {span}, so only the first value matches"
        for value in term.values if isinstance(term, CronValues) else ():
            yield from _outside(value, domain)
        if isinstance(term, CronRange | CronEnumRange):
            yield from _range_problems(domain.number(term.start), domain.number(term.end), domain)


def _range_problems(start: int, end: int, domain: Domain) -> Iterator[str]:
    yield from _outside(start, domain)
    yield from _outside(end, domain)
    if start > end:
        yield (
            f"{domain.name} range {domain.shown(start)} to {domain.shown(end)} ends before it "
            "starts; write two ranges to wrap around"
        )


def _outside(value: int, domain: Domain) -> Iterator[str]:
    if not domain.low <= value <= domain.high:
        yield f"{domain.name} {value} is not between {domain.low} and {domain.high}"


_FIELDS = ("minutes", "hours", "days", "months", "weekdays")
_ANY_TIME = datetime(2000, 1, 1, tzinfo=UTC)


class ExpressionProblem(Exception):
    """The text is not a valid cron expression; ``problems`` has one sentence per mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class ExpressionFields:
    """The five fields of a cron expression, as terms."""

    minute: list[NumericTerm]
    hour: list[NumericTerm]
    day_of_month: list[NumericTerm]
    month: list[MonthTerm]
    day_of_week: list[WeekdayTerm]


def read_expression(expression: str) -> ExpressionFields:
    """Parse a classic expression; raise ExpressionProblem with all mistakes."""
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
    # Keep the order of the months: it is part of the stored hash, and a changed hash resets the
    # timetable.
    return ExpressionFields(
        _numeric_terms(minute),
        _numeric_terms(hour),
        _numeric_terms(day_of_month),
        [_month_term(term) for term in _numeric_terms(month, is_sorted=False)],
        _weekday_terms(day_of_week),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The text between two commas, and its values according to cronsim."""

    text: str
    values: tuple[int, ...]


def _read_field(position: int, text: str, problems: list[str]) -> Iterable[_Part]:
    for part in text.split(","):
        fields = ["*"] * len(_FIELDS)
        fields[position] = part or "?"
        try:
            found: set[Any] = getattr(CronSim(" ".join(fields), _ANY_TIME), _FIELDS[position])
        except CronSimError as error:
            problems.append(f"{str(error).lower()} {part!r}")
            continue
        if not all(isinstance(value, int) and value >= 0 for value in found):
            problems.append(f"{part!r} is an extension of cron that has no typed form")
        else:
            yield _Part(part, tuple(sorted(found)))


def _numeric_terms(parts: Sequence[_Part], *, is_sorted: bool = True) -> list[NumericTerm]:
    terms: list[NumericTerm] = []
    listed: list[int] = []
    for part in parts:
        if part.text == "*":
            return [CronEvery()]
        if part.text.startswith("*"):
            terms.append(CronStep(step=int(part.text.partition("/")[2])))
        elif len(part.values) == 1:
            listed += part.values
        else:
            first, second, *_ = part.values
            terms.append(CronRange(start=first, end=part.values[-1], step=second - first))
    if listed:
        terms.append(CronValues(values=sorted(set(listed)) if is_sorted else listed))
    return terms


def _month_term(term: NumericTerm) -> MonthTerm:
    months = dict(enumerate(Month, start=1))
    match term:
        case CronEvery():
            return term
        case CronStep(step=step):
            return CronEnumStep[Month](step=step)
        case CronRange(start=start, end=end, step=step):
            return CronEnumRange[Month](start=months[start], end=months[end], step=step)
        case CronValues(values=values):
            return CronEnumValues[Month](values=[months[number] for number in values])


def _weekday_terms(parts: Sequence[_Part]) -> list[WeekdayTerm]:
    # Cron counts weekdays from Sunday (0 or 7), ``Weekday`` from Monday. A range or step may
    # therefore become a list.
    if any(part.text == "*" for part in parts):
        return [CronEvery()]
    days = tuple(Weekday)
    numbers = sorted({(number - 1) % 7 for part in parts for number in part.values})
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 2 and len(numbers) == last - first + 1:
        return [CronEnumRange[Weekday](start=days[first], end=days[last])]
    return [CronEnumValues[Weekday](values=[days[number] for number in numbers])]
