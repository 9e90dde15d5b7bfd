"""The content of a delivery: the body, and the headers with the signature. Pure functions."""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from horsies._version import __version__
from horsies.ids import new_id

ID_HEADER = "webhook-id"
TIME_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"

_VERBS = {
    "task.failed": "failed",
    "task.cancelled": "was cancelled",
    "task.expired": "expired before it started",
}
_TEST = "webhook.test"
_FINDINGS = {"finding.opened": "Found", "finding.closed": "No longer found"}


def sample_event(name: str) -> dict[str, Any]:
    """Return a sample event for the receiver of this webhook, without a task or run."""
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"id": new_id(), "type": _TEST, "timestamp": now, "data": {"webhook": name}}


def body_of(event: Mapping[str, Any], form: Literal["json", "slack"]) -> bytes:
    """Return the body of an event's request."""
    document = dict(event) if form == "json" else {"text": sentence(event)}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def headers_of(event_id: str, body: bytes, keys: Sequence[bytes], now: int) -> dict[str, str]:
    """Return the headers. All attempts have the same id, but their own time and signature."""
    headers = {
        "content-type": "application/json; charset=utf-8",
        "user-agent": f"horsies/{__version__}",
        ID_HEADER: event_id,
        TIME_HEADER: str(now),
    }
    if keys:
        signed = (signature(key, event_id, now, body) for key in keys)
        headers[SIGNATURE_HEADER] = " ".join(signed)
    return headers


def signature(key: bytes, event_id: str, timestamp: int, body: bytes) -> str:
    """Return one signature: the HMAC-SHA256 of id, time and body, as in the Standard Webhooks
    specification.
    """
    content = f"{event_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, content, "sha256")).decode()


def sentence(event: Mapping[str, Any]) -> str:
    """Format an event as one line; escape the characters that chat services interpret."""
    kind, facts = str(event.get("type")), event.get("data") or {}
    if kind in _VERBS:
        subject, how = f"Task {facts.get('task_name')}", _VERBS[kind]
        place = f"task {facts.get('task_id')}, queue {facts.get('queue_name')}"
    elif kind == "run.ended":
        subject, how = f"Run of {facts.get('name')}", f"ended: {facts.get('status')}"
        place = f"run {facts.get('run_id')}"
    elif kind in _FINDINGS:
        return _escaped(f"{_FINDINGS[kind]}: {facts.get('sentence')} ({facts.get('code')})")
    elif kind == _TEST:
        return _escaped(f"This is a test of the webhook {facts.get('webhook')}.")
    else:
        return _escaped(f"Horsies sends the event {kind}.")
    code = f" with {facts['error_code']}" if facts.get("error_code") else ""
    return _escaped(f"{subject} {how}{code} ({place})")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
