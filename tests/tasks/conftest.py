"""Fixtures: a task to send, and patience with explanations."""

from __future__ import annotations

import pytest

from horsies.app import Horsies
from tests.support.applications import Task, add_task


@pytest.fixture
def add(app: Horsies) -> Task:
    return add_task(app)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an explanation takes longer than a wait that has timed out waits for it."""
    for module in ("handle", "waiters"):
        monkeypatch.setattr(f"horsies.tasks.{module}.OBSTACLE_SECONDS", 60.0)
