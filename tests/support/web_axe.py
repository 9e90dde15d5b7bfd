"""An open page as axe and a ruler see it, in both themes and at all widths; needs `bypass_csp`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

from tests.support.web_keyboard import WIDTHS, resize

# All rules, those of the accessibility standards and those of usual practice; the results have violations
# alone, each with its first element.
AXE_RUN = """axe.run({resultTypes: ["violations"], elementRef: false}).then(found => found.violations
    .map(one => `${one.id}: ${one.nodes[0].html.slice(0, 120)}`))"""

# By how many pixels something is wider than the window, or than its card.
OVERFLOW = """Math.max(document.documentElement.scrollWidth - innerWidth,
    ...[...document.querySelectorAll(".card")].map(one => one.scrollWidth - one.clientWidth))"""

FOLDED = """() => [...document.querySelectorAll("details")].map(one => one.open)"""
FOLD = """states => document.querySelectorAll("details").forEach((one, place) => {
    one.open = states ? states[place] : true; })"""


def found_on(page: Page, widths: Sequence[int] = WIDTHS) -> dict[str, Any]:
    """Return what axe finds and what is too wide, as the page opens and with everything unfolded."""
    page.evaluate(AXE_SCRIPT)
    folded = page.evaluate(FOLDED)
    found = {}
    for theme, width in product(("light", "dark"), widths):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        resize(page, width)
        page.evaluate(FOLD, folded)
        overflows = [page.evaluate(OVERFLOW)]
        page.evaluate(FOLD)
        overflows.append(page.evaluate(OVERFLOW))
        violations = page.evaluate(AXE_RUN)
        if violations or max(overflows) > 0:
            found[f"{theme} {width}"] = (violations, *overflows)
    return found
