"""Identifiers: UUIDv7 by the book, in the order of time."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from horsies.ids import _Sequence, fixed_id, new_id, stored_form

# Later than the clock of the machine that runs the tests.
_LATE = (1 << 48) - 1_000_000


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
    made, sequence = [], _Sequence()
    for timestamp in (1, 255, 256, 1_700_000_000_000, 1_700_000_000_001, (1 << 48) - 1):
        clock = SimpleNamespace(time_ns=lambda timestamp=timestamp: timestamp * 1_000_000)
        monkeypatch.setattr("horsies.ids.time", clock)
        made.append(sequence.next())
    assert made == sorted(made)
    assert {len(text) for text in made} == {36}


def test_ids_do_not_repeat_and_use_all_their_random_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(_LATE)
    monkeypatch.setattr(
        "horsies.ids.time", SimpleNamespace(time_ns=lambda: next(ticks) * 1_000_000)
    )
    made = [uuid.UUID(_Sequence().next()).int for _ in range(5_000)]
    assert len(set(made)) == len(made)
    varying = 0
    for number in made:
        varying |= number ^ made[0]
    # The first bit of the last 48 stays free for the ids that follow within the millisecond.
    random_bits = ((1 << 12) - 1) << 64 | (1 << 62) - 1 - (1 << 47)
    assert varying & random_bits == random_bits


def test_every_id_of_a_process_is_greater_than_the_one_before() -> None:
    made = [new_id() for _ in range(20_000)]
    assert made == sorted(set(made))


def test_ids_keep_their_order_when_the_clock_stops_or_steps_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequence, clock = _Sequence(), SimpleNamespace(time_ns=lambda: _LATE * 1_000_000)
    monkeypatch.setattr("horsies.ids.time", clock)
    made = [sequence.next()]
    clock.time_ns = lambda: (_LATE - 3_600_000) * 1_000_000
    # More ids than the 48 bits behind one millisecond have room for: the time in the id goes on.
    made += [sequence.next() for _ in range(300_000)]
    assert made == sorted(set(made))
    assert uuid.UUID(made[-1]).int >> 80 > _LATE


def test_threads_share_one_sequence_without_repeating_an_id() -> None:
    sequence = _Sequence()
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(lambda _: [sequence.next() for _ in range(2_000)], range(8)))
    made = [text for part in parts for text in part]
    assert len(set(made)) == len(made)
    assert all(part == sorted(part) for part in parts)


_FORK = """
import os, threading
from horsies import ids
ids.time = type("Clock", (), {"time_ns": staticmethod(lambda: 10**18)})
ids.new_id()
held = threading.Thread(target=ids._sequence._lock.acquire)
held.start(), held.join()  # as if the fork came while another thread makes an id
if os.fork() == 0:
    print(ids.new_id(), flush=True)
    os._exit(0)
os.wait()
ids._sequence._lock.release()
print(ids.new_id())
"""


def test_a_forked_process_has_a_sequence_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=60, check=True
    )
    child, parent = done.stdout.split()
    assert child[:13] == parent[:13]
    assert child[14:23] != parent[14:23]


@pytest.mark.parametrize("text", ["", "x", None, 7, b"bytes", "0" * 31, "g" * 32])
def test_what_is_no_id_has_no_stored_form(text: object) -> None:
    assert stored_form(text) is None


def test_every_spelling_of_an_id_has_one_stored_form() -> None:
    text = new_id()
    texts = [text, text.upper(), text.replace("-", ""), f"{{{text}}}", f"urn:uuid:{text}"]
    for spelling in (*texts, uuid.UUID(text)):
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
