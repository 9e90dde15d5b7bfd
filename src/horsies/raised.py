"""Raised exceptions as text that can be stored: escaped, bounded, and whatever they do.

What a child puts into the report of a task that raised, near the end of the line producer -> SQL ->
turn -> child -> report -> result.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

_MESSAGE_CHARACTERS_MAX = 4_000
_TRACEBACK_CHARACTERS_MAX = 16_000


def exception_text(exception: BaseException) -> str:
    """Return what an exception says as storable text of bounded size; never raises."""
    return _text_or(lambda: str(exception), "<unprintable>")


def describe_exception(exception: BaseException) -> dict[str, str]:
    """Return an exception as JSON-ready text of bounded size; never raises."""
    return {
        "type": _text_or(lambda: type(exception).__name__, "<unknown type>"),
        "message": exception_text(exception),
        "traceback": _text_or(
            lambda: "".join(traceback.format_exception(exception)),
            "<traceback unavailable>",
            _TRACEBACK_CHARACTERS_MAX,
        ),
    }


def _text_or(make: Callable[[], str], fallback: str, limit: int = _MESSAGE_CHARACTERS_MAX) -> str:
    # User code runs here (__str__ and friends) and may raise anything at all; the report of a
    # failure must survive it.
    try:
        return _clipped(_storable(make()), limit)
    except BaseException:
        return fallback


def _storable(text: str) -> str:
    """Escape what JSON in UTF-8 or a PostgreSQL text column cannot hold."""
    escaped = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return escaped.replace("\x00", "\\x00")


def _clipped(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"
