"""The pages of the documentation in the order of the site, and `llms.txt`, which lists them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from tools.site.pages import OUTSIDE, first_sentence

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
SETTINGS = REPOSITORY / "mkdocs.yml"
LLMS = DOCS / "llms.txt"


@dataclass(frozen=True)
class Entry:
    """A page in the navigation: its tab, its group, its title and its file below docs/."""

    tab: str
    group: str
    title: str
    name: str

    @property
    def path(self) -> Path:
        return REPOSITORY / OUTSIDE[self.name] if self.name in OUTSIDE else DOCS / self.name


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without calling the Python functions that its settings may name."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
_Loader.add_constructor("!ENV", lambda *_: None)


def settings() -> dict[str, Any]:
    """Return the settings of the site."""
    found: dict[str, Any] = yaml.load(SETTINGS.read_text("utf-8"), _Loader)
    return found


def entries() -> list[Entry]:
    """Return every page of the navigation in order."""
    tabs = [item for tab in settings()["nav"] for item in tab.items()]
    return [Entry(tab, *leaf) for tab, below in tabs for leaf in _leaves(tab, below)]


def _leaves(group: str, nav: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for item in nav:
        for title, below in item.items():
            if isinstance(below, str):
                yield group, title, below
            else:
                yield from _leaves(title, below)


def _line(entry: Entry) -> str:
    sentence = first_sentence(entry.path.read_text("utf-8"))
    return f"- [{entry.title}]({entry.name}): {sentence}"


def llms_text() -> str:
    """Return the list of pages for programs that read the documentation."""
    shown = settings()
    lines = [f"# {shown['site_name']}", "", f"> {shown['site_description']}"]
    for tab, pages in groupby(entries(), lambda entry: entry.tab):
        lines += ["", f"## {tab}", ""]
        lines += [_line(entry) for entry in pages if entry.name not in OUTSIDE]
    return "\n".join(lines) + "\n"
