"""Access to the dashboard: policies, signatures, and checks of a browser's request.

A policy decides for each request who the viewer is, and what the viewer may see and change. ``horsies
web`` chooses a policy by ``--auth``; an application that mounts the dashboard passes its own policy.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

Verb = Literal[
    "pause_queue",
    "purge_queue",
    "pause_key",
    "limit_key",
    "cancel_task",
    "retry_task",
    "erase_task",
    "send_task",
    "control_run",
    "signal_run",
    "control_schedule",
    "run_schedule",
    "ping",
]
"""A change that the dashboard can make; `Access.may` lists the changes that a user may make."""
VERBS: frozenset[Verb] = frozenset(get_args(Verb))
"""Every change, for users without restrictions."""

LOOPBACK = ("127.0.0.1", "::1")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
SESSION_COOKIE = "horsies_session"
SESSION_SECONDS = 12 * 3600
TOKEN_LENGTH_MIN = 32
WRONG_TRIES_MAX = 5
WRONG_TRIES_SECONDS = 60.0
_REPORTED_CLIENT = "horsies.client"

Networks: TypeAlias = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


class Access(NamedTuple):
    """A request's user, the changes that the user may make, and whether arguments are shown to the user.

    Changes and arguments also require the dashboard's own switches: ``actions`` and ``payload`` of
    ``create_app``.
    """

    user: str
    """The name under which changes are recorded."""
    may: frozenset[Verb] = frozenset()
    """The changes that the user may make."""
    sees_payload: bool = False
    """Whether the user sees arguments, results and kept log lines."""


class Policy(Protocol):
    """Decides about each request: returns its access, a response such as a redirect to a login, or None
    for 403.
    """

    async def access(self, request: HTTPConnection) -> Access | Response | None:
        """Return this request's access."""


class AllowAll:
    """Every viewer may do everything that the dashboard's switches allow."""

    def __init__(self, user: str = "anonymous") -> None:
        self._access = Access(user, VERBS, sees_payload=True)

    async def access(self, request: HTTPConnection) -> Access:
        """Return the same access for every request."""
        return self._access


class ViewOnly:
    """Every user may view the pages; no user may make changes or see arguments and results."""

    def __init__(self, user: str = "viewer") -> None:
        self._access = Access(user)

    async def access(self, request: HTTPConnection) -> Access:
        """Return the same access for every request."""
        return self._access


class TrustedHeader:
    """Takes the user from a header that a proxy sets; the proxy is trusted because of its address.

    ``allow_actions`` is True, False, or the names of the users who may make changes and see arguments. A
    request from an address outside ``proxies`` (addresses or networks) is always rejected.
    """

    def __init__(
        self,
        name: str = "X-Forwarded-User",
        *,
        allow_actions: bool | Collection[str] = False,
        proxies: Iterable[str] | Networks = LOOPBACK,
    ) -> None:
        self._name = name
        self._allow_actions = allow_actions
        self._proxies = parse_networks(proxies)

    async def access(self, request: HTTPConnection) -> Access | None:
        """Return the access of the user named in the header, or None without the header."""
        user = request.headers.get(self._name, "").strip()
        if not user or not is_within(peer_address(request), self._proxies):
            return None
        allowed = self._allow_actions
        may_act = allowed if isinstance(allowed, bool) else user in allowed
        return Access(user, VERBS, sees_payload=True) if may_act else Access(user)


class TokenPolicy:
    """One secret token for all users, opened as ``/?token=…`` or typed into the login page.

    The token is exchanged for a signed cookie, so that it stays out of the browser's history. ``/api``
    also accepts it as ``Authorization: Bearer``.
    """

    def __init__(self, token: str, signer: Signer, user: str = "token") -> None:
        if len(token) < TOKEN_LENGTH_MIN:
            raise ValueError(f"the token has fewer than {TOKEN_LENGTH_MIN} characters")
        self._token = token.encode()
        # A new token ends the sessions of the old token.
        self._purpose = f"session {hashlib.sha256(self._token).hexdigest()}"
        self._signer = signer
        self._access = Access(user, VERBS, sees_payload=True)
        self._tries = Tries()

    async def access(self, request: HTTPConnection) -> Access | Response | None:
        """Return access for a valid cookie or bearer token; return a redirect for a valid ``?token=``."""
        given = request.query_params.get("token")
        if self._signer.opened(self._purpose, request.cookies.get(SESSION_COOKIE, "")) is not None:
            # Without a redirect, the token would stay in the address and in the page's links.
            is_left = given is not None and request.scope.get("method") in ("GET", "HEAD")
            return RedirectResponse(_without_token(request), 303) if is_left else self._access
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_right(bearer, request):
            return self._access
        if given is None or not self.is_right(given, request):
            return None
        return self.logged_in(request, _without_token(request))

    def is_right(self, given: str, request: HTTPConnection) -> bool:
        """Compare in constant time; after five wrong tries, block an address for a minute."""
        address = client_address(request)
        if not self._tries.are_left(address):
            return False
        is_right = hmac.compare_digest(given.encode(), self._token)
        if not is_right:
            self._tries.add(address)
        return is_right

    def logged_in(self, request: HTTPConnection, path: str) -> Response:
        """Return a redirect that sets the session cookie."""
        response = RedirectResponse(path, 303)
        set_cookie(
            response,
            request,
            SESSION_COOKIE,
            self._signer.sealed(self._purpose, self._access.user, SESSION_SECONDS),
            SESSION_SECONDS,
        )
        return response


class BasicPolicy:
    """Names and passwords with HTTP basic authentication; ``users`` has the hash of each password.

    Members of ``viewers`` may only read. A correct password is remembered by its digest: scrypt
    deliberately takes about 50 ms, and a browser sends the password with every request.
    """

    def __init__(self, users: Mapping[str, str], viewers: Collection[str] = ()) -> None:
        self._users = dict(users)
        self._viewers = frozenset(viewers)
        self._salt = secrets.token_bytes(16)
        self._right: set[tuple[str, bytes]] = set()
        # A browser that reopens tabs sends the same password several times at once, so check it
        # only once.
        self._checking: dict[tuple[str, bytes], asyncio.Future[bool]] = {}
        self._tries = Tries()

    async def access(self, request: HTTPConnection) -> Access | Response:
        """Return the user's access, or ask the browser for a name and a password."""
        given = _basic_credentials(request.headers.get("authorization", ""))
        if given and await self._is_right(*given, client_address(request)):
            user = given[0]
            return Access(user) if user in self._viewers else Access(user, VERBS, True)
        challenge = {"WWW-Authenticate": 'Basic realm="horsies", charset="UTF-8"'}
        return Response("Name and password are needed.", 401, challenge, "text/plain")

    async def _is_right(self, user: str, password: str, address: str) -> bool:
        guess = user, hmac.digest(self._salt, password.encode(), "sha256")
        if guess in self._right:
            return True
        if (checking := self._checking.get(guess)) is None:
            if not self._tries.are_left(address):
                return False
            # Check a hash that matches no password, so that an unknown name takes as long as a
            # wrong password.
            stored = self._users.get(user) or "scrypt$AAAA$AAAA"
            checked = asyncio.to_thread(password_matches, password, stored)
            checking = self._checking[guess] = asyncio.ensure_future(checked)
            checking.add_done_callback(lambda _: self._checking.pop(guess))
            # Count the try before its result is known; otherwise many simultaneous tries would all
            # be allowed.
            self._tries.add(address)
            if await asyncio.shield(checking):
                self._right.add(guess)
                self._tries.take_back(address)
        return await asyncio.shield(checking)


class CanPolicy(Protocol):
    """The older form of a policy, with two methods that return True or False."""

    async def can_view(self, request: HTTPConnection) -> bool:
        """Whether the user may view the dashboard."""

    async def can_act(self, request: HTTPConnection) -> bool:
        """Whether the user may make changes."""


class AdaptedPolicy:
    """A policy built from an object with ``can_view`` and ``can_act``."""

    def __init__(self, policy: CanPolicy) -> None:
        self._policy = policy

    async def access(self, request: HTTPConnection) -> Access | None:
        """Ask both questions."""
        if not await self._policy.can_view(request):
            return None
        user = _user_name(request.scope.get("user"))
        if not await self._policy.can_act(request):
            return Access(user)
        return Access(user, VERBS, sees_payload=True)


def _user_name(user: object) -> str:
    """Return a name that stays the same in all requests, because form tokens are bound to it."""
    try:
        return str(user.display_name) or "viewer"  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError):
        return str(user or "viewer")


class Signer:
    """Signs cookies and form tokens; all processes that serve a dashboard need the same secret."""

    def __init__(self, secret: str | None = None) -> None:
        self._key = hashlib.sha256((secret or secrets.token_hex(32)).encode()).digest()

    def sign(self, *parts: str) -> str:
        text = "\x1f".join(parts).encode()
        return base64.urlsafe_b64encode(hmac.digest(self._key, text, "sha256")).decode().rstrip("=")

    def is_signed(self, signature: str, *parts: str) -> bool:
        """Check a signature in constant time."""
        return hmac.compare_digest(self.sign(*parts).encode(), signature.encode())

    def sealed(self, purpose: str, text: str, seconds: float) -> str:
        """Return the text with its expiry and signature, in characters that a cookie allows."""
        expires = str(int(time.time() + seconds))
        encoded = base64.urlsafe_b64encode(text.encode()).decode()
        return f"{encoded}.{expires}.{self.sign(purpose, encoded, expires)}"

    def opened(self, purpose: str, sealed: str) -> str | None:
        """Return the content of a sealed text, or None if the text is forged or has expired."""
        encoded, _, rest = sealed.partition(".")
        expires, _, signature = rest.partition(".")
        if not sealed.isascii() or not self.is_signed(signature, purpose, encoded, expires):
            return None
        if float(expires) < time.time():
            return None
        return base64.urlsafe_b64decode(encoded).decode()

    def form_token(self, user: str, verb: str) -> str:
        """Return a form's token, which is valid for this user and verb for at least twelve hours."""
        return self.sign("form", user, verb, str(_period()))

    def is_form_token(self, token: str, user: str, verb: str) -> bool:
        """Check a form's token against the current period and the previous period."""
        now = _period()
        return any(
            self.is_signed(token, "form", user, verb, str(period)) for period in (now, now - 1)
        )


def _period() -> int:
    return int(time.time() // SESSION_SECONDS)


class Tries:
    """Counts wrong passwords per address; after five in a minute, an address must wait."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def are_left(self, address: str) -> bool:
        return len(self._recent(address)) < WRONG_TRIES_MAX

    def add(self, address: str) -> None:
        if len(self._times) > 10_000:  # Drop addresses to limit the memory use.
            self._times.clear()
        self._times[address] = [*self._recent(address), time.monotonic()]

    def take_back(self, address: str) -> None:
        """Forget the newest try, because its password was correct."""
        self._times[address] = self._recent(address)[:-1]

    def _recent(self, address: str) -> list[float]:
        since = time.monotonic() - WRONG_TRIES_SECONDS
        return [at for at in self._times.get(address, ()) if at > since]


def hash_password(password: str) -> str:
    """Return a password's scrypt hash, for a line of ``--users-file``."""
    salt = secrets.token_bytes(16)
    return f"scrypt${_base64(salt)}${_base64(_scrypt(password, salt))}"


def password_matches(password: str, stored: str) -> bool:
    """Check a password against a line made by ``hash_password``."""
    _, salt, digest = stored.split("$")
    expected = base64.b64decode(digest)
    return hmac.compare_digest(_scrypt(password, base64.b64decode(salt)), expected)


def _scrypt(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=16_384, r=8, p=1)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def parse_users(text: str) -> BasicPolicy:
    """Parse the lines of a users file: ``name:hash`` or ``name:hash:viewer``."""
    users, viewers = {}, set()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.strip().partition(":")
        stored, _, role = rest.partition(":")
        if not name or stored.count("$") != 2 or role not in ("", "viewer"):
            raise ValueError(f"line {number} is not name:hash or name:hash:viewer")
        users[name] = stored
        if role:
            viewers.add(name)
    if not users:
        raise ValueError("the file has no users")
    return BasicPolicy(users, viewers)


def parse_networks(texts: Iterable[str] | Networks) -> Networks:
    """Parse addresses and networks such as ``10.0.0.0/8``; raise ValueError with the invalid entry."""
    return tuple(ipaddress.ip_network(text, strict=False) for text in texts)


def is_within(address: str, networks: Networks) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in networks)


def peer_address(request: HTTPConnection) -> str:
    """Return the address of the connection's peer, or an empty text for a Unix socket."""
    return request.client.host if request.client else ""


def client_address(request: HTTPConnection) -> str:
    """Return the viewer's address, which may come from a trusted proxy's header."""
    reported: str | None = request.scope.get(_REPORTED_CLIENT)
    return reported or peer_address(request)


def behind_proxy(scope: Scope, proxies: Networks) -> Scope:
    """Return the scope with the scheme and the client that a trusted proxy reports in its headers."""
    if not proxies or scope["type"] != "http":
        return scope
    request = HTTPConnection(scope)
    if not is_within(peer_address(request), proxies):
        return scope
    # The proxy appends the address that it sees; the client may have forged earlier entries.
    client = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    is_https = request.headers.get("x-forwarded-proto", "").strip().lower() == "https"
    reported = {_REPORTED_CLIENT: client} if client else {}
    return {**scope, **reported, **({"scheme": "https"} if is_https else {})}


def host_name(host: str) -> str:
    """Return the host name from a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:  # The header is invalid, for example because of an unclosed bracket.
        return ""


def is_allowed_host(host: str, allowed: Collection[str] | None) -> bool:
    """Check a Host header, because an unknown name that resolves to this server may be DNS rebinding."""
    return allowed is None or "*" in allowed or host_name(host) in map(str.lower, allowed)


def is_same_site(request: HTTPConnection) -> bool:
    """Check that a POST comes from a page of the same origin, if the browser reports the origin."""
    site = request.headers.get("sec-fetch-site")
    if site is not None and site not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    return origin is None or net_location(origin) == request.headers.get("host", "").lower()


def net_location(url: str) -> str | None:
    """Return the host and port of a URL, or None if the URL is invalid."""
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return None


def set_cookie(
    response: Response, request: HTTPConnection, name: str, value: str, seconds: int
) -> None:
    """Set a cookie that scripts cannot read and other sites do not send."""
    response.set_cookie(
        name,
        value,
        max_age=seconds,
        path=request.scope.get("root_path") or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


def _basic_credentials(header: str) -> tuple[str, str] | None:
    scheme, _, encoded = header.partition(" ")
    try:
        text = base64.b64decode(encoded, validate=True).decode()
    except ValueError:  # the header is not base64, or the decoded bytes are not UTF-8
        return None
    user, colon, password = text.partition(":")
    return (user, password) if scheme.lower() == "basic" and colon else None


def _without_token(request: HTTPConnection) -> str:
    others = [pair for pair in parse_qsl(request.url.query) if pair[0] != "token"]
    return request.url.path + (f"?{urlencode(others)}" if others else "")
