"""Fixtures: an application written as a module, and the command line inside this process."""

from __future__ import annotations

import importlib
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horsies import Horsies
from tests.support.database import Database

HEADER = """
from typing import Any
from horsies import *

app = Horsies("postgresql://shop@127.0.0.1:1/shop")

@app.task("work")
def work(n: int = 1) -> TaskResult[int, TaskError]:
    return TaskResult(ok=n)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Horsies]]:
    """Write and import a module with an application, and return the application."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(body: str) -> Horsies:
        names.append(f"first_day_{uuid.uuid4().hex}")
        (tmp_path / f"{names[-1]}.py").write_text(HEADER + textwrap.dedent(body))
        app = importlib.import_module(names[-1]).app
        assert isinstance(app, Horsies)
        return app

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def database(connection: Database) -> Database:
    """The database behind the commands, its tables empty."""
    return connection
