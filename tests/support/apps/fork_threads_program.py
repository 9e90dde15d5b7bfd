"""A program whose forked children first use the application in many threads; see test_waiting.py."""

from __future__ import annotations

import os
import sys
import threading

import psycopg

from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskResult

FORKS = 30
THREADS = 8

app = Horsies(AppConfig(broker=PostgresConfig(database_url=sys.argv[1], pool_size=1)))


@app.task("forked")
def forked(a: int) -> TaskResult[int, TaskError]:
    return TaskResult(ok=a)


def problems(task_id: str) -> list[str]:
    """Use the waiters and the pool in all threads at the same time."""
    sys.setswitchinterval(1e-6)
    barrier = threading.Barrier(THREADS)
    broker = app.get_broker()
    pools, found = set(), []

    def use() -> None:
        barrier.wait()
        pools.add(id(broker.database.pool()))
        result = app.handle(task_id).get(timeout_ms=30_000)
        if result.is_err():
            found.append(str(result.err_value.error_code))

    threads = [threading.Thread(target=use) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found + (["several pools"] if len(pools) > 1 else [])


def main() -> None:
    handle = forked.send(1).unwrap()
    with psycopg.connect(sys.argv[1], autocommit=True) as connection:
        connection.execute("""UPDATE horsies_tasks SET status = 'COMPLETED', result = '{"ok":1}'""")
    handle.get(timeout_ms=30_000)  # The waiters' thread starts before the fork.
    for _ in range(FORKS):
        child = os.fork()
        if child == 0:
            found = problems(handle.task_id)
            print(*found, flush=True)
            os._exit(1 if found else 0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(1)
    app.close()


main()
