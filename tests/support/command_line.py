"""Runs the command line in this process, and returns its output and exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Finished:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


Run: TypeAlias = Callable[..., Finished]


def assert_unreachable(finished: Finished) -> None:
    """Check the report about a database that cannot be reached: one sentence without a password."""
    assert (finished.code, finished.out) == (1, "")
    assert "Traceback" not in finished.err
    assert "hunter2" not in finished.err
    assert "start PostgreSQL" in finished.err
