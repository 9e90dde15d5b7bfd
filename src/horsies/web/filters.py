"""Filters in a URL's query, with the same names for pages, the JSON API and bulk orders."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from horsies.encryption import is_opaque
from horsies.monitor.arguments import ArgumentProblem, parse_argument, search_for
from horsies.monitor.queries import Search, TaskFilters, parse_time, task_filters
from horsies.result import Err
from horsies.tasks.broker import BrokerResult
from horsies.web.reading import BadRequest, Forbidden
from horsies.web.rendering import View

T = TypeVar("T")

LIMIT_DEFAULT = 50
LIMIT_MAX = 200

TASK_FILTERS = frozenset(
    {
        *("status", "queue", "task_name", "error_code", "fingerprint", "worker", "retried_only"),
        *("since", "until", "argument", "before", "limit"),
    }
)


def texts_of(view: View, name: str) -> list[str]:
    """Return the values of a repeatable filter, without the blank values that empty fields send."""
    return [value for value in view.query.getlist(name) if value.strip()]


def text_of(view: View, name: str) -> str | None:
    """Return a filter's last value, or None if it is missing or blank."""
    return next(reversed(texts_of(view, name)), None)


def refuse_unknown(view: View, known: Collection[str]) -> None:
    """Reject a query with unknown filters, because a misspelt filter would show too many rows."""
    if unknown := sorted(set(view.query) - set(known)):
        raise BadRequest(
            f"There is no filter {unknown[0]!r}; the filters are {', '.join(sorted(known))}.",
            code="UNKNOWN_FILTER",
        )


def time_of(view: View, name: str, now: datetime | None = None) -> datetime | None:
    """Parse a time: ``15m`` ago, or ``2026-01-31T12:00``, in UTC unless it has an offset."""
    text = text_of(view, name)
    return None if text is None else parsed_time(name, text, now)


def parsed_time(name: str, text: str, now: datetime | None = None) -> datetime:
    try:
        return parse_time(text, now or datetime.now(UTC), UTC)
    except ValueError as error:
        raise BadRequest(f"{name}: {error}", code="INVALID_FILTER") from error


def number_of(view: View, name: str, default: int, most: int) -> int:
    """Parse a whole number from 1 to ``most``."""
    if (text := text_of(view, name)) is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise BadRequest(
            f"{name} must be a whole number from 1 to {most:,}, not {text[:40]!r}.",
            code="INVALID_FILTER",
        )
    return int(text)


def task_filters_of(view: View) -> TaskFilters:
    """Return a task list's filters; reject invalid filters with 400."""
    given: dict[str, Any] = {
        "status": texts_of(view, "status") or None,
        "queue": texts_of(view, "queue") or None,
        "name": texts_of(view, "task_name") or None,
        "error_code": texts_of(view, "error_code") or None,
        "worker": texts_of(view, "worker") or None,
        "retried_only": is_on(view, "retried_only"),
        "fingerprint": text_of(view, "fingerprint"),
        "since": time_of(view, "since"),
        "until": time_of(view, "until"),
        "after": text_of(view, "before"),
        "limit": number_of(view, "limit", LIMIT_DEFAULT, LIMIT_MAX),
    }
    return replace(accepted(task_filters(**given)), search=_search_of(view))


def run_filter_values(view: View) -> dict[str, Any]:
    """Return the filters that all run lists share, in the form that ``run_filters`` takes."""
    return {
        "status": texts_of(view, "status") or None,
        "name": texts_of(view, "name") or None,
        "workflow_key": texts_of(view, "workflow_key") or None,
        "since": time_of(view, "since"),
        "until": time_of(view, "until"),
    }


def accepted(checked: BrokerResult[T]) -> T:
    """Return checked filters; reject invalid filters with 400."""
    if isinstance(checked, Err):
        raise BadRequest(checked.err_value.message, code="INVALID_FILTER")
    return checked.ok_value


def is_on(view: View, name: str) -> bool:
    """Return whether a switch is on; reject any other value with 400."""
    text = (text_of(view, name) or "0").lower()
    if text not in ("0", "1", "false", "true", "on", "off"):
        raise BadRequest(f"{name} must be true or false, not {text[:40]!r}.", code="INVALID_FILTER")
    return text in ("1", "true", "on")


def _search_of(view: View) -> Search | None:
    if (text := text_of(view, "argument")) is None:
        return None
    # Check the permission, because the number of results would reveal arguments.
    if not view.access.sees_payload:
        raise Forbidden("You may not see arguments, so you cannot search them.", code="NO_PAYLOAD")
    if text_of(view, "fingerprint") is not None:
        raise BadRequest(
            "argument and fingerprint exclude each other; leave one out.", code="INVALID_FILTER"
        )
    try:
        argument = parse_argument(text, view.site.masking)
    except ArgumentProblem as problem:
        raise BadRequest(str(problem), code="INVALID_FILTER") from problem
    app = view.site.app
    if app is not None and is_opaque(app.config.broker):
        argument = argument.among_encrypted()
    names = app.list_tasks() if app else ()
    parameters = {name: view.site.parameter_names(name) for name in names}
    return search_for(argument, view.site.masking, parameters)
