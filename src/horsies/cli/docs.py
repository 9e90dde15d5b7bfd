"""`horsies docs`: this version's documentation, in the terminal.

The wheel contains the Markdown pages next to the code (see ``hatch_build.py``); a source checkout reads
its docs/ folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from horsies.cli.options import EXIT_FAILED, EXIT_NOT_FOUND, exit_with

_PACKAGE = Path(__file__).parents[1]
# The topics in the order of the site: one heading per tab, one line per page.
_LIST_OF_PAGES = "llms.txt"
_LISTED = re.compile(r"^(?:## (.+)|- \[.+?\]\((.+?)\.md\):.*)$", re.MULTILINE)
DIRECTORIES = (_PACKAGE / "documentation", _PACKAGE.parents[1] / "docs")


def docs(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="[TOPIC]", help="A page, such as retries, or a code, such as WORKER_CRASHED."
        ),
    ] = None,
) -> None:
    """Print a page of the documentation, the entry of an error code, or all topics.

    In a terminal the page opens in your pager; other output gets the Markdown.

    Exit codes: 0 done, 1 failure, 4 no such topic.

    Example:
        horsies docs
        horsies docs retries
        horsies docs WORKER_CRASHED
    """
    pages = _pages()
    if topic is None:
        _print(_contents(pages))
        return
    entry = _entry_of_code(topic.upper(), pages)
    matches = _matches(topic, list(pages))
    # A page can have the same name as a code in lower case.
    if entry and (topic.isupper() or not matches):
        _print(entry)
        return
    match matches:
        case [found]:
            _print(pages[found].read_text("utf-8"))
        case []:
            exit_with(f"There is no topic {topic!r}; {_suggestion(topic, pages)}", EXIT_NOT_FOUND)
        case several:
            choices = " or ".join(several)
            exit_with(f"There are several topics {topic!r}; write {choices}.", EXIT_NOT_FOUND)


def _pages() -> dict[str, Path]:
    """Return the pages by topic, which is the path below the directory, sorted by folder and name."""
    for directory in DIRECTORIES:
        paths = {
            path.relative_to(directory).with_suffix("").as_posix(): path
            for path in directory.rglob("*.md")
        }
        if paths:
            return dict(sorted(paths.items(), key=lambda one: one[0].rpartition("/")))
    return exit_with("This installation of horsies has no documentation.", EXIT_FAILED)


def _entry_of_code(code: str, pages: dict[str, Path]) -> str | None:
    """Return all documentation of a code: an error code, a reason code or the code of a check."""
    found = [
        *_section(code, _text("codes", pages)),
        *(
            f"`horsies explain`, {row[0]}: {row[3]}\n\n**Remedy:** {row[4]}"
            for row in _rows(_text("explain", pages))
            if row[1:2] == [f"`{code}`"]
        ),
        *(
            f"`horsies doctor` checks: {row[1]}\n\nYellow: {row[2]}. Red: {row[3]}."
            for row in _rows(_text("doctor", pages))
            if row[0] == f"`{code.lower().replace('_', '-')}`"
        ),
    ]
    return "\n\n".join([code, *found, ""]) if found else None


def _text(topic: str, pages: dict[str, Path]) -> str:
    return pages[topic].read_text("utf-8") if topic in pages else ""


def _section(code: str, text: str) -> list[str]:
    found = re.search(rf"^### {re.escape(code)}\n+(.*?)\n+(?=### |<!--|\Z)", text, re.M | re.S)
    return [found[1]] if found else []


def _rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of each table row."""
    for line in text.splitlines():
        if line.startswith("| "):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def _matches(topic: str, known: list[str]) -> list[str]:
    """Return the topic itself, or else all topics with this name in any folder."""
    wanted = topic.strip("/").removesuffix(".md").lower()
    if wanted in known:
        return [wanted]
    return [one for one in known if one.rpartition("/")[2] == wanted]


def _suggestion(topic: str, pages: dict[str, Path]) -> str:
    names = {one.rpartition("/")[2]: one for one in reversed(pages)} | {one: one for one in pages}
    close = dict.fromkeys(names[one] for one in get_close_matches(topic.lower(), names))
    return f"did you mean {' or '.join(close)}?" if close else "list all with: horsies docs"


def _contents(pages: dict[str, Path]) -> str:
    """Return the topics below the headings of the site's navigation."""
    width = max(map(len, pages))
    lines = ["Read a page with: horsies docs TOPIC", "Look up a code with: horsies docs CODE"]
    rest = dict(pages)
    for tab, topic in _LISTED.findall(_list_of_pages()):
        lines += ["", tab] if tab else []
        if path := rest.pop(topic, None):
            lines.append(f"  {topic:{width}}  {_title(path)}")
    lines += ["", *(f"  {topic:{width}}  {_title(path)}" for topic, path in rest.items())]
    return "\n".join(lines).rstrip() + "\n"


def _list_of_pages() -> str:
    lists = (directory / _LIST_OF_PAGES for directory in DIRECTORIES)
    return next((one.read_text("utf-8") for one in lists if one.exists()), "")


def _title(page: Path) -> str:
    lines = page.read_text("utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")


def _print(text: str) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    import pydoc  # Imported only for terminals, because it takes 20 ms to load.

    pydoc.pager(text)
