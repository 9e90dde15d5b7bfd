"""Sends one HTTP request to a checked address, without redirects, within a time limit."""

from __future__ import annotations

import http.client
import io
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from horsies.webhooks.addresses import resolve

# The body of a response is not used. A few bytes are read so that the connection ends normally for
# the receiver.
_READ_BYTES = 4_096
_WHOLE_SECONDS = re.compile(r"\d{1,9}")
# The exceptions of a request without a response; an unresolvable name may also raise UnicodeError.
NO_ANSWER = (OSError, http.client.HTTPException, UnicodeError)


class Answer(NamedTuple):
    """The status of a receiver's response, and the seconds that it requests before the next attempt."""

    status: int
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of a webhook's requests; messages omit its address, which may be a secret."""

    scheme: str
    host: str
    port: int
    target: str
    authority: str

    @classmethod
    def of(cls, url: str) -> Destination:
        """Return the parts of a checked address."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        authority = parts.netloc.rpartition("@")[2]
        return cls(parts.scheme, parts.hostname or "", port, target, authority)


def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    timeout_seconds: float,
    allow_private: bool,
) -> Answer:
    """Send the request and return the response; raise OSError or HTTPException without one."""
    destination = Destination.of(url)
    deadline = time.monotonic() + timeout_seconds
    addresses = resolve(destination.host, destination.port, allow_private=allow_private)
    stream = _connect(destination, addresses, deadline)
    try:
        return _exchange(destination, stream, body, headers, deadline)
    finally:
        stream.close()


def _connect(destination: Destination, addresses: list[str], deadline: float) -> socket.socket:
    """Connect to the first address that responds within its share of the remaining time."""
    last: OSError = OSError("the host has no address")
    for tried, address in enumerate(addresses):
        share = _left(deadline) / (len(addresses) - tried)
        try:
            return _open(destination, address, time.monotonic() + share)
        except ssl.SSLCertVerificationError:
            raise
        except OSError as error:
            last = error
    raise last


def _open(destination: Destination, address: str, deadline: float) -> socket.socket:
    """Connect to one address; the host name is used for the certificate only."""
    stream = socket.create_connection((address, destination.port), _left(deadline))
    if destination.scheme == "http":
        return stream
    try:
        stream.settimeout(_left(deadline))
        context = ssl.create_default_context()
        return context.wrap_socket(stream, server_hostname=destination.host)
    except BaseException:
        stream.close()
        raise


def _exchange(
    destination: Destination,
    stream: socket.socket,
    body: bytes,
    headers: Mapping[str, str],
    deadline: float,
) -> Answer:
    stream.settimeout(_left(deadline))
    connection = http.client.HTTPConnection(destination.host, destination.port)
    connection.sock = cast("socket.socket", _Limited(stream, deadline))
    fields = {"host": destination.authority, "connection": "close", **headers}
    connection.request("POST", destination.target, body, fields)
    with connection.getresponse() as response:
        wait = response.headers.get("retry-after", "").strip()
        response.read(_READ_BYTES)
        seconds = float(wait) if _WHOLE_SECONDS.fullmatch(wait) else None
        return Answer(response.status, seconds)


class _Limited:
    """A connection for the HTTP library whose reads end at the deadline, even if the bytes arrive
    slowly. The owner closes the connection.
    """

    def __init__(self, stream: socket.socket, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._stream.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self._stream, self._deadline))

    def close(self) -> None:
        """Keep the connection open, because the library closes it before it reads the response's body."""


class _Incoming(io.RawIOBase):
    """Reads the bytes of a connection until the deadline."""

    def __init__(self, stream: socket.socket, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        self._stream.settimeout(_left(self._deadline))
        return self._stream.recv_into(buffer)


def reason(error: BaseException) -> str:
    """Explain why there was no response. Messages of the HTTP library may quote the path, which may be a
    secret, so they are left out; so is the part of a message about a certificate that names the host.
    """
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not accepted ({error.verify_message.partition(',')[0]})"
    return getattr(error, "strerror", None) or type(error).__name__


def _left(deadline: float) -> float:
    """Return the seconds until the deadline; raise TimeoutError after it."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
