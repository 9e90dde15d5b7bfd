"""A payment gateway for the example: it asks for patience once per order and refuses large sums."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

asked: set[int] = set()


class Gateway(BaseHTTPRequestHandler):
    """Answer ``POST /charges`` with 429 the first time, then with a receipt or 402."""

    def do_POST(self) -> None:
        """Take one charge."""
        charge = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if charge["order"] not in asked:
            asked.add(charge["order"])
            self._answer(429, "come back later", retry_after="0.1")
        elif charge["cents"] > 100_000:
            self._answer(402, "the card was refused")
        else:
            self._answer(200, json.dumps({"receipt": f"R{charge['order']}"}))

    def _answer(self, status: int, text: str, retry_after: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Stay silent."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Gateway).serve_forever()
