"""Ports for servers that a test starts, stops and restarts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from random import SystemRandom

# The ports are below the range for clients, so that no client can get a stopped server's port, not
# even a client that connects to this port.
PORTS = range(15_000, 32_000)
PROCESSES_MAX = 16


def free_port() -> int:
    """Return a port without a listener; each test process has its own range, and reuses a port only
    after all others.
    """
    for port in islice(_own_ports(), len(PORTS)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@cache
def _own_ports() -> Iterator[int]:
    number = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
    share = PORTS[number % PROCESSES_MAX :: PROCESSES_MAX]
    # Do not use `random`, because with its shared seed two test runs would choose the same ports.
    return cycle(SystemRandom().sample(share, len(share)))
