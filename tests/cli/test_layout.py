"""Text and tables: wrapping, columns, wide characters and styles."""

from __future__ import annotations

import pytest

from horsies.cli.layout import Table, Text


def _lines(part: Text | Table, width: int) -> list[str]:
    return [line.plain.rstrip() for line in part.lines(width)]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("ten letter", ["ten letter"]),
        ("one two three four", ["one two", "three four"]),
        ("  indented text", ["  indented", "text"]),
        ("0123456789abcdef", ["0123456789", "abcdef"]),
        ("a 0123456789abcdef", ["a", "0123456789", "abcdef"]),
        ("0123456789abcdef and on", ["0123456789", "abcdef and", "on"]),
        ("first\nsecond line", ["first", "second", "line"]),
        ("\u8349\u8349\u8349\u8349\u8349\u8349", ["\u8349" * 5, "\u8349"]),  # two cells each
    ],
)
def test_text_breaks_between_words_and_inside_of_long_ones(text: str, lines: list[str]) -> None:
    assert _lines(Text(text), 10) == lines


def test_text_that_must_not_wrap_stays_in_one_line() -> None:
    command = "      horsies retry --order 7"
    assert _lines(Text(command, no_wrap=True), 10) == [command]


def test_the_flexible_column_takes_the_width_that_the_others_leave() -> None:
    table = Table(("left", "right", "fold"), ("ID", "AGE", "TASK"))
    table.add_row("1", "4m12s", "charge the card of an order")
    table.add_row("22", "3s", Text("mail").append("\npaused", "yellow"))
    assert _lines(table, 24) == [
        "ID    AGE  TASK",
        "1   4m12s  charge the",
        "           card of an",
        "           order",
        "22     3s  mail",
        "           paused",
    ]


def test_wide_characters_keep_the_columns_in_line() -> None:
    table = Table(("left", "left"))
    table.add_row("\u8349\u8349", "x")
    table.add_row("e\u0301abc", "y")
    assert _lines(table, 80) == ["\u8349\u8349  x", "e\u0301abc  y"]


def test_styles_survive_wrapping() -> None:
    text = Text("code: ", "bold red").append("a sentence", "dim").append(" end")
    assert [line.painted() for line in text.lines(9)] == [
        "\x1b[1;31mcode: \x1b[0m\x1b[2ma\x1b[0m",
        "\x1b[2msentence\x1b[0m",
        "end",
    ]
