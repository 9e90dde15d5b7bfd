"""Identifiers: UUIDv7 by the book, in the order of time."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from horsies.ids import fixed_id, new_id, stored_form


def test_an_id_is_a_version_7_uuid_in_its_usual_form() -> None:
    for _ in range(1_000):
        text = new_id()
        parsed = uuid.UUID(text)
        assert str(parsed) == text
        assert parsed.version == 7
        assert parsed.variant == uuid.RFC_4122


def test_an_id_begins_with_the_milliseconds_of_its_making() -> None:
    before = time.time_ns() // 1_000_000
    made = uuid.UUID(new_id()).int >> 80
    assert before <= made <= time.time_ns() // 1_000_000


def test_an_id_of_a_later_millisecond_is_greater(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for timestamp in (1, 255, 256, 1_700_000_000_000, 1_700_000_000_001, (1 << 48) - 1):
        clock = SimpleNamespace(time_ns=lambda timestamp=timestamp: timestamp * 1_000_000)
        monkeypatch.setattr("horsies.ids.time", clock)
        made.append(new_id())
    assert made == sorted(made)
    assert {len(text) for text in made} == {36}


def test_ids_do_not_repeat_and_use_all_their_random_bits() -> None:
    made = [uuid.UUID(new_id()).int for _ in range(5_000)]
    assert len(set(made)) == len(made)
    varying = 0
    for number in made:
        varying |= number ^ made[0]
    random_bits = ((1 << 12) - 1) << 64 | (1 << 62) - 1
    assert varying & random_bits == random_bits


@pytest.mark.parametrize("text", ["", "x", None, 7, b"bytes", "0" * 31, "g" * 32])
def test_what_is_no_id_has_no_stored_form(text: object) -> None:
    assert stored_form(text) is None


def test_every_spelling_of_an_id_has_one_stored_form() -> None:
    text = new_id()
    for spelling in (text, text.upper(), text.replace("-", ""), f"{{{text}}}", f"urn:uuid:{text}"):
        assert stored_form(spelling) == text


def test_a_fixed_id_is_made_of_a_timestamp_and_a_text_and_nothing_else() -> None:
    timestamp = datetime(2026, 3, 29, 1, tzinfo=UTC)
    made = fixed_id(timestamp, "report")
    assert made == fixed_id(timestamp, "report") == "019d371a-da80-7845-9e91-831319e89c4d"
    parsed = uuid.UUID(made)
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert parsed.int >> 80 == int(timestamp.timestamp() * 1000)
    others = {fixed_id(timestamp, f"report {number}") for number in range(1_000)}
    assert len(others | {made}) == 1_001
    assert fixed_id(timestamp + timedelta(milliseconds=1), "a") > max(others)
