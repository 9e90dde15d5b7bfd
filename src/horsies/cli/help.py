"""Help texts that fit on one screen of 80 columns and 40 rows: examples first, one row per option.

A command declares its examples in its docstring, below ``Example:``. An option shows as many clauses of
its text as fit into one row; the documentation has all of them. rich's boxes would take a quarter of
the rows, and 40 ms to load.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo, TyperInfo

from horsies.cli.locator import read_locator_last
from horsies.cli.parsing import pass_plain_values

# The width of the widest option with its value; a wider option gets its own row.
_TERM_WIDTH_MAX = 28
_VALUE_NAMES = {"str": "TEXT", "int": "N", "float": "NUMBER", "file": "PATH", "directory": "PATH"}
_TYPE = re.compile(r"<([^>]*)>")
_DEFAULT = re.compile(r"default: ([^;\]]*)")
_DOUBLE = re.compile(r"^\[(\[.*\])\](\.\.\.)?$|^\{(\w+)\}$")
_CLAUSE = re.compile(r"(?<=[.;]) ")

Row = tuple[str, str]
Sections = dict[str, list[Row]]


class ScreenCommand(TyperCommand):
    """A command whose help text begins with its examples."""

    def make_parser(self, ctx: Any) -> Any:
        return read_locator_last(super().make_parser(ctx), self.get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        pass_plain_values(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # Typer puts brackets around the metavar of an optional argument, even if it already has
        # brackets.
        return [_DOUBLE.sub(r"\1\3", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        parameters = [one for one in self.get_params(ctx) if "--help" not in one.opts]
        rows = [row for one in parameters if (row := _row(one, ctx))]
        title = "Arguments and options, with [defaults]:"
        _write(self, ctx, formatter, {title: rows} if rows else {})


class ScreenGroup(TyperGroup):
    """A group whose help text begins with an example of each command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        pass_plain_values(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if self.epilog is None:
            firsts = ((one.epilog or "").splitlines()[:1] for one in self.commands.values())
            self.epilog = "\n".join(line for lines in firsts for line in lines)
        _write(self, ctx, formatter, self.sections())

    def sections(self) -> Sections:
        return {"Commands:": [(name, _summary(one)) for name, one in self.commands.items()]}


def describe(info: CommandInfo | TyperInfo) -> None:
    """Take a command's help text and examples from its function's docstring."""
    text, _, examples = (inspect.getdoc(info.callback) or "").partition("\n\nExample:\n")
    # Join the lines, because Typer keeps a docstring's line breaks, which look ragged on a narrower
    # terminal.
    info.help = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
    info.epilog = textwrap.dedent(examples)


def _write(command: Any, context: Any, formatter: Any, sections: Sections) -> None:
    width = formatter.width
    usage = f"Usage: {context.command_path} {' '.join(command.collect_usage_pieces(context))}"
    lines = [*(f"$ {line}" for line in (command.epilog or "").splitlines()), ""]
    lines += [*textwrap.wrap(usage, width), ""]
    for paragraph in (command.help or "").split("\n\n"):
        lines += textwrap.wrap(paragraph, width)
    terms = [term for rows in sections.values() for term, _ in rows]
    term_width = min(max(map(len, terms), default=0), _TERM_WIDTH_MAX)
    lines += [""] if sections else []
    for title, rows in sections.items():
        lines += [title, *_columns(rows, term_width, width)]
    formatter.write("".join(f"{line}\n" for line in lines))


def _columns(rows: list[Row], term_width: int, width: int) -> Iterator[str]:
    text_width = width - term_width - 4
    for term, text in rows:
        brief = textwrap.wrap(_brief(text, text_width), text_width) or [""]
        if len(term) > term_width:
            yield f"  {term}"
            term = ""
        for line in brief:
            yield f"  {term:{term_width}}  {line}".rstrip()
            term = ""


def _brief(text: str, width: int) -> str:
    """Drop the last clauses until the text fits into one row; keep the first clause and the default."""
    text, bracket, default = text.partition(" [")
    room = width - len(bracket + default)
    clauses = _CLAUSE.split(text)
    while len(clauses) > 1 and len(" ".join(clauses)) > room + 1:
        clauses.pop()
    return " ".join(clauses).rstrip(".;") + bracket + default


def _row(parameter: Any, context: Any) -> Row | None:
    """Shorten the metavar of an option, and drop every note except the default."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    term, text = record
    is_argument = parameter.param_type_name == "argument"
    term = _TYPE.sub("" if is_argument else lambda kind: _value_name(kind[1]), term)
    text, _, notes = text.partition("  [")
    default = _DEFAULT.search(notes)
    return term.strip(), f"{text} [{default[1]}]" if default else text


def _value_name(kind: str) -> str:
    kind = kind.removeprefix("list[").removesuffix("]")
    return kind if "|" in kind else _VALUE_NAMES.get(kind.removesuffix(" range"), kind.upper())


def _summary(command: Any) -> str:
    return (command.help or "").split("\n\n")[0].partition(". ")[0]
