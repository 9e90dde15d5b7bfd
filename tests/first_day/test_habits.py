"""Habits of users of other task queues: each test is one of them, and works here as they expect."""

from __future__ import annotations

import json

import pytest

from horsies import AppConfig, CustomQueueConfig, Horsies, PostgresConfig, QueueMode
from horsies.cli.worker import _banner
from horsies.config.app import PayloadConfig
from horsies.task_result import TaskError, TaskResult
from horsies.worker.child.execute import execute
from horsies.worker.config import WorkerConfig, served_queues
from horsies.worker.protocol import Assignment

BROKER = PostgresConfig(database_url="postgresql://nobody@localhost/nothing")


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (PayloadConfig(), None),
        (PayloadConfig(warn_bytes=10, reject_bytes=10), None),
        (PayloadConfig(max_result_bytes=1_000_000), "PAYLOAD_TOO_LARGE"),
    ],
    ids=["default", "limited sends", "limited results"],
)
def test_a_large_result_is_kept_unless_results_have_a_limit(
    limits: PayloadConfig, code: str | None
) -> None:
    app = Horsies(AppConfig(broker=BROKER, payload=limits))

    @app.task("export")
    def export(size: int) -> TaskResult[str, TaskError]:
        return TaskResult(ok="x" * size)

    size = 17_000_000
    report = execute(app, Assignment("task-1", 1, "export", 1, json.dumps([size]), "{}", None))
    assert report.error_code == code
    assert report.ok is (code is None)
    assert (len(report.result_json) > size) is (code is None)


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
