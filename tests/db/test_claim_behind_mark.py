"""The short form of the claim, which a worker with a backlog uses: it claims what the full form claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from psycopg import Connection

from horsies.config.app import Rate
from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import ClaimedTask, claim_tasks
from horsies.tasks.outcome import Outcome
from horsies.worker.connection import TURN_SETTINGS
from horsies.worker.turn import (
    EVERYWHERE,
    Bookmarks,
    Claimer,
    Positions,
    TurnRequest,
    take_turn,
)
from tests.support.query_plans import task_reads
from tests.support.rows import add_task, ago

CLAIMER = Claimer("w", "host", ["default"], [None])
SHORT = "claim_behind_mark"


class Turns:
    """The turns of a worker without children, on a clock of the test's own."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.bookmarks = Bookmarks(CLAIMER.queues)
        self.ended: Sequence[ClaimedTask] = ()

    def take(self, children: int = 2) -> list[str]:
        """Take a turn at the same instant and return the claimed tasks, in order."""
        positions = self.bookmarks.positions(1000.0)
        wanted = TurnRequest(pids=list(range(children, 0, -1)), positions=positions)
        outcomes = [Outcome.completed(task, '{"ok":1}') for task in self.ended]
        turned = take_turn(self.pipeline, CLAIMER, outcomes, wanted)
        assert len(turned.recorded) == len(outcomes)
        assert [one.worker_pid for one in turned.claimed] == wanted.pids[: len(turned.claimed)]
        self.ended, was_short = turned.claimed, len(turned.claimed) < children
        self.bookmarks.note_claim(
            positions, turned.claimed, was_short=was_short, span=(1000.0, 1000.0)
        )
        return [task.id for task in turned.claimed]

    def statement(self) -> str:
        wanted = TurnRequest(pids=[1, 2], positions=self.bookmarks.positions(1000.0))
        return CLAIMER.claim_step(wanted)[0].name


@pytest.fixture
def turns(connection: Connection[Any]) -> Turns:
    return Turns(Pipeline(connection, prepared=False))


def add(connection: Connection[Any], count: int) -> list[str]:
    return [add_task(connection, enqueued_at=ago(99 - number)) for number in range(count)]


def test_with_a_backlog_every_turn_is_one_round_trip_and_the_order_is_exact(
    connection: Connection[Any], turns: Turns
) -> None:
    ids = add(connection, 12)
    forms = []
    for start in range(0, 12, 2):
        forms.append(turns.statement())
        assert turns.take() == ids[start : start + 2]
    assert forms == ["claim_tasks"] * 2 + [SHORT] * 4
    assert turns.pipeline.round_trips == 6


def test_at_the_end_of_a_backlog_the_turn_finds_tasks_before_the_mark(
    connection: Connection[Any], turns: Turns
) -> None:
    ids = add(connection, 7)
    assert [turns.take() for _ in range(3)] == [ids[:2], ids[2:4], ids[4:6]]
    older = add_task(connection, enqueued_at=ago(1000))
    urgent = add_task(connection, priority=1)
    assert turns.statement() == SHORT
    assert turns.take(3) == [ids[6], urgent, older]
    turns.take()
    assert turns.statement() == "claim_tasks"
    trips = turns.pipeline.round_trips
    assert turns.take() == []
    assert turns.pipeline.round_trips == trips + 1, (
        "without a backlog one claim searches everywhere"
    )


def test_a_resting_worker_does_not_search_before_the_mark(
    connection: Connection[Any], turns: Turns
) -> None:
    ids = add(connection, 6)
    assert [turns.take() for _ in range(2)] == [ids[:2], ids[2:4]]
    add_task(connection, enqueued_at=ago(1000))
    turns.bookmarks.rested_at = 2000.0
    assert turns.statement() == SHORT
    assert turns.take(3) == ids[4:]
    assert turns.pipeline.round_trips == 3


def behind(connection: Connection[Any]) -> Positions:
    """The position behind a task that came before all others."""
    row = connection.execute("SELECT (now() - interval '1 hour')::text").fetchone()
    assert row is not None
    first = "00000000-0000-0000-0000-000000000000"
    return Positions([100], [row[0]], [first], looks_everywhere=False, has_backlog=True)


def test_both_forms_claim_the_same_rows(connection: Connection[Any]) -> None:
    add_task(connection, sent_at=ago(50), args=None, burst=True, timeout_ms=5)
    add_task(connection, good_until=ago(-50), task_options='{"async":true}')
    add_task(connection, schedule_name="nightly", scheduled_for=ago(60), max_retries=3)
    add_task(connection, retry_count=1, generation=7, claimed=True, claim_expires_at=ago(9))
    for columns in (
        {"held": True},
        {"enqueued_at": ago(-60)},
        {"good_until": ago(1)},
        {"queue_name": "other"},
        {"priority": 101},
    ):
        add_task(connection, **columns)
    wanted = TurnRequest(pids=list(range(1, 10)), positions=behind(connection))
    short, full = CLAIMER.claim_step(wanted), (claim_tasks, CLAIMER.claim(wanted))
    assert short[0].name == SHORT
    read = "to_jsonb(task) - '{claimed_at,started_at,updated_at}'::text[], started_at IS NULL"
    found: list[Any] = []
    for step in (short, full):
        with connection.transaction(force_rollback=True):
            rows = Pipeline(connection, prepared=False).run([step])[0]
            stored = connection.execute(f"SELECT {read} FROM horsies_tasks AS task ORDER BY id")
            found.append((sorted(rows, key=lambda row: row.worker_pid), stored.fetchall()))
    assert found[0] == found[1]
    assert [row.worker_pid for row in found[0][0]] == [1, 2, 3, 4]


def test_the_short_form_claims_nothing_from_a_paused_queue(connection: Connection[Any]) -> None:
    add(connection, 2)
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('default', now())"
    )
    wanted = TurnRequest(pids=[1, 2], positions=behind(connection))
    assert Pipeline(connection, prepared=False).run([CLAIMER.claim_step(wanted)]) == [[]]


@pytest.mark.parametrize(
    "claimer",
    [
        Claimer("w", "host", ["default", "other"], [None, None]),
        Claimer("w", "host", ["default"], [3]),
        Claimer("w", "host", ["default"], [None], cluster_cap=3),
        Claimer("w", "host", ["default"], [None], max_claim_batch=1),
        Claimer("w", "host", ["default"], [None], rates=[Rate(count=1)]),
        Claimer("w", "host", ["default"], [None], is_prepared=False),
    ],
)
def test_workers_with_limits_use_the_full_form(claimer: Claimer) -> None:
    marks = Positions([100], ["2026-01-01"], ["a"], has_backlog=True)
    step = claimer.claim_step(TurnRequest(pids=[1], positions=marks))
    assert step[0].name == "claim_tasks"


@pytest.mark.parametrize(
    "changes",
    [
        {"prefetch": 1},
        {"ahead": [2]},
        {"is_async": False},
        {"unknown_names": ["work"]},
        {"refused_ids": ["a"]},
        {"refused_by": ["a"]},
        {"cursors": [1]},
        {"freed_lanes": [("default", 1)]},
        {"positions": EVERYWHERE},
    ],
)
def test_claims_with_conditions_use_the_full_form(changes: dict[str, Any]) -> None:
    marks = Positions([100], ["2026-01-01"], ["a"], has_backlog=True)
    wanted = TurnRequest(pids=[1], positions=marks)
    assert CLAIMER.claim_step(wanted)[0].name == SHORT
    assert CLAIMER.claim_step(wanted._replace(**changes))[0].name == "claim_tasks"


def test_the_short_form_reads_only_what_it_claims(connection: Connection[Any]) -> None:
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, enqueued_at) "
        "SELECT gen_random_uuid(), 'work', 'default', 'sha', now() - interval '1 minute' "
        "FROM generate_series(1, 20000)"
    )
    connection.execute("VACUUM (ANALYZE) horsies_tasks")
    for setting in TURN_SETTINGS.removeprefix("-c ").split(" -c "):
        connection.execute(f"SET {setting.strip()}")
    wanted = TurnRequest(pids=[1, 2], positions=behind(connection))
    rows, scans, fetched, entries = task_reads(connection, CLAIMER.claim_step(wanted))
    assert len(rows) == 2
    assert scans == 0
    assert fetched + entries < 50
