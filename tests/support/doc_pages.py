"""Reads the documentation: its pages, code blocks, tables, links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horsies.tasks.broker import PostgresBroker

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(
            REPOSITORY / name
            for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
        ),
        *(REPOSITORY / "docs").rglob("*.md"),
    ]
)

# How tests run a marked block: with its own setting, as part of an example, as a file that a
# test creates and runs, or not at all, as code of another system that is only compiled.
MARKS = ("with-setting", "quoted", "as-file", "other-system")
_BLOCK = re.compile(r"(?:<!-- file: (\S+) -->\n)?^```(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
_LINK = re.compile(r"\[(`?)([^\]]+?)\1\]\(([^)\s]+)\)")
_ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its file, the text after the fence, and its contents."""

    file_name: str | None
    language: str
    text: str

    @property
    def is_python(self) -> bool:
        """Whether the block is Python."""
        return self.language.split()[:1] == ["python"]

    @property
    def is_run(self) -> bool:
        """Whether the block can be executed in the order of its page."""
        return self.language == "python"

    @property
    def mark(self) -> str:
        """The mark of a block that does not run in the order of its page: one of MARKS."""
        return self.language.partition(" ")[2]


@dataclass(frozen=True)
class Link:
    """A link: its text, its target, and whether its text is code."""

    is_code: bool
    text: str
    target: str


def page(name: str) -> str:
    """Return the text of a page below docs, or of the README."""
    path = REPOSITORY / name if name == "README.md" else REPOSITORY / "docs" / name
    return path.read_text("utf-8")


def title(path: Path) -> str:
    """Return the name of a page in test names."""
    return str(path.relative_to(REPOSITORY))


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [Block(name or None, language, body) for name, language, body in _BLOCK.findall(text)]


def files(text: str) -> dict[str, str]:
    """Return the files that a page asks its reader to create."""
    return {block.file_name: block.text for block in blocks(text) if block.file_name}


def links(text: str) -> list[Link]:
    """Return the links of a page, except those in code blocks."""
    return [Link(bool(mark), shown, to) for mark, shown, to in _LINK.findall(_BLOCK.sub("", text))]


def anchors(text: str) -> set[str]:
    """Return the anchors that a link may use: those of headings and of moved sections."""
    plain = _BLOCK.sub("", text)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in _HEADING.findall(plain)
    } | set(_ANCHOR.findall(plain))


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading of any level."""
    return re.split(r"^#+ ", text.split(f" {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of every table row, without headings and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if set(line) <= set("|- ") or (set(after) <= set("|- ") and after):
            continue
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def code_of(cell: str) -> str:
    """Return the text between the back quotes of a cell."""
    return cell.strip("`")


def documented(page_name: str, command: str) -> str:
    """Return the output below a command in a console block of the documentation."""
    found = re.search(
        rf"^\$ {re.escape(command)}\n((?:(?!\$ |```).*\n)*)", page(page_name), re.MULTILINE
    )
    assert found is not None, f"{page_name} does not show {command}"
    return found[1]


def plain(text: str) -> str:
    """Replace variable texts: durations, times of pauses, the version and addresses."""
    text = re.sub(r"horsies \d+\.\d+\.\d+\S*", "horsies VERSION", text)
    text = re.sub(r"postgresql://\S+", "URL", text)
    text = re.sub(r"since \d{4}-\d\d-\d\d [\d:.]+", "since TIME", text)
    return re.sub(r" {1,2}\d{1,2}s\b", " 1s", text).replace("\r\n", "\n")


def execute(name: str) -> dict[str, Any]:
    """Run the Python blocks of a page in order, as one module; return its names."""
    namespace: dict[str, Any] = {"__name__": name.removesuffix(".md")}
    for block in blocks(page(name)):
        if block.is_run:
            exec(compile(block.text, name, "exec", dont_inherit=True), namespace)
    return namespace


def run_page(name: str) -> dict[str, Any]:
    """Run the Python blocks of a page whose application needs its database."""
    namespace = execute(name)
    assert isinstance(namespace["app"].get_broker(), PostgresBroker)
    return namespace
