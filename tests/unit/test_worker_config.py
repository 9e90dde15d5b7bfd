"""A worker's settings from flags and configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from horsies import (
    AppConfig,
    ConfigurationError,
    CustomQueueConfig,
    ErrorCode,
    Horsies,
    PostgresConfig,
    QueueMode,
)
from horsies.cli.worker import _banner
from horsies.worker.config import (
    WorkerConfig,
    describe_concurrency,
    refuse_bad_limits,
    served_queues,
    with_connections,
)
from tests.support.doc_pages import blocks, code_of, page, rows

BROKER = PostgresConfig(database_url="postgresql://nobody@localhost/nothing")


def make_config(**changes: Any) -> WorkerConfig:
    return WorkerConfig(
        **{"app_locator": "shop:app", "processes": 4, "queues": ["default"], **changes}
    )


def make_app(**changes: Any) -> Horsies:
    return Horsies(AppConfig(broker=BROKER, **changes))


def test_the_defaults_are_accepted() -> None:
    refuse_bad_limits(make_config())


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"processes": 0}, "--processes"),
        ({"max_claim_batch": -1}, "--max-claim-batch"),
        ({"max_claim_per_worker": -1}, "--max-claim-per-worker"),
        ({"max_tasks_per_child": 1}, "--max-tasks-per-child"),
        ({"max_tasks_per_child": -5}, "--max-tasks-per-child"),
        ({"max_memory_per_child_mb": 0}, "--max-memory-per-child-mb"),
        ({"shutdown_grace_seconds": -0.1}, "--shutdown-grace"),
        ({"name": " "}, "--name"),
        ({"name": "a\nb"}, "--name"),
    ],
)
def test_a_limit_that_cannot_work_is_refused_by_the_name_of_its_flag(
    changes: dict[str, Any], flag: str
) -> None:
    with pytest.raises(ConfigurationError, match=flag) as caught:
        refuse_bad_limits(make_config(**changes))
    assert caught.value.code is ErrorCode.CLI_INVALID_ARGS


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tasks_per_child": 0},
        {"max_tasks_per_child": 2},
        {"max_memory_per_child_mb": 1},
        {"shutdown_grace_seconds": 0.0},
    ],
)
def test_the_smallest_sensible_limits_are_accepted(changes: dict[str, Any]) -> None:
    refuse_bad_limits(make_config(**changes))


@pytest.mark.parametrize(("limit", "held"), [(0, 4), (3, 3), (4, 4), (9, 4)])
def test_a_worker_holds_one_task_per_child_or_fewer(limit: int, held: int) -> None:
    assert make_config(max_claim_per_worker=limit, window=0).effective_claims == held


def test_the_contract_line_names_the_limits_in_force() -> None:
    app = make_app(cluster_wide_cap=20)
    assert describe_concurrency(app, make_config()) == (
        "Concurrency config: processes=4, cluster_wide_cap=20, max_claim_per_worker=4, "
        "max_claim_batch=0, queue_caps=none"
    )


def test_the_contract_line_says_unlimited_without_a_cap() -> None:
    line = describe_concurrency(make_app(), make_config(max_claim_per_worker=2, max_claim_batch=8))
    assert line == (
        "Concurrency config: processes=4, cluster_wide_cap=unlimited, "
        "max_claim_per_worker=2, max_claim_batch=8, queue_caps=none"
    )


def test_the_contract_line_begins_alike_with_async_children() -> None:
    line = describe_concurrency(make_app(), make_config(async_children=1, async_slots=9))
    assert line.startswith("Concurrency config: processes=4, cluster_wide_cap=unlimited, max_claim")
    assert line.endswith("max_claim_batch=0, queue_caps=none, async_children=1, async_slots=9")


def test_the_connections_are_those_of_the_application() -> None:
    secret = "postgresql://app:secret@db/shop"
    broker = PostgresConfig(
        database_url=secret,
        session_database_url=f"{secret}2",
        pgbouncer_transaction_mode=True,
        worker_pool_size=4,
        worker_max_overflow=None,
        max_overflow=7,
        worker_child_pool_min_size=1,
        worker_child_pool_max_size=5,
    )
    config = with_connections(make_config(), broker)
    assert (config.dsn, config.session_dsn) == (secret, f"{secret}2")
    assert config.pgbouncer_transaction_mode
    assert (config.parent_pool_size, config.parent_max_overflow) == (4, 7)
    assert (config.child_pool_min_size, config.child_pool_max_size) == (1, 5)
    assert "secret" not in repr(config)


def test_queues_are_served_in_the_order_of_their_priority() -> None:
    queues = [
        CustomQueueConfig(name="slow", priority=50),
        CustomQueueConfig(name="urgent", priority=1),
        CustomQueueConfig(name="usual", priority=10),
    ]
    app = make_app(queue_mode=QueueMode.CUSTOM, custom_queues=queues)
    assert served_queues(app) == ["urgent", "usual", "slow"]
    assert served_queues(make_app()) == ["default"]


@pytest.mark.parametrize(
    ("only", "excluded", "served"),
    [
        (["mail, orders"], None, ["orders", "mail"]),
        (["mail", "orders"], ["mail"], ["orders"]),
        (None, ["orders,mail"], ["reports"]),
    ],
)
def test_flags_choose_the_queues_and_keep_their_order(
    only: list[str] | None, excluded: list[str] | None, served: list[str]
) -> None:
    assert served_queues(team_app(), only, excluded) == served


@pytest.mark.parametrize(
    ("only", "excluded", "message"),
    [
        (["mail,nope"], None, "--queues names 'nope', which this application does not have"),
        (None, ["nope"], "--exclude-queues names 'nope'"),
        (["mail"], ["mail"], "leave no queue to serve"),
        ([""], None, "leave no queue to serve"),
    ],
)
def test_queues_that_cannot_be_served_are_refused_with_the_known_ones(
    only: list[str] | None, excluded: list[str] | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        served_queues(team_app(), only, excluded)
    assert "orders, mail, reports" in (caught.value.help_text or "")


def team_app() -> Horsies:
    names = ("orders", "mail", "reports")
    queues = [CustomQueueConfig(name=name, priority=at) for at, name in enumerate(names, start=1)]
    return make_app(queue_mode=QueueMode.CUSTOM, custom_queues=queues)


@pytest.mark.parametrize("window", [-1, 33])
def test_a_window_has_a_range(window: int) -> None:
    with pytest.raises(ConfigurationError, match=r"--window must be 0 .* to 32"):
        refuse_bad_limits(make_config(window=window))


@pytest.mark.parametrize(
    ("changes", "width", "held"),
    [
        ({}, 32, 4 * 32),
        ({"window": 0}, 0, 4),
        ({"window": 8, "max_claim_per_worker": 10}, 8, 10),
        ({"prefetch_buffer": 2}, 0, 6),
    ],
)
def test_a_worker_holds_full_windows_unless_it_prefetches(
    changes: dict[str, int], width: int, held: int
) -> None:
    config = make_config(processes=4, **changes)
    assert (config.window_width, config.held_max) == (width, held)


LOWERED = "to the most that the worker can hold"


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
    assert f"max_claim_per_worker={shown}" in describe_concurrency(make_app(), config)
    # The number of tasks that the worker claims up to.
    assert not typed or shown.startswith(f"{config.held_max}")


def test_the_start_up_line_is_that_of_the_documentation() -> None:
    text = page("workers.md")
    (shown,) = [one.text for one in blocks(text) if one.text.startswith("Concurrency config:")]
    mail = CustomQueueConfig(name="mail", max_concurrency=10)
    app = make_app(queue_mode=QueueMode.CUSTOM, custom_queues=[mail])
    config = WorkerConfig("shop:app", 8, ["mail"])
    assert shown == f"{describe_concurrency(app, config)}\n"
    lowered = describe_concurrency(app, replace(config, max_claim_per_worker=20, window=0))
    assert f"`{lowered.split(', ')[2]}`" in text


def test_the_reference_lists_the_settings_of_a_worker() -> None:
    reference = page("api/configuration.md").partition("### WorkerConfig")[2].partition("\n### ")[0]
    meanings = {code_of(name): meaning for name, _, meaning in rows(reference)}
    thirteen = """
        dsn session_dsn pgbouncer_transaction_mode queues processes parent_pool_size
        parent_max_overflow child_pool_min_size child_pool_max_size max_claim_batch
        max_claim_per_worker app_locator imports
    """
    assert all(meanings[name] for name in thirteen.split())


@pytest.mark.parametrize(
    ("max_concurrency", "cluster_wide_cap", "caps"),
    [(None, None, "none"), (3, None, "mail 3"), (0, 15, "cluster 15, mail 0")],
)
def test_a_queue_has_no_cap_unless_it_sets_one_and_the_banner_shows_every_cap(
    max_concurrency: int | None, cluster_wide_cap: int | None, caps: str
) -> None:
    assert CustomQueueConfig(name="reports").max_concurrency is None
    mail = CustomQueueConfig(name="mail", max_concurrency=max_concurrency)
    config = AppConfig(
        broker=BROKER,
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[mail, CustomQueueConfig(name="reports")],
        cluster_wide_cap=cluster_wide_cap,
    )
    app = Horsies(config)
    banner = _banner(app, WorkerConfig("shop:app", 2, served_queues(app)))
    assert f"  caps       {caps}\n" in banner
    assert "not served" not in banner
    limited = WorkerConfig("shop:app", 2, served_queues(app, ["mail"]), name="post")
    assert "  not served reports\n" in _banner(app, limited)
    assert " worker post\n" in _banner(app, limited)
