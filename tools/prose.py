"""Lint the language of docstrings, comments, SQL comments, documentation, logs and help.

`python -m tools.prose` prints the share of sentences that describe a thing by a free relative clause
("what is left", "whoever asks") instead of a noun, and fails above the limit. It also fails when a
log line, an error message or a help text uses a retired word, and when a page of the documentation or a
module of the folders in `CLEAN` has one of the `HABITS`, which it prints with the plain wording. In other
folders habits are only counted. `-v` lists every hit; `-v PREFIX` those in files whose path starts with
PREFIX, such as `src/horsies/db`. `--draw N SEED` prints N texts at random, to be rated by readers.
"""

from __future__ import annotations

import ast
import io
import random
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
# Metaphors that operators cannot search for; docs/internals/glossary.md has the replacements.
RETIRED = re.compile(
    r"\b(goodbye|farewell|dead hands|deaf|ear|hears?|heard|hearing|bury|buried|told|settle[ds]?|settlement"
    r"|desk|roster|strays?|steer(ed|ing)?|survey|portrait|whoever|nobody|somebody|anybody|papers"
    r"|is no (?!longer\b)[a-z]+|are no [a-z]+ of)\b",
    re.IGNORECASE,
)
_THING = r"(?:(?:the|a|an|its|their|each|all|one|this|that|those|your|every|another) )?[\w'-]+"
# Wordings that sound translated, each with its replacement.
HABITS = {
    rf"\bof {_THING} of {_THING} of\b": "fewer nouns joined by 'of'",
    r"\bfor ever\b": "forever, indefinitely",
    r"\bsigns? of life\b": "heartbeat",
    r"\bso (?:many|long|often)\b(?= \w+ (?:ago|times|later)| after| before|$)": "this many, n times",
    r"\bas many\b(?!.* as\b)": "the same number of",
    r"\bcondemn\w*": "declare lost",
    r"\bof (?:yours|ours|theirs|mine)\b": "your, our, their",
    r"\b(?:an? (?:[\w-]+ )?[\w-]+|[\w-]+s) of (?:its|their|your|our) own\b"
    r"(?! (?!for|in|and|or|with|to|that|on|if|at|by|is|it)[a-z])": "its own, before the noun",
    r", also (?:after|if|when|while|in|with|without|from|for|on|under|where|by|of|those|to|at)\b": (
        "even, including"
    ),
    r"\b(?:a|async) twins?\b|\btwins? of\b": "async version",
    r"\b(?:a|one|each|every|next|last|two|this|another) looks?\b(?!-| like)": (
        "a query, a poll, a check"
    ),
    r"\btells whether\b|(?-i:^Tell whether\b)": "shows whether, return whether",
    r"\b(?:ends?|stops?|stopped|ended|closed|exits?) in order\b": "shuts down cleanly",
    r"\bby hand\b": "manually, manual",
    r"\bfor good\b": "permanently, finally",
    r"\bonce more\b(?! \w+ arrive)|\banew\b": "again",
    r"\b(?:go|goes|going) on\b(?! (?:top|the))": "continue",
    r"\b(?:told|tells?) (?:\w+ ){0,2}apart\b": "distinguish",
    r"\blest\b|\bin vain\b": "so that, for nothing",
    r"\bat fault\b": "wrong, responsible",
}
_HABITS = {re.compile(pattern, re.IGNORECASE): plain for pattern, plain in HABITS.items()}
# Pages and folders in which a habit fails the check.
CLEAN = (
    *("docs/", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "src/horsies/"),
    *("tests/support/", "tools/", "benchmarks/"),
)
# Folders of Python outside the package whose docstrings and comments are checked too.
BESIDE = ("tests/support", "tools", "benchmarks")
# Generated from docstrings and messages of other folders.
GENERATED = ("docs/api.md", "docs/api/", "docs/doctor.md", "docs/explain.md")
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
# The bar separates the cells of a table row.
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\s*\|\s+")
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\bhttps?://\S+")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose and its position."""

    place: str
    text: str

    def sentences(self) -> Iterator[str]:
        plain = _CODE.sub("X", self.text)
        for sentence in _SENTENCE_END.split(plain):
            words = re.findall(r"[A-Za-z']+", sentence)
            if len(words) >= 3:
                yield " ".join(sentence.split())


def python_prose(path: Path) -> Iterator[Text]:
    """Yield the docstrings and comments of a module."""
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
    """Yield the comment blocks of an SQL file."""
    name = str(path.relative_to(REPOSITORY))
    block: list[str] = []
    for number, line in enumerate([*path.read_text("utf-8").splitlines(), ""], 1):
        comment = re.match(r"\s*--(?! ?name:) ?(.*)", line)
        if comment:
            block.append(comment[1])
        elif block:
            yield Text(f"{name}:{number - len(block)}", " ".join(block))
            block = []


def page_prose(path: Path) -> Iterator[Text]:
    """Yield the paragraphs, list items and table rows of a Markdown page, without its code blocks."""
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
            yield Text(f"{name}:{number}", paragraph)
        number += paragraph.count("\n")


def spoken(path: Path) -> Iterator[Text]:
    """Yield the log messages, error messages and help texts of a module."""
    tree = ast.parse(path.read_text("utf-8"))
    name = str(path.relative_to(REPOSITORY))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _speaks(node):
            yield from (Text(f"{name}:{line}", text) for line, text in _strings(node))
        if (
            path.parent.name == "cli"
            and isinstance(node, ast.FunctionDef)
            and not node.name.startswith("_")
        ):
            yield Text(f"{name}:{node.lineno}", ast.get_docstring(node) or "")


def _strings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Every string below a node and its line; a formatted string is one text, `…` where a value stands."""
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        yield node.lineno, "".join(map(str, parts))
        node = ast.Tuple(
            [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        )
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    for child in ast.iter_child_nodes(node):
        yield from _strings(child)


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


def all_prose() -> Iterator[Text]:
    """Yield the docstrings and comments of the package and its tools, and the pages of the
    documentation.
    """
    for folder in (SOURCE, *(REPOSITORY / name for name in BESIDE)):
        for path in sorted(folder.rglob("*.py")):
            yield from python_prose(path)
    for path in sorted(SOURCE.rglob("*.sql")):
        yield from sql_prose(path)
    for path in (*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))):
        yield from page_prose(path)


def habits_of(sentence: str) -> Iterator[str]:
    """Yield the replacements for the habits in a sentence."""
    return (plain for pattern, plain in _HABITS.items() if pattern.search(sentence))


def retired_words() -> list[str]:
    """Return the messages that use a retired word, with their places."""
    return [
        f"{text.place}: {text.text.strip()!r}"
        for path in sorted(SOURCE.rglob("*.py"))
        for text in spoken(path)
        if RETIRED.search(_CODE.sub("X", text.text))
    ]


def draw(count: int, seed: int) -> str:
    """Whole texts of at least four words at random, numbered and with their places: docstrings, comments,
    SQL, pages and messages.
    """
    messages = (text for path in sorted(SOURCE.rglob("*.py")) for text in spoken(path))
    texts = [
        f"{text.place}: {' '.join(text.text.split())}"
        for text in (*all_prose(), *messages)
        if len(re.findall(r"[A-Za-z']{2,}", text.text)) >= 4
    ]
    drawn = random.Random(seed).sample(texts, count)
    return "\n".join(f"{number}. {text}" for number, text in enumerate(drawn, 1))


def main() -> int:
    """Print the figures and return 1 when one is over its limit."""
    if sys.argv[1:2] == ["--draw"]:
        print(draw(int(sys.argv[2]), int(sys.argv[3])))
        return 0
    verbose = "-v" in sys.argv
    prefix = sys.argv[-1] if len(sys.argv) > 2 else ""
    sentences = [(text.place, one) for text in all_prose() for one in text.sentences()]
    relative = [
        f"{place}: {one}"
        for place, one in sentences
        if FREE_RELATIVE.search(one) and not one.endswith("?")
    ]
    habits = [f"{place}: {one} [{plain}]" for place, one in sentences for plain in habits_of(one)]
    wrong = [hit for hit in habits if hit.startswith(CLEAN) and not hit.startswith(GENERATED)]
    retired = retired_words()
    if verbose:
        print("\n".join(hit for hit in (*relative, *habits) if hit.startswith(prefix)))
    else:
        print("\n".join(f"habit: {line}" for line in wrong))
    print("\n".join(f"retired word: {line}" for line in retired))
    share = len(relative) / len(sentences)
    print(
        f"prose: {len(relative)} of {len(sentences)} sentences use a free relative clause ({share:.1%}, "
        f"at most {SHARE_MAX:.1%}); {len(retired)} messages use a retired word; {len(habits)} sentences "
        f"have a habit to drop, {len(wrong)} of them in pages and folders that had none"
    )
    return int(share > SHARE_MAX or bool(retired or wrong))


if __name__ == "__main__":
    sys.exit(main())
