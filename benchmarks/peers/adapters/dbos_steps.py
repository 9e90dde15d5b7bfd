"""Runs recorded steps of DBOS workflows in threads of one process, and prints the seconds.

The arguments are the URL of the database and the numbers of runs, steps and threads.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from dbos import DBOS, DBOSConfig


@DBOS.step()
def one(number: int) -> int:
    """Do nothing, recorded."""
    return number


@DBOS.workflow()
def steps(count: int) -> int:
    """Record this many steps."""
    return sum(one(number) for number in range(count))


def main(url: str, runs: int, count: int, threads: int) -> None:
    """Launch DBOS, warm up, and measure."""
    config: DBOSConfig = {
        "name": "steps",
        "system_database_url": url,
        "log_level": "ERROR",
        "run_admin_server": False,
    }
    DBOS(config=config)
    DBOS.launch()
    steps(3)
    started = time.perf_counter()
    if threads == 1:
        for _ in range(runs):
            steps(count)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(steps, [count] * runs))
    print(time.perf_counter() - started, flush=True)
    DBOS.destroy()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
