"""S3Store against a real server: objects, failures, redirects, and nothing of its credentials anywhere."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

import pytest

from horsies import PayloadStore, PostgresConfig, S3Store
from tests.support.s3_server import ACCESS_KEY, CREDENTIALS, PREFIX, Bucket, s3_server

HIDDEN = [one for name, one in CREDENTIALS.items() if name.startswith("AWS_S") or one == ACCESS_KEY]


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3_port: int) -> Iterator[Bucket]:
    with Bucket(s3_port, f"payloads-{uuid4()}") as made:
        yield made


def test_objects_come_and_go(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    store: PayloadStore = S3Store(bucket.name, prefix=PREFIX, endpoint_url=bucket.endpoint_url)
    data = os.urandom(300_000)
    with caplog.at_level(logging.DEBUG):
        store.put("a", data)
        store.put("b", b"")
        assert (store.get("a"), store.get("b"), store.get("c")) == (data, b"", None)
    assert bucket.object_keys() == {f"{PREFIX}a", f"{PREFIX}b"}
    store.delete(["a", "c"])
    assert bucket.names() == {"b"}
    assert not [one for one in HIDDEN if one in caplog.text]


def test_a_failure_is_one_sentence_without_the_request(bucket: Bucket) -> None:
    store = S3Store(bucket.name, prefix=PREFIX, endpoint_url=bucket.endpoint_url)
    missing = S3Store("no-such-bucket", endpoint_url=bucket.endpoint_url)
    with pytest.raises(ConnectionError) as failed:
        missing.put("a", b"data")
    assert str(failed.value) == "bucket 'no-such-bucket': NoSuchBucket (HTTP 404)"
    with pytest.raises(ConnectionError, match="NoSuchBucket"):
        missing.get("a")
    bucket.close()
    for request in (partial(store.put, "a", b"data"), partial(store.delete, ["a"])):
        with pytest.raises(ConnectionError) as failed:
            request()
        assert str(failed.value) == f"bucket {bucket.name!r}: EndpointConnectionError"
        assert (failed.value.__cause__, failed.value.__context__) == (None, None)
    bucket.open()
    store.put("a", b"data")
    assert store.get("a") == b"data"


@contextmanager
def redirecting(target: str, code: str) -> Iterator[tuple[str, list[str]]]:
    """A server that sends every request on, as S3 does with those for a bucket in another region."""
    asked: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = f"<Error><Code>{code}</Code><Endpoint>{target}</Endpoint></Error>".encode()
            self.send_response(307 if code == "TemporaryRedirect" else 301)
            self.send_header("location", f"http://{target}{self.path}")
            self.send_header("x-amz-bucket-region", "eu-west-1")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET = do_DELETE = do_HEAD = _answer

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirecting)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("code", ["TemporaryRedirect", "PermanentRedirect"])
def test_no_request_follows_a_redirect(bucket: Bucket, code: str) -> None:
    with redirecting(bucket.endpoint_url.removeprefix("http://"), code) as (url, asked):
        store = S3Store(bucket.name, prefix=PREFIX, endpoint_url=url)
        for request in (partial(store.put, "a", b"data"), partial(store.get, "a")):
            with pytest.raises(ConnectionError, match=bucket.name):
                request()
        store._clients.clear()
    assert asked
    assert bucket.names() == set()


def test_a_client_sends_to_one_host_only() -> None:
    """Amazon's own addresses differ by region, and a client without an endpoint would follow there."""
    sent: list[str] = []
    store = S3Store("shop-payloads", region="us-west-2")

    def answer(request: Any, **_: object) -> Any:
        from botocore.awsrequest import AWSResponse

        sent.append(request.url)
        headers = {"x-amz-bucket-region": "eu-west-1"}
        return AWSResponse(request.url, 301, headers, _Raw())

    store._client().meta.events.register_last("before-send.s3", answer)
    with pytest.raises(ConnectionError, match="redirects to another host; correct region"):
        store.put("a", b"data")
    assert sent == ["https://shop-payloads.s3.us-west-2.amazonaws.com/horsies/a"]


class _Raw:
    """The body of an answer."""

    def stream(self, **_: object) -> Iterator[bytes]:
        yield b"<Error><Code>PermanentRedirect</Code></Error>"


def test_a_store_shows_no_credentials() -> None:
    store = S3Store("shop-payloads", endpoint_url="http://127.0.0.1:1")
    config = PostgresConfig(database_url="postgresql://db/shop", store=store)
    assert repr(store) == "S3Store('shop-payloads', prefix='horsies/')"
    assert not [one for one in HIDDEN if one in f"{config!r} {store!r} {vars(store)}"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bucket": "No Bucket"}, "must be the name of a bucket"),
        ({"prefix": "ada@example.com/"}, "prefix of S3Store must be folders"),
        ({"prefix": "a"}, "each followed by '/'"),
        ({"endpoint_url": "http://user:hunter2@host"}, "without a user, a password"),
        ({"endpoint_url": "s3.example.com"}, "must be http:// or https://"),
    ],
)
def test_wrong_settings_are_refused_and_not_quoted(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        S3Store(**{"bucket": "shop-payloads"} | settings)
    assert "hunter2" not in str(refused.value)
