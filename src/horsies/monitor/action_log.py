"""The record of changes made by people, read back: newest first, by subject or author."""

from __future__ import annotations

from horsies.db.statement import Script, one_or_none
from horsies.db.statements.actions import (
    ActionRow,
    last_action,
    list_actions,
)
from horsies.task_result import storable_text
from horsies.tasks.recording import Actor

__all__ = ["ActionRow", "Actor", "author_script", "last_action_script", "list_actions_script"]

_LAST_ID = (1 << 63) - 1


def list_actions_script(
    subject: str | None = None, actor: str | None = None, before: int | None = None, limit: int = 50
) -> Script[list[ActionRow]]:
    """Read a page of changes, newest first; ``before`` is the id of the previous page's last row."""
    found: list[ActionRow] = yield list_actions(
        subject=None if subject is None else storable_text(subject),
        actor=None if actor is None else storable_text(actor),
        before=_LAST_ID if before is None else before,
        limit=limit,
    )
    return found


def last_action_script(subject: str, verb: str) -> Script[ActionRow | None]:
    """Read the newest change of this kind that took effect, such as the pause of ``queue mail``."""
    return one_or_none((yield last_action(subject, verb)))


def author_script(subject: str, verb: str) -> Script[str | None]:
    """Return who made the last such manual change, and the reason if there is one."""
    row = yield from last_action_script(subject, verb)
    if row is None:
        return None
    return f"{row.actor} ({row.detail})" if row.detail else row.actor
