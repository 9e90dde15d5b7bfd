"""`horsies webhooks test`: one signed event, sent as a worker sends a delivery."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_line import Run
from tests.support.receiver import Receiver, receiving

PROGRAM = """
import json

from horsies import AppConfig, Horsies, PostgresConfig, Webhook

broker = PostgresConfig(database_url="postgresql://shop@127.0.0.1:1/shop")
app = Horsies(AppConfig(broker=broker, webhooks=[Webhook(**json.loads({hook!r}))]))
"""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def program(folder: Path, receiver: Receiver, **changes: object) -> str:
    """The place of an application with this webhook, whose database is away."""
    hook = json.dumps(receiver.webhook(**changes))
    file = folder / f"program_{receiver.port}.py"
    file.write_text(PROGRAM.format(hook=hook))
    return f"{file}:app"


def test_one_signed_event_is_sent_and_the_answer_printed(
    horsies: Run, receiver: Receiver, tmp_path: Path
) -> None:
    locator = program(tmp_path, receiver)
    sent = horsies("webhooks", "test", "alerts", locator)
    assert sent.code == 0
    assert "The receiver of webhook 'alerts' answered 200 after" in sent.out
    (received,) = receiver.received
    assert received.is_signed()
    assert received.event["id"] == received.id
    assert received.event["type"] == "webhook.test"
    assert received.event["data"] == {"webhook": "alerts"}
    shown = json.loads(horsies("webhooks", "test", "alerts", locator, "--json").out)
    assert (shown["status"], shown["problem"]) == (200, None)
    assert len(receiver.received) == 2


def test_a_chat_service_gets_a_sentence(horsies: Run, receiver: Receiver, tmp_path: Path) -> None:
    locator = program(tmp_path, receiver, body="slack")
    assert horsies("webhooks", "test", "alerts", locator).code == 0
    assert receiver.received[0].event == {"text": "This is a test of the webhook alerts."}


@pytest.mark.parametrize("answer", [500, 410, 302, 503])
def test_an_answer_that_does_not_accept_the_event_is_a_failure(
    horsies: Run, receiver: Receiver, tmp_path: Path, answer: int
) -> None:
    receiver.answers, receiver.headers = [answer], {"retry-after": "5"}
    failed = horsies("webhooks", "test", "alerts", program(tmp_path, receiver))
    assert failed.code == 1
    assert f"answered {answer}" in failed.err
    assert "hidden" not in failed.out + failed.err
    assert len(receiver.received) == 1  # it is not repeated


def test_a_private_address_is_refused_as_in_a_delivery(
    horsies: Run, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", receiver.port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    url = f"https://hooks.example:{receiver.port}/hook"
    locator = program(tmp_path, receiver, url=url, allow_private=False)
    refused = horsies("webhooks", "test", "alerts", locator)
    assert refused.code == 1
    assert "private addresses only, so nothing was sent" in refused.err
    assert receiver.arrived == 0


def test_an_unknown_webhook_is_named(horsies: Run, receiver: Receiver, tmp_path: Path) -> None:
    missing = horsies("webhooks", "test", "alarms", program(tmp_path, receiver))
    assert (missing.code, missing.out) == (4, "")
    assert "no webhook 'alarms'; it has alerts." in missing.err
