"""Figures about the documentation's style, per tab of the site. `python -m tests.support.voice` prints a
table: the words of prose on the pages of each tab, the number of "you" and "we" per thousand words,
table rows, words per sentence, long sentences, callouts, pictures and diagrams. `python -m
tests.support.voice pages` prints a row per page, and `python -m tests.support.voice long [WORDS]` prints
the sentences over that length. Code blocks, headings and generated tables are left out; a code span
counts as one word.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from tests.support import site_map

LONG, TOO_LONG = 35, 45
# The tab for contributors, whose design notes may have longer sentences.
FOR_CONTRIBUTORS = "Project"
# The minimum number of "you" and "we" per thousand words, for a tab and each of its pages.
FLOOR, FLOOR_OF_PAGE = 20, 15
COMMAND = "python -m tests.support.voice"
# Pages generated from docstrings, and the history, which readers do not read from top to bottom.
LEFT_OUT = ("api/", "changelog.md")

_BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- (?:begin|measured): .*? -->.*?<!-- end.*? -->", re.DOTALL)
_ADDRESS = re.compile(r"\b(?:you|your|yours|yourself|we|our|us|let's)\b", re.IGNORECASE)
_CODE = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK_TARGET = re.compile(r"\]\([^)]*\)(?:\{[^}]*\})?")
_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)|<img\b[^>]*>")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=[A-Z`*\[\"'(])")
_CALLOUT = re.compile(r"^> \[!\w+\]", re.MULTILINE)


@dataclass(frozen=True)
class Voice:
    """The figures of one page, or of several pages together. `sentences` includes sentences in table
    cells; `in_prose` excludes them.
    """

    name: str
    pages: int
    words: int
    addresses: int
    table_rows: int
    in_prose: int
    sentences: tuple[str, ...]
    callouts: int
    pictures: int
    diagrams: int

    @property
    def addresses_per_thousand(self) -> float:
        return 1000 * self.addresses / max(self.words, 1)

    def over(self, words: int) -> list[str]:
        """Return the sentences with more words than this."""
        return [one for one in self.sentences if _count(one) > words]

    def row(self) -> str:
        cells = (
            *(f"{self.pages}", f"{self.words:,}", f"{self.addresses_per_thousand:.1f}"),
            f"{1000 * self.table_rows / max(self.words, 1):.1f}",
            f"{self.words / max(self.in_prose, 1):.1f}",
            *(f"{len(self.over(limit))}" for limit in (LONG, TOO_LONG)),
            *(f"{self.callouts}", f"{self.pictures}", f"{self.diagrams}"),
        )
        return f"| {self.name} | {' | '.join(cells)} |"


HEADING = (
    f'| | pages | words of prose | "you/we" per 1,000 | table rows per 1,000 | words per sentence '
    f"| over {LONG} words | over {TOO_LONG} | callouts | pictures | diagrams |\n| --- {'| --: ' * 10}|"
)


def voice_of(name: str, text: str) -> Voice:
    """Return the figures of one Markdown page."""
    prose, cells, table_rows = [], [], 0
    for kind, paragraph in _paragraphs(_GENERATED.sub("\n", text)):
        if kind == "row":
            table_rows += 1
            cells.append(paragraph)
        else:
            prose.append(paragraph)
    pictures = _PICTURE.findall(text)
    return Voice(
        name=name,
        pages=1,
        words=sum(map(_count, prose)),
        addresses=sum(len(_ADDRESS.findall(one)) for one in prose),
        table_rows=table_rows,
        in_prose=len(list(_sentences(prose))),
        sentences=tuple(_sentences([*prose, *cells])),
        callouts=len(_CALLOUT.findall(text)),
        pictures=sum(".svg" not in one for one in pictures),
        diagrams=sum(".svg" in one for one in pictures) + text.count("\n```mermaid"),
    )


def together(name: str, voices: Iterable[Voice]) -> Voice:
    """Combine the figures of several pages."""
    all_of_them = list(voices)
    return Voice(
        name,
        pages=len(all_of_them),
        words=sum(one.words for one in all_of_them),
        addresses=sum(one.addresses for one in all_of_them),
        table_rows=sum(one.table_rows for one in all_of_them),
        in_prose=sum(one.in_prose for one in all_of_them),
        sentences=tuple(sentence for one in all_of_them for sentence in one.sentences),
        callouts=sum(one.callouts for one in all_of_them),
        pictures=sum(one.pictures for one in all_of_them),
        diagrams=sum(one.diagrams for one in all_of_them),
    )


def pages() -> Iterator[tuple[str, Voice]]:
    """Return every measured page of the site with its tab."""
    for entry in site_map.entries():
        if not entry.name.startswith(LEFT_OUT):
            yield entry.tab, voice_of(entry.name, entry.path.read_text("utf-8"))


def tabs() -> list[Voice]:
    """Return the figures of each tab of the site, and of all tabs."""
    measured = list(pages())
    grouped = groupby(measured, key=lambda one: one[0])
    by_tab = [together(tab, [voice for _, voice in of_tab]) for tab, of_tab in grouped]
    return [*by_tab, together("**all**", [voice for _, voice in measured])]


def _paragraphs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs, list items and table rows of a page without markup, each with a flag for
    table rows.
    """
    text = _PICTURE.sub("", _BLOCK.sub("\n", text))
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", "", text, flags=re.DOTALL)
    text = _CODE.sub("`code`", _LINK_TARGET.sub("]", text)).replace("[", "").replace("]", "")
    text = re.sub(r"^(?:> ?)+(?:!\w+$)?", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) ?)", text):
        stripped = paragraph.strip()
        if stripped.startswith("|"):
            if re.search(r"\w", stripped):
                yield "row", stripped
        elif stripped and not stripped.startswith("#"):
            yield "text", re.sub(r"^(?:[-*]|\d+\.) ", "", stripped)


def _sentences(paragraphs: Iterable[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        parts = paragraph.split("|") if paragraph.startswith("|") else [paragraph]
        for part in parts:
            yield from (" ".join(one.split()) for one in _SENTENCE_END.split(part) if one.strip())


def _count(text: str) -> int:
    return len(re.findall(r"[A-Za-z0-9][\w'.,-]*", text))


def main() -> None:
    """Print the table, a row per page, or the long sentences."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    if wanted == "long":
        limit = int(sys.argv[2]) if len(sys.argv) > 2 else LONG
        for _, voice in pages():
            print("".join(f"{voice.name}: {one}\n" for one in voice.over(limit)), end="")
        return
    print(HEADING)
    for voice in (voice for _, voice in pages()) if wanted == "pages" else tabs():
        print(voice.row())


if __name__ == "__main__":
    main()
