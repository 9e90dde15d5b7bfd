"""The site: every page is in its navigation and in llms.txt, and its tools are pinned."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.drawings.chart import SYSTEMS, TABLE, chart, rates
from tools.drawings.pictures import PICTURES
from tools.drawings.recording import moving
from tools.drawings.sequence import CannotDraw, drawn
from tools.site.pages import first_sentence, with_callouts
from tools.site.search_words import WORDS

from tests.support import doc_pages, site_map
from tests.support.transitions import TASK_TRANSITIONS

IMAGES = site_map.DOCS / "images"
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
        sentence = first_sentence(text)
        assert re.match("[A-Z`](?!his (page|section) )", sentence), entry.name
        assert " " in sentence, entry.name


def test_the_title_of_a_page_contains_its_title_in_the_navigation() -> None:
    """The navigation and the search show one, the page and `horsies docs` the other."""
    titles = {
        entry: entry.path.read_text("utf-8").partition("\n")[0].replace("`", "").lower()
        for entry in site_map.entries()
    }
    different = [one.name for one, title in titles.items() if one.title.lower() not in title]
    assert different == ["index.md"]  # "Home"


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


def test_words_of_readers_lead_to_pages_that_exist_and_do_not_repeat_titles() -> None:
    titles = {entry.name: f"{entry.title} {entry.name}".lower() for entry in site_map.entries()}
    assert set(WORDS) <= set(titles)
    assert [word for name, words in WORDS.items() for word in words if word in titles[name]] == []


def test_the_tools_of_the_site_are_pinned() -> None:
    lines = [one for one in REQUIREMENTS.read_text("utf-8").splitlines() if one[:1] != "#"]
    assert [one for one in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", one)] == []
    assert any(one.startswith("mkdocs-material==") for one in lines)


@pytest.mark.parametrize("name", [*PICTURES, "benchmark"])
def test_a_drawing_is_up_to_date_and_has_a_title(name: str) -> None:
    drawing = {**PICTURES, "benchmark": chart}[name]().svg()
    assert (IMAGES / f"{name}.svg").read_text("utf-8") == drawing, "run `make docs`"
    root = ElementTree.fromstring(drawing)
    assert root.get("class") == "drawing"
    assert root.findtext("{*}title")


def test_the_chart_has_a_bar_for_every_system() -> None:
    assert set(rates(TABLE.read_text("utf-8"))) == set(SYSTEMS)


def test_every_drawing_is_shown_on_a_page() -> None:
    text = "".join(path.read_text("utf-8") for path in doc_pages.PAGES)
    assert [path.name for path in IMAGES.glob("*.svg") if f"images/{path.name}" not in text] == []


def test_the_drawing_of_the_state_machine_has_every_transition() -> None:
    root = ElementTree.fromstring(PICTURES["state-machine"]().svg())
    shown = Counter(one.text for one in root.findall("{*}text"))
    verbs = Counter(one.verb for one in TASK_TRANSITIONS for _ in one.from_statuses)
    assert {verb: shown[verb] for verb in verbs} == dict(verbs)
    assert {status for one in TASK_TRANSITIONS for status in one.from_statuses} <= set(shown)


def test_a_recording_is_an_image_with_every_line() -> None:
    root = ElementTree.fromstring(moving([(0.0, "$ horsies demo"), (0.5, "ok  a < b")]))
    assert [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")] == [
        "$ horsies demo",
        "ok  a < b",
    ]


def test_a_sequence_diagram_is_drawn_and_another_kind_is_refused() -> None:
    text = "sequenceDiagram\n participant a\n a->>b: hello\n Note over a,b: both\n b-->>a: bye\n"
    shown = [one.text for one in ElementTree.fromstring(drawn(text)).findall("{*}text")]
    assert [one for one in shown if one] == ["a", "b", "hello", "both", "bye"]
    with pytest.raises(CannotDraw, match=r"tools/drawings/pictures\.py"):
        drawn("flowchart TD\n a --> b")
    with pytest.raises(CannotDraw, match="loop"):
        drawn("sequenceDiagram\n loop forever")


def test_a_callout_of_the_repository_becomes_one_of_the_site() -> None:
    text = "Before.\n\n> [!WARNING]\n> Two\n> lines.\n\nAfter.\n"
    assert with_callouts(text) == "Before.\n\n!!! warning\n\n    Two\n    lines.\n\nAfter.\n"
