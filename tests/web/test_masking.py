"""Stored text to show: every symbol survives, secrets never show, searches see only visible values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horsies.monitor.arguments import MASKED, ArgumentProblem, parse_argument
from horsies.web.masking import (
    MASK,
    Masking,
    visible,
)

MASKING = Masking()
SECRET = "5ecret-va1ue"

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10)
)
keys = st.text(max_size=8).filter(lambda key: not MASKING.hides(key))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
secret_keys = st.sampled_from(
    ["password", "apiToken", "Authorization", "card_number", "p\u0061ss", "api_key", "IBAN"]
)


@given(values, st.booleans(), st.sampled_from([None, 1, 4]))
def test_shown_text_has_the_tokens_of_the_stored_text(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    stored = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    shown = MASKING.shown(stored, limit=None)
    assert shown.is_json
    if visible(stored) == stored and "://" not in stored:
        assert json.loads(shown.text) == value
        assert "".join(shown.text.split()) == "".join(stored.split())


@given(values, secret_keys, st.sampled_from([SECRET, [SECRET], {"a": {"b": SECRET}}]))
def test_the_value_of_a_secret_key_never_shows(value: Any, key: str, secret: Any) -> None:
    document = {"before": value, "list": [{"deep": {key: secret}}], "after": value}
    stored = json.dumps(document)
    assert SECRET not in MASKING.shown(stored).text
    assert f"{MASK} " in MASKING.shown(stored, limit=None).text
    assert SECRET not in json.dumps(MASKING.value(document))
    for wanted in (SECRET, SECRET[2:6]):
        assert not parse_argument(wanted, MASKING).matches(MASKING, "[]", stored)


@given(st.text(max_size=40), st.integers(0, 60))
def test_text_that_is_not_json_shows_no_secret_and_raises_nothing(text: str, place: int) -> None:
    stored = '{"password": "5ecret-va1ue", "list": [1, 2, {"a": "b"}]}'
    broken = stored[:place] + text + stored[place + 1 :]
    shown = MASKING.shown(broken)
    if '"password":' in broken:
        assert SECRET not in shown.text
    shown.text.encode()


def test_numbers_repeated_keys_and_escapes_stay_as_stored() -> None:
    stored = r'{"n":12345678901234567890.10,"n":1e400,"z":"\u0000 é \ud800","e":{},"l":[]}'
    assert MASKING.shown(stored).text.splitlines() == [
        "{",
        '  "n": 12345678901234567890.10,',
        '  "n": 1e400,',
        r'  "z": "\u0000 é \ud800",',
        '  "e": {},',
        '  "l": []',
        "}",
    ]


def test_a_masked_value_keeps_its_type() -> None:
    stored = r'{"p\u0061ssword":"x","token":[1],"card":{"n":1},"secret":null,"key":4,"keys":true}'
    shown = MASKING.shown(stored).text
    kinds = ["string", "list", "object", "null", "number"]
    assert [line.rsplit(" ", 1)[1].rstrip(",") for line in shown.splitlines()[1:6]] == kinds
    assert '"keys": true' in shown


def test_names_of_parameters_mask_positional_arguments() -> None:
    names = ("order", "card")
    assert MASKING.shown('[1,"4111",{"a":2}]', names=names).text.splitlines()[2] == (
        f"  {MASK} string,"
    )
    assert MASKING.value([1, "4111", 2], names) == [1, MASKED, 2]
    assert not parse_argument("4111", MASKING).matches(MASKING, '[1,"4111"]', "{}", names)
    assert parse_argument("order=1", MASKING).matches(MASKING, '[1,"4111"]', "{}", names)


def test_more_keys_can_be_masked() -> None:
    masking = Masking(["birth"])
    assert MASK in masking.shown('{"date_of_birth":"2000-01-01"}').text
    assert MASKING.shown('{"date_of_birth":"2000-01-01"}').text.count("2000") == 1
    patterns = Masking(["*_number"])
    assert [patterns.hides(key) for key in ("Phone_Number", "numbers", "number_x")] == [
        True,
        False,
        False,
    ]


def test_passwords_in_addresses_are_masked() -> None:
    stored = json.dumps({"dsn": "postgresql://app:s3cret@db/shop", "é": "see https://x/?a=1"})
    shown = MASKING.shown(stored).text
    assert "s3cret" not in shown
    assert "app:***@db/shop" in shown
    assert "https://x/?a=1" in shown
    assert not parse_argument("s3cret", MASKING).matches(MASKING, "[]", stored)


def test_large_text_is_cut_and_deep_text_stays_small() -> None:
    large = MASKING.shown(json.dumps(["x" * 1_000_000]))
    assert large.is_cut
    assert len(large.text) == 65_536
    deep = "[" * 100_000
    assert len(MASKING.shown(deep + "]" * 100_000).text) == 65_536
    assert not MASKING.shown("[" * 500).is_json
    assert MASKING.stored_value("[" * 400 + "]" * 400) == "[" * 400 + "]" * 400


def test_control_and_direction_characters_show() -> None:
    assert visible("a\x00b\x1b[31m\x7f\u202eevil\ud800\n\tend") == (
        "a␀b␛[31m␡⟨U+202E⟩evil⟨U+D800⟩\n\tend"
    )


@pytest.mark.parametrize(
    ("search", "kwargs", "is_found"),
    [
        ("order_id=17", {"order_id": 17}, True),
        ("order_id=17", {"order_id": 170}, False),
        ("order_id=17", {"order_id": "17x"}, False),
        ("order_id=17", {"order_id": "17"}, False),
        ("order_id=17", {"other": 17, "order_id": 1}, False),
        ('order_id="17"', {"order_id": "17"}, True),
        ('city="New York"', {"city": "New York"}, True),
        ("city = New York", {"city": "New York"}, True),
        ("city=New", {"city": "New York"}, False),
        ("address.city=Köln", {"to": [{"address": {"city": "Köln"}}]}, True),
        ("city=Köln", {"to": [{"address": {"city": "Köln"}}]}, True),
        ("city.address=Köln", {"to": [{"address": {"city": "Köln"}}]}, False),
        ("flag=1", {"flag": True}, False),
        ("flag=true", {"flag": True}, True),
        ("nothing=null", {"nothing": None}, True),
        ("ids=[1, 2]", {"ids": [1, 2]}, True),
        ("York", {"city": "New York"}, True),
        ("18", {"order_id": 2180}, True),
        ('say "hi"', {"text": 'I say "hi"'}, True),
        ("masked", {"password": "x"}, False),
    ],
)
def test_a_search_compares_values_and_its_needles_occur_in_the_text(
    search: str, kwargs: dict[str, Any], is_found: bool
) -> None:
    stored = json.dumps(kwargs, separators=(",", ":"), ensure_ascii=False)
    argument = parse_argument(search, MASKING)
    assert argument.matches(MASKING, "[]", stored) is is_found
    if is_found:
        assert all(needle in stored for needle in argument.needles)


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ("", "argument must be a text"),
        ("a\x00b", "argument must be a text"),
        ("a\ud800b", "argument must be a text"),
        ("card=4111", "'card' is masked"),
        ("card.number=4111", "'card' is masked"),
    ],
)
def test_searches_that_are_refused(search: str, problem: str) -> None:
    with pytest.raises(ArgumentProblem, match=problem):
        parse_argument(search, MASKING)


def test_arguments_that_are_not_json_are_never_found() -> None:
    assert not parse_argument("word", MASKING).matches(MASKING, "[]", "not json: word")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("2026-11-18T06:00:00.123Z INFO shop.auth: user 7 passed", None),
        ("2026-11-18T06:00:00.123Z INFO shop: token=abc, order=17", "token=•••, order=17"),
        ('got {"card": "4111", "order": 17}', '"card": •••, "order": 17}'),
        ("headers Authorization: Bearer abc.def next", "Authorization: ••• next"),
        ("payload {'card': {'number': 4111}}", "'card': •••"),
        ("api_key = 'a b c' and more", "api_key = ••• and more"),
        ("password: x\x1b[2J", "password: •••"),
        ("connected to postgresql://u:hunter2@db", "postgresql://u:***@db"),
    ],
)
def test_the_values_after_secret_keys_are_masked_in_log_lines(line: str, shown: str | None) -> None:
    (masked,) = MASKING.log_lines([line])
    assert masked == line if shown is None else masked.endswith(shown)
