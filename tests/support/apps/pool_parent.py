"""A worker's parent process that only waits to be killed; it reports the pids of its descendants."""

from __future__ import annotations

import os
import selectors
from pathlib import Path

import psutil

from horsies.worker.pool.children import PoolSettings
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import ChildPool
from tests.support.pool import BOOT, assignment, collect_until


def main(method: str, reports: str) -> None:
    with selectors.DefaultSelector() as selector:
        pool = ChildPool(PoolSettings(2, StartMethod(method)), BOOT, selector)
        pool.start()
        started = Path(reports + ".started")
        pool.dispatch(assignment("wait_forever", str(started)))
        collect_until(pool, started.exists)
        family = [str(one.pid) for one in psutil.Process().children(recursive=True)]
        Path(reports + ".part").write_text(" ".join(family))
        os.rename(reports + ".part", reports)
        while True:
            pool.collect(60)
