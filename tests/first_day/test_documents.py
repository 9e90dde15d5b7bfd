"""Single sentences of the documentation, each with the case that once contradicted it."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import Connection

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    PostgresConfig,
    QueueMode,
    RecoveryConfig,
)
from horsies.db.pipeline import Pipeline
from horsies.errors import ConfigurationError, ErrorCode
from horsies.retry import Backoff
from horsies.tasks.blocked import Blocked
from horsies.tasks.recovery import recover_stale
from horsies.worker.config import WorkerConfig, describe_concurrency
from horsies.worker.reaper import recover_ownerless, sweep
from tests.support.doc_pages import blocks, code_of, page, rows
from tests.support.rows import add_task, ago, attempts_of, row_of

LOWERED = "to the most that the worker can hold"
BROKER = PostgresConfig(database_url="postgresql://localhost/unused")


def new_app(broker: PostgresConfig = BROKER, **settings: Any) -> Horsies:
    return Horsies(AppConfig(broker=broker, **settings))


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_db_retry_max_ms_is_the_longest_wait(draw: float) -> None:
    backoff = Backoff(initial_ms=500, max_ms=3_000, random=lambda: draw)
    waits = [backoff.next_delay_seconds() or 0.0 for _ in range(8)]
    assert max(waits) <= 3.0


def test_waits_at_the_maximum_still_vary() -> None:
    draws = iter([0.6, 0.9])
    backoff = Backoff(initial_ms=3_000, max_ms=3_000, random=lambda: next(draws))
    assert backoff.next_delay_seconds() != backoff.next_delay_seconds()


async def async_generator_hook() -> AsyncIterator[None]:
    yield


def generator_hook() -> Iterator[None]:
    yield


class AsyncGeneratorHook:
    async def __call__(self) -> AsyncIterator[None]:
        yield


@pytest.mark.parametrize(
    "hook",
    [
        async_generator_hook,
        functools.partial(async_generator_hook),
        AsyncGeneratorHook(),
        generator_hook,
    ],
)
def test_a_start_hook_whose_body_would_never_run_is_refused(hook: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        new_app().on_child_process_start(hook)
    assert caught.value.code is ErrorCode.CONFIG_INVALID_CHILD_HOOK


@pytest.mark.parametrize(
    ("typed", "others", "shown"),
    [
        (20, {"prefetch_buffer": 1}, f"5 (lowered from 20 {LOWERED}), "),
        (20, {"window": 0}, f"4 (lowered from 20 {LOWERED}), "),
        (20, {}, "20, "),  # with short tasks in the windows of the children
        (200, {}, f"128 (lowered from 200 {LOWERED}), "),
        (5, {"prefetch_buffer": 1}, "5, "),
        (0, {"prefetch_buffer": 1}, "5, "),
        (0, {}, "4, "),
    ],
)
def test_the_start_up_line_names_a_lowered_limit(
    typed: int, others: dict[str, Any], shown: str
) -> None:
    config = WorkerConfig("shop:app", 4, ["default"], max_claim_per_worker=typed, **others)
    assert f"max_claim_per_worker={shown}" in describe_concurrency(new_app(), config)
    # The number of tasks that the worker claims up to.
    assert not typed or shown.startswith(f"{config.held_max}")


def test_the_start_up_line_is_that_of_the_documentation() -> None:
    text = page("workers.md")
    (shown,) = [one.text for one in blocks(text) if one.text.startswith("Concurrency config:")]
    mail = CustomQueueConfig(name="mail", max_concurrency=10)
    app = new_app(queue_mode=QueueMode.CUSTOM, custom_queues=[mail])
    config = WorkerConfig("shop:app", 8, ["mail"])
    assert shown == f"{describe_concurrency(app, config)}\n"
    lowered = describe_concurrency(app, replace(config, max_claim_per_worker=20, window=0))
    assert f"`{lowered.split(', ')[2]}`" in text


def test_the_reference_lists_the_settings_of_a_worker() -> None:
    reference = page("api.md").partition("### WorkerConfig")[2].partition("\n### ")[0]
    meanings = {code_of(name): meaning for name, _, meaning in rows(reference)}
    thirteen = """
        dsn session_dsn pgbouncer_transaction_mode queues processes parent_pool_size
        parent_max_overflow child_pool_min_size child_pool_max_size max_claim_batch
        max_claim_per_worker app_locator imports
    """
    assert all(meanings[name] for name in thirteen.split())


@pytest.mark.parametrize(("role", "sizes"), [("worker", (2, 3)), ("child", (0, 4))])
def test_a_broker_built_during_import_takes_the_pool_sizes_of_its_process(
    role: str, sizes: tuple[int, int]
) -> None:
    broker = PostgresConfig(
        database_url=BROKER.database_url,
        worker_pool_size=2,
        worker_max_overflow=1,
        worker_child_pool_max_size=4,
    )
    app = new_app(broker)
    database = app.get_broker().database
    app.role = role
    limits = database.pool()._limits
    assert (limits.kept, limits.most) == sizes


@pytest.fixture
def pipeline(connection: Connection[Any], process_url: str) -> Iterator[Pipeline]:
    """A reaper's connection."""
    with psycopg.connect(process_url, autocommit=True) as mine:
        yield Pipeline(mine)


def add_ownerless(connection: Connection[Any], status: str, age: float, **columns: Any) -> str:
    """A task that an operator set to this status without the name of a worker."""
    values = {"status": status, "claimed": status == "CLAIMED", "updated_at": ago(age), **columns}
    return add_task(connection, **values)


def statuses(connection: Connection[Any], ids: list[str]) -> list[str]:
    return [row_of(connection, task_id)["status"] for task_id in ids]


def test_tasks_without_the_name_of_a_worker_are_recovered_after_their_threshold(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    recovered = [
        add_ownerless(connection, "CLAIMED", 200),
        add_ownerless(connection, "CLAIMED", 200, claimed_at=ago(200)),
        add_ownerless(connection, "RUNNING", 400, started_at=ago(400)),
        add_ownerless(connection, "RUNNING", 400),
    ]
    kept = [
        add_ownerless(connection, "CLAIMED", 100),
        add_ownerless(connection, "CLAIMED", 900, claimed_at=ago(100)),
        add_ownerless(connection, "RUNNING", 200),
    ]
    assert recover_ownerless(pipeline, RecoveryConfig(), Blocked()) == 4
    assert statuses(connection, recovered) == ["PENDING", "PENDING", "FAILED", "FAILED"]
    assert statuses(connection, kept) == ["CLAIMED", "CLAIMED", "RUNNING"]
    assert row_of(connection, recovered[0])["claimed"] is False
    assert row_of(connection, recovered[2])["error_code"] == "WORKER_CRASHED"
    assert [attempt["outcome"] for attempt in attempts_of(connection, recovered[2])] == [
        "WORKER_FAILURE"
    ]


def test_an_operator_can_recover_tasks_without_the_name_of_a_worker(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    ids = [add_ownerless(connection, status, 400) for status in ("RUNNING", "RUNNING", "CLAIMED")]
    assert recover_stale(pipeline, 300, "RUNNING") == 2
    assert recover_stale(pipeline, 300, "CLAIMED") == 1
    assert statuses(connection, ids) == ["FAILED", "FAILED", "PENDING"]


def test_retention_deletes_ended_tasks_whose_ids_have_no_time(
    pipeline: Pipeline, connection: Connection[Any]
) -> None:
    def add_ended(hours: float, **columns: Any) -> str:
        values = {"status": "COMPLETED", "completed_at": ago(hours * 3_600), **columns}
        return add_task(connection, id=str(uuid4()), **values)

    for _ in range(20):
        add_ended(25)
    add_ended(0, status="FAILED", completed_at=None, failed_at=ago(90_000))
    add_ended(0, status="EXPIRED", completed_at=None, updated_at=ago(90_000))
    kept = {
        add_ended(23),
        add_ended(25, workflow_id=str(uuid4())),
        add_ended(25, status="PENDING", completed_at=None, updated_at=ago(90_000)),
    }
    sweep(pipeline, RecoveryConfig(terminal_record_retention_hours=24))
    left = {row[0] for row in connection.execute("SELECT id::text FROM horsies_tasks").fetchall()}
    assert left == kept
