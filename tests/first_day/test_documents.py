"""Single sentences of the documentation, each with the case that once contradicted it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import Connection

from horsies import AppConfig, Err, Horsies, Ok, PostgresConfig, RecoveryConfig
from horsies.db.database import pool_sizes
from horsies.db.pipeline import Pipeline
from horsies.db.statements.tasks import OutcomeRow
from horsies.errors import ConfigurationError, ErrorCode
from horsies.ids import new_id
from horsies.retry import Backoff
from horsies.tasks.blocked import Blocked
from horsies.tasks.handle import result_of
from horsies.tasks.recovery import EXPIRED_RESULT, recover_stale
from horsies.worker.config import WorkerConfig, describe_concurrency
from horsies.worker.reaper import recover_ownerless, sweep
from tests.support.rows import add_task, ago, attempts_of, row_of


def new_app(**broker_settings: Any) -> Horsies:
    broker = PostgresConfig(database_url="postgresql://localhost/unused", **broker_settings)
    return Horsies(AppConfig(broker=broker))


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
    ("typed", "shown"),
    [
        (
            20,
            "max_claim_per_worker=5 (lowered from 20 to the number of places + prefetch_buffer), ",
        ),
        (5, "max_claim_per_worker=5, "),
        (0, "max_claim_per_worker=5, "),
    ],
)
def test_the_start_up_line_names_a_lowered_limit(typed: int, shown: str) -> None:
    config = WorkerConfig(
        app_locator="shop:app",
        processes=4,
        queues=["default"],
        max_claim_per_worker=typed,
        prefetch_buffer=1,
    )
    assert shown in describe_concurrency(new_app(), config)


@pytest.mark.parametrize(("role", "sizes"), [("worker", (2, 3)), ("child", (0, 4))])
def test_a_broker_built_during_import_takes_the_pool_sizes_of_its_process(
    role: str, sizes: tuple[int, int]
) -> None:
    app = new_app(worker_pool_size=2, worker_max_overflow=1, worker_child_pool_max_size=4)
    database = app.get_broker().database
    app.role = role
    assert pool_sizes(database.config, database.role) == sizes


@pytest.mark.parametrize(
    ("status", "stored", "code"),
    [
        ("CANCELLED", None, "TASK_CANCELLED"),
        ("EXPIRED", EXPIRED_RESULT, "TASK_EXPIRED"),
        ("EXPIRED", None, "TASK_EXPIRED"),
        ("COMPLETED", None, "RESULT_NOT_AVAILABLE"),
    ],
)
def test_an_error_in_place_of_a_result_carries_the_id_of_its_task(
    status: str, stored: str | None, code: str
) -> None:
    task_id = new_id()
    row = OutcomeRow(task_id, "work", status, stored, failed_reason=None, error_code=None)
    error = result_of(row, None).err_value
    assert error.error_code == code
    assert error.data == {"task_id": task_id}


@pytest.mark.parametrize("result", [Ok(1), Err("no")])
@pytest.mark.parametrize("name", ["value", "x"])
def test_a_result_cannot_be_changed(result: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        setattr(result, name, 2)
    with pytest.raises(AttributeError, match=name):
        delattr(result, name)


@pytest.mark.parametrize("result", [Ok([1]), Err("no"), Ok[int](1)])
def test_a_result_can_be_copied_and_pickled(result: Any) -> None:
    assert copy.copy(result) == copy.deepcopy(result) == result
    assert pickle.loads(pickle.dumps(result)) == result


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
