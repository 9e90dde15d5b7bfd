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
