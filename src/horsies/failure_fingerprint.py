"""Fingerprints of failures: attempts that failed for the same reason have the same fingerprint.

The reason consists of the task, the error code, the class of the exception, and the place in the
application's code that raised it. Line numbers and messages are ignored, because they change with
releases and arguments.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import NamedTuple

from horsies.errors import RetryLater, TaskFailed

# The length of the database columns.
TEXT_MAX = 255
_DIGEST_BYTES = 6
_INSTALLED = re.compile(
    r"[/\\](?:site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]|^<(?:frozen |string>)"
)
_STANDARD = re.compile(r"[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages|dist-packages)|^<frozen ")
_OURS = str(Path(__file__).parent) + "/"


class Origin(NamedTuple):
    """The class of an exception, and the application's file and function that raised it.

    The values are None if the error code is more specific, or if no exception was raised.
    """

    exception_type: str | None = None
    raised_in: str | None = None


NO_ORIGIN = Origin()


def fingerprint_of(task_name: str, error_code: str | None, origin: Origin = NO_ORIGIN) -> str:
    """Return twelve hexadecimal digits that identify the reason of a failure.

    Example:
        >>> fingerprint_of("charge", "CARD_DECLINED")
        'ef96c64c5a97'
    """
    parts = (task_name, error_code or "", *(part or "" for part in origin))
    text = "\0".join(parts).encode(errors="backslashreplace")
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()


def origin_of(raised: object) -> Origin:
    """Return the origin of an exception, or an unknown origin for any other object. Never raises."""
    if not isinstance(raised, BaseException):
        return NO_ORIGIN
    try:
        kind, place = error_type(raised), _place(raised.__traceback__)
        return Origin(kind and kind[:TEXT_MAX], place and place[:TEXT_MAX])
    # A metaclass, or the globals of code built at run time, may lack the attribute or raise.
    except Exception:
        return NO_ORIGIN


def error_type(error: BaseException) -> str | None:
    """Return the qualified name of an exception's class, or None if its error code is more specific.

    Different bugs share the code of unhandled exceptions, so only the class distinguishes them.

    Example:
        >>> error_type(ZeroDivisionError())
        'ZeroDivisionError'
    """
    if isinstance(error, TaskFailed | RetryLater):
        return None
    kind = type(error)
    is_plain = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if is_plain else f"{kind.__module__}.{kind.__qualname__}"


def is_installed(file: str) -> bool:
    """Return whether a file was installed instead of written with the application."""
    return _INSTALLED.search(file) is not None


def _place(traceback: TracebackType | None) -> str | None:
    """Return the innermost frame of the application's code.

    For an installed application, return the innermost frame outside the standard library and this
    package.
    """
    frames = list(_frames(traceback))
    frames = [one for one in frames if not one[0].co_filename.startswith(_OURS)] or frames
    for is_foreign in (is_installed, _STANDARD.search, lambda file: False):
        own = [frame for frame in frames if not is_foreign(frame[0].co_filename)]
        if own:
            return _place_text(*own[-1])
    return None


def _frames(traceback: TracebackType | None) -> Iterator[tuple[CodeType, str]]:
    while traceback is not None:
        frame = traceback.tb_frame
        yield frame.f_code, str(frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next


def _place_text(code: CodeType, module: str) -> str:
    """Return a place as ``shop/payments.py:charge``.

    Only the last part of the path, which matches the module's name, is kept, because directories differ
    between hosts and releases.
    """
    parts = re.split(r"[/\\]", code.co_filename)
    depth = 1 if module == "__main__" else module.count(".") + 1
    depth += parts[-1] == "__init__.py"
    return f"{'/'.join(parts[-depth:])}:{code.co_qualname}"
