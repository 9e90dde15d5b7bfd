"""The reference of the Python API: every public name once, every member with a meaning."""

from __future__ import annotations

import re

import horsies
import horsies.testing
import horsies.web
from tests.support import api_page, doc_pages


def test_every_public_name_is_on_one_page() -> None:
    entries = [
        name
        for page in sorted(set(api_page.PAGES.values()))
        for name in re.findall(r"^### (\w+)$", doc_pages.page(f"api/{page}.md"), re.MULTILINE)
    ]
    modules = (horsies, horsies.testing, horsies.web)
    names = [name for module in modules for name in module.__all__ if name != "__version__"]
    assert sorted(entries) == sorted(
        [*names, "HorsiesBackend"]
    )  # of horsies.django, which needs Django


def test_every_public_name_field_value_and_method_has_a_meaning() -> None:
    assert api_page.without_meaning() == [], "write a docstring behind the field or in the method"


def test_inherited_members_are_listed() -> None:
    tasks = doc_pages.page("api/tasks.md")
    function = tasks.partition("### TaskFunction\n")[2].partition("\n### ")[0]
    assert "`send(*args: P.args, **kwargs: P.kwargs)" in function
    info = tasks.partition("### TaskInfo\n")[2].partition("\n### ")[0]
    assert "| `status` | [`TaskStatus`](outcomes.md#taskstatus) |" in info


def test_a_method_and_its_async_version_share_a_line() -> None:
    for page in set(api_page.PAGES.values()):
        lines = re.findall(r"^- `(\w+)\(.*$", doc_pages.page(f"api/{page}.md"), re.MULTILINE)
        assert [name for name in lines if name.endswith("_async") and name[:-6] in lines] == []


def test_a_link_to_a_name_of_the_old_single_page_still_works() -> None:
    anchors = doc_pages.anchors(doc_pages.page("api.md"))
    assert {name.lower() for name in horsies.__all__} - {"__version__"} <= anchors
