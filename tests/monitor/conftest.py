"""Fixtures: the database behind the commands."""

from __future__ import annotations

import pytest

from tests.support.database import Database


@pytest.fixture
def database(connection: Database) -> Database:
    """The database behind the commands, its tables empty."""
    return connection
