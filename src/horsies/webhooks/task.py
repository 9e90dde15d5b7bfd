"""The built-in task that delivers the events of one webhook.

Each webhook has its own task, ``horsies.webhook.NAME``. Only workers with the webhook in their
configuration take its deliveries. Failures, retries and pauses work as for any task. The stored row has
the event and the name; address and secret come from the worker's configuration.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from horsies.config.app import AppConfig
from horsies.db.statement import Step
from horsies.db.statements.webhooks import ask_for_findings
from horsies.errors import RetryLater, TaskFailed
from horsies.modules import Deferred
from horsies.retry import RetryPolicy
from horsies.tasks.definition import (
    FINDINGS_TASK,
    WEBHOOK_PREFIX,
    DecoratorOptions,
    TaskDefinition,
    define_builtin,
)
from horsies.tasks.options import NO_OPTIONS, encode_options, retention_seconds
from horsies.tasks.request import max_retries

if TYPE_CHECKING:
    from horsies.config.webhooks import Webhook
    from horsies.tasks.broker import PostgresBroker
    from horsies.webhooks import addresses, findings, message, post
    from horsies.webhooks.post import Answer
else:  # Imported here, because only a child that delivers needs these modules.
    addresses = Deferred("horsies.webhooks.addresses")
    findings = Deferred("horsies.webhooks.findings")
    message = Deferred("horsies.webhooks.message")
    post = Deferred("horsies.webhooks.post")

FAILED, GONE, PRIVATE = "WEBHOOK_FAILED", "WEBHOOK_GONE", "WEBHOOK_ADDRESS_PRIVATE"

_LONGEST_WAIT_SECONDS = 3_600.0
# The resolver of host names has no time limit, but the time limit of the task stops it.
_GRACE_SECONDS = 5.0
_RETRIED = (FAILED, "TASK_TIMEOUT", "WORKER_CRASHED", "WORKER_STOPPED")


def builtin_tasks(
    config: AppConfig, get_broker: Callable[[], PostgresBroker]
) -> Iterator[TaskDefinition]:
    """Return the tasks that webhooks add to the application's tasks."""
    for hook in config.webhooks:
        yield delivery_of(config, hook)
    if wants_findings(config) and (task := findings.findings_task(config, get_broker)):
        yield task


def wants_findings(config: AppConfig) -> bool:
    """Return whether a webhook subscribes to findings."""
    return any(event.startswith("finding.") for hook in config.webhooks for event in hook.on)


def delivery_of(config: AppConfig, hook: Webhook) -> TaskDefinition:
    """Return the task that delivers the events of this webhook."""

    def deliver(event: dict[str, Any]) -> int:
        return deliver_event(hook, event)

    policy = RetryPolicy.exponential(
        hook.retry_seconds,
        max_retries=hook.max_retries,
        max_delay_seconds=max(_LONGEST_WAIT_SECONDS, hook.retry_seconds),
        auto_retry_for=_RETRIED,
    )
    options = DecoratorOptions(
        hook.queue_name,
        policy,
        None,
        FAILED,
        round((hook.timeout_seconds + _GRACE_SECONDS) * 1000),
        {},
        on_stop="requeue",
    )
    return define_builtin(config, deliver, f"{WEBHOOK_PREFIX}{hook.name}", options)


def deliver_event(hook: Webhook, event: dict[str, Any]) -> int:
    """Send one event and return the receiver's status; raise if the receiver did not accept the event."""
    body = message.body_of(event, hook.body)
    headers = message.headers_of(str(event.get("id")), body, hook.keys, int(time.time()))
    return judge(hook.name, send(hook, body, headers))


def send(hook: Webhook, body: bytes, headers: dict[str, str]) -> Answer:
    """Send one request. The reason of a failure never contains the address."""
    try:
        return post.post(
            hook.url,
            body,
            headers,
            timeout_seconds=hook.timeout_seconds,
            allow_private=hook.allow_private,
        )
    except addresses.NoPublicAddress:
        raise TaskFailed(
            PRIVATE,
            f"The host of webhook {hook.name!r} has private addresses only, so nothing was sent; set "
            "allow_private=True if that is intended.",
        ) from None
    except post.NO_ANSWER as error:
        text = f"The receiver of webhook {hook.name!r} did not answer: {post.reason(error)}."
        raise TaskFailed(FAILED, text) from None


def judge(name: str, answer: Answer) -> int:
    """Return the status of an accepting response; raise for any other response."""
    status, wait = answer
    if 200 <= status < 300:
        return status
    if status == 410:
        text = f"The receiver of webhook {name!r} answered 410 Gone: it takes no more events."
        raise TaskFailed(GONE, text)
    text = f"The receiver of webhook {name!r} answered {status}."
    if 300 <= status < 400:
        text = f"{text[:-1]}, a redirect, which is not followed; correct the url."
    if wait is not None and status in (429, 503):
        raise RetryLater(min(wait, _LONGEST_WAIT_SECONDS), text)
    raise TaskFailed(FAILED, text)


def asking(definitions: Mapping[str, TaskDefinition]) -> Step | None:
    """Return the statement that sends the check for findings, at most once a minute; return None without
    the task.
    """
    task = definitions.get(FINDINGS_TASK)
    if task is None or task.timeout_ms is None:
        return None
    options = encode_options(task, None)
    return ask_for_findings(task.name, task.queue_name, task.priority, options, task.timeout_ms)


def subscriptions(config: AppConfig) -> str:
    """Return the application's webhooks as JSON in the form of horsies_webhooks, without addresses and
    secrets.
    """
    return json.dumps([_subscription(config, hook) for hook in config.webhooks])


def _subscription(config: AppConfig, hook: Webhook) -> dict[str, Any]:
    task = delivery_of(config, hook)
    return {
        "name": hook.name,
        "events": hook.on,
        "task_names": hook.task_names,
        "queue_name": task.queue_name,
        "priority": task.priority,
        "max_retries": max_retries(task),
        "task_options": encode_options(task, None),
        "timeout_ms": task.timeout_ms,
        "retention_seconds": retention_seconds(config, task.queue_name, NO_OPTIONS),
    }
