"""`horsies explain`: why a task, node, run, queue or schedule is not making progress, and what helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from horsies.cli import output
from horsies.cli.layout import Table, Text
from horsies.cli.options import DatabaseUrlsOption, LocatorsArgument, ModuleOption
from horsies.cli.session import (
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    JsonOption,
    Session,
    full_id,
    open_sessions,
    read_each,
    report_unread,
    require_one,
)
from horsies.db.statement import Script
from horsies.monitor.diagnose.explain import (
    Explanation,
    Finding,
    explain_queue_script,
    explain_schedule_script,
    explain_script,
)
from horsies.monitor.diagnose.explain import explain as read_explanation
from horsies.tasks.broker import BrokerResult

_KINDS = ("queue", "schedule")


def explain(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="ID|queue|schedule",
            help="The id of a task or run, or its first digits; or queue, or schedule.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="The node of the run, or the name of the queue or schedule.",
            show_default=False,
        ),
    ] = None,
    locators: LocatorsArgument = None,
    module: ModuleOption = None,
    database_urls: DatabaseUrlsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why a task, a run or one of its nodes, a queue or a schedule is not making progress: all
    reasons, obstacles first, with the command that helps, and the conditions that are met. If several
    databases are given, each one that has the subject explains it.

    Exit codes: 0 explained, 1 failure, 4 no such task, run, node, queue or schedule. If no readable
    database has it but another could not be read, that is a failure.

    Example:
        horsies explain 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a
        horsies explain queue mail
    """

    named = list(locators or ())
    if name is None and named and (subject in _KINDS or module or database_urls):
        name = named.pop(0)  # The name of a node can look like a locator.

    def read(session: Session) -> BrokerResult[Explanation]:
        wanted = subject if subject in _KINDS else full_id(session, subject)
        script = _script(wanted, name, list(session.queue_caps or ()))
        return read_explanation(session.broker, script)

    with open_sessions("explain", [module] if module else named, database_urls) as sessions:
        found = read_each(sessions, read)
    require_one(found)
    explained = report_unread(found)
    known = [(session, one) for session, one in explained if one.status is not None]
    _print_all(known or explained[:1], as_json, is_one=len(found) == 1)
    if not known:
        raise typer.Exit(EXIT_NOT_FOUND if len(explained) == len(found) else EXIT_FAILED)


def _print_all(
    explained: Sequence[tuple[Session, Explanation]], as_json: bool, *, is_one: bool
) -> None:
    if as_json and not is_one:
        rows = [{"database": session.name, **one.to_dict()} for session, one in explained]
        output.print_json({"databases": rows})
        return
    for session, explanation in explained:
        if as_json:
            output.print_json(explanation.to_dict())
            return
        if explanation.status is not None and session.name:
            output.print_parts(output.safe_text(f"database {session.name}", "bold"))
        _print(explanation)


def _script(subject: str, name: str | None, configured: list[str]) -> Script[Explanation]:
    if subject not in _KINDS:
        return explain_script(subject, name)
    if name is None:
        raise typer.BadParameter(
            f"horsies explain {subject} needs the name of a {subject}.", param_hint="NAME"
        )
    if subject == "queue":
        return explain_queue_script(name, configured)
    return explain_schedule_script(name)


def _print(explanation: Explanation) -> None:
    state = explanation.status or "not found"
    output.print_parts(
        output.safe_text(f"{explanation.subject}: {state}", "bold"),
        *(part for one in explanation.reasons for part in _reason_parts(one)),
        *(output.hanging("ok ", output.safe_text(one), "dim") for one in explanation.holds),
    )


def _reason_parts(one: Finding) -> Iterator[Table]:
    mark, style = ("!", "red") if one.blocks else ("-", "")
    text = Text(f"{one.code}: ", style)
    yield output.hanging(f"{mark:3}", text.append_text(output.safe_text(one.sentence)), style)
    if one.remedy is not None:
        yield output.hanging(" " * 5, output.remedy_text(one, "bold"))
