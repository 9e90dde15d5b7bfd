"""Turns the Markdown of the repository into pages of the site. The pages must also be readable in the
repository, so links to files outside ``docs/`` lead to the source on the repository's server
(``HORSIES_REPOSITORY_URL``) or, if the repository has no address, to a copy on the site. The change log
and the rules for contributors become pages.
"""

from __future__ import annotations

import html
import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from tools.site.pages import (  # noqa: E402
    LINK,
    OUTSIDE,
    first_sentence,
    path_of,
    with_blocks,
    with_callouts,
    with_links,
)
from tools.site.search_words import WORDS  # noqa: E402

# The search weight of the pages of each tab, and of pages that differ from their tab.
BOOSTS = {"Start": 2.0, "Guides": 2.0, "Cookbook": 1.4, "Operate": 1.6, "Concepts": 1.0}
BOOST_OF_OTHERS = 0.4
BOOSTS_OF_FOLDERS = {"internals": 0.05, "api": 0.1}
BOOSTS_OF_PAGES = {
    "api.md": 0.1,
    "codes.md": 0.2,
    "schema.md": 0.3,
    "benchmarks.md": 0.3,
    "comparison.md": 0.8,
    "faq.md": 1.2,
    "words.md": 0.3,
    "changelog.md": 0.1,
    "contributing.md": 0.2,
}
COPIES = "source"

_CELL = re.compile(r"(<td\b[^>]*>)(.+?)(</td>)", re.DOTALL)
_IMAGE = re.compile(r'<img [^>]*src="([^"]*images/([\w-]+\.svg))"[^>]*>')


def on_config(config: Any) -> Any:
    """Show a link to the source of each page if the repository has an address."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/, and the source files to which pages link."""
    for name, source in OUTSIDE.items():
        if (REPOSITORY / source).exists():
            text = (REPOSITORY / source).read_text("utf-8")
            files.append(File.generated(config, name, content=text))
    if not config.repo_url:
        for path in sorted(_linked_sources()):
            content = (REPOSITORY / path).read_text("utf-8")
            files.append(File.generated(config, f"{COPIES}/{path}.txt", content=content))
    return files


def _linked_sources() -> set[str]:
    pages = [*(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / one for one in OUTSIDE.values())]
    found = {
        path_of(str(page.relative_to(REPOSITORY)), target)
        for page in pages
        if page.exists()
        for _, target in LINK.findall(page.read_text("utf-8"))
    }
    outside = {path for path in found if not path.startswith(("docs/", ".."))}
    return {path for path in outside if (REPOSITORY / path).is_file()} - set(OUTSIDE.values())


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the text of a page in the form for the site, and set the page's description."""
    name = page.file.src_uri
    tab = page.ancestors[-1].title if page.ancestors else ""
    page.meta.setdefault("description", _plain(first_sentence(markdown)))
    usual = BOOSTS_OF_FOLDERS.get(name.partition("/")[0], BOOSTS.get(tab, BOOST_OF_OTHERS))
    boost = BOOSTS_OF_PAGES.get(name, usual)
    page.meta.setdefault("search", {"boost": boost})
    page.meta.setdefault("tags", WORDS.get(name, []))
    source = OUTSIDE.get(name, f"docs/{name}")
    known = {f"docs/{one}" for one in files.src_uris}
    text = with_blocks(with_callouts(markdown))
    if config.repo_url:
        text = text.replace(". Replace `ADDRESS` with its address:", ":")
        text = text.replace("git clone ADDRESS", f"git clone {config.repo_url}")
    return with_links(text, source, lambda path: _address(path, name, known, config.repo_url))


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Make every table cell a paragraph. The search shows the paragraphs that contain a searched word; in
    text outside paragraphs, it leaves out the spaces around code.
    """
    return _CELL.sub(r"\1<p>\2</p>\3", content)


def _plain(sentence: str) -> str:
    return html.escape(sentence.replace("`", ""), quote=True)


def _address(path: str, page: str, known: set[str], repository_url: str | None) -> str | None:
    path = {outside: f"docs/{name}" for name, outside in OUTSIDE.items()}.get(path, path)
    if path.startswith("docs/"):
        return posixpath.relpath(path, posixpath.dirname(f"docs/{page}"))
    if repository_url:
        return f"{repository_url}/blob/main/{path}"
    copy = f"docs/{COPIES}/{path}.txt"
    return posixpath.relpath(copy, posixpath.dirname(f"docs/{page}")) if copy in known else None


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Embed the drawings in the page, so that they use its colours."""

    def drawing(found: re.Match[str]) -> str:
        text = (Path(config.docs_dir) / "images" / found[2]).read_text("utf-8")
        is_drawing = 'class="drawing"' in text
        return f'<span class="picture">{text}</span>' if is_drawing else found[0]

    return _IMAGE.sub(drawing, output)


def on_post_build(config: Any) -> None:
    """Write the Markdown of every page next to it, and all pages into one file, for programs that read
    them.
    """
    site, docs = Path(config.site_dir), Path(config.docs_dir)
    for path in docs.rglob("*.md"):
        shutil.copy(path, site / path.relative_to(docs))
    listed = (site / "llms.txt").read_text("utf-8")
    names = re.findall(r"\]\(([^)]+\.md)\)", listed)
    texts = [f"<!-- {name} -->\n\n{(docs / name).read_text('utf-8')}" for name in names]
    (site / "llms-full.txt").write_text("\n\n".join(texts), "utf-8")
    if config.site_url:
        absolute = re.sub(r"\]\(([^)]+\.md)\)", rf"]({config.site_url}\1)", listed)
        (site / "llms.txt").write_text(absolute, "utf-8")
