"""Fixtures: a task to send."""

from __future__ import annotations

import pytest

from horsies.app import Horsies
from tests.support.applications import Task, add_task


@pytest.fixture
def add(app: Horsies) -> Task:
    return add_task(app)
