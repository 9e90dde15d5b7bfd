"""DurableHandle: controls and reads a run of a durable function from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from pydantic_core import from_json

from horsies.codec.form import CodecError, JsonForm
from horsies.db.statement import Script, one_or_none
from horsies.db.statements.durable import (
    RunRow,
    StepRow,
    list_steps,
    read_call,
    read_run,
    reset_task,
    resume_task,
    signal_task,
)
from horsies.durable.past import checked_name
from horsies.durable.steps import excess, form_of
from horsies.encryption import is_encrypted, masked, missing_key
from horsies.errors import DurableMisuse
from horsies.ids import stored_form
from horsies.result import Err, Ok, Result
from horsies.states import TASK_TERMINAL_STATES, SignalDelivery, TaskStatus
from horsies.tasks import recording
from horsies.tasks.broker import BrokerErrorCode, PostgresBroker
from horsies.tasks.definition import DurableTraits, TaskDefinition
from horsies.tasks.handle import (
    TaskActionError,
    TaskActionErrorCode,
    action_result,
    no_such_task,
    task_action,
)

T = TypeVar("T")

FindDefinition = Callable[[str], TaskDefinition | None]
# The remedy if this program does not have the function's code.
IMPORT_IT = "import its module into this application"
# The maximum number of steps that a sentence lists.
_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class DurableStep:
    """A recorded step. ``result`` is its JSON value; ``error`` has the code, message and data of its
    failure.
    """

    name: str
    """The name of the step."""
    kind: str
    """The kind of step, such as ``step``, ``sleep`` or ``signal``."""
    result: Any
    """The recorded JSON value of the step."""
    error: Mapping[str, Any] | None
    """The code, message and data of the step's failure, or None."""
    due_at: datetime | None
    """When the wait ends, for a step that waits."""
    attempt: int
    """How many times the step was tried."""
    started_at: datetime
    """When the step started."""
    ended_at: datetime
    """When the step was recorded."""

    @classmethod
    def of(cls, row: StepRow) -> DurableStep:
        """Build a step from its row; a value that is still encrypted becomes the word "encrypted"."""
        result = None if row.result is None else from_json(masked(row.result))
        error = None if row.error is None else _shown_error(row.error)
        return cls(
            row.name,
            row.kind,
            result,
            error,
            row.due_at,
            row.attempt,
            row.started_at,
            row.ended_at,
        )


@dataclass(frozen=True, slots=True)
class DurableInfo:
    """A run and its recorded steps; the fields from ``parked_since`` on describe its wait, if it is parked.

    ``problem`` is the reason if the run is held because its code no longer fits its record.
    """

    task_id: str
    """The id of the run."""
    task_name: str
    """The name of the durable function."""
    status: TaskStatus
    """The status of the run's task."""
    steps: list[DurableStep]
    """The recorded steps, in order."""
    parked_since: datetime | None
    """When the run was parked, or None while it is not parked."""
    parked_until: datetime | None
    """The latest time at which the run continues, or None without such a time."""
    signals: list[str]
    """The names of the signals that the run waits for."""
    children: list[str]
    """The ids of the tasks that the run waits for."""
    problem: str | None
    """The reason why the run is held, or None."""
    deadline: datetime | None = None
    """When the run is cancelled if it has not ended, or None if it has no deadline."""
    missing_key: str | None = None
    """The id of the missing key if some values are shown as ``encrypted``, or None."""


def _shown_error(text: str) -> Mapping[str, Any]:
    shown = from_json(masked(text))
    return shown if isinstance(shown, Mapping) else {"code": shown, "message": shown, "data": None}


def _missing_key(rows: Iterable[StepRow], *texts: str) -> str | None:
    return missing_key(*texts, *(text for row in rows for text in (row.result, row.error) if text))


def _written(form: JsonForm, value: object) -> tuple[str, str | None]:
    """Return a value's JSON text, or the problem if it cannot be encoded or is too large."""
    text = form.encode(value)
    if isinstance(text, CodecError):
        return "", text.message
    large = excess(text)
    return text, large and f"its value {large}; send a reference to the data instead."


def _read_json(form: JsonForm, value: object) -> tuple[str, str | None]:
    """Return the JSON text of a value, or the problem if it cannot be stored or does not fit the
    declared type.
    """
    text, problem = _written(form_of(Any, "a JSON value"), value)
    if problem is not None:
        return "", problem
    read = form.decode(text)
    return text, read.value.message if isinstance(read, Err) else None


def run_document(info: DurableInfo) -> dict[str, Any]:
    """Return a run as JSON values, for `horsies durable show --json`."""
    return {
        **{name: getattr(info, name) for name in DurableInfo.__slots__ if name != "steps"},
        "steps": [
            {name: getattr(step, name) for name in DurableStep.__slots__} for step in info.steps
        ],
    }


class DurableHandle:
    """A run of a durable function, created by ``app.durable_handle(task_id)``.

    Example:
        run = app.durable_handle(task_id)
        run.signal("approve", True).unwrap()
    """

    def __init__(
        self,
        task_id: str,
        broker: PostgresBroker,
        find: FindDefinition,
        remedy: str = IMPORT_IT,
    ) -> None:
        self.task_id = task_id
        self._broker = broker
        self._find = find
        # The remedy shown if this program lacks the code or the key of the function.
        self._remedy = remedy

    def __repr__(self) -> str:
        return f"DurableHandle({self.task_id!r})"

    def signal(self, name: str, value: object = None) -> Result[SignalDelivery, TaskActionError]:
        """Send a value to the run. If the run does not wait for it yet, the value is stored. Returns an
        error if the run has ended, or if the function does not declare such a name or value.
        """
        return self._change("signal_run", self._signal(name, value), f"signal {name}")

    def signal_json(self, name: str, value: object) -> Result[SignalDelivery, TaskActionError]:
        """Send a signal like ``signal``, with a value that is already JSON, such as a command-line
        argument.
        """
        return self._change("signal_run", self._signal(name, value, is_json=True), f"signal {name}")

    async def signal_async(
        self, name: str, value: object = None
    ) -> Result[SignalDelivery, TaskActionError]:
        """Run ``signal`` without blocking the event loop."""
        script = self._signal(name, value)
        return await self._change_async("signal_run", script, f"signal {name}")

    async def signal_json_async(
        self, name: str, value: object
    ) -> Result[SignalDelivery, TaskActionError]:
        """Run ``signal_json`` without blocking the event loop."""
        script = self._signal(name, value, is_json=True)
        return await self._change_async("signal_run", script, f"signal {name}")

    def resume(self, *, reason: str | None = None) -> Result[None, TaskActionError]:
        """Continue a run that was held because its code does not fit its record."""
        return self._change("resume_run", self._resume(), reason)

    async def resume_async(self, *, reason: str | None = None) -> Result[None, TaskActionError]:
        """Run ``resume`` without blocking the event loop."""
        return await self._change_async("resume_run", self._resume(), reason)

    def reset(self, step: str, *, reason: str | None = None) -> Result[int, TaskActionError]:
        """Forget this step and all later steps, and continue the run at this step. Returns the number of
        forgotten steps. Only a parked or held run can be reset. Effects of forgotten steps stay, and
        happen again.
        """
        return self._change("reset_run", self._reset(step), reason)

    async def reset_async(
        self, step: str, *, reason: str | None = None
    ) -> Result[int, TaskActionError]:
        """Run ``reset`` without blocking the event loop."""
        return await self._change_async("reset_run", self._reset(step), reason)

    def info(self) -> Result[DurableInfo, TaskActionError]:
        """Read the run, its recorded steps and its current waits."""
        read = self._broker.perform(BrokerErrorCode.CLEANUP_FAILED, self._info())
        return action_result(self.task_id, read)

    async def info_async(self) -> Result[DurableInfo, TaskActionError]:
        """Run ``info`` without blocking the event loop."""
        read = await self._broker.perform_async(BrokerErrorCode.CLEANUP_FAILED, self._info())
        return action_result(self.task_id, read)

    def export(self) -> Result[dict[str, Any], TaskActionError]:
        """Return the record of the run for ``horsies.testing.replay``, with arguments and results.

        If this program lacks the key of an encrypted record, the result is an error.
        """
        read = self._broker.perform(BrokerErrorCode.CLEANUP_FAILED, self._export())
        return action_result(self.task_id, read)

    def _export(self) -> Script[Result[dict[str, Any], TaskActionError]]:
        stored = stored_form(self.task_id)
        row = None if stored is None else one_or_none((yield read_call(stored)))
        if row is None:
            return Err(no_such_task(self.task_id))
        steps: list[StepRow] = yield list_steps(self.task_id)
        if (key_id := _missing_key(steps, row.args, row.kwargs)) is not None:
            message = (
                f"Run {self.task_id} is not exported: its record is encrypted with key {key_id}, which this "
                f"program does not have; {self._remedy}."
            )
            code = TaskActionErrorCode.VALIDATION_FAILED
            return Err(TaskActionError(code, message, self.task_id))
        columns = ("name", "kind", "result", "error")
        return Ok(
            {
                **row._asdict(),
                "task_id": self.task_id,
                "steps": [{name: getattr(step, name) for name in columns} for step in steps],
            }
        )

    def _change(
        self, verb: str, script: Script[Result[T, TaskActionError]], reason: str | None
    ) -> Result[T, TaskActionError]:
        action = task_action(verb, self.task_id, reason)
        code = BrokerErrorCode.CLEANUP_FAILED
        done = recording.perform_action(self._broker, code, action, script)
        return action_result(self.task_id, done)

    async def _change_async(
        self, verb: str, script: Script[Result[T, TaskActionError]], reason: str | None
    ) -> Result[T, TaskActionError]:
        action = task_action(verb, self.task_id, reason)
        code = BrokerErrorCode.CLEANUP_FAILED
        done = await recording.perform_action_async(self._broker, code, action, script)
        return action_result(self.task_id, done)

    def _run(self) -> Script[RunRow | None]:
        if (stored := stored_form(self.task_id)) is None:
            return None
        return one_or_none((yield read_run(stored)))

    def _signal(
        self, name: str, value: object, *, is_json: bool = False
    ) -> Script[Result[SignalDelivery, TaskActionError]]:
        run = yield from self._run()
        if run is None:
            return Err(no_such_task(self.task_id))
        checked = self._checked(run, name, value, is_json)
        if isinstance(checked, TaskActionError):
            return Err(checked)
        (row,) = yield signal_task(self.task_id, name, checked)
        if row.answer in ("delivered", "stored"):
            return Ok(SignalDelivery(row.answer))
        return Err(self._refused(row.answer, "takes no more signals"))

    def _checked(
        self, run: RunRow, name: str, value: object, is_json: bool
    ) -> str | TaskActionError:
        """Return the JSON text of a signal's value, or the reason why the run cannot take it."""
        definition = self._find(run.task_name)
        traits = _registered(run) if definition is None else definition.durable
        if traits is None:
            code = TaskActionErrorCode.TASK_NOT_DURABLE
            message = (
                f"Task {self.task_id} is of {run.task_name!r}, which is not a durable function."
            )
            return TaskActionError(code, message, self.task_id)
        declared = traits.signals
        if declared is not None and name not in declared:
            known = ", ".join(map(repr, declared)) or "none"
            message = f"{run.task_name!r} has no signal {name!r}; its signals are {known}."
            return TaskActionError(TaskActionErrorCode.SIGNAL_NOT_FOUND, message, self.task_id)
        # A program's value has a type to check; JSON typed by a user is checked only against the
        # declared type.
        is_unchecked = definition is None and is_json and declared is not None
        problem = self._unsent(run, is_unchecked)
        try:
            checked_name(name)
            form = form_of(Any if declared is None else declared[name], f"signal {name!r}")
            text, wrong = _read_json(form, value) if is_json else _written(form, value)
        except DurableMisuse as misuse:
            text, wrong = "", str(misuse)
        if (problem := wrong or problem) is None:
            return str(text)
        message = f"The signal {name!r} was not sent: {problem}"
        return TaskActionError(TaskActionErrorCode.VALIDATION_FAILED, message, self.task_id)

    def _unsent(self, run: RunRow, is_unchecked: bool) -> str | None:
        """Explain why a value would be stored as plain text next to encrypted values, or with an
        unchecked type.
        """
        starts = (run.args_start or "", run.kwargs_start or "")
        is_secret = run.encrypts or any(map(is_encrypted, starts))
        if is_secret and self._broker.config.codec is None:
            return f"{run.task_name!r} encrypts its payload, and this program has no key; {self._remedy}."
        if is_unchecked:
            return f"its type is declared in the code of {run.task_name!r}; {self._remedy}."
        return None

    def _resume(self) -> Script[Result[None, TaskActionError]]:
        if (stored := stored_form(self.task_id)) is None:
            return Err(no_such_task(self.task_id))
        (row,) = yield resume_task(stored)
        if row.answer == "resumed":
            return Ok(None)
        return Err(self._refused(row.answer, "cannot be resumed"))

    def _reset(self, step: str) -> Script[Result[int, TaskActionError]]:
        if (stored := stored_form(self.task_id)) is None:
            return Err(no_such_task(self.task_id))
        (row,) = yield reset_task(stored, step)
        if row.answer is not None and row.answer.isdigit():
            return Ok(int(row.answer))
        if row.answer == "STEP_NOT_FOUND":
            rows: list[StepRow] = yield list_steps(stored)
            known = _named_steps([row.name for row in rows])
            message = f"Run {self.task_id} has no recorded step {step!r}; {known}."
            return Err(TaskActionError(TaskActionErrorCode.STEP_NOT_FOUND, message, self.task_id))
        if row.answer == "CANCELLING":
            message = (
                f"Run {self.task_id} is being cancelled, and a reset to {step!r} would undo that; let its "
                "clean-up end, or cancel it again if it is held."
            )
            return Err(TaskActionError(TaskActionErrorCode.TASK_RUNNING, message, self.task_id))
        return Err(self._refused(row.answer, "cannot be reset"))

    def _refused(self, answer: str | None, why: str) -> TaskActionError:
        if answer is None:
            return no_such_task(self.task_id)
        if answer == "NOT_HELD":
            why = f"`horsies explain {self.task_id}` says what it waits for"
            message = f"Run {self.task_id} is not held; {why}."
            return TaskActionError(TaskActionErrorCode.TASK_NOT_HELD, message, self.task_id)
        status = TaskStatus(answer)
        is_over = status in TASK_TERMINAL_STATES
        code = TaskActionErrorCode.TASK_ENDED if is_over else TaskActionErrorCode.TASK_RUNNING
        message = (
            f"Run {self.task_id} is {status.value} and {why}; {_instead(self.task_id, status)}."
        )
        return TaskActionError(code, message, self.task_id, status)

    def _info(self) -> Script[Result[DurableInfo, TaskActionError]]:
        run = yield from self._run()
        if run is None:
            return Err(no_such_task(self.task_id))
        rows: list[StepRow] = yield list_steps(self.task_id)
        return Ok(
            DurableInfo(
                self.task_id,
                run.task_name,
                TaskStatus(run.status),
                [DurableStep.of(row) for row in rows],
                run.since,
                run.until,
                list(run.signals or ()),
                list(run.children or ()),
                run.problem,
                run.deadline,
                _missing_key(rows),
            )
        )


def _registered(run: RunRow) -> DurableTraits | None:
    """Return the data that workers registered about a function without local code, or None for a plain
    task.
    """
    if run.is_durable is False:
        return None
    return DurableTraits(None if run.declared is None else dict.fromkeys(run.declared, Any))


def _named_steps(names: Sequence[str]) -> str:
    """Return the steps to which a run can be reset. A row with "!" in its name belongs to another step."""
    own = [name for name in names if "!" not in name]
    if not own:
        return "none is recorded yet"
    shown = ", ".join(map(repr, own[:_NAMES_SHOWN]))
    more = f" and {len(own) - _NAMES_SHOWN:,} more" if len(own) > _NAMES_SHOWN else ""
    return f"its steps are {shown}{more}"


def _instead(task_id: str, status: TaskStatus) -> str:
    """Return the alternative for a run that cannot be changed."""
    if status is TaskStatus.COMPLETED:
        return "start a new run of its function"
    if status in TASK_TERMINAL_STATES:
        return f"`horsies retry {task_id}` starts a new run with the same arguments"
    return f"wait until it is parked, or end it with `horsies cancel {task_id}`"
