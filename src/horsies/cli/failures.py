"""`horsies failures`: failed attempts by their reason, and one reason with its failures over time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from horsies.cli import output
from horsies.cli.options import DatabaseUrlOption, LocatorArgument, ModuleOption
from horsies.cli.session import (
    EXIT_NOT_FOUND,
    JsonOption,
    Session,
    exit_with,
    fingerprint_option,
    open_session,
    unwrap_or_exit,
)
from horsies.db.statements.lookup import FailureGroup
from horsies.monitor.failures import (
    FAILURES_MAX,
    Failures,
    failure_document,
    failure_script,
    failures_document,
    failures_script,
    over_time,
    reason_text,
    release_text,
)
from horsies.tasks.broker import BrokerErrorCode

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED
_LEVELS = "▁▂▃▄▅▆▇█"


def failures(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Only failures of this task; may be repeated.")
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(metavar="DIGITS", help="Show one reason, by the digits in the list."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List failed attempts by their reason: the task, the exception class and the place that raised it.

    The list covers the newest 20,000 attempts; when a reason was first seen is known for all attempts
    on record. To send all tasks of one reason again: horsies retry --fingerprint DIGITS.

    Exit codes: 0 done (even if nothing has failed), 1 failure, 4 no such fingerprint.

    Example:
        horsies failures --name charge
        horsies failures --fingerprint ef96c64c5a97
    """
    wanted = None if fingerprint is None else fingerprint_option(fingerprint)
    with open_session("failures", module or locator, database_url) as session:
        if wanted is not None:
            _show_one(session, wanted, as_json)
            return
        script = failures_script(name or ())
        found = unwrap_or_exit(session.broker.perform(_READING, script))
    if as_json:
        output.print_json(failures_document(found))
    else:
        _print_groups(found)


def _print_groups(found: Failures) -> None:
    if not found.groups:
        output.print_parts("No attempt has failed.")
        return
    now = datetime.now(UTC)
    table = output.plain_table(
        "ID", "FAILED", "FINAL", "FIRST", "LAST", "REASON", flexible="REASON"
    )
    for group in found.groups:
        text = output.safe_text(f"{group.task_name}: {reason_text(group)}")
        if group.message:
            text.append_text(output.safe_text("\n" + group.message.replace("\n", " "), "dim"))
        ages = (output.age((now - at).total_seconds()) for at in (group.first_at, group.last_at))
        total, final = f"{group.total:,}", f"{group.final:,}"
        table.add_row(group.fingerprint or "", total, final, *ages, text)
    output.print_parts(table)
    if found.looked_back_to is not None:
        typer.echo(f"Searched back to {output.timestamp(found.looked_back_to)}.", err=True)


def _show_one(session: Session, fingerprint: str, as_json: bool) -> None:
    group = unwrap_or_exit(session.broker.perform(_READING, failure_script(fingerprint)))
    if group is None:
        exit_with(f"No failure on record has the fingerprint {fingerprint}.", EXIT_NOT_FOUND)
    if as_json:
        output.print_json(failure_document(group, datetime.now(UTC)))
    else:
        output.print_parts(output.fact_table(_facts(group)))


def _facts(group: FailureGroup) -> Iterator[tuple[str, str | None]]:
    more = "+" if group.total >= FAILURES_MAX else ""
    slots = over_time(group, datetime.now(UTC))
    yield "task", group.task_name
    yield "error", group.error_code
    yield "exception", group.exception_type
    yield "raised in", group.raised_in
    yield "message", group.message
    yield "failed", f"{group.total:,}{more}, {group.final:,} of them final"
    yield "first seen", output.timestamp(group.first_at)
    yield "last seen", output.timestamp(group.last_at)
    yield "release", release_text(group)
    yield "hosts", ", ".join(group.hosts or ()) or None
    yield "over time", bars([slot.failures for slot in slots])
    yield "", f"from {output.timestamp(slots[0].at)} until now"
    yield "example", f"horsies show {group.newest_task_id}"
    if group.final:
        yield "send again", f"horsies retry --fingerprint {group.fingerprint} --dry-run"


def bars(counts: list[int]) -> str:
    """Draw one character per count; a space stands for zero.

    Example:
        >>> bars([0, 1, 4, 8])
        ' ▁▄█'
    """
    highest = max(counts, default=0) or 1
    return "".join(
        _LEVELS[max(count * len(_LEVELS) // highest - 1, 0)] if count else " " for count in counts
    )
