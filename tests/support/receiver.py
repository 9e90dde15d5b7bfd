"""A receiver of webhooks: a real HTTP server that responds as the test specifies and records the
requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "the-secret-of-the-receiver-0123456789"


@dataclass(frozen=True, slots=True)
class Received:
    """One request."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    answered: int

    @property
    def event(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    def is_signed(self, secret: str = SECRET) -> bool:
        """Return whether one of the signatures is correct, without the sender's hmac module."""
        timestamp = self.headers["webhook-timestamp"]
        content = f"{self.id}.{timestamp}.".encode() + self.body
        expected = base64.b64encode(_hmac_sha256(secret.encode(), content)).decode()
        return f"v1,{expected}" in self.headers.get("webhook-signature", "").split(" ")


def _hmac_sha256(key: bytes, content: bytes) -> bytes:
    """Compute HMAC-SHA256 by the definition in RFC 2104, without the library."""
    block = hashlib.sha256(key).digest() if len(key) > 64 else key
    block = block.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(one ^ 0x36 for one in block) + content).digest()
    return hashlib.sha256(bytes(one ^ 0x5C for one in block) + inner).digest()


@dataclass
class Receiver:
    """Responds with the next entry of `answers`, repeating the last one; 0 closes the connection without
    a response.
    """

    answers: list[int] = field(default_factory=lambda: [200])
    headers: dict[str, str] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    # While this event is not set, senders wait for their response.
    is_awake: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    # The number of requests, including requests that wait for their response.
    arrived: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?token=hidden"

    def accepted(self) -> list[Received]:
        """The requests that were accepted."""
        return [one for one in list(self.received) if 200 <= one.answered < 300]

    def webhook(self, **changes: Any) -> dict[str, Any]:
        """Return a webhook of an application that sends to this receiver and does not wait long."""
        return {
            "name": "alerts",
            "url": self.url,
            "secret": SECRET,
            "on": ["task.failed", "task.cancelled", "task.expired", "run.ended"],
            "allow_private": True,
            "retry_seconds": 0.1,
            **changes,
        }

    def next_answer(self) -> int:
        answers = self.answers  # A test may replace the list at any time.
        return answers.pop(0) if len(answers) > 1 else answers[0]


@contextmanager
def receiving(given: Receiver | None = None) -> Iterator[Receiver]:
    """Run a receiver on a free port, or restart an earlier one on its port."""
    receiver = given or Receiver()
    receiver.is_awake.set()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                receiver.arrived += 1
            receiver.is_awake.wait(30)
            with lock:
                status = receiver.next_answer()
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.received.append(Received(self.path, headers, body, status))
            if status:
                self.send_response(status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    class Server(ThreadingHTTPServer):
        allow_reuse_address = True

        def handle_error(self, *_: object) -> None:
            """Ignore errors of connections whose sender was killed."""

    server = Server(("127.0.0.1", receiver.port), Handler)
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.is_awake.set()
        server.shutdown()
        thread.join()
        server.server_close()
