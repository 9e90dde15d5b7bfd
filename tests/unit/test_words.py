"""Durations, sizes and counts as words."""

from __future__ import annotations

import pytest

from horsies.words import age, counted, elapsed, lasting, megabytes, memory, size


@pytest.mark.parametrize(
    ("seconds", "in_a_table", "in_whole_seconds", "in_a_sentence"),
    [
        (-1, "0ms", "0s", "0.0 s"),
        (0.0004, "0.4ms", "0s", "0.0 s"),
        (0.24, "240ms", "0s", "0.2 s"),
        (1.44, "1.4s", "1s", "1 s"),
        (59.9, "59s", "59s", "59 s"),
        (60, "1m00s", "1m00s", "1 min"),
        (3_600, "1h00m", "1h00m", "1 h"),
        (3_660, "1h01m", "1h01m", "1 h 1 min"),
        (90_000, "1d01h", "1d01h", "1 d 1 h"),
        (7 * 86_400, "7d00h", "7d00h", "7 d"),
    ],
)
def test_a_duration_has_at_most_two_units(
    seconds: float, in_a_table: str, in_whole_seconds: str, in_a_sentence: str
) -> None:
    assert elapsed(seconds) == in_a_table
    assert age(seconds) == in_whole_seconds
    assert lasting(seconds) == in_a_sentence


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (12 * 1024, "12 KB"),
        (412 * 1024**2, "412 MB"),
        (1000 * 1024**2, "1.0 GB"),
        (1.3 * 1024**3, "1.3 GB"),
    ],
)
def test_a_size_has_one_unit(count: float, text: str) -> None:
    assert size(count) == text


def test_what_is_unknown_is_a_dash() -> None:
    assert (age(None), memory(None), memory(412)) == ("-", "-", "412 MB")


def test_megabytes_are_written_in_the_unit_of_the_settings() -> None:
    assert (megabytes(411.6), megabytes(1_340)) == ("412 MB", "1,340 MB")


def test_a_count_has_its_noun() -> None:
    assert (counted(1, "task"), counted(1_187, "task")) == ("1 task", "1,187 tasks")
