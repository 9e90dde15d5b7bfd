"""The addresses that a delivery may connect to.

A host name is resolved once per delivery, and the connection is made to one of the checked addresses, so
that a second DNS response cannot redirect it into the private network.
"""

from __future__ import annotations

import socket

from horsies.config.webhooks import is_public


class NoPublicAddress(Exception):
    """All addresses of the host are private."""


def resolve(host: str, port: int, *, allow_private: bool) -> list[str]:
    """Return the addresses of a host that a delivery may use, in the resolver's order."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    allowed = [one for one in addresses if allow_private or is_public(one)]
    if addresses and not allowed:
        raise NoPublicAddress
    return allowed
