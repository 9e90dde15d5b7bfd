"""The first hour with Horsies: calls that look right, fail, and must say so."""

from __future__ import annotations

from horsies.app import Horsies
from horsies.task_result import TaskError, TaskResult
from tests.support.applications import Call
from tests.support.database import Database
from tests.support.proxy import Proxy
from tests.support.rows import finish

# Results


def test_a_get_after_an_outage_connects_by_itself(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    @distant_app.task("add")
    def add(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    handle = add.send(1).unwrap()
    finish(connection, handle.task_id)
    proxy.stop()
    # Failed reconnects: the next one by the clock alone is seconds away.
    for _ in range(6):
        assert distant_app.handle(handle.task_id).get(timeout_ms=0).is_err()
    proxy.start()
    for timeout_ms in (0, 20_000):
        assert call(distant_app, distant_app.handle(handle.task_id), "get", timeout_ms).is_ok()
