"""Webhooks without a database: mistakes in a configuration, addresses, signatures, answers."""

from __future__ import annotations

import base64
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from horsies import AppConfig, CustomQueueConfig, Horsies, PostgresConfig, QueueMode, Webhook
from horsies.config.webhooks import is_public
from horsies.errors import ErrorCode, HorsiesError, RetryLater, TaskFailed
from horsies.webhooks.addresses import NoPublicAddress, resolve
from horsies.webhooks.message import body_of, headers_of, sentence
from horsies.webhooks.post import Answer, Destination, post, reason
from horsies.webhooks.task import deliver_event, judge, subscriptions
from tests.support.receiver import SECRET, Received, Receiver, receiving

BROKER = PostgresConfig(database_url="postgresql://shop@127.0.0.1:1/shop")
PATH = "/services/T0/B0/very-secret"
EVENT = {
    "id": "01a1",
    "type": "task.failed",
    "timestamp": "2030-01-01T00:00:00.000000Z",
    "data": {
        "task_id": "01a0",
        "task_name": "send <invoice>",
        "queue_name": "mail",
        "error_code": "DOWN",
    },
}


def hook(**changes: Any) -> Webhook:
    fields: dict[str, Any] = {
        "name": "alerts",
        "url": f"https://hooks.example{PATH}",
        "secret": SECRET,
        "on": ["task.failed"],
    }
    return Webhook(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "My hook"}, "name must be 1 to 40 lower-case letters"),
        ({"name": ""}, "name must be"),
        ({"on": ["run.ended", "run.ended"]}, "on lists 'run.ended' more than once"),
        ({"on": ["task.done"]}, "on[0]: input should be 'task.failed'"),
        ({"on": []}, "on: list should have at least 1 item"),
        ({"on": ["run.ended"], "task_names": ["a"]}, "task_names selects among task events"),
        ({"url": "hooks.example/x"}, "url is not an address of the form https://host/path"),
        ({"url": "https:///x"}, "url is not an address"),
        ({"url": "https://hooks.example:0/"}, "url is not an address"),
        ({"url": "https://hooks.example:x/"}, "url is not an address"),
        ({"url": "ftp://hooks.example/"}, "url is not an address"),
        (
            {"url": "https://hooks.example/\r\nx: y"},
            "url has characters that must be percent-encoded",
        ),
        ({"url": "https://me:pw@hooks.example/"}, "url has a user name or a password"),
        ({"url": "http://hooks.example/"}, "url begins with http://"),
        ({"url": "https://127.0.0.1/"}, "url leads to a private address"),
        ({"url": "https://[::1]/"}, "url leads to a private address"),
        ({"url": "https://localhost./"}, "url leads to a private address"),
        ({"url": "https://localhost/"}, "url leads to a private address"),
        ({"secret": None}, "secret is missing"),
        ({"secret": []}, "secret is missing"),
        ({"secret": "short"}, "secret must have at least 24 bytes"),
        ({"secret": [SECRET, "short"]}, "secret must have at least 24 bytes"),
        ({"secret": "whsec_%%%"}, "secret begins with 'whsec_', but the rest is not base64"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"max_retries": 0}, "max_retries"),
    ],
)
def test_a_mistake_is_one_sentence_without_secrets(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HorsiesError) as caught:
        hook(**changes)
    assert sentence in str(caught.value)
    for hidden in ("very-secret", "pw", SECRET, "short"):
        assert hidden not in str(caught.value).replace("shorten", "")


@pytest.mark.parametrize(
    ("hooks", "queues", "sentence"),
    [
        ([{}, {}], None, "has the name 'alerts' more than once"),
        ([{"queue_name": "mail"}], None, "has a queue_name, which needs queue_mode CUSTOM"),
        ([{}], ["mail", "rest"], "needs a queue_name in CUSTOM mode: one of mail, rest"),
        ([{"queue_name": "other"}], ["mail"], "needs a queue_name in CUSTOM mode: one of mail"),
    ],
)
def test_webhooks_fit_the_queues(
    hooks: list[dict[str, Any]], queues: list[str] | None, sentence: str
) -> None:
    custom = [CustomQueueConfig(name=name) for name in queues or []]
    mode = QueueMode.CUSTOM if queues else QueueMode.DEFAULT
    with pytest.raises(HorsiesError, match=sentence) as caught:
        AppConfig(
            broker=BROKER,
            queue_mode=mode,
            custom_queues=custom or None,
            webhooks=[hook(**changes) for changes in hooks],
        )
    assert caught.value.code is ErrorCode.CONFIG_INVALID_WEBHOOK


def test_addresses_and_secrets_are_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    config = AppConfig(broker=BROKER, webhooks=[hook(secret=[SECRET, "y" * 30])])
    with caplog.at_level(logging.INFO):
        config.log_config(logging.getLogger())
    app = Horsies(config)
    (task,) = app.definitions().values()
    assert "webhooks = alerts (task.failed)" in caplog.text
    for text in (caplog.text, repr(config), str(config), repr(task), subscriptions(config)):
        for hidden in (PATH, "very-secret", SECRET, "y" * 30):
            assert hidden not in text


def test_a_webhook_is_a_task_with_retries() -> None:
    app = Horsies(AppConfig(broker=BROKER, webhooks=[hook()]))
    (task,) = app.definitions().values()
    assert (task.name, task.queue_name, task.timeout_ms) == (
        "horsies.webhook.alerts",
        "default",
        15_000,
    )
    assert task.retry_policy is not None
    assert task.retry_policy.max_retries == 36
    assert app.check() == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
        "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fc00::1", "ff02::1",
        "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::", "2002:a00:1::1", "2001:db8::1", "2001:0:808:808::f5ff:fffe", "fec0::1", "feff::1",
        "64:ff9b:1::10.0.0.1", "64:ff9b:1:a00:0:100:101:101", "::ffff:0:10.0.0.1", "5f00::1", "100::1",
    ],
)  # fmt: skip
def test_private_addresses_are_recognised(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "93.184.215.14", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1", "2002:101:101::1"],
)  # fmt: skip
def test_public_addresses_are_recognised(address: str) -> None:
    assert is_public(address)


def answers(*addresses: str) -> Any:
    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    return getaddrinfo


def test_only_the_public_addresses_of_a_name_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answers("10.0.0.1", "1.1.1.1", "1.1.1.1", "::1"))
    assert resolve("hooks.example", 443, allow_private=False) == ["1.1.1.1"]
    monkeypatch.setattr(socket, "getaddrinfo", answers("10.0.0.1", "169.254.169.254"))
    with pytest.raises(NoPublicAddress):
        resolve("hooks.example", 443, allow_private=False)
    assert len(resolve("hooks.example", 443, allow_private=True)) == 2


def test_a_name_with_private_addresses_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setattr(socket, "getaddrinfo", answers("127.0.0.1"))
        with pytest.raises(TaskFailed) as caught:
            deliver_event(hook(url=f"https://hooks.example:{receiver.port}/x"), EVENT)
        assert caught.value.code == "WEBHOOK_ADDRESS_PRIVATE"
        assert not receiver.received


@contextmanager
def swallowing(address: str, port: int) -> Iterator[None]:
    """An address that answers no connection: the queue of its listener is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((address, port))
        yield


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_an_address_that_swallows_packets_leaves_time_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    real = socket.getaddrinfo

    def both(host: str, port: int, *rest: Any, **options: Any) -> Any:
        if host != "hooks.example":
            return real(host, port, *rest, **options)
        return answers("127.0.0.2", "127.0.0.1")(host, port)

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with receiving() as receiver, swallowing("127.0.0.2", receiver.port):
        url = f"{scheme}://hooks.example:{receiver.port}/x"
        there = hook(url=url, allow_private=True, timeout_seconds=6)
        if scheme == "http":
            assert deliver_event(there, EVENT) == 200
        else:  # the second address was tried: it does not speak TLS
            with pytest.raises(TaskFailed, match=r"did not answer: (?!timed out)"):
                deliver_event(there, EVENT)


def test_the_connection_goes_to_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers differently a second time is not asked a second time."""
    asked = []
    with receiving() as receiver:
        url = f"http://rebound.example:{receiver.port}/x"
        real = answers("127.0.0.1")

        def once(host: str, port: int, *rest: Any, **options: Any) -> Any:
            asked.append(host)
            return real(host, port)

        monkeypatch.setattr(socket, "getaddrinfo", once)
        assert deliver_event(hook(url=url, allow_private=True), EVENT) == 200
        assert receiver.received[0].headers["host"] == f"rebound.example:{receiver.port}"
    assert asked.count("rebound.example") == 1


def test_every_key_signs_the_id_the_time_and_the_body() -> None:
    body = body_of(EVENT, "json")
    second = b"another secret of the receiver"
    headers = headers_of("01a1", body, [SECRET.encode(), second], 1_893_456_000)
    got = Received("/", headers, body, 200)
    assert got.is_signed()
    assert got.is_signed(second.decode())
    assert not got.is_signed("another secret that is wrong......")
    assert not Received("/", headers | {"webhook-timestamp": "1"}, body, 200).is_signed()
    assert not Received("/", headers | {"webhook-id": "x"}, body, 200).is_signed()
    assert not Received("/", headers, body + b" ", 200).is_signed()


def test_a_known_signature_of_the_specification() -> None:
    """The example of the Standard Webhooks specification."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    keys = hook(secret=secret).keys
    headers = headers_of("msg_p5jXN8AQM9LWM0D4loKWxJek", body, keys, 1_614_265_330)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert keys == [base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")]


def test_a_sentence_for_chats_is_escaped() -> None:
    text = sentence(EVENT)
    assert text == "Task send &lt;invoice&gt; failed with DOWN (task 01a0, queue mail)"
    run = {"type": "run.ended", "data": {"run_id": "7", "name": "order", "status": "COMPLETED"}}
    assert sentence(run) == "Run of order ended: COMPLETED (run 7)"
    assert body_of(run, "slack") == b'{"text":"Run of order ended: COMPLETED (run 7)"}'


def test_answers_are_judged() -> None:
    assert judge("a", Answer(204)) == 204
    for status, code in ((500, "WEBHOOK_FAILED"), (404, "WEBHOOK_FAILED"), (410, "WEBHOOK_GONE")):
        with pytest.raises(TaskFailed) as caught:
            judge("a", Answer(status))
        assert caught.value.code == code
    with pytest.raises(RetryLater) as later:
        judge("a", Answer(429, 120.0))
    assert later.value.seconds == 120.0
    with pytest.raises(RetryLater) as later:
        judge("a", Answer(503, 999_999_999.0))
    assert later.value.seconds == 3_600.0


def test_a_redirect_is_not_followed() -> None:
    with receiving() as other, receiving(Receiver(answers=[302])) as receiver:
        receiver.headers["location"] = other.url
        with pytest.raises(TaskFailed, match="a redirect, which is not followed"):
            deliver_event(hook(url=receiver.url, allow_private=True), EVENT)
        assert not other.received


def test_a_receiver_that_keeps_quiet_or_is_down_has_not_answered() -> None:
    with receiving(Receiver(answers=[0])) as receiver:
        closing = hook(url=receiver.url, allow_private=True)
        with pytest.raises(TaskFailed, match="did not answer: RemoteDisconnected") as caught:
            deliver_event(closing, EVENT)
        assert "hidden" not in str(caught.value)
        receiver.is_awake.clear()
        slow = hook(url=receiver.url, allow_private=True, timeout_seconds=0.2)
        with pytest.raises(TaskFailed, match="did not answer: timed out"):
            deliver_event(slow, EVENT)
    with pytest.raises(TaskFailed, match="did not answer: Connection refused"):
        deliver_event(closing, EVENT)


def test_an_answer_that_comes_byte_by_byte_ends_with_the_time_limit() -> None:
    with creeping() as port:
        there = hook(url=f"http://127.0.0.1:{port}/x", allow_private=True, timeout_seconds=0.5)
        with pytest.raises(TaskFailed, match="did not answer: timed out"):
            deliver_event(there, EVENT)


@contextmanager
def creeping() -> Iterator[int]:
    """A receiver that sends its answer byte by byte, for three seconds."""

    def answer(listener: socket.socket) -> None:
        stream, _ = listener.accept()
        with stream, suppress(OSError):
            stream.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            for _ in range(300):
                stream.sendall(b"x")
                time.sleep(0.01)
            stream.sendall(b"\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        listener.settimeout(10)
        threads.submit(answer, listener)
        yield listener.getsockname()[1]


def test_the_certificate_of_another_host_is_refused_without_naming_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = tmp_path / "certificate.pem"
    certificate.write_bytes(certificate_of("other.example"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setattr(socket, "getaddrinfo", answers("127.0.0.1"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def greet(listener: socket.socket) -> None:
        stream, _ = listener.accept()
        with stream, suppress(OSError):
            context.wrap_socket(stream, server_side=True).close()

    for host in ("hidden.example", "127.0.0.1"):
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
            listener.settimeout(10)
            threads.submit(greet, listener)
            url = f"https://{host}:{listener.getsockname()[1]}/x"
            with pytest.raises(TaskFailed, match="the certificate is not accepted") as caught:
                deliver_event(hook(url=url, allow_private=True), EVENT)
        assert "mismatch" in str(caught.value)
        assert host not in str(caught.value)


def certificate_of(host: str) -> bytes:
    """A certificate that signs itself, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    kept = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return made.public_bytes(Encoding.PEM) + key.private_bytes(*kept)


def test_an_unencrypted_receiver_gets_nothing_over_https() -> None:
    with receiving() as receiver:
        url = receiver.url.replace("http:", "https:")
        with pytest.raises(TaskFailed, match="did not answer"):
            deliver_event(hook(url=url, allow_private=True), EVENT)
        assert not receiver.received


def test_a_host_that_cannot_be_resolved_has_not_answered() -> None:
    for host in ("x" * 64 + ".example", "nowhere.invalid"):
        with pytest.raises(TaskFailed, match="did not answer"):
            deliver_event(hook(url=f"https://{host}/"), EVENT)


def test_the_address_is_taken_apart() -> None:
    there = Destination.of("https://Hooks.example:8443/a/b?c=d#e")
    assert (there.host, there.port, there.target) == ("hooks.example", 8443, "/a/b?c=d")
    assert there.authority == "Hooks.example:8443"
    assert Destination.of("http://h").target == "/"
    assert Destination.of("http://h").port == 80


def test_a_reason_never_quotes_an_unknown_message() -> None:
    assert reason(ValueError(PATH)) == "ValueError"
    assert reason(TimeoutError(PATH)) == "timed out"


def test_an_answer_may_name_the_time_of_the_next_attempt() -> None:
    with receiving(Receiver(answers=[503], headers={"retry-after": "7"})) as receiver:
        answer = post(receiver.url, b"{}", {}, timeout_seconds=5, allow_private=True)
        assert answer == Answer(503, 7.0)
        receiver.headers["retry-after"] = "Wed, 21 Oct 2026 07:28:00 GMT"
        answer = post(receiver.url, b"{}", {}, timeout_seconds=5, allow_private=True)
        assert answer == Answer(503, None)
