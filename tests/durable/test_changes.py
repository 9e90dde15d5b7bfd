"""The table of the documentation: a run that was parked behind steps continues with changed code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from horsies import Durable, Horsies, TaskStatus, TaskTransaction
from horsies.testing import clock_of, run_pending
from tests.support.doc_pages import page, rows, section

DAY = timedelta(days=1)


def one() -> int:
    return 1


def two(number: int = 0) -> int:
    return 2


def three() -> int:
    return 3


def text() -> str:
    return "two"


def before(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.step(two)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def added_after(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.step(two)
    ctx.sleep(DAY)
    return total + ctx.with_options(name="new").step(one) + ctx.step(three)


def added_before(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.with_options(name="new").step(one) + ctx.step(two)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def added_before_guarded(ctx: Durable) -> int:
    total = ctx.step(one)
    if ctx.patched("new"):
        total += ctx.with_options(name="new").step(one)
    total += ctx.step(two)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def removed(ctx: Durable) -> int:
    total = ctx.step(one)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def removed_at_the_end(ctx: Durable) -> int:
    total = ctx.step(one)
    ctx.sleep(DAY)
    return total


def renamed(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.with_options(name="zwei").step(two)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def reordered(ctx: Durable) -> int:
    total = ctx.step(two)
    ctx.sleep(DAY)
    return total + ctx.step(one) + ctx.step(three)


def other_arguments(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.step(two, 9)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def other_annotation(ctx: Durable) -> int:
    ctx.step(one)
    return len(ctx.with_options(name="two").step(text))


def in_transaction(tx: TaskTransaction) -> int:
    return 2


def now_a_transaction(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.with_options(name="two").tx_step(in_transaction)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def side_by_side(ctx: Durable) -> int:
    total = sum(ctx.gather(ctx.call(two), ctx.call(one)))
    ctx.sleep(DAY)
    return total + ctx.step(three)


def other_wait(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.step(two)
    ctx.sleep(100 * DAY)
    return total + ctx.step(three)


def with_a_default(ctx: Durable, more: int = 10) -> int:
    return before(ctx) + more


def without_a_default(ctx: Durable, more: int) -> int:
    return before(ctx) + more


HELD = "is held"
WAITS = "waits"
CHANGES: dict[str, tuple[Callable[..., int], Any]] = {
    "a step added after the wait": (added_after, 7),
    "a step added before the wait": (added_before, HELD),
    "a step added before the wait, behind `ctx.patched`": (added_before_guarded, 6),
    "a recorded step removed": (removed, HELD),
    "a recorded step removed, without a new step after it": (removed_at_the_end, 1),
    "a recorded step renamed": (renamed, HELD),
    "recorded steps in another order": (reordered, 6),
    "recorded steps that now run in `ctx.gather`": (side_by_side, 6),
    "a recorded step that is now a `tx_step`": (now_a_transaction, HELD),
    "a step with other arguments": (other_arguments, 6),
    "a step whose recorded value does not fit its new annotation": (
        other_annotation,
        "RESULT_DESERIALIZATION_ERROR",
    ),
    "a longer or shorter wait": (other_wait, 6),
    "a parameter of the function added, with a default": (with_a_default, 16),
    "a parameter of the function added, without a default": (
        without_a_default,
        WAITS,
    ),
}


def test_the_documentation_lists_these_changes() -> None:
    listed = rows(section(page("durable-functions.md"), "When the code changes"))
    assert [cells[0] for cells in listed] == list(CHANGES)
    for change, held in listed:
        _, end = CHANGES[change]
        assert held.startswith(HELD) == (end == HELD), change
        assert end in held if isinstance(end, str) else "continues" in held or "ends" in held


@contextmanager
def release(app: Horsies, function: Callable[..., int]) -> Iterator[Horsies]:
    """A release of the application, on the same database."""
    made = Horsies(app.config)
    made.durable("changing")(function)
    yield made
    made.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_meets_changed_code_as_documented(
    app: Horsies, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed, end = CHANGES[change]
    with release(app, before) as former, release(app, changed) as latter:
        sent = former.send_by_name("changing").unwrap()
        run_pending(former)
        clock_of(former).advance(2 * DAY)
        with caplog.at_level(logging.WARNING, "horsies.child"):
            run_pending(latter)
        if end == HELD:
            info = latter.durable_handle(sent.task_id).info().unwrap()
            assert "DURABLE_MISMATCH" in (info.problem or "")
            assert info.status is TaskStatus.PENDING
            former.durable_handle(sent.task_id).resume().unwrap()
            run_pending(former)
            assert sent.get(timeout_ms=0).ok_value == 6
        elif end == WAITS:
            assert latter.durable_handle(sent.task_id).info().unwrap().problem is None
            run_pending(former)
            assert sent.get(timeout_ms=0).ok_value == 6
        elif isinstance(end, str):
            assert sent.get(timeout_ms=0).err_value.error_code == end
        else:
            assert sent.get(timeout_ms=0).ok_value == end
    is_warned = "without asking for its recorded step 'two'" in caplog.text
    assert is_warned == (change == "a recorded step removed, without a new step after it")
