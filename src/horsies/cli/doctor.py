"""`horsies doctor`: check the server, the schema and the work, with the remedy for each finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import typer

from horsies.cli import output
from horsies.cli.layout import Table, Text
from horsies.cli.options import DatabaseUrlOption, LocatorArgument, ModuleOption, refuse_both
from horsies.cli.session import EXIT_FAILED, JsonOption, open_session, unwrap_or_exit
from horsies.findings import Finding, Level
from horsies.monitor.diagnose.doctor import (
    CHECKS,
    CheckReport,
    doctor_document,
    run_doctor,
    seriousness,
    worst,
)

EXIT_RED = 3
_INDENT = " " * 7

_STYLES = {Level.GREEN: "green", Level.YELLOW: "yellow", Level.RED: "red", Level.UNKNOWN: "yellow"}
_EXIT_CODES = {Level.RED: EXIT_RED, Level.UNKNOWN: EXIT_FAILED}


def doctor(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    as_json: JsonOption = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID", help="Run this check only; may be repeated.", show_default=False
        ),
    ] = None,
    fix_sql: Annotated[
        bool, typer.Option("--fix-sql", help="Print only the statements that remedy the findings.")
    ] = False,
) -> None:
    """Check the server, the schema, workers, queues, runs and schedules. Nothing is changed.

    Each finding has its evidence and a remedy to paste into psql or a shell.

    Exit codes: 0 no red finding, 1 failure, or a check could not read its facts, 3 a red finding.

    Example:
        horsies doctor
        horsies doctor --fix-sql
    """
    refuse_both("--json", as_json, "--fix-sql", fix_sql)
    _refuse_unknown(only or ())
    with open_session("doctor", module or locator, database_url) as session:
        reports = unwrap_or_exit(run_doctor(session.broker, only or None))
    if as_json:
        output.print_json(doctor_document(reports))
    elif fix_sql:
        _print_statements(reports)
    else:
        _print_reports(reports)
    if code := _EXIT_CODES.get(worst(report.level for report in reports)):
        raise typer.Exit(code)


def _refuse_unknown(ids: Sequence[str]) -> None:
    known = [check.id for check in CHECKS]
    for one in ids:
        if one not in known:
            message = f"{one!r} is not a check; the checks are {', '.join(known)}."
            raise typer.BadParameter(message, param_hint="--only")


def _print_statements(reports: Iterable[CheckReport]) -> None:
    found = [(report.id, one) for report in reports for one in report.findings if one.is_sql]
    for check, finding in found:
        sentence = output.safe_text(finding.sentence).plain
        typer.echo(f"-- {check}: {sentence}\n{finding.remedy}")
    if not found:
        typer.echo("No finding has a remedy in SQL.", err=True)


def _print_reports(reports: Sequence[CheckReport]) -> None:
    found = [(report.id, one) for report in reports for one in report.findings]
    found = _grouped(sorted(found, key=lambda pair: seriousness(pair[1].level)))
    counts = {level: sum(one.level is level for one in reports) for level in Level}
    green = counts.pop(Level.GREEN)
    rest = "".join(f", {count} {level.value}" for level, count in counts.items() if count)
    parts = [part for title, one in found for part in _lines(title, one)]
    output.print_parts(*parts, f"{green} of {len(reports)} checks green{rest}.")


def _grouped(found: Iterable[tuple[str, Finding]]) -> list[tuple[str, Finding]]:
    """Replace the findings of checks that could not read their facts for the same reason by one finding."""
    shown: dict[object, tuple[list[str], Finding]] = {}
    for check, one in found:
        key = one.sentence if one.level is Level.UNKNOWN else (check, len(shown))
        shown.setdefault(key, ([], one))[0].append(check)
    return [
        (checks[0], one)
        if len(checks) == 1
        else (f"{len(checks)} checks", replace(one, evidence=(", ".join(checks),)))
        for checks, one in shown.values()
    ]


def _lines(title: str, finding: Finding) -> Iterator[Table]:
    level = finding.level
    text = Text(f"{title}: ", "bold").append_text(output.safe_text(finding.sentence))
    yield output.hanging(f"{level.value:<7}", text, _STYLES[level])
    yield from (output.hanging(_INDENT, output.safe_text(line)) for line in finding.evidence)
    if finding.remedy is not None:
        text = Text("remedy: ", no_wrap=finding.is_command)
        yield output.hanging(_INDENT, text.append_text(_remedy(finding)))


def _remedy(finding: Finding) -> Text:
    """Format the remedy; indent the further lines of a statement below its first line."""
    lines = (finding.remedy or "").split("\n")
    return output.safe_text(f"\n{' ' * len('remedy: ')}".join(lines))
