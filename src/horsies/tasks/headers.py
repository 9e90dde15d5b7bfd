"""Headers: small texts that travel with a task, to the tasks that it sends and the workflows that it starts.

A tenant, a trace id or the name of a user are typical ones. They are stored in the task's options. While a
child runs a task, sends and starts of that process take over the headers of the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

HEADERS_BYTES_MAX = 8_192

_NONE: Mapping[str, str] = {}
# Most children run one task at a time; a module variable also reaches the threads that the task starts.
_inherited: Mapping[str, str] = _NONE
# The headers of a coroutine in a child that runs several at a time.
_inherited_here: ContextVar[Mapping[str, str]] = ContextVar("horsies_headers", default=_NONE)


def set_inherited(headers: Mapping[str, str] | None) -> None:
    """Set the headers of the running task, which its sends take over; None when it has ended."""
    global _inherited
    _inherited = headers or _NONE


def set_inherited_here(headers: Mapping[str, str]) -> None:
    """Set the headers that the sends of this coroutine, and of those that it starts, take over."""
    _inherited_here.set(headers)


def inherited() -> Mapping[str, str]:
    """Return the headers of the running task; empty outside of tasks."""
    return _inherited or _inherited_here.get()


def merged(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the inherited headers under those of a send."""
    return inherited() if headers is None else {**inherited(), **headers}


def headers_problem(headers: object) -> str | None:
    """Return why these headers cannot be stored, or None."""
    if not isinstance(headers, Mapping):
        return f"headers must be a dictionary of texts, not {type(headers).__name__}"
    try:
        found = dict(headers)
    except Exception as error:  # the application's own Mapping may raise anything
        return f"headers could not be read: {type(error).__name__}"
    size = 0
    for name, value in found.items():
        if not isinstance(name, str) or not name:
            return "the name of a header must be a text that is not empty"
        if not isinstance(value, str):
            return f"header {name[:40]!r} must be a text, not {type(value).__name__}"
        try:
            size += len(name.encode()) + len(value.encode())
        except UnicodeEncodeError:
            return f"header {name[:40]!a} contains a lone surrogate; replace that character"
        if "\0" in name or "\0" in value:
            return f"header {name[:40]!a} contains a NUL character; remove it"
    if size > HEADERS_BYTES_MAX:
        return (
            f"headers are {size:,} bytes, more than {HEADERS_BYTES_MAX:,}; send an argument instead"
        )
    return None
