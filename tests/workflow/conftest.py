"""Fixtures: both faces of every method, and an application with tasks to build workflows of."""

from __future__ import annotations

import pytest

from horsies.app import Horsies
from tests.support.database import Database
from tests.support.turns import Hands, Tasks, define_tasks


@pytest.fixture
def tasks(app: Horsies) -> Tasks:
    """Tasks of an application on this process's database."""
    return define_tasks(app)


@pytest.fixture
def hands(connection: Database) -> Hands:
    """Does by hand what workers would do."""
    return Hands(connection)
