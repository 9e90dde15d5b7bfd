"""An animated SVG of `horsies demo`: the real output of one run, line by line, with long pauses
shortened. Readers who prefer reduced motion see the last frame.
"""

from __future__ import annotations

import subprocess
import sys
import time
from html import escape

from tools.drawings.canvas import MONO

COLUMNS = 88
ROWS = 26
CHARACTER = 8.4
LINE = 19
PAUSE_MAX = 1.1
LAST_FRAME = 4.0
TOP = 44


def record() -> str:
    """Run the demonstration and return its animated SVG."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "horsies", "demo"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines: list[tuple[float, str]] = [(0.0, "$ horsies demo")]
    before, shown_at = time.monotonic(), 0.6
    for line in process.stdout:
        now = time.monotonic()
        shown_at += min(now - before, PAUSE_MAX)
        before = now
        lines.append((shown_at, line.rstrip()[:COLUMNS]))
    if process.wait() != 0:
        raise SystemExit("The demonstration failed; nothing was recorded.")
    return moving(_without_the_end(lines))


def _without_the_end(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Leave out the hints at the end, which contain file names of this machine."""
    texts = [text for _, text in lines]
    return lines[: texts.index("Next")] if "Next" in texts else lines


def moving(lines: list[tuple[float, str]]) -> str:
    """Return an animated SVG of lines and the seconds at which they appear."""
    total = lines[-1][0] + LAST_FRAME
    width, height = round(COLUMNS * CHARACTER) + 40, TOP + ROWS * LINE + 16
    scrolled = [max(0, number + 1 - ROWS) for number in range(len(lines))]
    steps = "".join(
        f"{at / total:.2%}{{transform:translateY({-rows * LINE}px)}}"
        for (at, _), rows in zip(lines, scrolled, strict=True)
    )
    style = [
        f"text{{font:14px {MONO};fill:#e6e6e3;white-space:pre}}",
        ".prompt{fill:#e3a57f}.ok{fill:#6fcf97}.failed{fill:#ff8f85}.heading{font-weight:700}",
        f"@keyframes scroll{{0%{{transform:translateY(0)}}{steps}"
        f"100%{{transform:translateY({-scrolled[-1] * LINE}px)}}}}",
        f"#screen{{animation:scroll {total:.1f}s step-end infinite}}",
        "@media (prefers-reduced-motion:reduce){#screen,text{animation:none!important}"
        f"#screen{{transform:translateY({-scrolled[-1] * LINE}px)}}}}",
    ]
    texts = []
    for number, (at, text) in enumerate(lines):
        if not text:
            continue
        share = at / total
        style.append(
            f"@keyframes l{number}{{0%{{opacity:0}}{share:.2%}{{opacity:1}}100%{{opacity:1}}}}"
            f"#l{number}{{animation:l{number} {total:.1f}s step-end infinite}}"
        )
        texts.append(
            f'<text id="l{number}" x="20" y="{TOP + LINE * (number + 1) - 5}" '
            f'class="{_kind(text)}" xml:space="preserve">{escape(text)}</text>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="A recording of horsies demo">',
            "<title>A recording of horsies demo</title>",
            f"<style>{''.join(style)}</style>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#16171a"/>',
            *(
                f'<circle cx="{22 + 20 * place}" cy="20" r="6" fill="{colour}"/>'
                for place, colour in enumerate(("#ff8f85", "#e5bc5c", "#6fcf97"))
            ),
            f'<clipPath id="window"><rect x="0" y="{TOP - 6}" width="{width}" '
            f'height="{ROWS * LINE + 8}"/></clipPath>',
            '<g clip-path="url(#window)"><g id="screen">',
            *texts,
            "</g></g></svg>\n",
        ]
    )


def _kind(text: str) -> str:
    if text.startswith("$ "):
        return "prompt"
    if text.startswith(("ok ", "✓")):
        return "ok"
    if "WORKER_CRASHED" in text or "kill -9" in text:
        return "failed"
    is_heading = text[:1].isupper() and not text.startswith("PostgreSQL")
    return "heading" if is_heading else ""
