"""A real server with the S3 interface, behind a gate that can be closed."""

from __future__ import annotations

import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Self

import pytest

from tests.support.ports import free_port
from tests.support.wait import wait_until

# No part of these credentials may appear in a log, an error or a table.
ACCESS_KEY, SECRET_KEY, SESSION_TOKEN = "AKIAHIDDENACCESSKEY", "hidden-secret-key", "hidden-token"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_SESSION_TOKEN": SESSION_TOKEN,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
PREFIX = "test/"
_BYTES = 65_536


@contextmanager
def s3_server() -> Iterator[int]:
    """Run moto as a process and yield its port."""
    for package in ("boto3", "moto", "flask_cors"):
        if find_spec(package) is None:
            pytest.skip(f"S3 needs a server to be tested with: the package {package} is missing")
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: _answers(port), what="a listening S3 server")
        yield port
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class Bucket:
    """A bucket behind its own gate; a closed gate rejects connections."""

    def __init__(self, port: int, name: str) -> None:
        import boto3

        self.name = name
        self._port = free_port()
        self._server_port = port
        self._gate: _Gate | None = None
        session = boto3.session.Session(
            aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
        )
        self.client: Any = session.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        self.client.create_bucket(Bucket=name)

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def place(self) -> str:
        """The store's value for the environment of ``apps.confidential``."""
        return f"{self.endpoint_url}/{self.name}"

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.client.close()

    def open(self) -> None:
        """Open the gate again, on the same port."""
        self._gate = _Gate(self._port, self._server_port)

    def close(self) -> None:
        """Cut all connections and reject new ones."""
        if self._gate is not None:
            self._gate.stop()
            self._gate = None

    def names(self) -> set[str]:
        """The names of all objects."""
        return {key.removeprefix(PREFIX) for key in self.object_keys()}

    def delete(self, name: str) -> None:
        """Lose an object."""
        self.client.delete_object(Bucket=self.name, Key=f"{PREFIX}{name}")

    def object_keys(self) -> set[str]:
        """The keys of all objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return {one["Key"] for page in pages for one in page.get("Contents", ())}


class _Gate(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = False

    def __init__(self, port: int, server_port: int) -> None:
        self.server_port = server_port
        self.sockets: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.is_stopped = False
        super().__init__(("127.0.0.1", port), _Forwarder)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        with self.lock:
            self.is_stopped = True
            for one in self.sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self.server_close()  # Stopping waits for the forwarding threads.


class _Forwarder(socketserver.BaseRequestHandler):
    server: _Gate

    def handle(self) -> None:
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self.server.server_port)) as behind,
        ):
            pair: tuple[socket.socket, socket.socket] = (self.request, behind)
            with self.server.lock:
                if self.server.is_stopped:
                    return
                self.server.sockets.update(pair)
            back = threading.Thread(target=_forward, args=(behind, self.request))
            back.start()
            _forward(*pair)
            back.join()
            with self.server.lock:
                self.server.sockets.difference_update(pair)


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(_BYTES):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
