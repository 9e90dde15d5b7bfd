"""One call of a durable function: the decisions about its steps, shared by ``def`` and ``async def``. A
script yields the operations that it needs (a statement, a pause or the call of a step's function) and
returns the step's value. ``engine.py`` performs the operations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from pydantic_core import from_json, to_json

from horsies.codec.form import JsonForm
from horsies.codec.results import decode_untyped, split_result
from horsies.db.statement import Script, Step
from horsies.db.statements.durable import (
    HoldRun,
    LimitedRun,
    RecordedStep,
    RecordStep,
    TakeSignal,
    find_events,
    limit_run,
    read_step,
    record_step,
    take_signal,
)
from horsies.db.statements.tasks import OutcomeRow, read_outcomes
from horsies.durable.calls import (
    Call,
    Called,
    Child,
    Launch,
    NewChild,
    Outcome,
    StepOptions,
    Unstorable,
)
from horsies.durable.leaving import Leaving, Parked, RunCancelled, RunLost, Unreadable
from horsies.durable.past import DONE, LIMIT, TRY, Past, checked_name, mismatch
from horsies.durable.steps import CodeOf, Failure, decoded, failure_of, form_of, too_large
from horsies.encryption import missing_key
from horsies.error_codes import OutcomeCode, RetrievalCode, error_code_text
from horsies.errors import DurableMisuse, RetryLater, StepFailed
from horsies.parking import ParkRequest
from horsies.result import Err
from horsies.retry import decide_retry, exception_names
from horsies.states import TaskStatus
from horsies.tasks.definition import LONGEST_RUN

# A run parks only for longer sleeps than this; during a shorter sleep it stays in its process.
IN_PROCESS_SECONDS = 1.0
# A failed step is retried in the same process if the wait is at most this long.
TRY_AGAIN_SECONDS = 5.0
LONGEST_WAIT = LONGEST_RUN
PARALLEL_MAX = 256

# The running step of the current thread or coroutine.
current_step: ContextVar[str | None] = ContextVar("horsies_step", default=None)

Answer = TypeVar("Answer")
T = TypeVar("T")


class Pause(NamedTuple):
    """Wait in this process."""

    seconds: float


class Invoke(NamedTuple):
    """Call the function of a step; the script receives a ``Called``."""

    name: str
    call: Call


class Start(NamedTuple):
    """Store a child and the step that starts it in one transaction. The script receives the step, or
    None if another attempt was first.
    """

    name: str
    kind: str
    launch: Callable[[], Launch]


class Transact(NamedTuple):
    """Call the function of a tx_step and commit its step with its effects; the script receives a
    ``Called``.
    """

    name: str
    call: Call


Effects: TypeAlias = Generator[Step | Pause | Invoke | Transact | Start, Any, Answer]


class Fence(NamedTuple):
    """The attempt that may record steps of a run, while it owns the run."""

    worker_id: str
    task_id: str
    generation: int
    attempt: int

    @property
    def held(self) -> HoldRun:
        return HoldRun(self.worker_id, self.task_id, self.generation)

    @property
    def mark(self) -> str:
        return f"{self.task_id}/{self.generation}"


@dataclass(slots=True)
class Run:
    """The past of a run, and the scripts of its steps."""

    fence: Fence
    past: Past
    code_of: CodeOf
    # The declared types of the run's signals; None accepts any name.
    signals: Mapping[str, Any] | None = None
    # The JSON texts of the arguments with which the run could continue; None in a replay.
    new_call: Callable[[tuple[Any, ...], dict[str, Any]], tuple[str, str]] | None = None
    # Wraps the calls of step functions in spans.
    surround: Callable[[str], AbstractContextManager[object]] = nullcontext
    # How the call has left its function; kept even if user code caught the exception.
    left: Leaving | None = None
    is_over: bool = False
    # The return values of ``patched`` in this call, so that every iteration of a loop gets the same
    # value.
    patches: dict[str, bool] = field(default_factory=dict)
    # The clean-up steps that this call has registered.
    clean_ups: list[tuple[str, Call]] = field(default_factory=list)
    # Whether the run was cancelled because its deadline has passed.
    is_late: bool = False

    def check_use(self) -> None:
        """Reject a use of the context inside a step or after the function has ended."""
        if self.left is not None:
            raise self.left
        if self.is_over:
            raise DurableMisuse("The durable function has ended; use ctx before it returns.")
        if (step := current_step.get()) is not None:
            raise DurableMisuse(
                f"ctx is used inside step {step!r}, which is replayed as a whole; use it in the durable "
                "function."
            )

    # Steps

    def step(self, call: Call, kind: str = "step") -> Effects[Any]:
        """Return the recorded value of the next occurrence, or call the function and record its value."""
        name = self.past.name(call.base)
        if (known := self.past.visit(name, kind)) is not None:
            return call.read(known)
        return (yield from self.new_step(call, name, kind))

    def new_step(
        self, call: Call, name: str, kind: str, beside: Collection[str] = ()
    ) -> Effects[Any]:
        """Call the function, with retries as its policy allows, and record its value or its failure."""
        tries, left_seconds = self.past.last_try(name)
        self.past.admit(name, beside)
        if left_seconds > 0:
            yield from self._waiting(left_seconds)
        while True:
            called: Called = yield (Transact if kind == "tx" else Invoke)(name, call)
            if called.error is None:
                return (yield from self._succeeded(call, name, kind, called))
            failure, seconds = self._failure(call, called.error, tries)
            if seconds is None:
                step = yield from self.recording(
                    name, kind, None, failure.to_json(), run_us=called.run_us
                )
                return _raised(call, step, failure, called.error)
            tries += 1
            text = failure.to_json()
            yield from self.recording(
                f"{name}{TRY}{tries}", "try", None, text, seconds, called.run_us
            )
            yield from self._waiting(seconds)

    def _succeeded(self, call: Call, name: str, kind: str, called: Called) -> Effects[Any]:
        if called.recorded is False:
            return call.read((yield from self.adopting(name)))
        if isinstance(called.recorded, RecordStep):
            self.added(called.recorded)
            return call.described.unwrapped(called.value)
        text = call.described.encode(name, called.value)
        if isinstance(text, Failure):
            failed = text.to_json()
            return call.read((yield from self.recording(name, kind, None, failed)))
        step = yield from self.recording(name, kind, text, run_us=called.run_us)
        # Another recorded text means that an earlier attempt was faster and recorded its own value.
        return call.described.unwrapped(called.value) if step.result is text else call.read(step)

    def _failure(self, call: Call, error: Exception, tries: int) -> tuple[Failure, float | None]:
        """Return the record of a failed try, and the seconds until the next try; None after the last
        try.
        """
        if isinstance(error, Unstorable):
            return error.failure, None
        failure = failure_of(error, self.code_of)
        if (policy := call.options.retry) is None:
            return failure, None
        decision = decide_retry(
            task_options=json.dumps({"retry_policy": policy.to_json()}),
            error_code=failure.code,
            retry_count=tries,
            max_retries=policy.max_retries,
            exception_names=exception_names(error),
            retry_after=error.seconds if isinstance(error, RetryLater) else None,
        )
        return failure, decision.delay_seconds

    def _waiting(self, seconds: float) -> Effects[None]:
        if seconds > TRY_AGAIN_SECONDS:
            raise Parked(ParkRequest(seconds=seconds))
        yield Pause(seconds)

    def dealt(self, names: Collection[str]) -> None:
        """Check the names of concurrent steps before the first of them starts."""
        new = [name for name in names if self.past.visit(name, "step") is None]
        for name in new:
            self.past.last_try(name)
        if new:
            self.past.admit(new[0], names)

    def recording(
        self,
        name: str,
        kind: str,
        result: str | None = None,
        error: str | None = None,
        due_seconds: float | None = None,
        run_us: int = 0,
    ) -> Effects[RecordedStep]:
        """Record a step; if an earlier attempt has recorded it, use that record."""
        step = self.made(name, kind, result, error, due_seconds, run_us)
        rows = yield record_step, step
        if not rows:
            return (yield from self.adopting(name))
        return self.added(step)

    def added(self, step: RecordStep) -> RecordedStep:
        """Add a step that is recorded now."""
        recorded = _stored(step)
        self.past.add(recorded)
        return recorded

    def made(
        self,
        name: str,
        kind: str,
        result: str | None = None,
        error: str | None = None,
        due_seconds: float | None = None,
        run_us: int = 0,
    ) -> RecordStep:
        worker_id, task_id, generation, _ = self.fence
        position = self.past.next_position()
        return RecordStep(
            worker_id, task_id, generation, name, position, kind, result, error, due_seconds, run_us
        )

    def adopting(self, name: str) -> Effects[RecordedStep]:
        """Return the step as recorded by an earlier attempt; without a record, another attempt owns the
        run.
        """
        worker_id, task_id, generation, _ = self.fence
        found = yield read_step(worker_id, task_id, generation, name)
        if not found:
            raise RunLost
        recorded: RecordedStep = found[0]
        self.past.add(recorded)
        return recorded

    # Values that a replay reads from the record

    def value(self, base: str, made: str) -> Effects[str]:
        """Return a recorded value of the library as JSON: the time, a random number, or an id."""
        name = self.past.name(base)
        if (known := self.past.visit(name, "value")) is None:
            self.past.admit(name)
            known = yield from self.recording(name, "value", made)
        return known.result or "null"

    def patched(self, change: object) -> Effects[bool]:
        """Return whether this run takes the changed code: it reached this place first with the new code."""
        name = f"patch:{checked_name(change)}"
        if name not in self.patches:
            is_new = self.past.visit(name, "patch") is None
            self.patches[name] = not (is_new and self.past.unvisited)
            if is_new and self.patches[name]:
                self.past.admit(name)
                yield from self.recording(name, "patch", "true")
        return self.patches[name]

    # Waits

    def sleep(self, seconds: float) -> Effects[None]:
        """Wait in this process, or park the run if the wait is too long."""
        name = self.past.name("sleep")
        if (known := self.past.visit(name, "sleep")) is None:
            self.past.admit(name)
            known = yield from self.recording(name, "sleep", "null", due_seconds=seconds)
        left = known.left_seconds or 0.0
        if left > 0 and self.past.is_cancelled:
            raise RunCancelled
        if left > IN_PROCESS_SECONDS:
            raise Parked(ParkRequest(seconds=left))
        if left > 0:
            yield Pause(left)

    def wait_signal(self, signal: object, timeout: float | None) -> Effects[RecordedStep]:
        """Return the recorded signal; park the run until the signal arrives."""
        wanted = self._checked_signal(signal)
        name = self.past.name(f"signal:{wanted}")
        limit = self.past.visit(f"{name}{LIMIT}", "limit")
        if (known := self.past.visit(name, "signal")) is not None:
            return known
        self.past.admit(name)
        taken = yield from self._taking(name, wanted)
        if taken is not None:
            return taken
        if timeout is None:
            raise Parked(ParkRequest(signals=(wanted,)))
        if limit is None:
            limit = yield from self.recording(
                f"{name}{LIMIT}", "limit", "null", due_seconds=timeout
            )
        left = limit.left_seconds or 0.0
        if left > 0:
            raise Parked(ParkRequest(seconds=left, signals=(wanted,)))
        text = f"No signal {wanted!r} came within {timeout:g} seconds."
        failure = Failure(OutcomeCode.SIGNAL_TIMEOUT.value, text)
        return (yield from self.recording(name, "signal", None, failure.to_json()))

    def _checked_signal(self, signal: object) -> str:
        name = checked_name(signal)
        if self.signals is not None and name not in self.signals:
            declared = ", ".join(map(repr, self.signals)) or "none"
            raise DurableMisuse(
                f"The durable function declares no signal {name!r}; its signals= has {declared}."
            )
        return name

    def _taking(self, name: str, signal: str) -> Effects[RecordedStep | None]:
        worker_id, task_id, generation, _ = self.fence
        position = self.past.next_position()
        wanted = TakeSignal(worker_id, task_id, generation, name, position, [signal])
        rows = yield take_signal, wanted
        if not rows:
            return None
        if rows[0].kind is None:
            raise RunLost
        taken = RecordedStep(name, position, rows[0].kind, rows[0].result, rows[0].error)
        self.past.add(taken)
        return taken

    def wait_any(
        self, events: Sequence[Child[Any] | str], timeout: float | None
    ) -> Effects[Child[Any] | str]:
        """Return the first child or signal that is ready; park the run until then."""
        by_key = self._events(events)
        name = self.past.name("any")
        limit = self.past.visit(f"{name}{LIMIT}", "limit")
        known = self.past.visit(name, "any")
        if known is None:
            self.past.admit(name)
            known = yield from self._any(name, by_key, timeout, limit)
        key = value_of(known, form_of(str, "ctx.wait_any"))
        if key not in by_key:
            asked, recorded = f"one of {', '.join(map(repr, by_key))}", f"{key!r} for {name!r}"
            raise mismatch(asked, recorded)
        return by_key[key]

    def _events(self, events: Sequence[Child[Any] | str]) -> dict[str, Child[Any] | str]:
        if not events or not all(isinstance(one, Child | str) for one in events):
            raise DurableMisuse("ctx.wait_any takes children of ctx.start and names of signals.")
        return {
            one.step if isinstance(one, Child) else f"signal:{self._checked_signal(one)}": one
            for one in events
        }

    def _any(
        self,
        name: str,
        by_key: Mapping[str, Child[Any] | str],
        timeout: float | None,
        limit: RecordedStep | None,
    ) -> Effects[RecordedStep]:
        children = [one.task_id for one in by_key.values() if isinstance(one, Child)]
        signals = [one for one in by_key.values() if isinstance(one, str)]
        rows = yield find_events(self.fence.task_id, children, signals)
        come = {row.name for row in rows}
        for key, one in by_key.items():
            if (one if isinstance(one, str) else one.task_id) in come:
                return (yield from self.recording(name, "any", to_json(key).decode()))
        request = ParkRequest(None, tuple(signals), tuple(children))
        if timeout is None:
            raise Parked(request)
        if limit is None:
            until = f"{name}{LIMIT}"
            limit = yield from self.recording(until, "limit", "null", due_seconds=timeout)
        if (left := limit.left_seconds or 0.0) > 0:
            raise Parked(request._replace(seconds=left))
        text = f"None of {', '.join(map(repr, by_key))} came within {timeout:g} seconds."
        failure = Failure(RetrievalCode.WAIT_TIMEOUT.value, text)
        return (yield from self.recording(name, "any", None, failure.to_json()))

    def continued(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effects[NoReturn]:
        """Leave this call, so that the run continues with these arguments and an empty record."""
        self.past.admit("continue_as")
        yield from ()
        texts = ("[]", "{}") if self.new_call is None else self.new_call(args, kwargs)
        raise Parked(ParkRequest(args=texts[0], kwargs=texts[1]))

    # Cancellation

    def on_cancel(self, call: Call) -> Effects[None]:
        """Register a clean-up step. Its record shows the database that the run needs a clean-up."""
        name = self.past.name(f"on_cancel:{call.base}")
        if self.past.visit(name, "on_cancel") is None:
            self.past.admit(name)
            yield from self.recording(name, "on_cancel", "null")
        self.clean_ups.append((name, call))

    def cleaning(self) -> Effects[None]:
        """Execute the clean-up steps of a cancelled run, newest first, and leave the run."""
        if self.left is not None and not isinstance(self.left, RunCancelled):
            raise self.left
        self.left = None
        self.past.begin_clean_up()
        failed = []
        for name, call in reversed(self.clean_ups):
            try:
                if (known := self.past.visit(f"{name}{DONE}", "step")) is not None:
                    call.read(known)
                else:
                    yield from self.new_step(call, f"{name}{DONE}", "step")
            except StepFailed as failure:
                failed.append(f"clean-up step {call.base!r} failed with {failure.code}")
        reason = "The run reached its deadline" if self.is_late else "The run was cancelled"
        raise RunCancelled(f"{'; '.join([reason, *failed])}.")

    # Children

    def start(self, child: NewChild[T], options: StepOptions) -> Effects[Child[T]]:
        """Start a child exactly once."""
        if options.timeout_ms is not None:
            raise DurableMisuse(
                "ctx.start takes no timeout_ms; the task has its own: task.with_options(timeout_ms=...)."
            )
        kind = "detached" if options.detached else "start"
        name = self.past.name(f"start:{child.name}")
        if (known := self.past.visit(name, kind)) is None:
            self.past.admit(name)
            step: RecordStep | None = yield Start(name, kind, child.launch)
            known = (yield from self.adopting(name)) if step is None else self.added(step)
        return Child(str(from_json(known.result or '""')), name.partition(":")[2], child)

    def child_result(self, child: Child[Any]) -> Effects[RecordedStep]:
        """Return the recorded result of a child; park the run until the child has ended."""
        name = f"result:{child.step}"  # A second call for the same child reads the same record.
        if (known := self.past.visit(name, "result")) is not None:
            return known
        self.past.admit(name)
        ended = yield from (child.kind.outcome or _task_outcome)(child.task_id)
        if ended is None:
            raise Parked(ParkRequest(children=(child.task_id,)))
        result, failure = ended
        error = None if failure is None else failure.to_json()
        return (yield from self.recording(name, "result", result, error))


def limited(run: Run, seconds: float) -> Effects[None]:
    """Store the deadline of the run, unless an earlier call has stored it. At the deadline, a worker
    cancels the run.
    """
    worker_id, task_id, generation, _ = run.fence
    rows: list[LimitedRun] = yield limit_run(worker_id, task_id, generation, seconds)
    if not rows:
        raise RunLost
    run.is_late = rows[0].is_late


def _stored(step: RecordStep) -> RecordedStep:
    """Return the step in its stored form."""
    return RecordedStep(
        step.name, step.position, step.kind, step.result, step.error, step.due_seconds
    )


def _raised(call: Call, step: RecordedStep, failure: Failure, error: Exception) -> Any:
    """Raise the failure of a step from its exception; if an earlier attempt recorded another outcome,
    use that.
    """
    if step.error is None or Failure.from_json(step.error).code != failure.code:
        return call.read(step)
    raise failure.raised(step.name) from error


def _task_outcome(task_id: str) -> Script[Outcome | None]:
    rows: list[OutcomeRow] = yield read_outcomes([task_id])
    row = rows[0] if rows else None
    if row is not None and not TaskStatus(row.status).is_terminal:
        return None
    return _outcome_of(task_id, row)


def _outcome_of(child_id: str, row: OutcomeRow | None) -> Outcome:
    """Return the JSON text of a finished child's value, or its failure."""
    if row is None:
        text = f"Task {child_id} does not exist; its row was deleted before its result was read."
        return None, Failure(RetrievalCode.TASK_NOT_FOUND.value, text)
    if (key_id := missing_key(row.result or "")) is not None:
        raise Unreadable(key_id)
    if row.status == TaskStatus.COMPLETED:
        split = split_result(row.result or "")
        text = split[1] if split is not None else "null"
        failure = too_large(f"The result of task {child_id}", text)
        return (text, None) if failure is None else (None, failure)
    stored = None if row.result is None else decode_untyped(row.result)
    if stored is not None and not isinstance(stored, Err) and stored.value.is_err():
        error = stored.value.err_value
        code = str(error_code_text(error.error_code) or row.status)
        return None, Failure(code, error.message or code, error.data)
    code = row.error_code or row.status
    return None, Failure(code, f"Task {child_id} ended as {row.status}.")


def value_of(step: RecordedStep, form: JsonForm) -> Any:
    """Return the value of a recorded step, or raise StepFailed for its failure."""
    if step.error is not None:
        raise Failure.from_json(step.error).raised(step.name)
    return decoded(form, step.name, step.result or "null")


def seconds_of(duration: timedelta | float, what: str) -> float:
    """Return the seconds of a timedelta or a number; raise DurableMisuse for anything else."""
    seconds: object = duration.total_seconds() if isinstance(duration, timedelta) else duration
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if is_number and 0 <= float(str(seconds)) <= LONGEST_WAIT.total_seconds():
        return float(str(seconds))
    raise DurableMisuse(
        f"{what} takes a timedelta or a number of seconds, from 0 to {LONGEST_WAIT.days:,} days."
    )


class StepEngine(Protocol):
    """Performs the operations that the scripts of a run yield."""

    @property
    def run(self) -> Run: ...

    def perform(self, script: Effects[Answer]) -> Answer: ...

    def gather(self, calls: Sequence[Call]) -> tuple[Any, ...]: ...


class AsyncStepEngine(Protocol):
    """``StepEngine`` for a coroutine."""

    @property
    def run(self) -> Run: ...

    async def perform(self, script: Effects[Answer]) -> Answer: ...

    async def gather(self, calls: Sequence[Call]) -> tuple[Any, ...]: ...
