"""The frame of the dashboard: help, errors, static files, probes."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from horsies.web.rendering import NAVIGATION
from tests.support.web_keyboard import WIDTHS, resize
from tests.support.web_server import Ask


def test_help_names_the_user_and_the_keys(ask: Ask) -> None:
    answer = ask("/help")
    assert answer.status_code == 200
    assert "anonymous" in answer.text
    assert "<kbd>g</kbd>" in answer.text


def test_an_unknown_page_is_404_with_a_sentence(ask: Ask) -> None:
    answer = ask("/nothing")
    assert answer.status_code == 404
    assert "There is no page /nothing." in answer.text


def test_an_unknown_api_route_is_a_problem_document(ask: Ask) -> None:
    answer = ask("/api/nothing")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == 404


@pytest.mark.browser
def test_the_help_page_opens_in_a_browser(page: Page) -> None:
    page.goto("/help")
    expect(page.get_by_role("heading", name="Help")).to_be_visible()


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, *WIDTHS])
def test_the_navigation_shows_the_links_of_all_pages(page: Page, width: int) -> None:
    resize(page, width)
    page.goto("/history")
    links = page.locator(".side a")
    assert links.count() > len(NAVIGATION)
    for link in links.all():
        box = link.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width, link.text_content()
