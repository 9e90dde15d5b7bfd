"""The base class of configuration models, whose errors report all mistakes of an object together."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from horsies.errors import (
    ConfigurationError,
    ErrorCode,
    HorsiesError,
    InvalidFieldError,
    ValidationReport,
    raise_collected,
)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Pydantic quotes the invalid input by default, which may be an address with a password.
FROZEN_MODEL = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

# A hundred years: larger numbers of seconds, including infinity, overflow clocks and calendars.
SECONDS_MAX = 100 * 366 * 86_400

Problem: TypeAlias = tuple[ErrorCode, str]
# A condition that must be false, and the problem if it is true: a sentence that starts with a field
# name.
Check: TypeAlias = tuple[bool, ErrorCode, str]


def repeated_names(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, in order. One pass is enough for thousands of names."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


class FrozenModel(BaseModel):
    """An immutable model that rejects unknown fields and never quotes its input in errors.

    A wrong field raises an error with one sentence instead of pydantic's report.
    """

    model_config = FROZEN_MODEL

    if not TYPE_CHECKING:  # Type checkers derive the signature from the fields.

        def __init__(self, *unnamed: object, **fields: Any) -> None:
            if unnamed:
                raise _unnamed_error(type(self))
            try:
                super().__init__(**fields)
            except ValidationError as refused:
                raise field_error(type(self), refused) from None


def _unnamed_error(model: type[BaseModel]) -> InvalidFieldError:
    name = model.__name__
    # Omit `type` and `kind`, which distinguish the members of a union and have only one possible
    # value.
    given = (f"{one}=..." for one in model.model_fields if one not in ("type", "kind"))
    message = f"{name} takes its fields by name; write {name}({next(given, '')})."
    return InvalidFieldError(message, code=ErrorCode.CONFIG_INVALID_FIELD)


def field_error(model: type[BaseModel], refused: ValidationError) -> InvalidFieldError:
    """Return the error for the fields that pydantic rejected, with one sentence each; the first is the
    message.
    """
    sentences: dict[object, str] = {}
    for detail in refused.errors(include_url=False, include_input=False):
        # Pydantic reports an invalid union field once per member; keep the first report.
        sentences.setdefault(detail["loc"][:1], _field_sentence(model, detail))
    first, *others = sentences.values()
    return InvalidFieldError(first, code=ErrorCode.CONFIG_INVALID_FIELD, notes=others)


def _field_sentence(model: type[BaseModel], detail: ErrorDetails) -> str:
    name, *steps = detail["loc"] or ("",)
    place = f"{model.__name__}.{name}".rstrip(".") + "".join(
        f"[{step}]" for step in steps if isinstance(step, int)
    )
    known = [field.alias or field_name for field_name, field in model.model_fields.items()]
    match detail["type"]:
        case "extra_forbidden" if len(detail["loc"]) == 1:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(known)}."
            return f"{model.__name__} has no field {name!r}; {hint}"
        case "missing" if len(detail["loc"]) == 1:
            return f"{model.__name__} needs the field {name!r}."
        case "model_attributes_type" | "union_tag_not_found" if len(detail["loc"]) == 1:
            members = get_args(model.model_fields[str(name)].annotation)
            return f"{place} must be one of {', '.join(one.__name__ for one in members)}."
        case "model_type" | "dataclass_type":
            return f"{place} must be a {detail.get('ctx', {}).get('class_name', 'model')}."
        case "value_error":
            error = detail.get("ctx", {}).get("error")
            text = error.message if isinstance(error, HorsiesError) else str(error)
            return f"{place}: {text}"
    return f"{place}: {detail['msg'][:1].lower()}{detail['msg'][1:]}."


def raise_problems(phase: str, problems: Iterable[Problem]) -> None:
    """Raise all problems of one object as one error; do nothing without problems."""
    report = ValidationReport(phase)
    for code, message in problems:
        report.add(ConfigurationError(message, code=code))
    raise_collected(report)


def raise_failed(model: str, checks: Iterable[Check]) -> None:
    """Raise the problems of all conditions that are true, as `<model>.<sentence>`."""
    problems = ((code, f"{model}.{sentence}") for wrong, code, sentence in checks if wrong)
    raise_problems(model, problems)
