"""Claims for windows: which tasks may wait in a child, how far a claim goes, and when attempts started."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from psycopg import Connection

from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    CompleteTasks,
    FailTasks,
    RetryTasks,
    claim_tasks,
    complete_tasks,
    fail_tasks,
    retry_tasks,
)
from tests.support.rows import add_task, ago

CRASHES = '{"retry_policy":{"auto_retry_for":["DOWN","WORKER_CRASHED"]},"good_until":null}'


def claim(
    connection: Connection[Any],
    idle: int,
    ahead: int,
    *,
    names: Sequence[str] = ("work",),
    queues: Sequence[str] = ("default",),
    caps: Sequence[int | None] = (),
) -> list[ClaimedTask]:
    places = idle + ahead
    return claim_tasks.run(
        connection,
        ClaimTasks(
            "me",
            "host",
            list(range(1, places + 1)),
            list(queues),
            [places] * len(queues),
            queue_caps=list(caps),
            idle=idle,
            short_names=list(names),
        ),
    )


def add_line(connection: Connection[Any], kinds: str) -> None:
    """Add due tasks in this order: b may wait in a child, p may not, o may but has another name."""
    for place, kind in enumerate(kinds):
        add_task(
            connection,
            args=f'["{place}"]',
            burst=kind != "p",
            task_name="other" if kind == "o" else "work",
            enqueued_at=ago(100 - place),
        )


@pytest.mark.parametrize(
    ("kinds", "idle", "ahead", "taken"),
    [
        ("bbbbbb", 2, 2, 4),
        ("bbbbbb", 0, 3, 3),
        ("bbpbbb", 1, 5, 2),
        ("pbbbbb", 0, 4, 0),
        ("pbbbbb", 1, 4, 1),
        ("ppbbbb", 4, 2, 4),
        ("bbobbb", 1, 5, 2),
        ("bbp", 3, 3, 3),
        ("", 2, 2, 0),
    ],
)
def test_places_behind_others_get_the_leading_run_of_short_tasks(
    connection: Connection[Any], kinds: str, idle: int, ahead: int, taken: int
) -> None:
    add_line(connection, kinds)
    claimed = claim(connection, idle, ahead)
    assert [task.args for task in claimed] == [f'["{place}"]' for place in range(taken)]
    assert [task.worker_pid for task in claimed] == list(range(1, taken + 1))
    assert [task.burst for task in claimed] == [kind != "p" for kind in kinds[:taken]]


def test_without_short_names_no_place_behind_others_is_filled(connection: Connection[Any]) -> None:
    add_line(connection, "bbbb")
    assert len(claim(connection, 1, 3, names=())) == 1


def test_a_capped_queue_has_no_windows(connection: Connection[Any]) -> None:
    add_line(connection, "bbbb")
    assert len(claim(connection, 1, 3, caps=[100])) == 1


@pytest.mark.parametrize(
    ("options", "is_burst"),
    [
        (CRASHES, True),
        ('{"retry_policy":null,"good_until":null,"burst":true}', True),
        ('{"retry_policy":null,"good_until":null}', False),
        ('{"retry_policy":null,"headers":{"a":"\\"WORKER_CRASHED\\"","burst":"true"}}', False),
        ('{"retry_policy":{"auto_retry_for":["DOWN"]},"headers":{"x":"WORKER_CRASHED"}}', False),
        ('{"retry_policy":null,"burst":false}', False),
        (None, False),
    ],
)
def test_the_options_of_a_task_decide_whether_it_may_wait_in_a_child(
    connection: Connection[Any], options: str | None, is_burst: bool
) -> None:
    row = connection.execute("SELECT horsies_is_burst_v1(%s)", (options,)).fetchone()
    assert row == (is_burst,)


def spans(connection: Connection[Any]) -> list[timedelta]:
    rows = connection.execute("SELECT finished_at - started_at FROM horsies_task_attempts")
    return [span for (span,) in rows.fetchall()]


@pytest.mark.parametrize("run_us", [250_000, None])
def test_an_attempt_started_as_long_ago_as_it_ran(
    connection: Connection[Any], run_us: int | None
) -> None:
    long_ago = {"started_at": ago(30), "status": "RUNNING", "claimed_by_worker_id": "me"}
    ids = [[add_task(connection, generation=1, **long_ago)] for _ in range(3)]
    none, fail = [None], (["FAILED"], ["X"])
    complete_tasks.run(connection, CompleteTasks("me", ids[0], [1], ["1"], [run_us]))
    retry_tasks.run(
        connection,
        RetryTasks("me", ids[1], [1], [9.0], *fail, none, none, none, [3], [run_us]),
    )
    failed = FailTasks("me", ids[2], [1], ["FAILED"], ["1"], *fail, none, none, none, [run_us])
    fail_tasks.run(connection, failed)
    expected = 30.0 if run_us is None else run_us / 1e6
    assert [span.total_seconds() for span in spans(connection)] == [
        pytest.approx(expected, abs=5.0 if run_us is None else 0.01)
    ] * 3


def test_a_long_wait_in_the_transaction_that_records_an_end_does_not_move_the_start(
    connection: Connection[Any],
) -> None:
    running = {"status": "RUNNING", "claimed_by_worker_id": "me"}
    task_id = add_task(connection, generation=1, **running)
    with connection.transaction():
        connection.execute("SELECT pg_sleep(1.1)")
        complete_tasks.run(connection, CompleteTasks("me", [task_id], [1], ["1"], [250_000]))
        moved = connection.execute("SELECT started_at - now() FROM horsies_tasks").fetchone()
    assert moved == (timedelta(seconds=0.75),)
