"""`horsies web`: the address, the authentication and the database that it refuses or serves."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from horsies.cli.main import command_line
from horsies.cli.web import bound
from horsies.web import hash_password
from tests.support.web_server import served

URL = ("--database-url", "postgresql://localhost/unused")


def refusal(*arguments: str) -> str:
    done = CliRunner().invoke(command_line(), ["web", *arguments])
    assert done.exit_code == 1
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--host", "0.0.0.0"),
            "--host 0.0.0.0 lets other machines in without authentication; add --auth token.",
        ),
        (
            ("--auth", "token"),
            "--auth token: --token-file is missing, and HORSIES_WEB_TOKEN is not set.",
        ),
        (("--auth", "basic"), "--auth basic: --users-file is missing."),
        (
            ("--auth", "basic", "--users-file", "/nowhere"),
            "--auth basic: --users-file /nowhere cannot be read: No such file or directory.",
        ),
        (
            ("--auth", "trusted-header"),
            "--auth trusted-header: --trusted-proxy, the address of the proxy, is missing.",
        ),
        (
            ("--trusted-proxy", "proxy"),
            "--trusted-proxy: 'proxy' does not appear to be an IPv4 or IPv6 network.",
        ),
    ],
)
def test_wrong_options_end_with_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert refusal(*URL, *arguments) == f"error: {sentence}\n"


def test_a_short_token_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORSIES_WEB_TOKEN", "short")
    assert refusal(*URL, "--auth", "token") == (
        "error: --auth token: the token has fewer than 32 characters.\n"
    )


@pytest.mark.parametrize("line", ["anna", "anna:horse", "anna:scrypt$a$b:king", ""])
def test_a_wrong_line_of_the_users_file_is_named(line: str, tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(f"# users\n{line}\n")
    answer = refusal(*URL, "--auth", "basic", "--users-file", str(users))
    wanted = "line 2 is not name:hash or name:hash:viewer" if line else "the file has no users"
    assert answer == f"error: --auth basic: {wanted}.\n"


def test_an_embedded_database_is_not_served_to_others() -> None:
    answer = refusal(
        *("--database-url", "embedded:///nowhere", "--host", "0.0.0.0"),
        *("--auth", "trusted-header", "--trusted-proxy", "10.0.0.1"),
    )
    assert "serves this machine alone" in answer


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = refusal(*URL, "--port", str(port))
    wanted = f"--host 127.0.0.1 --port {port} cannot be used: address already in use."
    assert answer == f"error: {wanted}\n"


def test_answers_are_sent_at_once() -> None:
    """With Nagle's algorithm, the body of a page waits 40 ms for the acknowledgement of its head."""
    assert asyncio.run(_nodelay_of_an_answer()) != 0


async def _nodelay_of_an_answer() -> int:
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    with bound("127.0.0.1", 0) as listening:
        server = await asyncio.start_server(lambda _, out: accepted.set_result(out), sock=listening)
        async with server:
            _, ours = await asyncio.open_connection(*listening.getsockname()[:2])
            theirs = await accepted
            answering = theirs.get_extra_info("socket")
            nodelay: int = answering.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for writer in (ours, theirs):
                writer.close()
                await writer.wait_closed()
    return nodelay


@pytest.mark.parametrize(
    ("options", "status", "is_secure"),
    [((), 401, False), (("--trusted-proxy", "127.0.0.1"), 303, True)],
)
def test_forwarded_headers_count_only_from_a_named_proxy(
    process_url: str, options: tuple[str, ...], status: int, is_secure: bool
) -> None:
    """A program on the same machine could guess tokens without limit by naming another address each time."""
    token = "t" * 32
    environment = {"HORSIES_WEB_TOKEN": token}
    with served(*options, "--auth", "token", "--database-url", process_url, env=environment) as web:

        def tried(guess: str, address: str) -> httpx.Response:
            headers = {"X-Forwarded-For": address, "X-Forwarded-Proto": "https"}
            return web.get("/help", params={"token": guess}, headers=headers)

        first = tried(token, "10.0.0.1")
        assert ("Secure" in first.headers["set-cookie"]) is is_secure
        web.client.cookies.clear()
        for number in range(5):
            assert tried("wrong", f"10.0.1.{number}").status_code == 401
        assert tried(token, "10.0.0.1").status_code == status


def test_users_of_a_file_log_in(process_url: str, tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(f"anna:{hash_password('horse')}\n")
    options = ("--auth", "basic", "--users-file", str(users), "--database-url", process_url)
    with served(*options) as server:
        assert server.get("/help").status_code == 401
        assert server.get("/help", auth=("anna", "horse")).status_code == 200
        assert server.get("/readyz").text == "ready\n"


def test_a_database_behind_a_pooler_is_named_by_flags(process_url: str) -> None:
    direct = f"{process_url}{'&' if '?' in process_url else '?'}application_name=direct"
    pooled = ("--session-database-url", direct, "--pgbouncer-transaction-mode")
    with served("--database-url", process_url, *pooled) as web:
        assert web.get("/queues").status_code == 200


@pytest.mark.parametrize(
    "flags", [("--session-database-url", "postgresql:///b"), ("--pgbouncer-transaction-mode",)]
)
def test_an_application_names_its_pooler_itself(flags: tuple[str, ...]) -> None:
    done = CliRunner().invoke(command_line(), ["web", "shop:app", *flags])
    assert done.exit_code == 1
    assert f"LOCATOR and {flags[0]} exclude each other." in str(done.exception)


def test_transaction_mode_needs_a_direct_address() -> None:
    done = CliRunner().invoke(command_line(), ["web", *URL, "--pgbouncer-transaction-mode"])
    assert done.exit_code == 1
    assert "session_database_url" in str(done.exception)
