"""The figures of a soak run: caps, schedules, and the silence after which a worker may count as lost."""

from __future__ import annotations

from horsies import RecoveryConfig

CLUSTER_CAP = 8
QUEUE_CAPS: dict[str, int | None] = {"narrow": 1, "wide": 3, "open": None, "quick": None}
# Seconds between two slots, and whether slots missed during an interruption are sent later.
SCHEDULES: dict[str, tuple[int, bool]] = {
    "every second": (1, True),
    "every two seconds": (2, True),
    "latest only": (1, False),
}

WORKERS = 3
PROCESSES = 3
ASYNC_CHILDREN = 1
# This worker goes through PgBouncer in transaction mode, where that is installed.
POOLED_WORKER = 2
# How long it waits for an answer: PgBouncer itself would wait two minutes for a server.
POOLED_PATIENCE_MS = 3_000
SCHEDULERS = 2

# A living worker that is out of touch for less than this must keep its tasks.
LOST_AFTER_SECONDS = 5.0
# A worker needs up to a second to reconnect, and a busy machine takes its time to run it.
SLACK_SECONDS = 2.0
# A worker that comes back learns that it was declared lost, and ends its children, within this time.
RETURN_SECONDS = 6.0
# A live process that was not hit by a fault sends a new heartbeat within this time.
FROZEN_SECONDS = 15.0
# The load never pauses for as long as this while workers can work.
STILL_SECONDS = 4.0
# A process ends within this time after SIGTERM: its longest task runs for seven seconds.
STOP_SECONDS = 60.0


def recovery_settings() -> dict[str, int]:
    """Quick heartbeats and thresholds, so that a minute has room for many recoveries."""
    stale_ms = int(LOST_AFTER_SECONDS * 1000)
    settings = {
        "check_interval_ms": 1_000,
        "runner_heartbeat_interval_ms": 1_000,
        "claimer_heartbeat_interval_ms": 1_000,
        "running_stale_threshold_ms": stale_ms,
        "claimed_stale_threshold_ms": stale_ms,
    }
    if "worker_lost_after_ms" in RecoveryConfig.model_fields:
        settings["worker_lost_after_ms"] = stale_ms
    return settings
