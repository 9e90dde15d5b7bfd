"""S3Store: keeps large payload in a bucket of Amazon S3 or a compatible server, with boto3."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"([A-Za-z0-9_.-]+/){0,20}")
_PREFIX_CHARACTERS_MAX = 200
# The limits are short, because a send waits for the store, and so does the viewer of a task.
_CONNECT_SECONDS, _READ_SECONDS = 3, 20
_TRIES = 2
_LOGGERS = ("boto3", "botocore")


class S3Store:
    """Keeps large payload as objects in a bucket, on Amazon S3 or a server with the same interface.

    The name of an object is ``prefix`` and a UUID. boto3 finds the credentials: in the variables
    ``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY``, in its files, or from the role of the machine.
    The credentials need the rights to put, get and delete objects below the prefix. Needs the package
    boto3: ``pip install '/path/to/horsies[s3]'``. To use a server other than Amazon's, pass its
    ``endpoint_url``.

    Example:
        store = S3Store("shop-payloads", prefix="production/")
        app = Horsies(AppConfig(broker=PostgresConfig.from_env(store=store)))
    """

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "horsies/",
        endpoint_url: str | None = None,
        region: str | None = None,
        store_id: str = "s3",
    ) -> None:
        self._bucket = _checked_bucket(bucket)
        self._prefix = _checked_prefix(prefix)
        self._endpoint_url = _checked_endpoint(endpoint_url)
        self._region = region
        self._store_id = store_id
        # Clients by process id, because a forked process must not use its parent's connections.
        self._clients: dict[int, Any] = {}
        _import_boto3()

    @property
    def store_id(self) -> str:
        """The name of the store in references; give each bucket of an application a different name."""
        return self._store_id

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        client = self._client()
        self._request(
            partial(client.put_object, Bucket=self._bucket, Key=self._key(name), Body=data)
        )

    def get(self, name: str) -> bytes | None:
        """Read an object; return None if no object has this name."""
        client = self._client()

        def read() -> bytes:
            found = client.get_object(Bucket=self._bucket, Key=self._key(name))
            body: bytes = found["Body"].read()
            return body

        return self._request(read)

    def delete(self, names: Collection[str]) -> None:
        """Delete objects one by one, because not all servers have a request for several objects."""
        client = self._client()
        for name in names:
            self._request(partial(client.delete_object, Bucket=self._bucket, Key=self._key(name)))

    def __repr__(self) -> str:
        return f"S3Store({self._bucket!r}, prefix={self._prefix!r})"

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _client(self) -> Any:
        pid = os.getpid()
        if (client := self._clients.get(pid)) is None:
            client = self._clients.setdefault(pid, self._new_client())
        return client

    def _new_client(self) -> Any:
        boto3, config_class = _import_boto3()
        _keep_requests_out_of_logs()
        config = config_class(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            retries={"total_max_attempts": _TRIES, "mode": "standard"},
            s3={"addressing_style": "path" if self._endpoint_url else "auto"},
            # Checksums are unnecessary, because references contain a digest, and not all servers
            # support Amazon's checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        client = boto3.session.Session().client(
            "s3", region_name=self._region, endpoint_url=self._endpoint_url, config=config
        )
        client.meta.events.register("before-send.s3", _OneHost())
        return client

    def _request(self, send: Callable[[], T]) -> T | None:
        """Send a request and return its response, or None if the object does not exist. A failure is
        raised as a new exception without its chain of causes, which would contain the request.
        """
        try:
            return send()
        except Exception as error:
            if (problem := _problem(error)) is None:
                return None
        raise ConnectionError(f"bucket {self._bucket!r}: {problem}")


class _OneHost:
    """Refuses requests to a different host than the first request.

    A server may respond with a redirect, and boto3 would follow it and send the payload to another host.
    """

    def __init__(self) -> None:
        self._host: str | None = None

    def __call__(self, request: Any, **_: object) -> None:
        host = urlsplit(request.url).netloc
        if self._host is None:
            self._host = host
        if host != self._host:
            raise RedirectRefused


class RedirectRefused(Exception):
    """The server has redirected a request to another host."""


def _problem(error: Exception) -> str | None:
    """Describe an error without quoting the request; return None if the error means that the object does
    not exist.
    """
    if isinstance(error, RedirectRefused):
        return "the server redirects to another host; correct region or endpoint_url"
    response = getattr(error, "response", None)  # of a ClientError
    if not isinstance(response, dict):
        return type(error).__name__
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code in ("NoSuchKey", "404"):
        return None
    return f"{code} (HTTP {status})"


def _keep_requests_out_of_logs() -> None:
    """Raise the level of boto3's loggers, whose debugging lines contain payload and session tokens. An
    application that has set the level of these loggers still gets the lines.
    """
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def _checked_bucket(bucket: str) -> str:
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(
            "bucket of S3Store must be the name of a bucket: 3 to 63 lower-case letters, digits, '-' or '.'"
        )
    return bucket


def _checked_prefix(prefix: str) -> str:
    if len(prefix) > _PREFIX_CHARACTERS_MAX or not _PREFIX.fullmatch(prefix):
        raise ValueError(
            "prefix of S3Store must be folders of letters, digits, '_', '.' or '-', each followed by '/'"
        )
    return prefix


def _checked_endpoint(url: str | None) -> str | None:
    if url is None:
        return None
    parts = urlsplit(url)
    is_address = parts.scheme in ("http", "https") and parts.hostname
    if not is_address or "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "endpoint_url of S3Store must be http:// or https:// with a host, without a user, a password and "
            "parameters; boto3 finds the credentials"
        )
    return url


def _import_boto3() -> tuple[Any, Any]:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ImportError(
            "S3Store needs the package boto3: pip install '/path/to/horsies[s3]'"
        ) from error
    return boto3, Config
