"""The number of children: the processors that this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from horsies.worker.cpus import usable_cpus


@pytest.fixture
def one_cpu() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
@pytest.mark.usefixtures("one_cpu")
def test_children_are_not_started_for_cpus_that_others_use(tmp_path: Path) -> None:
    assert usable_cpus() == 1
    assert usable_cpus(tmp_path / "missing", tmp_path) == 1


# The group of the process, the quotas of the top group and of jobs/horsies in it, and the usable CPUs of 64.
SECOND_VERSION = [
    ("0::/", "150000 100000", None, 2),
    ("0::/", "10000 100000", None, 1),
    ("0::/", "max 100000", None, 64),
    ("0::/", "9900000 100000", None, 64),
    ("1:cpu:/\n0::/jobs/horsies", None, "300000 100000", 3),
    ("0::/jobs/horsies", "200000 100000", "300000 100000", 2),
    ("0::/jobs/horsies", "200000 100000", "max 100000", 2),
    ("1:cpu:/jobs/horsies", None, "100000 100000", 64),
    ("0::/", "nonsense", None, 64),
    ("0::/../..", "100000 100000", None, 1),
]
FIRST_VERSION = [
    ("4:cpu,cpuacct:/", "150000", None, 2),
    ("4:cpuacct,cpu:/", "10000", None, 1),
    ("4:cpu,cpuacct:/", "-1", None, 64),
    ("4:cpu,cpuacct:/", "nonsense", None, 64),
    ("3:memory:/\n4:cpu:/jobs/horsies\n0::/jobs", None, "300000", 3),
    ("4:cpu:/jobs/horsies", "200000", "300000", 2),
    # A container sees its own group as the top one, whatever its name on the host.
    ("4:cpu:/docker/0d7e", "200000", None, 2),
    ("3:cpuset:/jobs/horsies", None, "100000", 64),
]


@pytest.mark.parametrize(
    ("controller", "file", "group", "top", "service", "expected"),
    [("", "cpu.max", *row) for row in SECOND_VERSION]
    + [("cpu", "cpu.cfs_quota_us", *row) for row in FIRST_VERSION],
)
def test_the_quota_of_the_cgroup_limits_the_children(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    controller: str,
    file: str,
    group: str,
    top: str | None,
    service: str | None,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text(f"{group}\n")
    (root / controller / "jobs" / "horsies").mkdir(parents=True)
    for folder, quota in (
        (root / controller, top),
        (root / controller / "jobs" / "horsies", service),
    ):
        if controller:
            (folder / "cpu.cfs_period_us").write_text("100000\n")
        if quota is not None:
            (folder / file).write_text(f"{quota}\n")
    assert usable_cpus(own, root) == expected
