"""The table of the documentation: a run that was parked behind steps continues with changed code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import NamedTuple

import pytest

from horsies import Durable, Horsies, TaskFunction, TaskStatus, TaskTransaction
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


def text_length() -> int:
    return len(text())


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


def removed_guarded(ctx: Durable) -> int:
    total = ctx.step(one)
    if not ctx.patched("without two"):
        total += ctx.step(two)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def renamed_with_its_old_name(ctx: Durable) -> int:
    total = ctx.step(one) + ctx.with_options(name="two").step(text_length)
    ctx.sleep(DAY)
    return total + ctx.step(three)


def with_a_default(ctx: Durable, more: int = 10) -> int:
    return before(ctx) + more


def with_more(ctx: Durable, more: int) -> int:
    return before(ctx) + more


def with_others(ctx: Durable, others: int) -> int:
    return before(ctx) + others


def with_a_fraction(ctx: Durable, more: float) -> int:
    return before(ctx) + int(more)


def with_a_text(ctx: Durable, more: str) -> int:
    return before(ctx) + len(more)


HELD = "is held"
WAITS = "waits"


class Change(NamedTuple):
    """The code of two releases, and how a run ends that the former one has started."""

    latter: Callable[..., int]
    end: int | str
    former: Callable[..., int] = before
    args: tuple[int, ...] = ()
    kwargs: Mapping[str, int] = MappingProxyType({})


CHANGES: dict[str, Change] = {
    "a step added after the wait": Change(added_after, 7),
    "a step added before the wait": Change(added_before, HELD),
    "a step added before the wait, behind `ctx.patched`": Change(added_before_guarded, 6),
    "a `ctx.patched` removed, with its new code kept": Change(
        added_before, 7, added_before_guarded
    ),
    "a `ctx.patched` removed, with its new code": Change(before, HELD, added_before_guarded),
    "a recorded step removed": Change(removed, HELD),
    "a recorded step removed, without a new step after it": Change(removed_at_the_end, 1),
    "a recorded step removed, behind `ctx.patched`": Change(removed_guarded, 6),
    "a recorded step renamed": Change(renamed, HELD),
    "another function in a step, under the old name": Change(renamed_with_its_old_name, 6),
    "recorded steps in another order": Change(reordered, 6),
    "recorded steps that now run in `ctx.gather`": Change(side_by_side, 6),
    "a recorded step that is now a `tx_step`": Change(now_a_transaction, HELD),
    "a step with other arguments": Change(other_arguments, 6),
    "a step whose recorded value does not fit its new annotation": Change(
        other_annotation, "RESULT_DESERIALIZATION_ERROR"
    ),
    "a longer or shorter wait": Change(other_wait, 6),
    "a parameter of the function added, with a default": Change(with_a_default, 16),
    "a parameter of the function added, without a default": Change(with_more, WAITS),
    "a parameter of the function removed": Change(before, WAITS, with_more, (5,)),
    "a parameter of the function renamed, whose argument was sent by position": Change(
        with_others, 11, with_more, (5,)
    ),
    "a parameter of the function renamed, whose argument was sent by name": Change(
        with_others, WAITS, with_more, kwargs={"more": 5}
    ),
    "a parameter of the function with another type, which its argument fits": Change(
        with_a_fraction, 11, with_more, (5,)
    ),
    "a parameter of the function with another type, which its argument does not fit": Change(
        with_a_text, WAITS, with_more, (5,)
    ),
}


def test_the_documentation_lists_these_changes() -> None:
    listed = rows(section(page("durable-functions.md"), "When the code changes"))
    assert [cells[0] for cells in listed] == list(CHANGES)
    for change, held in listed:
        end = CHANGES[change].end
        assert held.startswith(HELD) == (end == HELD), change
        assert end in held if isinstance(end, str) else "continues" in held or "ends" in held


@contextmanager
def release(
    app: Horsies, function: Callable[..., int]
) -> Iterator[tuple[Horsies, TaskFunction[..., int]]]:
    """A release of the application with its function, on the same database."""
    made = Horsies(app.config)
    yield made, made.durable("changing")(function)
    made.close()


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_meets_changed_code_as_documented(
    app: Horsies, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    new, end, old, args, kwargs = CHANGES[change]
    with release(app, old) as (former, changing), release(app, new) as (latter, _):
        sent = changing.enqueue(*args, **kwargs)
        run_pending(former)
        clock_of(former).advance(2 * DAY)
        with caplog.at_level(logging.WARNING, "horsies.child"):
            run_pending(latter)
        info = latter.durable_handle(sent.task_id).info().unwrap()
        assert ("DURABLE_MISMATCH" in (info.problem or "")) == (end == HELD)
        if end in (HELD, WAITS):
            assert info.status is TaskStatus.PENDING
            if end == HELD:
                former.durable_handle(sent.task_id).resume().unwrap()
            run_pending(former)
            more = 1 if old is added_before_guarded else sum((*args, *kwargs.values()))
            assert sent.get(timeout_ms=0).ok_value == 6 + more
        elif isinstance(end, str):
            assert sent.get(timeout_ms=0).err_value.error_code == end
        else:
            assert sent.get(timeout_ms=0).ok_value == end
    is_warned = "without asking for its recorded step 'two'" in caplog.text
    assert is_warned == (change == "a recorded step removed, without a new step after it")
    assert ("without asking" in caplog.text) == is_warned
