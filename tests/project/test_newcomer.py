"""The documentation answers the twenty questions of a newcomer, each at one known place."""

from __future__ import annotations

import re

import pytest

from tests.support import doc_pages, site_map
from tests.support.newcomer import QUESTIONS, Question


def test_there_are_twenty_different_questions() -> None:
    assert len({one.text for one in QUESTIONS}) == 20


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one.text)
def test_the_answer_is_where_it_should_be(question: Question) -> None:
    assert question.page in {entry.name for entry in site_map.entries()}
    text = doc_pages.page(question.page)
    assert question.anchor in doc_pages.anchors(text)
    answer = _below(text, question.anchor)
    assert [word for word in question.words if word not in answer] == []


def _below(text: str, anchor: str) -> str:
    """The section of an anchor, with the sections below it."""
    parts = re.split(r"^(#+) (.+)$", text, flags=re.MULTILINE)
    levels = list(zip(parts[1::3], parts[2::3], parts[3::3], strict=True))
    start = next(
        position
        for position, (_, heading, _) in enumerate(levels)
        if anchor in doc_pages.anchors(f"# {heading}")
    )
    found = levels[start][2]
    for level, heading, body in levels[start + 1 :]:
        if len(level) <= len(levels[start][0]):
            break
        found += heading + body
    return found
