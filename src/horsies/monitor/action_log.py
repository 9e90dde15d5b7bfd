"""Reads the record of operators' changes, newest first, by subject or author."""

from __future__ import annotations

from collections.abc import Sequence

from horsies.db.statement import Script
from horsies.db.statements.actions import (
    ActionRow,
    last_actions,
    list_actions,
)
from horsies.task_result import storable_text
from horsies.tasks.recording import Actor

__all__ = ["ActionRow", "Actor", "author_script", "authors_script", "list_actions_script"]

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


def author_script(subject: str, verb: str) -> Script[str | None]:
    """Return the last author of this change to the subject, and the reason if one was given."""
    return (yield from authors_script([subject], verb)).get(subject)


def authors_script(subjects: Sequence[str], verb: str) -> Script[dict[str, str]]:
    """Return the last author and reason of this change for each subject; omit subjects without such a
    change.
    """
    rows: list[ActionRow] = yield last_actions(subjects, verb)
    return {row.subject: f"{row.actor} ({row.detail})" if row.detail else row.actor for row in rows}
