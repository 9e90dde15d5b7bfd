"""Fixtures: a journal of what the functions of steps did."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from horsies import TaskHandle, TaskInfo


def info_of(sent: TaskHandle[Any]) -> TaskInfo:
    """The present state of a run's task."""
    found = sent.info().unwrap()
    assert found is not None
    return found


class Effects(Counter[str]):
    """How often each effect happened, outside of the database."""

    def note(self, what: str) -> str:
        self[what] += 1
        return what


@pytest.fixture
def effects() -> Effects:
    return Effects()
