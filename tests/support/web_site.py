"""A dashboard with two test pages instead of the product's pages, for tests of the page framework; and the
parts of a page's HTML: its elements, its visible text, the cells of a row.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any

from jinja2 import ChoiceLoader, DictLoader
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from horsies.config.postgres import PostgresConfig
from horsies.db.statement import Script
from horsies.web.access import VERBS, Access, AllowAll, Policy, Signer
from horsies.web.app import Dashboard, help_page
from horsies.web.reading import Reader, web_broker
from horsies.web.rendering import Handler, Page, Route, Settings, Site, View, environment

TEMPLATES = {
    "counter.html": """{% extends "base.html" %}
{% macro shown(number) %}sample {{ number }}{% endmacro %}
{% block main %}
<section data-region="count">{% block region_count %}<p>{{ shown(count) }}</p>{% endblock %}</section>
<section data-region="still">{% block region_still %}<p>still</p>
<form method="post" action="{{ url('/pause') }}">{{ csrf('pause_queue') }}<button>Pause</button></form>
{% endblock %}</section>{% endblock %}""",
}


def site_of(database_url: str = "postgresql://localhost/unused", **settings: Any) -> Site:
    """Return a site whose templates include this module's templates."""
    templates = environment().overlay(
        loader=ChoiceLoader([DictLoader(TEMPLATES), environment().loader or DictLoader({})])
    )
    broker = web_broker(PostgresConfig(database_url=database_url))
    return Site(broker, None, Settings(**settings), Signer("secret"), templates)


def view_of(site: Site, path: str = "/", query: str = "", client: str = "10.0.0.1") -> View:
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost")],
        "client": (client, 1),
        "path_params": {},
    }
    return View(site, Request(scope), Access("anna", VERBS))


class Counter:
    """A page that counts how often it was sampled."""

    def __init__(self, live_seconds: float | None = 0.01) -> None:
        self.samples = 0
        self.live_seconds = live_seconds

    async def __call__(self, view: View) -> Page:
        self.samples += 1
        return Page("counter.html", "Counter", {"count": self.samples}, self.live_seconds)


async def pause(view: View) -> Response:
    """Respond to a change with the fields of the form."""
    return view.redirect("/counter", notice="paused <b>mail</b>")


async def api_pause(view: View) -> Response:
    return PlainTextResponse("done")


def routes_of(counter: Handler) -> tuple[Route, ...]:
    return (
        Route("GET", "/counter", None, counter),
        Route("GET", "/help", None, help_page),
        Route("POST", "/pause", "pause_queue", pause),
        Route("POST", "/api/pause", "pause_queue", api_pause),
    )


class Blank(Reader):
    """A readable database without rows."""

    async def read(self, script: Script[Any]) -> Any:
        return []


def dashboard_of(policy: Policy | None = None, **settings: Any) -> Dashboard:
    """Return a dashboard of the test pages with these settings."""
    site = site_of(**settings)
    site.reader = Blank(site.broker)
    return Dashboard(site, policy or AllowAll("anna"), routes_of(Counter()))


class Elements(HTMLParser):
    """The addresses in a page, and its attributes that a strict policy forbids. The changes in `at_once`
    need one click: their forms are not behind another button.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.posts: set[str] = set()
        self.at_once: set[str] = set()
        self._details = 0
        self.forbidden: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        # The formaction of a button replaces the action of its form.
        is_post = found.get("method") == "post" or "formaction" in found
        self._details += tag == "details"
        if is_post and self._details == 0:
            self.at_once.add(found.get("formaction") or found.get("action") or "")
        for name, value in attrs:
            if name in ("href", "src", "action", "formaction", "data-live") and value:
                (self.posts if is_post else self.addresses).add(value)
            if name == "style" or name.startswith("on"):
                self.forbidden.append(f"<{tag} {name}>")
        if tag == "style" or (tag == "script" and not dict(attrs).get("src")):
            self.forbidden.append(f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        self._details -= tag == "details"


def plain(text: str) -> str:
    """Return the visible text of HTML, in one line."""
    text = re.sub(r"<(title|desc|style|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def cells(page: str, key: str) -> dict[str, str]:
    """Return the cells of the row with this key, by their labels."""
    found = re.search(rf'<tr data-key="{re.escape(key)}">(.*?)</tr>', page, re.DOTALL)
    assert found is not None, f"no row {key}"
    labelled = re.findall(r'<td data-label="([^"]*)"[^>]*>(.*?)</td>', found[1], re.DOTALL)
    return {label: plain(text) for label, text in labelled}
