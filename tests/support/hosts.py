"""Hosts on one machine: network namespaces for the database and for workers, with virtual cables that
tests can unplug.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

import pytest


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Network namespaces: one for the database and two for workers, each with a cable to the database."""

    mark: str

    def through(self, host: str) -> list[str]:
        """Return the command prefix that runs a program on this host."""
        return ["ip", "netns", "exec", f"{self.mark}{host}"]

    def inside(self, host: str) -> list[str]:
        """Return a command prefix like ``through``, with the host's own hostname and process numbers.
        The program is a child of the started process, and has process number 1 on its host.
        """
        alone = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*self.through(host), *alone, "sh", "-c", 'hostname "$0" && exec "$@"', host]

    def url(self, number: int, port: int) -> str:
        """Return the URL of the database for a worker host."""
        return f"postgresql://postgres@10.201.{number}.1:{port}/postgres"

    def wire(self, number: int) -> None:
        """Create a worker host with its cable."""
        host, database, cable = f"{self.mark}w{number}", f"{self.mark}db", f"c{number}"
        run("ip", "netns", "add", host)
        run(
            "ip", "-n", database, "link", "add", cable, "type", "veth", "peer", "up0", "netns", host
        )
        run("ip", "-n", database, "addr", "add", f"10.201.{number}.1/24", "dev", cable)
        run("ip", "-n", host, "addr", "add", f"10.201.{number}.2/24", "dev", "up0")
        for name, device in ((database, cable), (host, "up0"), (host, "lo")):
            run("ip", "-n", name, "link", "set", device, "up")

    def cut(self, number: int) -> None:
        """Pull the cable."""
        run("ip", "-n", f"{self.mark}w{number}", "link", "set", "up0", "down")

    def mend(self, number: int) -> None:
        """Plug the host's cable in again."""
        run("ip", "-n", f"{self.mark}w{number}", "link", "set", "up0", "up")

    def swallow(self, number: int) -> None:
        """Silently drop every packet between this host and the database; both interfaces stay up."""
        for name, device, peer in self._ends(number):
            nobody = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
            run("ip", "-n", name, "neigh", "replace", peer, *nobody, "dev", device)

    def deliver(self, number: int) -> None:
        """Deliver packets again."""
        for name, device, peer in self._ends(number):
            run("ip", "-n", name, "neigh", "del", peer, "dev", device)

    def _ends(self, number: int) -> list[tuple[str, str, str]]:
        """Return both sides of a cable: the namespace, the device, and the address of the other side."""
        network = f"10.201.{number}"
        return [
            (f"{self.mark}w{number}", "up0", f"{network}.1"),
            (f"{self.mark}db", f"c{number}", f"{network}.2"),
        ]


@contextmanager
def namespaces() -> Iterator[Hosts]:
    hosts = Hosts(f"hz{uuid4().hex[:6]}")
    made = [f"{hosts.mark}{name}" for name in ("db", "w1", "w2")]
    try:
        run("ip", "netns", "add", made[0])
        run("ip", "-n", made[0], "link", "set", "lo", "up")
        for number in (1, 2):
            hosts.wire(number)
        yield hosts
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def hosts_or_skip() -> Iterator[Hosts]:
    """Yield hosts if the machine permits them; otherwise skip the test."""
    if shutil.which("ip") is None or shutil.which("setpriv") is None:
        pytest.skip("network namespaces need ip and setpriv: apt-get install iproute2 util-linux")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    probe = ["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(probe, check=False, capture_output=True).returncode != 0:
        pytest.skip("network namespaces are not permitted here")
    with namespaces() as made:
        yield made
