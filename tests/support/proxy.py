"""A proxy in front of PostgreSQL that can drop an answer or notifications, cut its connections, hold or
drop all traffic, stop for a while, or cause a fault at any message boundary. It parses the protocol to
detect when the server has finished a request, so that a dropped answer belongs to a committed statement.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self
from urllib.parse import quote

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from tests.support.database import terminate_others
from tests.support.faults import Cut, Direction, Faults
from tests.support.ports import free_port

READY_FOR_QUERY = b"Z\x00\x00\x00\x05"
NOTIFICATION = b"A"
WRONG_PASSWORD = 'password authentication failed for user "app"'


class Proxy:
    """Forwards connections to one server; use as a context manager."""

    def __init__(self, server_url: str | Callable[[], str], faults: Faults | None = None) -> None:
        # Returns the server's current address for each new connection, for a server that may move.
        self._find_server = server_url if callable(server_url) else lambda: server_url
        self._server = conninfo_to_dict(self._find_server())
        self._faults = faults
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._port = free_port()
        self._doomed: bytes | None = None
        self._is_flowing = threading.Event()
        self._is_flowing.set()
        # Changes each complete message from the server before it is passed on.
        self.rewrite: Callable[[bytes], bytes] = bytes
        # While set, every notification is dropped; all other messages pass.
        self.is_silent = False
        # The bytes that each client has sent, or None to keep nothing.
        self.questions: dict[socket.socket, bytearray] | None = None
        self.swallowed = threading.Event()

    @property
    def port(self) -> int:
        """The port on which the started proxy listens."""
        return self._port

    @property
    def url(self) -> str:
        user = quote(str(self._server.get("user") or ""))
        password = quote(str(self._server.get("password") or ""))
        database = quote(str(self._server.get("dbname") or ""))
        return (
            f"postgresql://{user}:{password}@127.0.0.1:{self._port}/{database}"
            "?sslmode=disable&gssencmode=disable"
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Accept connections, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Reject new connections and cut the open ones."""
        self._is_flowing.set()
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            # Wait here; otherwise a connection accepted at the last moment would be opened after
            # the cut.
            self._threads.pop(0).join()
        self.cut()
        while self._threads:
            self._threads.pop().join()

    def cut(self) -> None:
        """Cut every open connection."""
        with self._lock:
            doomed, self._sockets = self._sockets, set()
        for one in doomed:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def desert(self, marker: bytes) -> None:
        """Cut the client that has sent these bytes; the server is not told, and completes its request."""
        assert self.questions is not None
        (client,) = [one for one, sent in list(self.questions.items()) if marker in sent]
        with self._lock:
            self._sockets.remove(client)
        client.shutdown(socket.SHUT_RDWR)

    def pause(self) -> None:
        """Hold all traffic; connections stay open, and new connections are accepted."""
        self._is_flowing.clear()

    def resume(self) -> None:
        """Deliver the held traffic."""
        self._is_flowing.set()

    def swallow_answer_with(self, marker: bytes) -> None:
        """Cut the connection instead of delivering the next answer that contains these bytes."""
        self.swallowed.clear()
        self._doomed = marker

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = self._connect()
            except OSError:  # The server is down, so the client's connection breaks.
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            if (faults := self._faults) is not None:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._spawn(_forward_with_faults, faults, Direction.QUESTION, client, server)
                self._spawn(_forward_with_faults, faults, Direction.ANSWER, server, client)
                continue
            self._spawn(self._forward_questions, client, server)
            self._spawn(self._forward_answers, server, client)

    def _connect(self) -> socket.socket:
        target = conninfo_to_dict(self._find_server())
        host = str(target.get("host") or "127.0.0.1")
        port = int(target.get("port") or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        server = socket.socket(socket.AF_UNIX)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def _forward_questions(self, client: socket.socket, server: socket.socket) -> None:
        kept = bytearray()
        if self.questions is not None:
            self.questions[client] = kept
        with suppress(OSError), client:
            while data := client.recv(65536):
                if self.questions is not None:
                    kept += data
                self._is_flowing.wait()
                server.sendall(data)
        with self._lock:
            is_told = client in self._sockets
        if is_told:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)

    def _forward_answers(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError), server:
            answer = rest = b""
            is_whole = True
            while data := server.recv(65536):
                messages, rest = whole_messages(rest + data)
                passed = [message for message in messages if self._lets_pass(message)]
                answer += b"".join(map(self.rewrite, passed))
                # A notification may arrive after an answer, or between two answers.
                for message in messages:
                    if not message.startswith(NOTIFICATION):
                        is_whole = message.startswith(READY_FOR_QUERY)
                if self._doomed is not None and not is_whole:
                    continue
                if self._doomed is not None and self._doomed in answer:
                    self._doomed = None
                    self.swallowed.set()
                    break
                self._is_flowing.wait()
                client.sendall(answer)
                answer = b""
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _lets_pass(self, message: bytes) -> bool:
        return not (self.is_silent and message.startswith(NOTIFICATION))

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


def _forward_with_faults(
    faults: Faults, direction: Direction, source: socket.socket, target: socket.socket
) -> None:
    client = source if direction is Direction.QUESTION else target
    rest, held = b"", bytearray()

    def flush() -> None:
        for packet in faults.packets(bytes(held)):
            target.sendall(packet)
        held.clear()

    with suppress(OSError), source:
        if direction is Direction.QUESTION:
            # The start of a session and a request to cancel are messages without a type.
            target.sendall(source.recv(65536))
        try:
            while data := source.recv(65536):
                messages, rest = whole_messages(rest + data)
                for message in messages:
                    held += faults.passed(direction, message, flush)
                if direction is Direction.ANSWER or not faults.is_held(bytes(held)):
                    flush()
        except Cut as cut:
            client.sendall(cut.farewell)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def whole_messages(data: bytes) -> tuple[list[bytes], bytes]:
    """Split a server's bytes into messages; return an incomplete last message as the rest."""
    messages = []
    while len(data) >= 5 and len(data) > (size := int.from_bytes(data[1:5], "big")):
        messages.append(data[: size + 1])
        data = data[size + 1 :]
    return messages, data


class RefusingServer:
    """A server that rejects all clients: it answers every start-up with a wrong-password error."""

    def __init__(self, message: str = WRONG_PASSWORD) -> None:
        self._message = message
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client:
                    self._refuse(client)

    def _refuse(self, client: socket.socket) -> None:
        fields = f"SFATAL\0VFATAL\0C28P01\0M{self._message}\0\0".encode()
        while (size := client.recv(4)) and struct.unpack("!i", size)[0] == 8:
            client.recv(4)  # a request for encryption
            client.sendall(b"N")
        client.recv(65536)
        client.sendall(b"E" + struct.pack("!i", len(fields) + 4) + fields)


@contextmanager
def outage(server_url: str, connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Make the database reject all connections except the test's, and end the existing ones."""
    name = sql.Identifier(connection.info.dbname)
    allow = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(allow.format(name, sql.SQL("false")))
        try:
            terminate_others(connection)
            yield
        finally:
            server.execute(allow.format(name, sql.SQL("true")))
