"""Lint the language of docstrings, comments, SQL comments, documentation, logs and help.

`python -m tools.prose` prints the share of sentences that describe a thing by a free relative clause
("what is left", "whoever asks") instead of a noun, and fails above the limit. It also fails when a
log line, an error message or a help text uses a retired word. `-v` lists every hit; `-v PREFIX`
those in files whose path starts with PREFIX, such as `src/horsies/db`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "horsies"
SHARE_MAX = 0.015

FREE_RELATIVE = re.compile(
    r"\b(what(ever)?|who(m|ever|mever)|(those|nobody|somebody|anybody|everybody|one|he|they) who"
    r"|(^|[,;:(]\s*|\b(?:and|or|but|of|to|for|by|with|from|than) )who)\b",
    re.IGNORECASE,
)
# Metaphors and personifications that operators cannot search for. See docs/internals/glossary.md.
RETIRED = re.compile(
    r"\b(goodbye|farewell|dead hands|deaf|ear|hears?|heard|hearing|bury|buried|told|settle[ds]?|settlement"
    r"|desk|roster|strays?|steer(ed|ing)?|survey|portrait|whoever|nobody|somebody|anybody|papers"
    r"|is no [a-z]+|are no [a-z]+ of)\b",
    re.IGNORECASE,
)
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n")
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\bhttps?://\S+")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose and its place."""

    place: str
    text: str

    def sentences(self) -> Iterator[str]:
        plain = _CODE.sub("X", self.text)
        for sentence in _SENTENCE_END.split(plain):
            words = re.findall(r"[A-Za-z']+", sentence)
            if len(words) >= 3:
                yield " ".join(sentence.split())


def python_prose(path: Path) -> Iterator[Text]:
    """Docstrings and comments of a module."""
    source = path.read_text("utf-8")
    name = str(path.relative_to(REPOSITORY))
    for node in ast.walk(ast.parse(source)):
        constant = node.value if isinstance(node, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            yield Text(f"{name}:{constant.lineno}", constant.value)
    yield from _comments(name, source)


def _comments(name: str, source: str) -> Iterator[Text]:
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# noqa", "# type:", "#!")):
            continue
        if block and token.start[0] != last + 1:
            yield Text(f"{name}:{first}", " ".join(block))
            block = []
        first = first if block else token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield Text(f"{name}:{first}", " ".join(block))


def sql_prose(path: Path) -> Iterator[Text]:
    """Comment blocks of an SQL file."""
    name = str(path.relative_to(REPOSITORY))
    block: list[str] = []
    for number, line in enumerate([*path.read_text("utf-8").splitlines(), ""], 1):
        comment = re.match(r"\s*-- ?(?!name:)(.*)", line)
        if comment:
            block.append(comment[1])
        elif block:
            yield Text(f"{name}:{number - len(block)}", " ".join(block))
            block = []


def page_prose(path: Path) -> Iterator[Text]:
    """Paragraphs, list items and table cells of a Markdown page, without its code blocks."""
    name = str(path.relative_to(REPOSITORY))
    text = re.sub(
        r"^```.*?^```",
        lambda m: "\n" * m[0].count("\n"),
        path.read_text("utf-8"),
        flags=re.M | re.S,
    )
    text = re.sub(r"\]\([^)]*\)", "]", text)
    number = 1
    for paragraph in re.split(r"(\n\s*\n|\n(?=[-|#] ?))", text):
        if paragraph.strip():
            cells = re.split(r"\s*\|\s*", paragraph) if paragraph.startswith("|") else [paragraph]
            for cell in cells:
                yield Text(f"{name}:{number}", cell)
        number += paragraph.count("\n")


def spoken(path: Path) -> Iterator[Text]:
    """Log messages, messages of raised errors, and help texts of commands."""
    tree = ast.parse(path.read_text("utf-8"))
    name = str(path.relative_to(REPOSITORY))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _speaks(node):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield Text(f"{name}:{part.lineno}", part.value)
        if (
            path.parent.name == "cli"
            and isinstance(node, ast.FunctionDef)
            and not node.name.startswith("_")
        ):
            yield Text(f"{name}:{node.lineno}", ast.get_docstring(node) or "")


def _speaks(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute):
        owner = function.value
        is_logger = isinstance(owner, ast.Name) and owner.id == "logger"
        return (is_logger and function.attr in LOG_METHODS) or function.attr in {
            "Option",
            "Argument",
        }
    return isinstance(function, ast.Name) and function.id.endswith("Error")


def main() -> int:
    """Print the figures and return 1 when one is over its limit."""
    verbose = "-v" in sys.argv
    prefix = sys.argv[-1] if len(sys.argv) > 2 else ""
    modules = sorted(SOURCE.rglob("*.py"))
    texts = [text for path in modules for text in python_prose(path)]
    texts += [text for path in sorted(SOURCE.rglob("*.sql")) for text in sql_prose(path)]
    pages = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
    texts += [text for path in pages for text in page_prose(path)]
    total, hits = 0, []
    for text in texts:
        for sentence in text.sentences():
            total += 1
            if FREE_RELATIVE.search(sentence) and not sentence.endswith("?"):
                hits.append(f"{text.place}: {sentence}")
    retired = [
        f"{text.place}: {text.text.strip()!r}"
        for path in modules
        for text in spoken(path)
        if RETIRED.search(_CODE.sub("X", text.text))
    ]
    if verbose:
        print("\n".join(hit for hit in hits if hit.startswith(prefix)))
    print("\n".join(f"retired word: {line}" for line in retired))
    share = len(hits) / total
    print(
        f"prose: {len(hits)} of {total} sentences use a free relative clause "
        f"({share:.1%}, at most {SHARE_MAX:.1%}); {len(retired)} messages use a retired word"
    )
    return int(share > SHARE_MAX or bool(retired))


if __name__ == "__main__":
    sys.exit(main())
