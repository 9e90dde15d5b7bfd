"""Statements on webhooks and on the findings that webhooks announce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statement import StatementFile

WEBHOOKS = StatementFile("webhooks.sql")


class Announced(NamedTuple):
    """How many events were stored for delivery."""

    announced: int


@WEBHOOKS.statement
def store_webhooks(webhooks: str, queues: Sequence[str]) -> None: ...


@WEBHOOKS.statement
def ask_for_findings(
    task_name: str, queue_name: str, priority: int, task_options: str, timeout_ms: int
) -> None: ...


@WEBHOOKS.statement
def record_findings(
    # The findings as JSON objects with check_id, code, subject, level, sentence and remedy.
    found: str,
    # The checks that could read their facts; only the findings of these checks can be closed.
    checks: Sequence[str],
) -> Announced: ...


WEBHOOKS.complete()
