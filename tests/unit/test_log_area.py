"""The lines of an attempt in shared memory: the first and the last of them, within the limits."""

from __future__ import annotations

import mmap
import os
import random

import pytest

from horsies.captured_log import CapturedLog, LogLimits
from horsies.worker.log_area import LogArea, area_bytes


def area(max_bytes: int = 1_024, max_lines: int = 100) -> LogArea:
    limits = LogLimits(max_bytes, max_lines)
    made = LogArea(mmap.mmap(-1, area_bytes(limits)), 0, limits)
    made.begin(7)
    return made


def test_few_lines_are_kept_as_they_are() -> None:
    lines = area()
    assert lines.take() is None
    lines.write("first")
    lines.write("second\n    of two")
    assert lines.take() == CapturedLog("first\nsecond\n    of two\n", 0, 3)


@pytest.mark.parametrize(("max_bytes", "max_lines"), [(1_024, 100_000), (65_536, 10), (1_025, 11)])
def test_the_first_and_the_last_lines_are_kept_and_the_others_counted(
    max_bytes: int, max_lines: int
) -> None:
    generator = random.Random(max_lines)
    lines = area(max_bytes, max_lines)
    written = [f"{number} " + "x" * generator.randrange(40) for number in range(1_000)]
    for line in written:
        lines.write(line)
    found = lines.take()
    assert found is not None
    kept = found.body.splitlines()
    assert len(found.body) <= max_bytes
    assert len(kept) <= max_lines
    assert found.dropped == len(written) - len(kept)
    assert kept[: found.cut_after] == written[: found.cut_after]
    assert kept[found.cut_after :] == written[found.cut_after - len(kept) :]


def test_a_long_line_is_cut_between_characters() -> None:
    lines = area()
    lines.write("é" * 2_000)
    lines.write("after")
    found = lines.take()
    assert found is not None
    first, second = found.body.splitlines()
    assert first.removesuffix(" [...]") == "é" * first.count("é")
    assert second == "after"


def test_what_cannot_be_stored_is_replaced() -> None:
    lines = area()
    lines.write("zero \0, half \ud800")
    found = lines.take()
    assert found is not None
    assert found.body == "zero ?, half \\ud800\n"


def test_lines_belong_to_the_attempt_that_began_last() -> None:
    lines = area()
    lines.write("of the first")
    lines.begin(8)
    assert lines.read(7) is None
    assert lines.read(8) is None
    lines.write("of the second")
    assert lines.read(7) is None
    assert lines.read(8) == CapturedLog("of the second\n", 0, 1)


def test_a_task_that_writes_to_the_memory_harms_no_reader() -> None:
    limits = LogLimits(1_024, 100)
    memory = mmap.mmap(-1, area_bytes(limits))
    reader = LogArea(memory, 0, limits)
    for _ in range(2_000):
        memory[:] = os.urandom(len(memory))
        token = int.from_bytes(memory[:8], "little")
        found = reader.read(token)
        if found is not None:
            assert len(found.body.encode()) <= 3 * 1_024
            assert "\0" not in found.body
            assert CapturedLog.checked([*found]) == found


@pytest.mark.parametrize(
    "sent", [None, [], ["a", 1], ["a", -1, 0], ["a", 0, 2**31], [1, 0, 0], ["x" * 3_000_000, 0, 0]]
)
def test_a_malformed_log_is_refused(sent: object) -> None:
    with pytest.raises(ValueError, match="not a log"):
        CapturedLog.checked(sent)
