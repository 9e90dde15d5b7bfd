"""Fixtures: both faces of every method, and an application with tasks to build workflows of."""

from __future__ import annotations

import importlib
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horsies.app import Horsies
from tests.support.database import Database
from tests.support.oracle.compare import Duet
from tests.support.turns import Hands, Tasks, define_tasks

HEADER = """
from typing import Any
from horsies import *

app = Horsies("postgresql://shop@127.0.0.1:1/shop")

@app.task("work")
def work(n: int = 1) -> TaskResult[int, TaskError]:
    return TaskResult(ok=n)
"""


@pytest.fixture
def tasks(app: Horsies) -> Tasks:
    """Tasks of an application on this process's database."""
    return define_tasks(app)


@pytest.fixture
def hands(connection: Database) -> Hands:
    """Does the work of workers on the test's own connection."""
    return Hands(connection)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Horsies]]:
    """Write and import a module with an application, and return the application."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(body: str) -> Horsies:
        names.append(f"shop_{uuid.uuid4().hex}")
        (tmp_path / f"{names[-1]}.py").write_text(HEADER + textwrap.dedent(body))
        app = importlib.import_module(names[-1]).app
        assert isinstance(app, Horsies)
        return app

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def duet(connection: Database) -> Duet:
    """The engine beside the oracle that predicts it."""
    return Duet(connection)
