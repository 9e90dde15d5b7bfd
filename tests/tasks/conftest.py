"""Fixtures: a task to send."""

from __future__ import annotations

import pytest

from horsies.app import Horsies
from tests.support.applications import Task, add_task
from tests.support.database import Database


@pytest.fixture
def connection(kept_connection: Database) -> Database:
    """One session for all tests of a process, which saves each test the start of one."""
    return kept_connection


@pytest.fixture
def add(app: Horsies) -> Task:
    return add_task(app)
