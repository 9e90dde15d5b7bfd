"""The site: every page is in its navigation and in llms.txt, and its tools are pinned."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import doc_pages, site_map

REQUIREMENTS = site_map.REPOSITORY / "tools" / "site" / "requirements.txt"


def test_every_page_is_in_the_navigation_once() -> None:
    shown = [entry.path for entry in site_map.entries()]
    assert sorted(shown) == sorted(set(doc_pages.PAGES) - {site_map.REPOSITORY / "README.md"})


def test_llms_txt_lists_every_page_with_its_first_sentence() -> None:
    assert site_map.LLMS.read_text("utf-8") == site_map.llms_text(), "run `make docs`"


def test_a_page_begins_with_its_title_and_a_sentence() -> None:
    for entry in site_map.entries():
        text = entry.path.read_text("utf-8")
        assert re.match(r"# \S", text), entry.name
        sentence = site_map.first_sentence(text)
        assert re.match("[A-Z`]", sentence), entry.name
        assert " " in sentence, entry.name


def test_a_list_begins_after_a_blank_line() -> None:
    """The site joins a list that follows a line of text to that line; the repository does not."""
    joined = re.compile(r"^(?![-*|>#]|\d+\.|\s)\S.*\n(?:[-*]|\d+\.) .*", re.MULTILINE)
    found = {
        doc_pages.title(path): hits
        for path in doc_pages.PAGES
        if (hits := joined.findall(_without_blocks(path)))
    }
    assert found == {}


def _without_blocks(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_the_tools_of_the_site_are_pinned() -> None:
    lines = [one for one in REQUIREMENTS.read_text("utf-8").splitlines() if one[:1] != "#"]
    assert [one for one in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", one)] == []
    assert any(one.startswith("mkdocs-material==") for one in lines)
