"""Formatting for operator commands: tables and facts for people, JSON for programs.

Tables fit into 80 columns without a terminal. Control characters in stored text are escaped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from horsies.logs import duration as duration
from horsies.logs import memory as memory
from horsies.logs import timestamp as timestamp
from horsies.modules import Deferred

if TYPE_CHECKING:
    from horsies.db import paging
    from horsies.db.paging import Page
    from horsies.monitor import documents
else:
    documents = Deferred("horsies.monitor.documents")
    paging = Deferred("horsies.db.paging")

STATUS_STYLES = {"FAILED": "red", "EXPIRED": "yellow", "RUNNING": "green", "CANCELLED": "dim"}


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON document: stable keys, times in UTC, numbers rounded to thousandths."""
    # main() replaces characters that standard output cannot encode; the replacement is not valid JSON.
    is_plain = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"
    sys.stdout.write(documents.json_text(value, ascii_only=is_plain) + "\n")


def print_page_note(page: Page[Any], noun: str) -> None:
    """Print how to get the next page, on standard error."""
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
    """Return a table in which one column takes the width that the others leave."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        if column == flexible:
            table.add_column(column, overflow="fold")
        else:
            is_text = column in ("ID", "STATUS", "TIME (UTC)", "BY")
            table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    return table


def fact_table(facts: Iterable[tuple[str, str | None]]) -> Table:
    """Return a table with one line per fact; facts without a value are left out."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in facts:
        if value is not None:
            table.add_row(name, safe_text(value))
    return table


def print_parts(*parts: Table | Text | str) -> None:
    """Print to standard output, without the blanks that pad a table to its width."""
    console = Console(highlight=False, markup=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = captured.get().splitlines()
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))
