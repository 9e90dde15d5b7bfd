"""Counts the CPUs that this process may use, for the default number of children."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# The files with the quota and its period: one file in cgroup v2, two in v1.
_QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def usable_cpus(own_group: Path = _OWN_GROUP, groups: Path = _GROUPS) -> int:
    """Count the CPUs in the affinity mask, limited by cgroup CPU quotas, v1 and v2; at least 1.

    In a container, ``os.cpu_count()`` counts the host's CPUs.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has no affinity masks
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([allowed, *_quotas(own_group, groups)]))


def _quotas(own_group: Path, groups: Path) -> Iterator[int]:
    """Read the quotas of the process's groups and of all groups above them, in CPUs, rounded up."""
    for folder in _folders(own_group, groups):
        for names in _QUOTA_FILES:
            # If there is no quota, the first number is "max" in v2 and -1 in v1.
            with suppress(OSError, ValueError):
                text = " ".join((folder / name).read_text("ascii") for name in names)
                quota, period = map(int, text.split())
                if quota > 0:
                    yield -(-quota // max(period, 1))


def _folders(own_group: Path, groups: Path) -> list[Path]:
    """Return the folders of the groups that may have a quota.

    The lines have the form ``ID:CONTROLLERS:PATH``.
    """
    folders: list[Path] = []
    with suppress(OSError, ValueError):
        for line in own_group.read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            # A group outside the container's namespace is shown as "/../.."
            own = Path(path.removeprefix("/").replace("../", "").removesuffix(".."))
            # v2 lists no controllers; v1 has a hierarchy for each controller, which is found by its name.
            top = groups / "cpu" if controllers else groups
            folders += [top / one for one in (own, *own.parents)]
    return folders
