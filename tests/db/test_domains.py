"""The domains of the tables refuse a status or an outcome that does not exist."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import Connection, errors

from tests.support.rows import add_task


@pytest.mark.parametrize("status", ["DONE", "pending", ""])
def test_a_status_that_does_not_exist_is_refused(connection: Connection[Any], status: str) -> None:
    task_id = add_task(connection)
    with pytest.raises(errors.CheckViolation, match="horsies_task_status"):
        connection.execute("UPDATE horsies_tasks SET status = %s WHERE id = %s", (status, task_id))


def test_an_outcome_that_does_not_exist_is_refused(connection: Connection[Any]) -> None:
    task_id = add_task(connection)
    with pytest.raises(errors.CheckViolation, match="horsies_attempt_outcome"):
        connection.execute(
            "INSERT INTO horsies_task_attempts (task_id, attempt, outcome, finished_at) "
            "VALUES (%s, 1, 'RETRIED', now())",
            (task_id,),
        )
