"""Names of databases on the command line, and the pure parts of a group of workers."""

from __future__ import annotations

import signal

import pytest

from horsies.cli.session import split_name
from horsies.cli.supervise import next_pause, worst
from horsies.database_url import database_name


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("shop.background:app", ("", "shop.background:app")),
        ("east=shop.background:app", ("east", "shop.background:app")),
        ("postgresql://db/shop?sslmode=require", ("", "postgresql://db/shop?sslmode=require")),
        ("west=postgresql://db/shop?a=b", ("west", "postgresql://db/shop?a=b")),
        ("embedded://", ("", "embedded://")),
    ],
)
def test_a_name_stands_before_a_locator_or_url(text: str, parts: tuple[str, str]) -> None:
    assert split_name(text) == parts


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://app:p%40ss@db1,db2:5433/shop?target_session_attrs=read-write", "shop"),
        ("postgresql:///my%20shop", "my shop"),
        ("postgresql://db", ""),
        ("embedded:///var/lib/shop", "shop"),
    ],
)
def test_the_name_of_a_database_comes_from_its_url(url: str, name: str) -> None:
    assert database_name(url) == name


def test_pauses_double_up_to_a_minute_and_begin_again_after_a_long_run() -> None:
    pauses, last = [], 0.0
    for _ in range(8):
        last = next_pause(last, 2.0)
        pauses.append(last)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert next_pause(60.0, 61.0) == 1.0


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, None], 0),
        ([0, 3], 3),
        ([3, 1], 1),
        ([0, -signal.SIGKILL], 1),
        ([0, -signal.SIGTERM], 0),
    ],
)
def test_a_group_ends_with_its_worst_exit_code(codes: list[int | None], code: int) -> None:
    assert worst(codes) == code
