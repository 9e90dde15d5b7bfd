"""Fixtures: both faces of every method, and the command line inside this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from horsies.cli import main
from tests.support.database import Database


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run: TypeAlias = Callable[..., Finished]


@pytest.fixture
def horsies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], process_url: str
) -> Run:
    """Run a command on this process's database, as wide as a terminal of old, without colours."""
    for name in [name for name in os.environ if name.startswith(("HORSIES_", "FORCE_COLOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("DATABASE_URL", process_url)

    def run(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["horsies", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main.main()
        written = capsys.readouterr()
        assert isinstance(left.value.code, int)
        return Finished(left.value.code, written.out, written.err)

    return run


@pytest.fixture
def database(connection: Database) -> Database:
    """The database behind the commands, its tables empty."""
    return connection
