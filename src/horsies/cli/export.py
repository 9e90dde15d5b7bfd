"""`horsies export`: everything about one person, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer

from horsies.cli.changes import TaskIdsArgument, split_locator
from horsies.cli.erase import (
    ArgumentOption,
    Choice,
    KeyOption,
    parsed_argument,
    subject_ids,
    wanted_by,
)
from horsies.cli.options import DatabaseUrlOption, ModuleOption
from horsies.cli.session import Session, open_session, unwrap_or_exit
from horsies.db.statement import Script
from horsies.monitor.exporting import Export, portions, run_tasks_script
from horsies.monitor.personal_data import PersonalData, find_script, sorted_script
from horsies.tasks.broker import BrokerErrorCode


def export(
    task_ids: TaskIdsArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    key: KeyOption = None,
    argument: ArgumentOption = None,
) -> None:
    """Print everything about one person: a JSON object per line, with the kind of the row.

    The kinds are task, run, schedule, key and change. A task has its arguments, result, attempts, logs,
    steps and signals; a task of a workflow comes with its whole run. Open tasks are exported too.

    Exit codes: 0 done (even if nothing is found), 1 failure, 4 not an id.

    Example:
        horsies export --key customer-17 shop.background:app > customer-17.jsonl
    """
    if key is not None and argument is not None:
        raise typer.BadParameter("--key and --argument exclude each other.", param_hint="--key")
    is_bulk = key is not None or argument is not None
    given, locator = split_locator(task_ids or [], is_bulk=is_bulk)
    with open_session("export", module or locator, database_url) as session:
        chosen = Choice(subject_ids(session, given), None, key, parsed_argument(argument), True)
        script = (
            sorted_script(chosen.ids) if chosen.ids else find_script(wanted_by(session, chosen))
        )
        _print_all(session, _read(session, script), key)


def _read(session: Session, script: Script[Any]) -> Any:
    return unwrap_or_exit(session.broker.perform(BrokerErrorCode.MONITORING_QUERY_FAILED, script))


def _print_all(session: Session, found: PersonalData, key: str | None) -> None:
    rows = Export(session.broker.database.payloads)
    _print(_read(session, rows.others(found, key)))
    for ids in portions(found.tasks):
        _print(_read(session, rows.tasks(ids)))
    for run_id in found.runs:
        _print(_read(session, rows.runs([run_id])))
        for ids in portions(_read(session, run_tasks_script([run_id]))):
            _print(_read(session, rows.tasks(ids)))
    if rows.missing_keys:
        names = ", ".join(sorted(rows.missing_keys))
        remedy = "add it to the codec" if session.app else "name the application that has it"
        typer.echo(
            f"Some texts are encrypted with a key that is missing here ({names}): {remedy}.",
            err=True,
        )
    if rows.missing_stores:
        names = ", ".join(sorted(rows.missing_stores))
        remedy = "they may be lost" if session.app else "name the application that has it"
        typer.echo(
            f"Some texts are kept in a store that is missing here or does not have them ({names}): {remedy}.",
            err=True,
        )


def _print(documents: Iterable[dict[str, Any]]) -> None:
    for document in documents:
        typer.echo(json.dumps(document, ensure_ascii=False))
