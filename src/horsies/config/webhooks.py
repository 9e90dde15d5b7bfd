"""The configuration of webhooks: the events to send, their receiver, and their signature. Nothing here
connects. Invalid values are rejected when the object is built; the error never shows the address or a
secret.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Literal, Self, TypeAlias, get_args
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, model_validator

from horsies.errors import ErrorCode
from horsies.validation import Check, FrozenModel, raise_failed, repeated_names

WebhookEvent: TypeAlias = Literal[
    "task.failed", "task.cancelled", "task.expired", "run.ended", "finding.opened", "finding.closed"
]
FINDING_EVENTS = frozenset({"finding.opened", "finding.closed"})

# The prefix of a secret that is written in base64, as in the Standard Webhooks specification.
BASE64_MARK = "whsec_"
SECRET_BYTES_MIN = 24

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_NAME_RULE = "1 to 40 lower-case letters, digits, '-' and '_'"
_TASK_EVENTS = tuple(one for one in get_args(WebhookEvent) if one.startswith("task."))

# Addresses outside the private ranges that respond only inside a cloud: the agent of Azure's hosts.
_CLOUD_ADDRESSES = frozenset({ip_address("168.63.129.16")})
# Networks of IPv6 addresses whose last 32 bits contain the IPv4 address to which they lead.
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("::ffff:0:0:0/96"), IPv6Network("::/96"))
# The only IPv6 range with globally reachable addresses.
_GLOBAL_UNICAST = IPv6Network("2000::/3")


class Webhook(FrozenModel):
    """A subscription to events: each event is sent to your URL as a signed HTTP request. See
    [webhooks](webhooks.md).

    Example:
        Webhook(
            name="alerts",
            url="https://example.com/horsies",
            secret=os.environ["HORSIES_WEBHOOK_SECRET"],
            on=["task.failed", "run.ended"],
        )
    """

    name: str
    """The name of the webhook in logs, commands and task names: 1 to 40 lower-case letters, digits, `-`
    and `_`. Unique in the application. Required."""

    url: str = Field(repr=False)
    """The address, which begins with https://; http:// is accepted with allow_private only. Never stored in
    the database, and never shown in repr or logs. Required."""

    on: list[WebhookEvent] = Field(min_length=1)
    """The events to deliver, at least one: `task.failed`, `task.cancelled`, `task.expired`, `run.ended`,
    `finding.opened`, `finding.closed`. Required."""

    secret: str | list[str] | None = Field(default=None, repr=False)
    """The key that signs each request, at least 24 bytes. Text after the prefix `whsec_` is decoded as
    base64; any other text is used as it is. With a list, each key adds a signature, so that keys can be
    rotated. Required unless body is `slack`. Never stored in the database, and never shown in repr or logs.
    Defaults to None."""

    queue_name: str | None = None
    """The queue to which the deliveries are sent. Required in CUSTOM mode; must be None in DEFAULT mode.
    Defaults to None.
    """

    body: Literal["json", "slack"] = "json"
    """`json` sends the event as an object; `slack` sends one sentence in the form that incoming webhooks
    of Slack and compatible services expect. Defaults to `json`.
    """

    task_names: list[str] | None = Field(default=None, min_length=1)
    """Deliver the `task.` events of these tasks only. With None, the events of all tasks are delivered.
    Defaults to None.
    """

    allow_private: bool = False
    """Whether the address may be loopback, link-local or in a private network. Defaults to False."""

    timeout_seconds: float = Field(default=10.0, ge=0.1, le=300.0)
    """Seconds that a receiver may take to accept a delivery, from 0.1 to 300. Defaults to 10."""

    max_retries: int = Field(default=36, ge=1, le=1_000, strict=True)
    """The maximum number of retries of a failed delivery, from 1 to 1,000. Defaults to 36, which takes
    about a day.
    """

    retry_seconds: float = Field(default=5.0, ge=0.001, le=3_600.0)
    """Seconds before the first retry, from 0.001 to 3,600. Each further wait doubles, up to an hour.
    Defaults to 5."""

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.on)})"

    @property
    def keys(self) -> list[bytes]:
        """The keys that sign a delivery."""
        return [_key_of(one) for one in self._secrets()]

    def _secrets(self) -> list[str]:
        if self.secret is None:
            return []
        return [self.secret] if isinstance(self.secret, str) else self.secret

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_failed("Webhook", [*self._own_checks(), *self._url_checks(), *self._secret_checks()])
        return self

    def _own_checks(self) -> Iterator[Check]:
        code = ErrorCode.CONFIG_INVALID_WEBHOOK
        shown = self.name[:100]
        yield not _NAME.fullmatch(self.name), code, f"name must be {_NAME_RULE}; not {shown!r}"
        for event in repeated_names(self.on):
            yield True, code, f"on lists {event!r} more than once"
        yield (
            self.task_names is not None and not set(self.on) & set(_TASK_EVENTS),
            code,
            "task_names selects among task events, and on lists none; leave it out",
        )

    def _url_checks(self) -> Iterator[Check]:
        problem = url_problem(self.url, allow_private=self.allow_private)
        yield problem is not None, ErrorCode.CONFIG_INVALID_WEBHOOK, f"url {problem}"

    def _secret_checks(self) -> Iterator[Check]:
        code = ErrorCode.CONFIG_INVALID_WEBHOOK
        yield (
            not self._secrets() and self.body == "json",
            code,
            "secret is missing: without a signature a receiver cannot tell who sent a request; set it, or "
            'body="slack" for a service that takes unsigned requests',
        )
        for secret in self._secrets():
            try:
                is_short = len(_key_of(secret)) < SECRET_BYTES_MIN
            except binascii.Error:
                yield (
                    True,
                    code,
                    f"secret begins with {BASE64_MARK!r}, but the rest is not base64",
                )
            else:
                yield (
                    is_short,
                    code,
                    f"secret must have at least {SECRET_BYTES_MIN} bytes; make one with "
                    "`python -c 'import secrets; print(secrets.token_urlsafe(32))'`",
                )


def _key_of(secret: str) -> bytes:
    if secret.startswith(BASE64_MARK):
        return base64.b64decode(secret.removeprefix(BASE64_MARK), validate=True)
    return secret.encode()


def url_problem(url: str, *, allow_private: bool) -> str | None:
    """Describe a problem of the address in words that follow "url", or return None. The words do not
    contain the address, because its path may be a secret.
    """
    try:
        parts = urlsplit(url)
        port_is_right = parts.port != 0
    except ValueError:
        return "is not an address of the form https://host/path"
    if parts.scheme not in ("https", "http") or not parts.hostname or not port_is_right:
        return "is not an address of the form https://host/path"
    if re.search(r"[^!-~]", url):
        return "has characters that must be percent-encoded"
    if parts.username is not None or parts.password is not None:
        return "has a user name or a password, which are not sent; leave them out and check the signature"
    if allow_private:
        return None
    if parts.scheme == "http":
        return (
            "begins with http://, which anyone on the way can read; use https://, or allow_private=True "
            "inside your own network"
        )
    if _is_local(parts):
        return "leads to a private address; set allow_private=True if that is intended"
    return None


def _is_local(parts: SplitResult) -> bool:
    """Return whether the host is visibly private. Every delivery checks the addresses behind a host
    name.
    """
    host = (parts.hostname or "").removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return not is_public(host)
    except ValueError:
        return False


def is_public(text: str) -> bool:
    """Return whether an address is neither loopback, link-local, site-local, private, multicast nor
    reserved.
    """
    address = _target(ip_address(text.partition("%")[0]))
    if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    return address.is_global and not address.is_multicast and address not in _CLOUD_ADDRESSES


def _target(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the IPv4 address to which an IPv6 address is translated; return any other address
    unchanged.
    """
    if isinstance(address, IPv4Address):
        return address
    if any(address in network for network in _TRANSLATED):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour or address
