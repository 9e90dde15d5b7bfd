"""`horsies web`: serve the dashboard until a signal stops it."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from horsies.cli.options import (
    DatabaseUrlsOption,
    LocatorsArgument,
    LogFormatOption,
    LogLevelOption,
    ModuleOption,
    exit_with,
    named_database,
    refuse_both,
)
from horsies.cli.session import Target, named_targets
from horsies.database_url import is_embedded
from horsies.logs import LogFormat, LogLevel, attach_handler

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from horsies.web.access import Networks, Policy, Signer
    from horsies.web.rendering import Settings

PORT = 8600
# The packages in the extra `web`.
REQUIRED = ("jinja2", "starlette", "uvicorn")
TOKEN_VARIABLE = "HORSIES_WEB_TOKEN"  # noqa: S105
# How long a shutdown waits for open event streams.
SHUTDOWN_SECONDS = 3


class Auth(StrEnum):
    """How viewers are authenticated."""

    NONE = "none"
    TOKEN = "token"  # noqa: S105
    BASIC = "basic"
    TRUSTED_HEADER = "trusted-header"


SessionUrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A direct URL of the same database, if --database-url points to a pooler.",
        show_default=False,
    ),
]
PoolerOption = Annotated[
    bool,
    typer.Option(
        "--pgbouncer-transaction-mode",
        help="--database-url points to PgBouncer in transaction mode.",
    ),
]
HostOption = Annotated[
    str,
    typer.Option(help="The address to listen on; any address other than loopback needs --auth."),
]
PortOption = Annotated[
    int, typer.Option(min=0, max=65_535, help="The port to listen on; 0: any free port.")
]
RootPathOption = Annotated[
    str, typer.Option(metavar="PATH", help="The path prefix that a proxy in front strips.")
]
AuthOption = Annotated[Auth, typer.Option(help="How viewers are authenticated.")]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        help=f"The file with the token for --auth token; default: the variable {TOKEN_VARIABLE}.",
        show_default=False,
    ),
]
UsersFileOption = Annotated[
    Path | None,
    typer.Option(
        help="The users for --auth basic: lines of name:hash or name:hash:viewer.",
        show_default=False,
    ),
]
TrustedHeaderOption = Annotated[
    str, typer.Option(metavar="NAME", help="The header for --auth trusted-header.")
]
TrustedProxyOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        help="The address or network of a proxy whose X-Forwarded headers are trusted.",
        show_default=False,
    ),
]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A host name that requests may use, besides --host and loopback.",
        show_default=False,
    ),
]
ActionsOption = Annotated[
    bool, typer.Option("--enable-actions", help="Allow changes, not only reading.")
]
PayloadOption = Annotated[
    bool, typer.Option("--payload", help="Show arguments and results of tasks.")
]


def web(  # noqa: PLR0913, PLR0917
    locators: LocatorsArgument = None,
    module: ModuleOption = None,
    database_urls: DatabaseUrlsOption = None,
    session_database_url: SessionUrlOption = None,
    pgbouncer_transaction_mode: PoolerOption = False,
    host: HostOption = "127.0.0.1",
    port: PortOption = PORT,
    root_path: RootPathOption = "",
    auth: AuthOption = Auth.NONE,
    token_file: TokenFileOption = None,
    users_file: UsersFileOption = None,
    trusted_header: TrustedHeaderOption = "X-Forwarded-User",
    trusted_proxy: TrustedProxyOption = None,
    allowed_host: AllowedHostOption = None,
    enable_actions: ActionsOption = False,
    payload: PayloadOption = False,
    loglevel: LogLevelOption = LogLevel.WARNING,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve the dashboard at http://127.0.0.1:8600.

    Without --enable-actions it is read-only; without --payload it hides arguments and results. Several
    applications or URLs share one address: / lists the databases, /db/NAME/ shows one. SIGTERM or Ctrl-C
    stops it. Exit codes: 0 clean shutdown, 1 error.

    Example:
        horsies web
        horsies web shop.background:app --enable-actions
    """
    attach_handler(loglevel, log_format)
    named, urls = [module] if module else locators or [], database_urls or []
    refuse_both("LOCATOR", named, "--database-url", urls)
    pooled: dict[str, Any] = {
        "session_database_url": session_database_url,
        "pgbouncer_transaction_mode": pgbouncer_transaction_mode,
    }
    _refuse_pooler(named, urls, pooled)
    _refuse_open_address(host, auth)
    _require_extra()
    from horsies.web.access import LOOPBACK_NAMES, Signer
    from horsies.web.app import SECRET_VARIABLE
    from horsies.web.rendering import Settings

    signer = Signer(os.environ.get(SECRET_VARIABLE))
    proxies = _networks(trusted_proxy or ())
    policy = _policy(auth, signer, token_file, users_file, trusted_header, proxies)
    targets = named_targets("web", named, urls, partial(named_database, **pooled))
    settings = Settings(
        actions=enable_actions,
        payload=payload,
        allowed_hosts=frozenset({*LOOPBACK_NAMES, host, *(allowed_host or ())}),
        proxies=proxies,
        is_standalone=True,
        authentication=auth.value,
    )
    if any(is_embedded(one.config.database_url) for one in targets) and not _is_loopback(host):
        exit_with(f"An embedded:// database serves this machine alone, not --host {host}.", 1)
    _serve(_dashboard(targets, settings, policy, signer), host, port, root_path)


def _refuse_pooler(named: Sequence[str], urls: Sequence[str], pooled: dict[str, Any]) -> None:
    """Reject the pooler flags together with an application, which has its own settings, or with several
    URLs.
    """
    for name, value in pooled.items():
        flag = f"--{name.replace('_', '-')}"
        refuse_both("LOCATOR", named, flag, value)
        refuse_both("A second --database-url", urls[1:], flag, value)


def _dashboard(
    targets: Sequence[Target], settings: Settings, policy: Policy, signer: Signer
) -> ASGIApp:
    """Return the dashboard of one database, or the dashboards of several below a list."""
    from horsies.web.app import build
    from horsies.web.databases import Served, build_all

    if len(targets) == 1:
        return build(targets[0].config, targets[0].app, settings, policy, signer)
    served = [Served(one.name, one.config, one.app) for one in targets]
    return build_all(served, settings, policy, signer)


def _require_extra() -> None:
    for name in REQUIRED:
        try:
            import_module(name)
        except ImportError as error:
            exit_with(f"horsies web needs {error.name}; pip install '/path/to/horsies[web]'.", 1)


def _refuse_open_address(host: str, auth: Auth) -> None:
    if auth is Auth.NONE and not _is_loopback(host):
        exit_with(
            f"--host {host} lets other machines in without authentication; add --auth token.", 1
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _networks(texts: Iterable[str]) -> Networks:
    from horsies.web.access import parse_networks

    try:
        return parse_networks(texts)
    except ValueError as error:
        exit_with(f"--trusted-proxy: {error}.", 1)


def _policy(
    auth: Auth,
    signer: Signer,
    token_file: Path | None,
    users_file: Path | None,
    header: str,
    proxies: Networks,
) -> Policy:
    from horsies.web.access import AllowAll, TokenPolicy, TrustedHeader, parse_users

    try:
        if auth is Auth.TOKEN:
            return TokenPolicy(_token(token_file), signer)
        if auth is Auth.BASIC:
            return parse_users(_text("--users-file", users_file))
        if auth is Auth.TRUSTED_HEADER and not proxies:
            raise ValueError("--trusted-proxy, the address of the proxy, is missing")
        if auth is Auth.TRUSTED_HEADER:
            return TrustedHeader(header, allow_actions=True, proxies=proxies)
    except ValueError as error:
        exit_with(f"--auth {auth}: {error}.", 1)
    return AllowAll("local")


def _token(token_file: Path | None) -> str:
    if token_file is None and (token := os.environ.get(TOKEN_VARIABLE)):
        return token.strip()
    if token_file is None:
        raise ValueError(f"--token-file is missing, and {TOKEN_VARIABLE} is not set")
    return _text("--token-file", token_file).strip()


def _text(option: str, path: Path | None) -> str:
    if path is None:
        raise ValueError(f"{option} is missing")
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from error


def _serve(app: ASGIApp, host: str, port: int, root_path: str) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        root_path=root_path.rstrip("/"),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        log_config=None,
        access_log=False,
        server_header=False,
        # Trust forwarded headers only from the addresses in --trusted-proxy.
        proxy_headers=False,
        lifespan="off",
    )
    with bound(host, port) as listening:
        port = listening.getsockname()[1]
        in_url = f"[{host}]" if ":" in host else host
        address = f"http://{in_url}:{port}{root_path.rstrip('/')}/"
        typer.echo(f"The dashboard is at {address} (Ctrl-C to stop).")
        # The server raises the signal again after its shutdown; this handler keeps the exit status
        # 0.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        uvicorn.Server(config).run(sockets=[listening])


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address; end the command if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is given; otherwise pages took 40 ms
    # longer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        # From here on, the kernel queues requests that arrive before the server starts.
        listening.listen()
    except OSError as error:
        listening.close()
        reason = error.strerror or "it is not an address of this machine"
        exit_with(f"--host {host} --port {port} cannot be used: {reason.lower()}.", 1)
    return listening
