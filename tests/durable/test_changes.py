"""The table of the documentation: a run that was parked behind steps continues with changed code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from horsies import Durable, Horsies, TaskStatus
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


HELD = "is held"
CHANGES: dict[str, tuple[Callable[[Durable], int], Any]] = {
    "a step added after the wait": (added_after, 7),
    "a step added before the wait": (added_before, HELD),
    "a step added before the wait, behind `ctx.patched`": (added_before_guarded, 6),
    "a recorded step removed": (removed, HELD),
    "a recorded step removed, and no new step follows": (removed_at_the_end, 1),
    "a recorded step renamed": (renamed, HELD),
    "recorded steps in another order": (reordered, 6),
    "a step with other arguments": (other_arguments, 6),
    "a step whose recorded value does not fit its new annotation": (
        other_annotation,
        "RESULT_DESERIALIZATION_ERROR",
    ),
}


def test_the_documentation_lists_these_changes() -> None:
    listed = rows(section(page("durable-functions.md"), "When the code changes"))
    assert [cells[0] for cells in listed] == list(CHANGES)
    for change, held in listed:
        _, end = CHANGES[change]
        assert held.startswith(HELD) == (end == HELD), change
        assert end in held if isinstance(end, str) else "continues" in held or "ends" in held


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_meets_changed_code_as_documented(
    app: Horsies, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    code: list[Callable[[Durable], int]] = [before]

    @app.durable("changing")
    def changing(ctx: Durable) -> int:
        return code[0](ctx)

    sent = changing.enqueue()
    run_pending(app)
    code[0], end = CHANGES[change]
    clock_of(app).advance(2 * DAY)
    with caplog.at_level(logging.WARNING, "horsies.child"):
        run_pending(app)
    if end == HELD:
        info = app.durable_handle(sent.task_id).info().unwrap()
        assert "DURABLE_MISMATCH" in (info.problem or "")
        assert info.status is TaskStatus.PENDING
        code[0] = before
        app.durable_handle(sent.task_id).resume().unwrap()
        run_pending(app)
        assert sent.result(timeout_ms=0) == 6
    elif isinstance(end, str):
        assert sent.get(timeout_ms=0).err_value.error_code == end
    else:
        assert sent.result(timeout_ms=0) == end
    is_warned = "without asking for its recorded step 'two'" in caplog.text
    assert is_warned == (change == "a recorded step removed, and no new step follows")
