"""The documentation speaks to its reader: short sentences, "you", and callouts for what hurts."""

from __future__ import annotations

from tests.support import voice


def test_no_sentence_of_the_documentation_is_too_long() -> None:
    found = {
        one.name: sentences
        for tab, one in voice.pages()
        if (sentences := one.over(voice.TOO_LONG if tab == voice.FOR_CONTRIBUTORS else voice.LONG))
    }
    assert found == {}, "make two sentences or a list of it"


def test_start_and_guides_address_the_reader_and_warn() -> None:
    tabs = {one.name: one for one in voice.tabs()}
    for name in ("Start", "Guides"):
        assert tabs[name].addresses_per_thousand >= voice.FLOOR, f"see `{voice.COMMAND} pages`"
        assert tabs[name].callouts > 0
        assert tabs[name].diagrams > 0


def test_every_page_of_start_and_guides_addresses_the_reader() -> None:
    found = {
        one.name: round(one.addresses_per_thousand, 1)
        for tab, one in voice.pages()
        if tab in ("Start", "Guides") and one.addresses_per_thousand < voice.FLOOR_OF_PAGE
    }
    assert found == {}, f"see `{voice.COMMAND} pages`"


def test_the_figures_leave_out_code_headings_and_generated_parts() -> None:
    text = """# You and your title

You send `a b c` to [your worker](workers.md). We wait.

> [!WARNING]
> Check your value.

- one item
- another item

```python
you = your
```

| Your | Table |
| --- | --- |
| a cell | for you |

<!-- begin: part -->
| you | your |
<!-- end: part -->

![A picture](images/life.svg)
"""
    found = voice.voice_of("page", text)
    assert found.words == 15
    assert found.addresses == 4
    assert found.table_rows == 2
    assert (found.callouts, found.pictures, found.diagrams) == (1, 0, 1)
    assert "You send `code` to your worker." in found.sentences
    assert found.over(6) == []


def test_a_long_sentence_is_found_in_a_list_and_in_a_table() -> None:
    words = " ".join(["word"] * 46)
    for text in (f"- {words}.", f"| a | {words} |", f"Short one. {words.capitalize()}."):
        (sentence,) = voice.voice_of("page", text).over(voice.TOO_LONG)
        assert sentence.lower().startswith("word word")
