"""`horsies docs`: this version's documentation, in the terminal.

The wheel contains the Markdown pages next to the code (see ``hatch_build.py``); a checkout reads its own.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from horsies.cli.options import EXIT_FAILED, EXIT_NOT_FOUND, exit_with

_PACKAGE = Path(__file__).parents[1]
_NEXT_CODE = "\n### "
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
    if entry := _entry_of_code(topic, pages):
        _print(entry)
        return
    match _matches(topic, list(pages)):
        case [found]:
            _print(pages[found].read_text("utf-8"))
        case []:
            exit_with(f"There is no topic {topic!r}; {_suggestion(topic, pages)}", EXIT_NOT_FOUND)
        case several:
            choices = " or ".join(several)
            exit_with(f"There are several topics {topic!r}; write {choices}.", EXIT_NOT_FOUND)


def _pages() -> dict[str, Path]:
    """Return the pages by topic, which is the path below the directory: the start page first, folders
    last.
    """
    for directory in DIRECTORIES:
        paths = {
            path.relative_to(directory).with_suffix("").as_posix(): path
            for path in directory.rglob("*.md")
        }
        if paths:
            return dict(sorted(paths.items(), key=lambda one: _rank(one[0])))
    return exit_with("This installation of horsies has no documentation.", EXIT_FAILED)


def _rank(topic: str) -> tuple[bool, str, bool, str]:
    folder, _, name = topic.rpartition("/")
    return bool(folder), folder, name != "index", name


def _entry_of_code(topic: str, pages: dict[str, Path]) -> str | None:
    """Return the section of the page of codes, for an upper-case topic that is a code."""
    if topic != topic.upper() or "codes" not in pages:
        return None
    _, found, rest = pages["codes"].read_text("utf-8").partition(f"\n### {topic}\n")
    return (
        f"{topic}\n{rest.split(_NEXT_CODE, 1)[0].split('<!--', 1)[0].rstrip()}\n" if found else None
    )


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
    width = max(map(len, pages))
    lines = [f"{topic:{width}}  {_title(path)}" for topic, path in pages.items()]
    return "\n".join(["Read a page with: horsies docs TOPIC", "", *lines, ""])


def _title(page: Path) -> str:
    lines = page.read_text("utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")


def _print(text: str) -> None:
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    import pydoc  # for terminals only: it takes 20 ms to load

    pydoc.pager(text)
