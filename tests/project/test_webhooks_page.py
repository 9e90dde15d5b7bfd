"""The receiver of docs/webhooks.md verifies real requests, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from horsies import Webhook
from horsies.webhooks.task import deliver_event
from tests.support import doc_pages
from tests.support.receiver import SECRET, Received, receiving
from tests.support.workers import REPOSITORY

EVENT: dict[str, Any] = {"id": "01a1", "type": "run.ended", "data": {"name": "größe"}}
OTHER = "another-secret-of-the-receiver"
Verify = Callable[[Mapping[str, str], bytes, str], bool]


@pytest.fixture(scope="module")
def verify() -> Verify:
    page = (REPOSITORY / "docs" / "webhooks.md").read_text("utf-8")
    (text,) = [one.text for one in doc_pages.blocks(page) if "def verify" in one.text]
    assert len(text[text.index("def verify") :].strip().splitlines()) <= 10
    names: dict[str, Any] = {}
    exec(compile(text, "webhooks.md", "exec"), names)
    found: Verify = names["verify"]
    return found


@pytest.fixture(scope="module")
def request_got() -> Received:
    with receiving() as receiver:
        hook = Webhook(
            name="a", url=receiver.url, secret=[SECRET, OTHER], on=["run.ended"], allow_private=True
        )
        deliver_event(hook, EVENT)
        return receiver.received[0]


def test_a_real_request_is_accepted_with_either_secret(
    verify: Verify, request_got: Received
) -> None:
    assert verify(request_got.headers, request_got.body, SECRET)
    assert verify(request_got.headers, request_got.body, OTHER)


def test_a_changed_or_old_request_is_refused(verify: Verify, request_got: Received) -> None:
    headers, body = request_got.headers, request_got.body
    assert not verify(headers, body + b" ", SECRET)
    assert not verify(headers, body, "a-secret-that-is-not-theirs-at-all")
    assert not verify({**headers, "webhook-id": "other"}, body, SECRET)
    another_second = str(int(headers["webhook-timestamp"]) - 1)
    assert not verify({**headers, "webhook-timestamp": another_second}, body, SECRET)
    assert not verify({**headers, "webhook-signature": "v1,"}, body, SECRET)
