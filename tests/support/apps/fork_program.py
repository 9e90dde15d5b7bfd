"""A program that waits for results in a process and in its forked child; see test_waiting.py."""

from __future__ import annotations

import os
import sys

import psycopg

from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskHandle, TaskResult

app = Horsies(AppConfig(broker=PostgresConfig(database_url=sys.argv[1], pool_size=1)))


@app.task("forked")
def forked(a: int) -> TaskResult[int, TaskError]:
    return TaskResult(ok=a)


def finished(number: int) -> TaskHandle[int]:
    """Send a task and write its outcome directly to the database, without a worker."""
    handle = forked.send(number).unwrap()
    with psycopg.connect(sys.argv[1], autocommit=True) as connection:
        connection.execute(
            "UPDATE horsies_tasks SET status = 'COMPLETED', result = %s WHERE id = %s",
            (f'{{"ok":{number}}}', handle.task_id),
        )
    return handle


def show(name: str, handle: TaskHandle[int]) -> None:
    print(f"{name}:{handle.get(timeout_ms=30_000).ok_value}", flush=True)


def main() -> None:
    mine = finished(1)
    mine.get(timeout_ms=0)  # The waiters' thread starts before the fork.
    unread: TaskHandle[int] = app.handle(mine.task_id)
    child = os.fork()
    if child == 0:
        show("child", finished(2))
        app.close()
        sys.exit(0)
    os.waitpid(child, 0)
    show("parent", unread)
    show("again", finished(3))
    app.close()


main()
