"""The CPUs that this process may use, for the default number of children."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OWN_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def usable_cpus(own_group: Path = _OWN_GROUP, groups: Path = _GROUPS) -> int:
    """Count the CPUs of the affinity mask, limited by the CPU quotas of cgroups v2; at least 1.

    In a container ``os.cpu_count()`` counts the CPUs of the host.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has none
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([allowed, *_quotas(own_group, groups)]))


def _quotas(own_group: Path, groups: Path) -> Iterator[int]:
    """Read the quotas of the process's group and of all groups above it, in CPUs, rounded up."""
    for folder in _folders(own_group, groups):
        # The file does not exist without cgroups v2; without a quota it begins with "max".
        with suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text("ascii").split())
            yield -(-quota // max(period, 1))


def _folders(own_group: Path, groups: Path) -> list[Path]:
    with suppress(OSError, UnicodeDecodeError):
        for line in own_group.read_text("utf-8").splitlines():
            if line.startswith("0::/"):
                # A group outside of the container's namespace is shown as "/../.."
                own = Path(line.removeprefix("0::/").replace("../", "").removesuffix(".."))
                return [groups / one for one in (own, *own.parents)]
    return []
