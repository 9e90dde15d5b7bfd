"""A dashboard with one page whose rows come from a file that the test changes: `python -m … FILE PORT`."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import uvicorn

from horsies.web.access import AllowAll
from horsies.web.app import Dashboard, help_page
from horsies.web.rendering import Page, Route, View
from tests.support.web_site import TEMPLATES, site_of

TEMPLATES["rows.html"] = """{% extends "base.html" %}{% block main %}
<section data-region="rows">{% block region_rows %}
<details><summary>More</summary><p>{{ count }} rows</p></details>
<p><label>Filter <input id="filter" name="filter"></label> <time datetime="{{ at }}">12:00:00</time></p>
{% if count > 3 %}
<p>More than three</p>
{% endif %}
<table class="table"><tbody>
{% for row in rows %}
<tr data-key="{{ row.key }}"><td><input type="checkbox" data-select aria-label="select"></td>
<td><a href="{{ url('/rows') }}?open={{ row.key }}">{{ row.key }}</a></td>
<td class="word">{{ row.word }}</td></tr>
{% endfor %}
</tbody></table>
{% endblock %}</section>
<section data-region="steady">{% block region_steady %}
<ul data-steady>{% for row in rows %}
<li data-key="{{ row.key }}">{{ row.key }} {{ row.word }}</li>{% endfor %}</ul>
{% endblock %}</section>
<p data-selected-count>0</p>
{% endblock %}"""


async def rows_page(view: View) -> Page:
    rows = json.loads(Path(sys.argv[1]).read_text("utf-8"))  # noqa: ASYNC240
    at = datetime(2026, 1, 31, 12, tzinfo=UTC).isoformat()
    context = {"rows": rows, "count": len(rows), "at": at}
    return Page("rows.html", "Rows", context, live_seconds=0.05)


def main() -> None:
    site = site_of(is_standalone=True)
    routes = (Route("GET", "/rows", None, rows_page), Route("GET", "/help", None, help_page))
    dashboard = Dashboard(site, AllowAll(), routes)
    port = int(sys.argv[2])
    uvicorn.run(dashboard, port=port, log_level="warning", timeout_graceful_shutdown=3)


if __name__ == "__main__":
    main()
