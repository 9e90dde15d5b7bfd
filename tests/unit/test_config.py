from __future__ import annotations

import logging
import math
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr, ValidationError

import horsies.core.models.queues as documented_path
from horsies.config.app import (
    AppConfig,
    CustomQueueConfig,
    PayloadConfig,
    QueueMode,
    RecoveryConfig,
    WorkerResilienceConfig,
    queue_name_problem,
)
from horsies.config.defaults import default_config
from horsies.config.postgres import PostgresConfig
from horsies.error_codes import OperationalErrorCode
from horsies.errors import (
    ConfigurationError,
    ErrorCode,
    HorsiesError,
    InvalidFieldError,
    MultipleValidationErrors,
)
from horsies.validation import repeated_names

SECRET = "hunter2"
URL = f"postgresql://app:{SECRET}@db.example:5432/shop"
OTHER_URL = f"postgresql://app:{SECRET}@direct.example/shop"


def broker(**changes: Any) -> PostgresConfig:
    return PostgresConfig(**{"database_url": URL, **changes})


def app(**changes: Any) -> AppConfig:
    return AppConfig(**{"broker": broker(), **changes})


def custom(*names: str, **changes: Any) -> AppConfig:
    queues = [CustomQueueConfig(name=name) for name in names]
    return app(queue_mode=QueueMode.CUSTOM, custom_queues=queues, **changes)


def mistakes(build: Any, **changes: Any) -> list[HorsiesError]:
    with pytest.raises(HorsiesError) as raised:
        build(**changes)
    error = raised.value
    assert SECRET not in str(error)
    assert SECRET not in repr(error)
    return error.report.errors if isinstance(error, MultipleValidationErrors) else [error]


def codes(build: Any, **changes: Any) -> list[str]:
    found = mistakes(build, **changes)
    assert all(isinstance(error, ConfigurationError) for error in found)
    return [error.code.value for error in found]


RANGES: list[tuple[type[BaseModel], str, int, int | None]] = [
    (CustomQueueConfig, "priority", 1, 100),
    (CustomQueueConfig, "max_concurrency", 0, None),
    (PostgresConfig, "pool_size", 0, None),
    (PostgresConfig, "max_overflow", 0, None),
    (RecoveryConfig, "claimed_stale_threshold_ms", 1_000, 3_600_000),
    (RecoveryConfig, "running_stale_threshold_ms", 1_000, 7_200_000),
    (RecoveryConfig, "check_interval_ms", 1_000, 600_000),
    (RecoveryConfig, "runner_heartbeat_interval_ms", 1_000, 120_000),
    (RecoveryConfig, "claimer_heartbeat_interval_ms", 1_000, 120_000),
    (RecoveryConfig, "worker_state_snapshot_interval_ms", 1_000, 300_000),
    (RecoveryConfig, "heartbeat_retention_hours", 1, 8_760),
    (RecoveryConfig, "worker_state_retention_hours", 1, 8_760),
    (RecoveryConfig, "terminal_record_retention_hours", 1, 43_800),
    (WorkerResilienceConfig, "db_retry_initial_ms", 100, 60_000),
    (WorkerResilienceConfig, "db_retry_max_ms", 500, 300_000),
    (WorkerResilienceConfig, "db_retry_max_attempts", 0, 10_000),
    (WorkerResilienceConfig, "notify_poll_interval_ms", 1_000, 300_000),
    (PayloadConfig, "warn_bytes", 1, None),
    (PayloadConfig, "reject_bytes", 1, None),
    (PayloadConfig, "max_result_bytes", 1, None),
    (PayloadConfig, "max_input_bytes", 1, 805_306_368),
    (PayloadConfig, "max_map_items", 1, None),
]

# Further fields to set, so that the edge of one field does not contradict another field.
COMPANIONS: dict[str, dict[str, int]] = {
    "claimed_stale_threshold_ms": {"claimer_heartbeat_interval_ms": 1_000},
    "running_stale_threshold_ms": {"runner_heartbeat_interval_ms": 1_000},
    "claimer_heartbeat_interval_ms": {"claimed_stale_threshold_ms": 240_000},
    "db_retry_initial_ms": {"db_retry_max_ms": 60_000},
    "reject_bytes": {"warn_bytes": 1},
}
REQUIRED: dict[type[BaseModel], dict[str, str]] = {
    CustomQueueConfig: {"name": "q"},
    PostgresConfig: {"database_url": URL},
}


def build(model: type[BaseModel], field: str, value: int) -> BaseModel:
    companions = COMPANIONS.get(field, {})
    return model(**REQUIRED.get(model, {}), **companions, **{field: value})


@pytest.mark.parametrize(("model", "field", "smallest", "largest"), RANGES)
def test_a_value_out_of_its_range_is_a_pydantic_error(
    model: type[BaseModel], field: str, smallest: int, largest: int | None
) -> None:
    for value in [smallest - 1] if largest is None else [smallest - 1, largest + 1]:
        with pytest.raises(InvalidFieldError, match=field):
            build(model, field, value)


@pytest.mark.parametrize(("model", "field", "smallest", "largest"), RANGES)
def test_both_edges_of_a_range_are_inside(
    model: type[BaseModel], field: str, smallest: int, largest: int | None
) -> None:
    # No heartbeat is short enough for a stale threshold of one second.
    unreachable = {"claimed_stale_threshold_ms", "running_stale_threshold_ms"}
    edges = [] if field in unreachable else [smallest]
    for value in edges if largest is None else [*edges, largest]:
        assert getattr(build(model, field, value), field) == value


def test_the_smallest_stale_threshold_is_in_range_but_below_two_heartbeats() -> None:
    assert codes(RecoveryConfig, running_stale_threshold_ms=1_000) == ["HRS-204"]
    assert codes(RecoveryConfig, claimed_stale_threshold_ms=1_000) == ["HRS-204"]


@pytest.mark.parametrize(
    "field",
    [
        "heartbeat_retention_hours",
        "worker_state_retention_hours",
        "terminal_record_retention_hours",
    ],
)
def test_none_keeps_records_for_ever(field: str) -> None:
    settings: dict[str, Any] = {field: None}
    assert getattr(RecoveryConfig(**settings), field) is None


@pytest.mark.parametrize("field", ["pool_timeout", "pool_recycle"])
def test_pool_times_must_be_above_zero(field: str) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        broker(**{field: 0})
    assert getattr(broker(**{field: 0.5}), field) == 0.5


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 3_162_240_001, 1e11])
def test_a_wait_for_a_connection_that_no_clock_can_count_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidFieldError, match="pool_timeout"):
        broker(pool_timeout=seconds)
    assert broker(pool_timeout=3_162_240_000).pool_timeout == 3_162_240_000


def test_the_defaults_are_the_documented_ones() -> None:
    config = app()
    assert config.queue_mode is QueueMode.DEFAULT
    assert config.custom_queues is None
    assert config.cluster_wide_cap is None
    assert config.prefetch_buffer == 0
    assert config.claim_lease_ms is None
    assert config.max_claim_renew_age_ms == 180_000
    assert config.exception_mapper == {}
    assert config.default_unhandled_error_code == "UNHANDLED_EXCEPTION"
    assert config.resend_on_transient_err is False
    assert config.payload == PayloadConfig(
        warn_bytes=1_048_576, reject_bytes=16_777_216, max_map_items=100_000
    )
    assert config.recovery == RecoveryConfig(
        auto_requeue_stale_claimed=True,
        auto_fail_stale_running=True,
        claimed_stale_threshold_ms=120_000,
        running_stale_threshold_ms=300_000,
        worker_lost_after_ms=10_000,
        stop_tasks_after_silence_ms=None,
        unknown_task_grace_ms=600_000,
        check_interval_ms=30_000,
        runner_heartbeat_interval_ms=30_000,
        claimer_heartbeat_interval_ms=30_000,
        worker_state_snapshot_interval_ms=30_000,
        heartbeat_retention_hours=24,
        worker_state_retention_hours=168,
        terminal_record_retention_hours=720,
    )
    assert config.resilience == WorkerResilienceConfig(
        db_retry_initial_ms=500,
        db_retry_max_ms=30_000,
        db_retry_max_attempts=0,
        notify_poll_interval_ms=5_000,
    )
    assert config.broker == PostgresConfig(
        database_url=URL,
        session_database_url=None,
        pgbouncer_transaction_mode=False,
        pool_size=5,
        max_overflow=10,
        pool_timeout=30,
        pool_recycle=1800,
        pool_pre_ping=True,
        echo=False,
        worker_pool_size=3,
        worker_max_overflow=2,
        worker_child_pool_min_size=0,
        worker_child_pool_max_size=2,
        worker_child_pool_check=True,
        tcp_keepalives=True,
        tcp_keepalives_idle=30,
        tcp_keepalives_interval=10,
        tcp_keepalives_count=3,
        tcp_user_timeout_ms=30_000,
    )
    queue = CustomQueueConfig(name="q")
    assert (queue.priority, queue.max_concurrency) == (1, None)


@pytest.mark.parametrize(
    "model",
    [
        AppConfig,
        CustomQueueConfig,
        PayloadConfig,
        PostgresConfig,
        RecoveryConfig,
        WorkerResilienceConfig,
    ],
)
def test_unknown_fields_are_refused(model: type[BaseModel]) -> None:
    required: dict[str, Any] = {"broker": broker()} if model is AppConfig else {}
    with pytest.raises(InvalidFieldError, match="misspelt"):
        model(**REQUIRED.get(model, {}), **required, misspelt=1)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        app().prefetch_buffer = 3


def test_default_mode_has_one_uncapped_queue() -> None:
    assert app().queues() == [CustomQueueConfig(name="default", priority=100)]


def test_custom_queues_are_served_by_priority_and_then_as_written() -> None:
    queues = [CustomQueueConfig(name=n, priority=p) for n, p in [("c", 9), ("a", 1), ("b", 1)]]
    config = app(queue_mode="custom", custom_queues=queues)
    assert [queue.name for queue in config.queues()] == ["a", "b", "c"]


def test_custom_queues_in_default_mode_are_refused() -> None:
    queues = [CustomQueueConfig(name="q")]
    assert codes(app, custom_queues=queues) == ["HRS-200"]
    assert codes(app, custom_queues=[]) == ["HRS-200"]


def test_custom_mode_without_queues_is_refused() -> None:
    assert codes(custom) == ["HRS-200"]
    assert codes(app, queue_mode=QueueMode.CUSTOM) == ["HRS-200"]


def test_every_repeated_queue_name_is_one_mistake() -> None:
    with pytest.raises(MultipleValidationErrors) as raised:
        custom("a", "b", "a", "b", "a", "c")
    assert [error.code for error in raised.value.report.errors] == [
        ErrorCode.CONFIG_INVALID_QUEUE_MODE
    ] * 2


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "default", "x" * 52])
def test_safe_queue_names_are_accepted(name: str) -> None:
    assert queue_name_problem(name) is None
    assert CustomQueueConfig(name=name).name == name


@pytest.mark.parametrize("name", ["", " ", "two words", "é", "a;b", 'a"b', "a\n", "a/b", "a\x00"])
def test_other_queue_names_are_refused(name: str) -> None:
    assert codes(CustomQueueConfig, name=name) == ["HRS-200"]


@pytest.mark.parametrize("length", [53, 101])
def test_a_queue_name_too_long_for_a_channel_is_refused_with_the_limit(length: int) -> None:
    (error,) = mistakes(CustomQueueConfig, name="x" * length)
    assert error.code is ErrorCode.CONFIG_INVALID_QUEUE_MODE
    assert "52 bytes" in error.message


def test_one_documented_path_leads_to_the_same_classes() -> None:
    assert documented_path.QueueMode is QueueMode
    assert documented_path.CustomQueueConfig is CustomQueueConfig


@pytest.mark.parametrize("cap", [0, -1])
def test_a_cap_below_one_is_refused(cap: int) -> None:
    assert codes(app, cluster_wide_cap=cap) == ["HRS-201"]
    assert codes(app, cluster_wide_cap=cap, prefetch_buffer=1, claim_lease_ms=60_000) == ["HRS-201"]


def test_a_cap_and_prefetching_exclude_each_other() -> None:
    assert codes(app, cluster_wide_cap=1, prefetch_buffer=1, claim_lease_ms=60_000) == ["HRS-201"]
    assert app(cluster_wide_cap=1).cluster_wide_cap == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"prefetch_buffer": -1},
        {"prefetch_buffer": 1},
        {"claim_lease_ms": 0},
        {"claim_lease_ms": -5},
        {"claim_lease_ms": 1_999},
        {"max_claim_renew_age_ms": 0},
        {"max_claim_renew_age_ms": -1},
        {"max_claim_renew_age_ms": 59_999},
        {"claim_lease_ms": 180_001},
        {"claim_lease_ms": 59_999, "recovery": {"claimer_heartbeat_interval_ms": 30_000}},
        {"recovery": {"claimer_heartbeat_interval_ms": 30_001}},
    ],
)
def test_prefetch_and_lease_mistakes_are_reported_once(changes: dict[str, Any]) -> None:
    assert codes(app, **changes) == ["HRS-202"]


@pytest.mark.parametrize(
    "changes",
    [
        {"prefetch_buffer": 4, "claim_lease_ms": 5_000},
        {"claim_lease_ms": 2_000},
        {"claim_lease_ms": 180_000},
        {"max_claim_renew_age_ms": 60_000},
        {"claim_lease_ms": 60_000, "recovery": {"claimer_heartbeat_interval_ms": 30_000}},
    ],
)
def test_leases_at_the_edge_are_accepted(changes: dict[str, Any]) -> None:
    app(**changes)


def test_a_wrong_lease_does_not_hide_a_wrong_renew_age() -> None:
    assert codes(app, claim_lease_ms=0, max_claim_renew_age_ms=0) == ["HRS-202", "HRS-202"]


def test_the_lease_in_effect_is_a_minute_unless_set() -> None:
    assert app().effective_claim_lease_ms == 60_000
    assert app(claim_lease_ms=70_000).effective_claim_lease_ms == 70_000


@pytest.mark.parametrize(("lease", "interval"), [(None, 30_000), (5_000, 2_500), (90_000, 30_000)])
def test_a_heartbeat_left_out_follows_a_short_lease(lease: int | None, interval: int) -> None:
    assert app(claim_lease_ms=lease).effective_claimer_heartbeat_interval_ms == interval


def test_a_heartbeat_that_is_set_stays_as_it_is() -> None:
    config = app(recovery=RecoveryConfig(claimer_heartbeat_interval_ms=1_000))
    assert config.effective_claimer_heartbeat_interval_ms == 1_000


def test_prefetching_makes_limits_soft() -> None:
    assert app().hard_cap_mode
    assert not app(prefetch_buffer=1, claim_lease_ms=60_000).hard_cap_mode


@pytest.mark.parametrize(
    "url",
    ["mysql://app:hunter2@db/x", "postgresql+psycopg2://app:hunter2@db/x", "hunter2", ""],
)
def test_other_addresses_are_refused_with_the_fix(url: str) -> None:
    (error,) = mistakes(PostgresConfig, database_url=url)
    assert error.code is ErrorCode.BROKER_INVALID_URL
    assert "database_url" in error.message
    assert "postgresql://" in error.message
    assert codes(broker, session_database_url=url) == ["HRS-203"]


def test_postgresql_addresses_are_accepted_as_plain_or_secret_text() -> None:
    assert broker().database_url == URL
    assert broker(database_url=SecretStr(URL)).database_url == URL
    assert broker(session_database_url=SecretStr(OTHER_URL)).session_database_url == OTHER_URL
    psycopg_url = URL.replace("postgresql", "postgresql+psycopg")
    assert broker(database_url=psycopg_url).database_url == psycopg_url
    assert broker(database_url="embedded://").database_url == "embedded://"


def test_the_short_scheme_becomes_the_long_one() -> None:
    short = URL.replace("postgresql", "postgres")
    config = broker(database_url=short, session_database_url=short)
    assert (config.database_url, config.session_database_url) == (URL, URL)


def test_a_transaction_pooler_needs_another_address_for_sessions() -> None:
    same = URL.replace("postgresql", "postgresql+psycopg")
    assert codes(broker, pgbouncer_transaction_mode=True) == ["HRS-203"]
    for url in (URL, same):
        changes = {"pgbouncer_transaction_mode": True, "session_database_url": url}
        assert codes(broker, **changes) == ["HRS-203"]
    broker(pgbouncer_transaction_mode=True, session_database_url=OTHER_URL)


def test_an_embedded_server_cannot_be_mixed_with_a_named_one() -> None:
    assert codes(broker, session_database_url="embedded://") == ["HRS-203"]


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_size": 0, "max_overflow": 0},
        {"worker_pool_size": 0},
        {"worker_max_overflow": -1},
        {"worker_child_pool_min_size": -1},
        {"worker_child_pool_max_size": 0},
        {"worker_child_pool_min_size": 3},
    ],
)
def test_pool_sizes_that_cannot_work_are_refused(changes: dict[str, Any]) -> None:
    assert codes(broker, **changes) == ["HRS-213"]


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_size": 0, "max_overflow": 1},
        {"worker_pool_size": 1, "worker_max_overflow": 0},
        {"worker_pool_size": None, "worker_max_overflow": None},
        {"worker_child_pool_min_size": 1, "worker_child_pool_max_size": 1},
    ],
)
def test_pool_sizes_at_the_edge_are_accepted(changes: dict[str, Any]) -> None:
    broker(**changes)


@pytest.mark.parametrize(
    "field", ["tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count"]
)
def test_keepalive_values_count_only_while_keepalives_are_on(field: str) -> None:
    assert codes(broker, **{field: 0}) == ["HRS-215"]
    broker(**{field: 1})
    broker(**{field: 0}, tcp_keepalives=False)


@pytest.mark.parametrize(
    ("field", "largest"),
    [
        ("tcp_keepalives_idle", 32_767),
        ("tcp_keepalives_interval", 32_767),
        ("tcp_keepalives_count", 127),
    ],
)
def test_keepalive_values_the_operating_system_would_refuse_are_refused(
    field: str, largest: int
) -> None:
    (error,) = mistakes(broker, **{field: largest + 1})
    assert error.code is ErrorCode.CONFIG_INVALID_KEEPALIVE
    assert f"PostgresConfig.{field} must be from 1 to {largest:,}" in error.message
    broker(**{field: largest})
    broker(**{field: largest + 1}, tcp_keepalives=False)


def test_a_user_timeout_that_is_no_32_bit_number_is_refused() -> None:
    assert codes(broker, tcp_user_timeout_ms=2**31) == ["HRS-215"]
    broker(tcp_user_timeout_ms=2**31 - 1)


def test_a_negative_user_timeout_is_refused() -> None:
    assert codes(broker, tcp_user_timeout_ms=-1, tcp_keepalives=False) == ["HRS-215"]
    broker(tcp_user_timeout_ms=0)


def test_stale_thresholds_need_two_heartbeats_and_are_reported_together() -> None:
    changes = {
        "running_stale_threshold_ms": 59_999,
        "claimed_stale_threshold_ms": 59_999,
    }
    assert codes(RecoveryConfig, **changes) == ["HRS-204", "HRS-204"]
    RecoveryConfig(running_stale_threshold_ms=60_000, claimed_stale_threshold_ms=60_000)


def test_a_worker_stops_its_tasks_before_any_limit_of_other_workers() -> None:
    RecoveryConfig(stop_tasks_after_silence_ms=9_999)
    assert codes(RecoveryConfig, stop_tasks_after_silence_ms=10_000) == ["HRS-204"]
    stale: dict[str, Any] = {
        "running_stale_threshold_ms": 4_000,
        "claimed_stale_threshold_ms": 2_000,
        "runner_heartbeat_interval_ms": 1_000,
        "claimer_heartbeat_interval_ms": 1_000,
    }
    RecoveryConfig(stop_tasks_after_silence_ms=3_999, **stale)
    assert codes(RecoveryConfig, stop_tasks_after_silence_ms=4_000, **stale) == ["HRS-204"]


@pytest.mark.parametrize("allowed", [timedelta(0), timedelta(days=36_601), timedelta.max])
def test_a_pause_that_no_clock_can_end_is_refused(allowed: timedelta) -> None:
    assert codes(RecoveryConfig, paused_workflow_auto_cancel_after=allowed) == ["HRS-204"]
    RecoveryConfig(paused_workflow_auto_cancel_after=timedelta(days=36_600))


def test_the_largest_wait_must_not_be_below_the_first() -> None:
    changes = {"db_retry_initial_ms": 501, "db_retry_max_ms": 500}
    assert codes(WorkerResilienceConfig, **changes) == ["HRS-208"]
    WorkerResilienceConfig(db_retry_initial_ms=500, db_retry_max_ms=500)


def test_a_warning_must_come_before_the_refusal() -> None:
    with pytest.raises(InvalidFieldError, match="lower warn_bytes"):
        PayloadConfig(warn_bytes=11, reject_bytes=10)
    PayloadConfig(warn_bytes=10, reject_bytes=10)
    assert PayloadConfig(warn_bytes=2**40, reject_bytes=None).reject_bytes is None


@pytest.mark.parametrize(
    "changes",
    [
        {"exception_mapper": {"TimeoutError": "A"}},
        {"exception_mapper": {TimeoutError: "lower"}},
        {"exception_mapper": {TimeoutError: 5}},
        {"exception_mapper": {int: "A"}},
        {"exception_mapper": [TimeoutError]},
        {"exception_mapper": None},
        {"default_unhandled_error_code": "TimeoutError"},
        {"default_unhandled_error_code": ""},
        {"default_unhandled_error_code": None},
    ],
)
def test_a_bad_mapper_or_default_code_of_an_application_is_refused(changes: dict[str, Any]) -> None:
    assert codes(app, **changes) == ["HRS-209"]


def test_a_mapper_is_copied_so_that_later_changes_do_not_reach_the_app() -> None:
    mapper: dict[type[BaseException], str] = {TimeoutError: "GATEWAY_DOWN"}
    config = app(exception_mapper=mapper)
    mapper.clear()
    assert config.exception_mapper == {TimeoutError: "GATEWAY_DOWN"}


def test_a_built_in_member_may_be_the_default_code() -> None:
    code = OperationalErrorCode.TASK_EXCEPTION
    assert app(default_unhandled_error_code=code).default_unhandled_error_code == code


def test_all_independent_mistakes_of_an_app_come_together() -> None:
    found = codes(
        app,
        queue_mode=QueueMode.CUSTOM,
        cluster_wide_cap=0,
        prefetch_buffer=-1,
        claim_lease_ms=0,
        max_claim_renew_age_ms=0,
        exception_mapper={int: "A", OSError: "b"},
        default_unhandled_error_code="c",
    )
    assert found == ["HRS-200", "HRS-201"] + ["HRS-202"] * 3 + ["HRS-209"] * 3


def test_all_independent_mistakes_of_a_broker_come_together() -> None:
    found = codes(
        PostgresConfig,
        database_url=f"mysql://app:{SECRET}@db/x",
        session_database_url=f"oracle://app:{SECRET}@db/x",
        worker_pool_size=0,
        worker_child_pool_max_size=0,
        tcp_keepalives_idle=0,
        tcp_user_timeout_ms=-1,
    )
    assert found == ["HRS-203"] * 2 + ["HRS-213"] * 2 + ["HRS-215"] * 2


def test_a_value_out_of_range_keeps_cross_field_checks_from_running() -> None:
    with pytest.raises(InvalidFieldError):
        RecoveryConfig(check_interval_ms=1, running_stale_threshold_ms=1_000)


def test_a_mistake_points_at_the_line_that_built_the_object() -> None:
    (error,) = mistakes(lambda: AppConfig(broker=broker(), cluster_wide_cap=0))
    assert error.location is not None
    assert error.location.file == __file__


@pytest.mark.parametrize(
    "changes",
    [
        {"database_url": [URL]},
        {"database_url": URL, "pool_size": URL},
        {"database_url": URL, "session_database_url": 5},
        {"database_url": URL, "dsn": URL},
        {"databse_url": URL},
    ],
)
def test_a_pydantic_error_never_shows_a_password(changes: dict[str, Any]) -> None:
    for make in (lambda: PostgresConfig(**changes), lambda: app(broker=changes)):
        with pytest.raises(InvalidFieldError) as raised:
            make()
        assert SECRET not in str(raised.value)
        assert SECRET not in repr(raised.value)


def test_an_address_in_the_wrong_place_is_not_shown() -> None:
    with pytest.raises(ValidationError) as raised:
        AppConfig.model_validate({"broker": URL})
    assert SECRET not in str(raised.value)


def test_repr_and_str_never_show_an_address() -> None:
    config = app(broker=broker(session_database_url=OTHER_URL))
    for text in (repr(config), str(config), repr(config.broker), str(config.broker)):
        assert SECRET not in text
        assert "db.example" not in text


def test_the_environment_names_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", OTHER_URL)
    monkeypatch.setenv("HORSIES_DATABASE_URL", "  ")
    assert PostgresConfig.from_env(pool_size=2) == broker(database_url=OTHER_URL, pool_size=2)
    monkeypatch.setenv("HORSIES_DATABASE_URL", URL)
    assert PostgresConfig.from_env().database_url == URL
    assert PostgresConfig.from_env(database_url=OTHER_URL).database_url == OTHER_URL


def test_without_an_environment_nothing_is_chosen_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("HORSIES_DATABASE_URL", raising=False)
    (error,) = mistakes(PostgresConfig.from_env)
    assert error.code is ErrorCode.BROKER_INVALID_URL
    assert "HORSIES_DATABASE_URL" in error.message
    assert 'Horsies("embedded://")' in error.message


def test_the_database_url_of_an_application_belongs_to_its_broker() -> None:
    (error,) = mistakes(AppConfig, database_url=URL)
    assert error.code is ErrorCode.BROKER_INVALID_URL
    assert "broker=PostgresConfig(database_url=...)" in error.message


def test_a_bad_address_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORSIES_DATABASE_URL", f"mysql://app:{SECRET}@db/x")
    assert codes(PostgresConfig.from_env) == ["HRS-203"]


def test_the_log_shows_every_setting_and_no_password(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HORSIES_CHILD_PROCESS", raising=False)
    config = custom(
        "alpha",
        "beta",
        broker=broker(session_database_url=OTHER_URL),
        exception_mapper={TimeoutError: "GATEWAY_DOWN"},
    )
    with caplog.at_level(logging.INFO, logger="horsies.config"):
        config.log_config()
    assert SECRET not in caplog.text
    for line in (
        "broker.database_url = postgresql://app:***@db.example:5432/shop",
        "broker.session_database_url = postgresql://app:***@direct.example/shop",
        "queue_mode = custom",
        "custom_queues[1].name = beta",
        "recovery.check_interval_ms = 30000",
        "exception_mapper = {'TimeoutError': 'GATEWAY_DOWN'}",
    ):
        assert line in caplog.text


def test_the_log_goes_to_the_given_logger(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HORSIES_CHILD_PROCESS", raising=False)
    with caplog.at_level(logging.INFO, logger="mine"):
        app().log_config(logging.getLogger("mine"))
    assert [record.name for record in caplog.records] == ["mine"]


def test_a_child_process_logs_no_configuration(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORSIES_CHILD_PROCESS", "1")
    with caplog.at_level(logging.DEBUG):
        app().log_config()
    assert caplog.records == []


@pytest.mark.parametrize(
    "name", ["", "Horsies", "1st", "pg_horsies", "information_schema", 'a"b', "a b", "ä", "a" * 64]
)
def test_a_schema_whose_name_needs_quotes_is_refused(name: str) -> None:
    (error,) = mistakes(broker, schema=name)
    assert error.code is ErrorCode.CONFIG_INVALID_SCHEMA
    assert error.message.startswith("PostgresConfig.schema must be 1 to 63 lower-case letters")


@pytest.mark.parametrize("name", ["horsies", "_h1", "pgx", "a" * 63])
def test_other_schemas_are_accepted(name: str) -> None:
    assert broker(schema=name).schema_name == name


def test_the_schema_of_the_environment_counts_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HORSIES_SCHEMA", "billing")
    assert PostgresConfig.from_env(database_url=URL).schema_name == "billing"
    assert PostgresConfig.from_env(database_url=URL, schema="shop").schema_name == "shop"
    assert PostgresConfig(database_url=URL).schema_name == "public"
    monkeypatch.setenv("HORSIES_SCHEMA", "Bad")
    with pytest.raises(ConfigurationError, match=r"variable HORSIES_SCHEMA must be .* not 'Bad'"):
        PostgresConfig.from_env(database_url=URL)
    assert PostgresConfig.from_env(database_url=URL, schema="shop").schema_name == "shop"


def test_a_queue_name_leaves_room_for_the_prefix_of_a_schema() -> None:
    custom("a" * 43, broker=broker(schema="billing"))
    (error,) = mistakes(lambda: custom("a" * 44, broker=broker(schema="billing")))
    assert "at most 43 bytes fit into a channel name" in error.message


@pytest.mark.parametrize("url", ["postgres://app@db/shop", "postgresql+psycopg://db/shop"])
def test_the_quick_configuration_of_commands_has_the_same_defaults(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORSIES_SCHEMA", "shop")
    monkeypatch.setenv("HORSIES_DATABASE_URL", url)
    whole, quick = PostgresConfig.from_env(), default_config(None)
    assert quick is not None
    assert {name: getattr(quick, name) for name in PostgresConfig.model_fields} == dict(whole)
    assert default_config("mysql://db/shop") is None
    assert default_config("") is None
    monkeypatch.setenv("HORSIES_SCHEMA", "pg_shop")
    assert default_config(url) is None


def test_repeated_names_are_found_in_one_pass() -> None:
    compared = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, str(other))

        __hash__ = str.__hash__

    names = [Name(number) for number in range(1_000)]
    assert repeated_names([*names, "7", "5"]) == ["5", "7"]
    assert compared < 2_000


@pytest.mark.parametrize(
    "option", ["-csearch_path%3Djobs", "-c%20search_path=jobs", "--search_path=jobs"]
)
@pytest.mark.parametrize("field", ["database_url", "session_database_url"])
def test_a_search_path_in_a_url_is_refused_unless_the_schema_is_given(
    field: str, option: str
) -> None:
    address = f"postgresql://app:hunter2@db/shop?options={option}"
    given: dict[str, Any] = {"database_url": "postgresql://app@db/shop", field: address}
    with pytest.raises(HorsiesError) as caught:
        PostgresConfig(**given)
    assert caught.value.code is ErrorCode.CONFIG_INVALID_SCHEMA
    assert f"{field} sets a search_path in its options" in str(caught.value)
    assert "use PostgresConfig(schema='jobs')" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    for schema in ("jobs", "public"):
        assert PostgresConfig(**given, schema=schema).schema_name == schema
