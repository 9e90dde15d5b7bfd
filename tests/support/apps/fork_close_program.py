"""A program that forks while its waiters are busy, and closes in the child; see test_waiting.py."""

from __future__ import annotations

import os
import signal
import sys

from horsies import AppConfig, Horsies, PostgresConfig

app = Horsies(AppConfig(broker=PostgresConfig(database_url=sys.argv[1], pool_size=1)))
UNKNOWN = "01900000-0000-7000-8000-000000000000"


def main() -> None:
    waiters = app.get_broker().waiters
    future = waiters.watch(UNKNOWN, once=True)
    future.result(20)
    waiters._lock.acquire()  # Another thread of the parent may hold the lock at this moment.
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        waiters.forget(UNKNOWN, future)
        app.close()
        os._exit(0)
    waiters._lock.release()
    print(f"child:{os.waitpid(child, 0)[1]}")
    app.close()


main()
