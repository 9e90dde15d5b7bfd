"""Turn the Markdown of the repository into pages of the site.

The pages are written to be read in the repository too. Links that leave ``docs/`` therefore lead to
the source of the repository on its server (``repo_url`` in mkdocs.yml), or become plain text as
long as the repository has no address; the change log and the rules for contributors become pages.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

REPOSITORY = Path(__file__).parents[2]
OUTSIDE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}

_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")
_NAMED_BLOCK = re.compile(r"^<!-- file: (\S+) -->\n```(\w+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that the repository keeps outside of docs/."""
    for name, source in OUTSIDE.items():
        text = (REPOSITORY / source).read_text("utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the text of a page with links and code blocks as the site needs them."""
    source = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    known = {f"docs/{name}" for name in files.src_uris}
    text = _NAMED_BLOCK.sub(r'```\2 title="\1"', markdown.replace("```python no-run", "```python"))
    return _LINK.sub(lambda found: _link(found, source, known, config.repo_url), text)


def _link(found: re.Match[str], source: str, known: set[str], repository_url: str | None) -> str:
    text, target = found.groups()
    path, _, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    path = {outside: f"docs/{name}" for name, outside in OUTSIDE.items()}.get(path, path)
    if path in known:
        shown_in = posixpath.dirname(source if source.startswith("docs/") else "docs/page.md")
        return f"[{text}]({posixpath.relpath(path, shown_in)}{'#' + anchor if anchor else ''})"
    if path.startswith("docs/"):
        return found[0]
    return f"[{text}]({repository_url}/blob/main/{path})" if repository_url else text


def on_post_build(config: Any) -> None:
    """Put the Markdown of every page beside it, for programs that read llms.txt."""
    for path in Path(config.docs_dir).rglob("*.md"):
        shutil.copy(path, Path(config.site_dir) / path.relative_to(config.docs_dir))
