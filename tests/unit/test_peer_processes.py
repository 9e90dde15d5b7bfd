"""The processes that `make bench-peers` starts end with their block, whoever started them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from benchmarks.peers.processes import running


def test_a_process_that_lost_its_parent_ends_with_the_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(["sh", "-c", "sleep 600 & echo $!"], os.environ, log) as parent:
        assert parent.wait(30) == 0
        orphan = psutil.Process(int(log.read_text()))
        assert orphan.is_running()
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
