"""Markdown of the repository as Markdown of the site: links, callouts, diagrams, the first sentence."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from tools.drawings.sequence import drawn

# The pages that the site creates from files outside docs/.
OUTSIDE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security-policy.md": "SECURITY.md",
}

_NOT_PROSE = re.compile(
    r"<!--.*?-->|<picture>.*?</picture>|^!\[[^\n]*$|^```.*?^```$|^#+ [^\n]*$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")
_ANY_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_NAMED_BLOCK = re.compile(r"^<!-- file: (\S+) -->\n```(\w+)$", re.MULTILINE)
# Remove the mark of a block that tells tests how to run it, as in `python with-setting`.
_MARKED_BLOCK = re.compile(r"^( *)```(python|sql) [a-z-]+$", re.MULTILINE)
_CALLOUT = re.compile(
    r"^> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\n((?:>.*(?:\n|\Z))+)", re.MULTILINE
)
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# The site's names for the callouts of the repository's server.
_KINDS = {
    "NOTE": "note",
    "TIP": "tip",
    "IMPORTANT": "info",
    "WARNING": "warning",
    "CAUTION": "danger",
}


def first_sentence(text: str) -> str:
    """Return the first sentence of a page below its title."""
    plain = _ANY_LINK.sub(r"\1", _NOT_PROSE.sub("", text.split("\n", 1)[1])).strip()
    paragraph = " ".join(plain.split("\n\n", 1)[0].removeprefix("> ").split())
    return re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0].rstrip(":.") + "."


def with_callouts(text: str) -> str:
    """Convert a page's callouts to callouts of the site's theme."""
    return _CALLOUT.sub(_callout, text)


def _callout(found: re.Match[str]) -> str:
    lines = [line.removeprefix(">").removeprefix(" ") for line in found[2].splitlines()]
    body = "\n".join(f"    {line}".rstrip() for line in lines)
    return f"!!! {_KINDS[found[1]]}\n\n{body}\n"


def with_blocks(text: str) -> str:
    """Add titles with file names to a page's blocks, and draw its sequence diagrams."""
    named = _NAMED_BLOCK.sub(r'```\2 title="\1"', _MARKED_BLOCK.sub(r"\1```\2", text))
    return _MERMAID.sub(lambda found: f'<div class="picture">\n{drawn(found[1])}</div>', named)


def path_of(source: str, target: str) -> str:
    """Return the path in the repository that a link of a page points to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def with_links(text: str, source: str, address: Callable[[str], str | None]) -> str:
    """Convert a page's links to the address of each path; a link to a path without an address becomes
    text.
    """

    def replaced(found: re.Match[str]) -> str:
        shown, target = found.groups()
        anchor = target.partition("#")[2]
        place = address(path_of(source, target))
        if place is None:
            return shown
        return f"[{shown}]({place}{'#' + anchor if anchor else ''})"

    return LINK.sub(replaced, text)
