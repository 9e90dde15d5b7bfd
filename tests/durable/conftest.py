"""Fixtures: a journal of what the functions of steps did."""

from __future__ import annotations

import pytest

from tests.support.durable_runs import Effects


@pytest.fixture
def effects() -> Effects:
    return Effects()
