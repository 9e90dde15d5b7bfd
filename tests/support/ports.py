"""Ports for servers that a test starts, and stops and starts again."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from random import SystemRandom

# Below the range of the ports that the system gives to clients: while a server is down, a client gets none
# of these, not even one that connects to the port itself.
PORTS = range(15_000, 32_000)
PROCESSES_MAX = 16


def free_port() -> int:
    """Return a port that nothing listens on; each test process has its own range, and a port
    that was returned is reused only after all others.
    """
    for port in islice(_own_ports(), len(PORTS)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@cache
def _own_ports() -> Iterator[int]:
    number = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
    share = PORTS[number % PROCESSES_MAX :: PROCESSES_MAX]
    # With the shared seed of `random`, two runs of the tests would choose the same ports.
    return cycle(SystemRandom().sample(share, len(share)))
