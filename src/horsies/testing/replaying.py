"""replay: calls a durable function with the record of a real run, to check whether changed code still
fits the record. No step is executed: recorded steps return their recorded values, and the call ends at
the first unrecorded step. ``horsies durable export`` writes records.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NoReturn

from horsies.app import Horsies
from horsies.db.statements.durable import RecordedStep
from horsies.durable.async_context import AsyncDurable
from horsies.durable.calls import Call
from horsies.durable.context import Durable
from horsies.durable.leaving import Leaving, Parked
from horsies.durable.past import CANCEL, Past
from horsies.durable.run import Answer, Effects, Fence, Run
from horsies.result import Err
from horsies.task import AnyTask
from horsies.tasks.definition import TaskDefinition
from horsies.worker.child.durable_run import with_clean_up


class ReplayMismatch(AssertionError):
    """The code of a durable function does not fit the record of a run; the message names both steps."""


class _EndOfRecord(Leaving):
    """The call has reached the first unrecorded step."""


class _Replay:
    """An engine that executes no steps."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def perform(self, script: Effects[Answer]) -> Answer:
        try:
            script.send(None)
        except StopIteration as ended:
            returned: Answer = ended.value
            return returned
        except Leaving as how:
            self.run.left = how
            raise
        return self._end()

    def gather(self, calls: Sequence[Call]) -> tuple[Any, ...]:
        names = [self.run.past.name(call.base) for call in calls]
        try:
            self.run.dealt(names)
        except Leaving as how:
            self.run.left = how
            raise
        steps = [self.run.past.visit(name, "step") for name in names]
        if None in steps:
            self._end()
        pairs = zip(calls, steps, strict=True)
        return tuple(call.read(step) for call, step in pairs if step is not None)

    def _end(self) -> NoReturn:
        self.run.left = _EndOfRecord()
        raise self.run.left


class _AsyncReplay:
    """``_Replay`` for an ``async def`` function."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._replay = _Replay(run)

    async def perform(self, script: Effects[Answer]) -> Answer:
        return self._replay.perform(script)

    async def gather(self, calls: Sequence[Call]) -> tuple[Any, ...]:
        return self._replay.gather(calls)


def replay(function: AnyTask, record: Mapping[str, Any]) -> None:
    """Call a durable function with an exported record; raise ReplayMismatch if the code no longer fits
    it.

    Example:
        replay(onboard, json.loads(Path("records/onboard.json").read_text()))
    """
    definition = function.definition
    if definition.durable is None:
        raise TypeError(f"replay takes a durable function; {definition.name!r} is a plain task")
    fence, past = Fence("", str(record["task_id"]), 2, 1), Past(_steps(record["steps"]))
    run = Run(fence, past, lambda _: "UNHANDLED_EXCEPTION", definition.durable.signals)
    try:
        _call(definition, run, record)
    except Leaving:
        pass
    except Exception as error:
        if record["status"] == "COMPLETED":
            raise ReplayMismatch(
                f"{_named(record)} completed, but its code raises {type(error).__name__}: {error}"
            ) from error
    left = run.left
    if isinstance(left, Parked) and left.request.problem is not None:
        raise ReplayMismatch(f"{_named(record)}: {left.request.problem}")
    if left is None and run.past.unvisited:
        raise ReplayMismatch(
            f"{_named(record)}: the code ends without asking for the recorded step "
            f"{run.past.unvisited[0]!r}."
        )


def _steps(recorded: Sequence[Mapping[str, Any]]) -> Iterator[RecordedStep]:
    """Return the steps of a record with all waits finished, except for a sleep during which the run was
    cancelled.
    """
    names = [one["name"] for one in recorded]
    before_cancel = names.index(CANCEL) if CANCEL in names else 0
    for place, one in enumerate(recorded, start=1):
        is_cut = one["kind"] == "sleep" and place == before_cancel
        columns = one["name"], place, one["kind"], one["result"], one["error"]
        yield RecordedStep(*columns, 1.0 if is_cut else None)


def check_replay(app: Horsies, pattern: str) -> int:
    """Replay every exported record that matches the pattern; return their number, and raise if it is 0.
    The pattern is a relative or absolute path with ``*`` and ``**``. A file has one record, or several
    ``runs``, as ``horsies durable export --failed`` prints them.

    Example:
        def test_old_runs_fit_the_code() -> None:
            check_replay(app, "tests/records/*.json")
    """
    records = list(_records(pattern))
    if not records:
        raise ReplayMismatch(
            f"no record matches {pattern!r}; write some with horsies durable export"
        )
    for path, record in records:
        if (task := app.get_task(record["task_name"])) is None:
            raise ReplayMismatch(f"{path}: the application has no task {record['task_name']!r}.")
        replay(task, record)
    return len(records)


def _records(pattern: str) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for path in sorted(map(Path, glob(pattern, recursive=True))):
        stored = json.loads(path.read_text("utf-8"))
        yield from ((path, record) for record in stored.get("runs", [stored]))


def _call(definition: TaskDefinition, run: Run, record: Mapping[str, Any]) -> None:
    call = definition.signature.decode_call(record["args"], record["kwargs"])
    if isinstance(call, Err):
        raise ReplayMismatch(f"{_named(record)}: {call.value.message}")
    args, kwargs = call.value
    function = with_clean_up(definition).function
    if definition.is_async:
        asyncio.run(_called(function, run, args, kwargs))
    else:
        function(Durable(_Replay(run)), *args, **kwargs)


async def _called(
    function: Callable[..., Any], run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    await function(AsyncDurable(_AsyncReplay(run)), *args, **kwargs)


def _named(record: Mapping[str, Any]) -> str:
    return f"run {record['task_id']} of {record['task_name']!r}"
