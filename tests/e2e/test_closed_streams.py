"""Workers that are started without standard streams."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.workers import Fleet


@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_a_worker_without_standard_streams_runs_tasks_that_use_them(
    fleet: Fleet, programs: ModuleType, method: str
) -> None:
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    worker = fleet.start("--start-method", method, processes=1, through=closed)
    for stream in (1, 2):
        sent = programs.write_to_descriptor.send(stream).unwrap()
        assert sent.get(30_000).ok_value == "/dev/null"
    assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
    assert not worker.events("child_died")
    assert worker.stop() == 0
