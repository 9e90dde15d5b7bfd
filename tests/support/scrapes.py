"""The metrics that a worker serves."""

from __future__ import annotations

from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from tests.support.workers import RunningWorker


def port_of(worker: RunningWorker) -> int:
    """Return the port on which a worker with `--metrics-port 0` serves its metrics."""
    return int(worker.wait_for("metrics_served")["port"])


def scraped(port: int) -> dict[str, Any]:
    """Return the scraped families of metrics by name."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        text = response.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}
