"""The history that `python -m benchmarks growth` inserts is history for retention too."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import growth

from horsies.db.pipeline import Pipeline
from horsies.db.statements.workers import delete_old_tasks
from tests.support.database import Database


def test_inserted_history_has_times_in_its_ids_and_is_deleted_oldest_first(
    connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MILLION": 300, "MILLIONS": 2, "DAYS": 30}.items():
        monkeypatch.setattr(growth, name, value)
    growth._fill(connection)

    def one(query: str) -> Any:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return row

    attempts = "SELECT count(*), count(DISTINCT task_id) FROM horsies_task_attempts"
    assert one(attempts) == (600, 600)
    same_order = (
        "SELECT array_agg(id ORDER BY id) = array_agg(id ORDER BY sent_at, id) FROM horsies_tasks"
    )
    assert one(same_order) == (True,)
    (deleted,) = Pipeline(connection).run([(delete_old_tasks, (20 * 24.0, 1_000))])
    assert 150 < len(deleted) < 250
    oldest = "SELECT min(completed_at) > now() - interval '20 days 1 minute' FROM horsies_tasks"
    assert one(oldest) == (True,)
    assert one(attempts) == (600 - len(deleted), 600 - len(deleted))
