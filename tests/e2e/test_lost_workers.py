"""A worker that is killed while another one lives: an event that stays visible after the recovery."""

from __future__ import annotations

import json
import signal

from horsies.config.postgres import PostgresConfig
from horsies.monitor.metrics import ClusterGauges
from horsies.tasks.broker import BrokerErrorCode, PostgresBroker
from tests.support.command_line import Run
from tests.support.wait import wait_until
from tests.support.workers import Fleet


def test_a_killed_worker_is_reported_and_counted_although_another_one_lives(
    fleet: Fleet, process_url: str, horsies: Run
) -> None:
    alpha = fleet.start("--name", "alpha", processes=1)
    fleet.start("--name", "beta", processes=1)
    broker = PostgresBroker(PostgresConfig(database_url=process_url), migrates=False)
    gauges = ClusterGauges("public")

    def lost() -> list[float]:
        code = BrokerErrorCode.MONITORING_QUERY_FAILED
        broker.perform(code, gauges.script()).unwrap()
        return [one.value for one in gauges.samples() if one.name == "horsies_workers_lost_total"]

    try:
        assert lost() == [0]
        alpha.signal(signal.SIGKILL)
        alpha.wait()
        wait_until(lambda: lost() == [1])
    finally:
        broker.close()
    (check,) = json.loads(horsies("doctor", "--json", "--only", "losses").out)["checks"]
    (found,) = check["findings"]
    assert found["code"] == "WORKERS_LOST"
    assert found["sentence"].startswith("Worker alpha was lost ")
