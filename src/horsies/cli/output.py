"""Formatting for operator commands: tables and facts for people, JSON for programs.

Without a terminal, tables are limited to 80 columns. Control characters in stored text are escaped.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from horsies.cli.layout import Align, Table, Text
from horsies.logs import colors_wanted
from horsies.modules import Deferred
from horsies.words import age as age
from horsies.words import memory as memory
from horsies.words import timestamp as timestamp

if TYPE_CHECKING:
    from horsies.findings import Finding
    from horsies.monitor import documents, paging
    from horsies.monitor.paging import Page
else:
    documents = Deferred("horsies.monitor.documents")
    paging = Deferred("horsies.monitor.paging")

STATUS_STYLES = {"FAILED": "red", "EXPIRED": "yellow", "RUNNING": "green", "CANCELLED": "dim"}


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON document: stable keys, times in UTC, numbers rounded to thousandths."""
    # main() replaces characters that standard output cannot encode; the replacement is not valid JSON.
    is_plain = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"
    sys.stdout.write(documents.json_text(value, ascii_only=is_plain) + "\n")


def print_page_note(page: Page[Any], noun: str) -> None:
    """Print to standard error how to get the next page."""
    if page.next_cursor is None:
        return
    note = f"There may be more: --before {page.next_cursor}"
    if not page.looked_at_all:
        note = (
            f"Only the newest {paging.LIST_WINDOW:,} {noun} were searched; "
            f"to search further back: --before {page.next_cursor}"
        )
    typer.echo(note, err=True)


def safe_text(text: str, style: str = "") -> Text:
    """Return stored text for display, without markup and with control characters escaped."""
    visible = (
        character if character.isprintable() or character == "\n" else repr(character)[1:-1]
        for character in text
    )
    return Text("".join(visible), style)


def status_text(status: str) -> Text:
    return Text(status, STATUS_STYLES.get(status, ""))


def plain_table(*columns: str, flexible: str) -> Table:
    """Return a table in which one column takes the remaining width."""
    left = ("ID", "STATUS", "TIME (UTC)", "BY", "STEP", "KIND")
    aligns: list[Align] = [
        "fold" if column == flexible else "left" if column in left else "right"
        for column in columns
    ]
    return Table(aligns, columns)


def fact_table(facts: Iterable[tuple[str, str | None]]) -> Table:
    """Return a table with one line per fact; facts without a value are omitted."""
    table = Table(("left", "fold"), styles=("bold", ""))
    for name, value in facts:
        if value is not None:
            table.add_row(name, safe_text(value))
    return table


def hanging(mark: str, text: Text, style: str = "") -> Table:
    """Prefix a text with a mark, and indent its wrapped lines to match the first."""
    table = Table(("left", "fold"), styles=(style, ""), gap=" ")
    table.add_row(mark, text)
    return table


def remedy_text(remedy: Finding, style: str = "") -> Text:
    """Format a remedy; commands are not wrapped, because a command split over lines cannot be pasted."""
    text = safe_text(remedy.remedy or "", style)
    text.no_wrap = remedy.is_command
    return text


def print_parts(*parts: Table | Text | str) -> None:
    """Print parts to standard output, wrapped to the terminal's width."""
    width = shutil.get_terminal_size().columns
    is_styled = colors_wanted(sys.stdout) and os.environ.get("TERM") != "dumb"
    for part in parts:
        for line in (Text(part) if isinstance(part, str) else part).lines(width):
            text = line.painted() if is_styled else line.plain
            sys.stdout.write(f"{text.rstrip()}\n")
