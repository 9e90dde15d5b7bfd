"""Statements on many tasks find the values of each by the position of its id: the right ones, without a
comparison of every task with every id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any

import psycopg
import pytest
from psycopg import Connection

from horsies.db.statement import Statement
from horsies.db.statements.turn import (
    CompleteTasks,
    FailTasks,
    ReleaseClaimed,
    RenewClaims,
    RetryTasks,
    StartTasks,
    StoreProgress,
    complete_tasks,
    fail_tasks,
    release_claimed,
    renew_claims,
    retry_tasks,
    start_tasks,
    store_progress,
)
from horsies.db.statements.workers import FindOwned, find_owned
from horsies.worker.connection import TURN_SETTINGS
from tests.support.query_plans import nodes
from tests.support.rows import attempts_of, row_of

OWNER = "worker-1"
COUNT = 64
# The ids are random, the generations all different.
FILL = """
INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, status, generation, claimed_by_worker_id,
                           claimed_at, claim_expires_at)
SELECT gen_random_uuid(), 'work', 'default', 'sha', %s, n, 'worker-1', now(), now() + interval '1 minute'
FROM generate_series(1, %s) AS n RETURNING id::text, generation
"""


def words(kind: str, generations: Sequence[int]) -> list[str]:
    return [f"{kind} {generation}" for generation in generations]


def completion(ids: list[str], numbers: list[int]) -> CompleteTasks:
    return CompleteTasks(OWNER, ids, numbers, words("result", numbers))


def retrial(ids: list[str], numbers: list[int]) -> RetryTasks:
    return RetryTasks(
        OWNER,
        ids,
        numbers,
        [float(number) for number in numbers],
        ["FAILED"] * len(ids),
        words("code", numbers),
        words("message", numbers),
        words("failed", numbers),
        words("retry", numbers),
        [number + 100 for number in numbers],
    )


def failure(ids: list[str], numbers: list[int]) -> FailTasks:
    return FailTasks(
        OWNER,
        ids,
        numbers,
        ["CANCELLED" if number % 2 else "FAILED" for number in numbers],
        words("result", numbers),
        ["WORKER_FAILURE" if number % 2 else "FAILED" for number in numbers],
        words("code", numbers),
        words("message", numbers),
        words("failed", numbers),
        words("retry", numbers),
    )


def start(ids: list[str], numbers: list[int]) -> StartTasks:
    return StartTasks(OWNER, ids, numbers, [number + 1000 for number in numbers])


def progress(ids: list[str], numbers: list[int]) -> StoreProgress:
    totals = [number + 0.5 for number in numbers]
    return StoreProgress(
        OWNER, ids, numbers, list(map(float, numbers)), totals, words("note", numbers)
    )


CALLS: list[tuple[Statement[Any, Any], str, Callable[[list[str], list[int]], Any]]] = [
    (complete_tasks, "RUNNING", completion),
    (retry_tasks, "RUNNING", retrial),
    (fail_tasks, "RUNNING", failure),
    (start_tasks, "CLAIMED", start),
    (store_progress, "RUNNING", progress),
    (
        renew_claims,
        "CLAIMED",
        lambda ids, numbers: RenewClaims(OWNER, ids, numbers, 60_000, 60_000),
    ),
    (release_claimed, "CLAIMED", lambda ids, numbers: ReleaseClaimed(OWNER, ids, numbers)),
    (find_owned, "RUNNING", lambda ids, numbers: FindOwned(OWNER, ids, numbers)),
]
BY_NAME = pytest.mark.parametrize(
    ("statement", "status", "call"), [pytest.param(*one, id=one[0].name) for one in CALLS]
)


def add_tasks(connection: Connection[Any], status: str, count: int) -> dict[str, int]:
    return dict(connection.execute(FILL, (status, count)).fetchall())


@BY_NAME
def test_only_tasks_of_the_named_generation_match(
    connection: Connection[Any],
    statement: Statement[Any, Any],
    status: str,
    call: Callable[[list[str], list[int]], Any],
) -> None:
    tasks = add_tasks(connection, status, 6)
    ids = list(tasks)
    stale = {ids[1], ids[4]}
    numbers = [tasks[one] - (one in stale) for one in ids]
    assert {row[0] for row in statement.run(connection, call(ids, numbers))} == set(ids) - stale


def test_each_task_gets_its_own_values(connection: Connection[Any]) -> None:
    for statement, status, call in CALLS[:4]:
        tasks = add_tasks(connection, status, 5)
        statement.run(connection, call(list(tasks), list(tasks.values())))
        for task_id, number in tasks.items():
            row = row_of(connection, task_id)
            attempt: dict[str, Any] = next(iter(attempts_of(connection, task_id)), {})
            texts = attempt.get("error_code"), attempt.get("error_message")
            reasons = attempt.get("failed_reason"), attempt.get("retry_reason")
            match statement.name:
                case "complete_tasks":
                    assert row["result"] == f"result {number}"
                    assert attempt["outcome"] == "COMPLETED"
                case "retry_tasks":
                    assert row["enqueued_at"] == row["next_retry_at"]
                    assert (row["status"], row["max_retries"]) == ("PENDING", number + 100)
                    assert (texts, reasons) == (
                        (f"code {number}", f"message {number}"),
                        (f"failed {number}", f"retry {number}"),
                    )
                case "fail_tasks":
                    assert row["status"] == ("CANCELLED" if number % 2 else "FAILED")
                    assert (row["result"], row["error_code"]) == (
                        f"result {number}",
                        f"code {number}",
                    )
                    assert row["failed_reason"] == f"failed {number}"
                    assert attempt["outcome"] == ("WORKER_FAILURE" if number % 2 else "FAILED")
                    assert (texts, reasons) == (
                        (f"code {number}", f"message {number}"),
                        (f"failed {number}", f"retry {number}"),
                    )
                case _:
                    assert (row["worker_pid"], row["worker_process_name"]) == (
                        number + 1000,
                        f"worker-{number + 1000}",
                    )


def test_retries_are_due_after_their_own_delays(connection: Connection[Any]) -> None:
    tasks = add_tasks(connection, "RUNNING", 5)
    retry_tasks.run(connection, retrial(list(tasks), list(tasks.values())))
    in_order = connection.execute("SELECT id::text FROM horsies_tasks ORDER BY enqueued_at")
    assert [task_id for (task_id,) in in_order] == sorted(tasks, key=lambda one: tasks[one])


def test_each_task_gets_its_own_progress(connection: Connection[Any]) -> None:
    tasks = add_tasks(connection, "RUNNING", 5)
    store_progress.run(connection, progress(list(tasks), list(tasks.values())))
    found = connection.execute("SELECT task_id::text, done, total, note FROM horsies_task_progress")
    assert {row[0]: row[1:] for row in found} == {
        task_id: (number, number + 0.5, f"note {number}") for task_id, number in tasks.items()
    }


@pytest.fixture
def tuned(process_url: str, connection: Connection[Any]) -> Iterator[Connection[Any]]:
    with psycopg.connect(process_url, autocommit=True, options=TURN_SETTINGS) as tuned:
        yield tuned


def assert_compares_no_pairs(plan: Any) -> None:
    removed = [node.get("Rows Removed by Join Filter", 0) for node in nodes(plan)]
    assert sum(removed) == 0, json.dumps(plan, indent=1)
    assert any(node.get("Actual Rows") == COUNT for node in nodes(plan))


@BY_NAME
def test_no_task_is_compared_with_the_ids_of_all_others(
    tuned: Connection[Any],
    statement: Statement[Any, Any],
    status: str,
    call: Callable[[list[str], list[int]], Any],
) -> None:
    tasks = add_tasks(tuned, status, COUNT)
    params = statement.mapping(call(list(tasks), list(tasks.values())))
    explain = b"EXPLAIN (ANALYZE, FORMAT JSON) " + statement.query()
    (found,) = tuned.execute(explain, params).fetchall()
    assert_compares_no_pairs(found[0])


def explaining_claim() -> bytes:
    """A copy of the function that claims: it explains its statement, whose plan is not shown otherwise."""
    file = files("horsies.db.functions").joinpath("20_claim.sql").read_text("utf-8")
    body = file[file.index("CREATE OR REPLACE FUNCTION horsies_claim_v1") :].split("\n$$;")[0]
    claim = re.compile(r"RETURN QUERY\n(.+?;)\n.+?ROW_COUNT;", re.DOTALL)
    body, count = claim.subn(r"RETURN QUERY EXPLAIN (ANALYZE, FORMAT JSON)\n\1\nRETURN;", body)
    assert count == 1
    # The row that ends the walk over the keys: there are none here.
    body, count = re.subn(r"id := '';.+?RETURN NEXT;", "", body, flags=re.DOTALL)
    assert count == 1
    body = re.sub(r"RETURNS TABLE \(.+?\)", "RETURNS SETOF json", body, count=1, flags=re.DOTALL)
    return body.replace("horsies_claim_v1", "pg_temp.claim", 1).encode() + b"\n$$"


def test_no_claimed_task_is_compared_with_all_others(tuned: Connection[Any]) -> None:
    add_tasks(tuned, "PENDING", 2 * COUNT)
    tuned.execute(explaining_claim())
    (found,) = tuned.execute(
        "SELECT pg_temp.claim('worker-1', 'host', %s, 0, 60000, '{default}', %s, '{}', NULL, true, '{}')",
        (list(range(COUNT)), [COUNT]),
    ).fetchall()
    assert_compares_no_pairs(found[0])
