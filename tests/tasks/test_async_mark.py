"""Every way to send an `async def` task stores the mark by which claims for async children find it."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg import Connection

from horsies import Horsies, RetryPolicy, TaskNode

MARKED = b"""
SELECT count(*), count(*) FILTER (WHERE task_options LIKE '{"async":true%') FROM horsies_tasks
"""


@pytest.mark.parametrize("is_async", [True, False])
def test_sends_and_nodes_are_marked(
    app: Horsies, connection: Connection[Any], is_async: bool
) -> None:
    policy = RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"])
    if is_async:

        @app.task("fetch", retry_policy=policy, burst=True)
        async def fetch(page: int) -> int:
            return page

        @app.task("plain")
        async def plain() -> None:
            return None
    else:

        @app.task("fetch", retry_policy=policy, burst=True)
        def fetch(page: int) -> int:
            return page

        @app.task("plain")
        def plain() -> None:
            return None

    plain.send().unwrap()
    fetch.send(1).unwrap()
    fetch.with_options(headers={"async": "true"}).schedule(60, 2).unwrap()
    fetch.send_many(fetch.bind(page) for page in range(3)).unwrap()
    app.send_by_name("fetch", {"page": 4}).unwrap()
    nodes = [TaskNode(fetch, kwargs={"page": 5}), TaskNode(plain)]
    app.workflow("pages", nodes, definition_key="tests.pages").start().unwrap()
    assert connection.execute(MARKED).fetchone() == (9, 9 if is_async else 0)
