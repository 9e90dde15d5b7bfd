"""replay and the commands: records of real runs, seen and used from outside."""

from __future__ import annotations

import json
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from horsies import AsyncDurable, Durable, Horsies, TaskHandle, TaskTransaction
from horsies.testing import ReplayMismatch, check_replay, clock_of, replay, run_pending
from tests.support.command_line import Run
from tests.support.durable_runs import Effects


def one() -> int:
    return 1


def two() -> int:
    return 2


def old(ctx: Durable) -> int:
    total = ctx.step(one) + sum(ctx.gather(ctx.call(one), ctx.call(two)))
    ctx.sleep(timedelta(days=1))
    return total + ctx.step(two)


def renamed(ctx: Durable) -> int:
    return ctx.with_options(name="uno").step(one)


def shortened(ctx: Durable) -> int:
    return ctx.step(one)


def in_transaction(tx: TaskTransaction) -> int:
    return 1


def transacts(ctx: Durable) -> int:
    return ctx.with_options(name="one").tx_step(in_transaction)


def gathers(ctx: Durable) -> int:
    return sum(ctx.gather(ctx.call(one)))


def recorded(app: Horsies, code: list[Any]) -> tuple[Any, dict[str, Any]]:
    @app.durable("changing")
    def changing(ctx: Durable) -> int:
        return int(code[0](ctx))

    sent = changing.enqueue()
    run_pending(app)
    return changing, app.durable_handle(sent.task_id).export().unwrap()


def test_code_that_fits_the_record_replays(app: Horsies) -> None:
    changing, record = recorded(app, [old])
    replay(changing, record)
    assert [step["name"] for step in record["steps"]] == ["one", "one#2", "two", "sleep"]


@pytest.mark.parametrize(
    ("code", "message"),
    [(renamed, "asks for step 'uno'"), (shortened, "without asking for the recorded step 'one#2'")],
)
def test_code_that_does_not_fit_the_record_is_a_mismatch(
    app: Horsies, code: Any, message: str
) -> None:
    codes = [old]
    changing, record = recorded(app, codes)
    codes[0] = code
    with pytest.raises(ReplayMismatch, match=message):
        replay(changing, record)


def test_a_step_of_another_kind_in_a_gather_is_a_mismatch(app: Horsies) -> None:
    codes = [transacts]
    changing, record = recorded(app, codes)
    codes[0] = gathers
    with pytest.raises(ReplayMismatch, match=r"asks for a step 'one', .* a tx of that name"):
        replay(changing, record)


def cancelled(app: Horsies, sent: TaskHandle[Any]) -> dict[str, Any]:
    """The record of a run that was cancelled in its wait and has cleaned up."""
    run_pending(app)
    sent.cancel().unwrap()
    run_pending(app)
    record = app.durable_handle(sent.task_id).export().unwrap()
    names = [step["name"] for step in record["steps"]]
    assert (record["status"], names[-2:]) == ("CANCELLED", ["!cancel", "on_cancel:note!done"])
    return record


def test_a_cancelled_run_fits_the_code_that_registers_its_clean_up_before_the_wait(
    app: Horsies, effects: Effects
) -> None:
    is_before = [True]

    @app.durable("order")
    def order(ctx: Durable) -> int:
        if is_before[0]:
            ctx.on_cancel(effects.note, "undone")
        ctx.sleep(timedelta(days=1))
        if not is_before[0]:
            ctx.on_cancel(effects.note, "undone")
        return ctx.step(one)

    record = cancelled(app, order.enqueue())
    replay(order, record)
    is_before[0] = False
    with pytest.raises(ReplayMismatch, match="goes on with 'on_cancel:note'"):
        replay(order, record)
    assert effects == {"undone": 1}


def test_a_cancelled_run_of_an_async_function_replays_with_its_clean_up(
    app: Horsies, effects: Effects
) -> None:
    is_before = [True]

    @app.durable("order")
    async def order(ctx: AsyncDurable) -> int:
        if is_before[0]:
            await ctx.on_cancel(effects.note, "undone")
        await ctx.sleep(timedelta(days=1))
        if not is_before[0]:
            await ctx.on_cancel(effects.note, "undone")
        return await ctx.step(one)

    record = cancelled(app, order.enqueue())
    replay(order, record)
    is_before[0] = False
    with pytest.raises(ReplayMismatch, match="goes on with 'on_cancel:note'"):
        replay(order, record)
    assert effects == {"undone": 1}


def test_a_run_that_is_cancelled_after_its_wait_fits_a_clean_up_behind_it(
    app: Horsies, effects: Effects
) -> None:
    @app.durable("order")
    def order(ctx: Durable) -> None:
        ctx.sleep(timedelta(days=1))
        ctx.on_cancel(effects.note, "undone")
        ctx.wait_signal("never")

    sent = order.enqueue()
    run_pending(app)
    clock_of(app).advance(timedelta(days=2))
    replay(order, cancelled(app, sent))
    assert effects == {"undone": 1}


def test_an_async_function_replays(app: Horsies) -> None:
    async def three() -> int:
        return 3

    @app.durable("talk")
    async def talk(ctx: AsyncDurable) -> int:
        found = await ctx.step(three)
        await ctx.sleep(timedelta(days=1))
        return found

    sent = talk.enqueue()
    run_pending(app)
    replay(talk, app.durable_handle(sent.task_id).export().unwrap())


def test_all_records_of_a_folder_are_replayed(
    app: Horsies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, record = recorded(app, [old])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReplayMismatch, match="no record matches"):
        check_replay(app, "*.json")
    (tmp_path / "one.json").write_text(json.dumps(record))
    assert check_replay(app, "*.json") == 1
    assert check_replay(app, str(tmp_path / "*.json")) == 1
    assert check_replay(app, "**/*.json") == 1


def test_the_commands_show_signal_resume_reset_and_export(app: Horsies, horsies: Run) -> None:
    @app.durable("asks")
    def asks(ctx: Durable) -> int:
        return ctx.step(one) + ctx.wait_signal("go", int)

    sent = asks.enqueue()
    run_pending(app)
    run = partial(horsies, "durable")
    shown = run("show", sent.task_id)
    assert "signal go" in shown.out
    assert "one" in shown.out
    document = json.loads(run("show", sent.task_id, "--json").out)
    assert [step["name"] for step in document["steps"]] == ["one"]
    assert "not held" in run("resume", sent.task_id).err
    assert run("reset", sent.task_id, "none").code == 4
    assert "forgotten 1 step" in run("reset", sent.task_id, "one").out
    run_pending(app)
    assert run("signal", sent.task_id, "go", "no json").code == 1
    assert "delivered" in run("signal", sent.task_id, "go", "41").out
    run_pending(app)
    assert sent.result(timeout_ms=0) == 42
    record = json.loads(run("export", sent.task_id).out)
    assert (record["status"], len(record["steps"])) == ("COMPLETED", 2)
    assert run("show", "01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a").code == 4


def test_the_newest_failed_runs_are_exported_in_one_file(
    app: Horsies, horsies: Run, tmp_path: Path
) -> None:
    @app.durable("fails")
    def fails(ctx: Durable, number: int) -> int:
        if ctx.step(one) and number:
            raise ValueError(number)
        return number

    @app.durable("stepless")
    def stepless(ctx: Durable) -> None:
        raise ValueError

    sent = [fails.enqueue(number) for number in (1, 2, 0, 3)]
    stepless.enqueue()
    run_pending(app)
    run = partial(horsies, "durable", "export")
    (tmp_path / "failed.json").write_text(run("--failed").out)
    assert check_replay(app, str(tmp_path / "*.json")) == 3
    newest = json.loads(run("--failed", "--last", "2").out)["runs"]
    assert [record["task_id"] for record in newest] == [sent[3].task_id, sent[1].task_id]
    assert {record["status"] for record in newest} == {"FAILED"}
    every = json.loads(run("--last", "10").out)["runs"]
    assert [record["task_id"] for record in every] == [one.task_id for one in reversed(sent)]


@pytest.mark.parametrize("words", [[], ["01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a", "--failed"]])
def test_an_export_is_of_one_run_or_of_the_newest(horsies: Run, words: list[str]) -> None:
    ended = horsies("durable", "export", *words)
    assert (ended.code, "--failed or --last" in ended.err) == (2, True)
