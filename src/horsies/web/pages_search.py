"""`/search`: finds tasks, runs, queues, schedules and errors by a text in their name, key, id or
message.
"""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import RedirectResponse, Response

from horsies.monitor.arguments import ArgumentProblem, parse_argument
from horsies.monitor.search import Match, argument_match, search_script
from horsies.web.answers import answer_document
from horsies.web.filters import refuse_unknown, text_of
from horsies.web.reading import BadRequest
from horsies.web.rendering import Page, Route, View

TEXT_MAX = 200


def _asked(view: View) -> str:
    refuse_unknown(view, {"q"})
    asked = (text_of(view, "q") or "").strip()
    if len(asked) > TEXT_MAX:
        raise BadRequest(f"The text is longer than {TEXT_MAX} characters.")
    return asked


async def search(view: View) -> Page | Response:
    """List the matches; redirect to the page of a single match."""
    asked = _asked(view)
    found = await view.read(search_script(asked)) if asked else []
    if len(found) == 1:
        return RedirectResponse(view.url(found[0].path), 303)
    context = {"asked": asked, "matches": found}
    return Page("search.html", "Search", context, live_seconds=None)


async def search_api(view: View) -> Response:
    """Return the matches as JSON; without a match, suggest only a search of arguments."""
    asked = _asked(view)
    found = await view.read(search_script(asked)) if asked else []
    shown = found or _in_arguments(view, asked)
    return answer_document({"q": asked, "matches": [asdict(one) for one in shown]})


def _in_arguments(view: View, asked: str) -> list[Match]:
    """Suggest a search of arguments if the viewer may make one."""
    if not view.access.sees_payload:
        return []
    try:
        parse_argument(asked, view.site.masking)
    except ArgumentProblem:
        return []
    return [argument_match(asked)]


ROUTES = (Route("GET", "/search", None, search), Route("GET", "/api/search", None, search_api))
