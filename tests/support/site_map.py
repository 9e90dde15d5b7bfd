"""The pages of the documentation in the order of the site, and `llms.txt`, which lists them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
SETTINGS = REPOSITORY / "mkdocs.yml"
LLMS = DOCS / "llms.txt"
# The site makes these of files outside of docs/.
OUTSIDE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}

_NOT_PROSE = re.compile(r"<!--.*?-->|<picture>.*?</picture>|^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


@dataclass(frozen=True)
class Entry:
    """A page in the navigation: its tab, its title and its file below docs/."""

    tab: str
    title: str
    name: str

    @property
    def path(self) -> Path:
        return REPOSITORY / OUTSIDE[self.name] if self.name in OUTSIDE else DOCS / self.name


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose settings may name Python functions, without calling them."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def settings() -> dict[str, Any]:
    """Return the settings of the site."""
    found: dict[str, Any] = yaml.load(SETTINGS.read_text("utf-8"), _Loader)
    return found


def entries() -> list[Entry]:
    """Return every page of the navigation in order."""
    tabs = [item for tab in settings()["nav"] for item in tab.items()]
    found = [Entry(tab, title, name) for tab, below in tabs for title, name in _leaves(below)]
    return [entry for entry in found if entry.path.exists()]


def _leaves(nav: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for item in nav:
        for title, below in item.items():
            if isinstance(below, str):
                yield title, below
            else:
                yield from _leaves(below)


def first_sentence(text: str) -> str:
    """Return the first sentence of a page below its title."""
    plain = _LINK.sub(r"\1", _NOT_PROSE.sub("", text.split("\n", 1)[1])).strip()
    paragraph = " ".join(plain.split("\n\n", 1)[0].removeprefix("> ").split())
    return re.split(r"(?<=[.!?:])\s", paragraph, maxsplit=1)[0].rstrip(":.") + "."


def llms_text() -> str:
    """Return the list of pages for programs that read the documentation."""
    shown = settings()
    lines = [f"# {shown['site_name']}", "", f"> {shown['site_description']}"]
    tab = ""
    for entry in entries():
        if entry.name in OUTSIDE:
            continue
        if entry.tab != tab:
            tab = entry.tab
            lines += ["", f"## {tab}", ""]
        sentence = first_sentence(entry.path.read_text("utf-8"))
        lines.append(f"- [{entry.title}]({entry.name}): {sentence}")
    return "\n".join(lines) + "\n"
