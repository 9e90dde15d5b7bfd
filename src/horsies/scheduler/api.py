"""`app.schedules`: add, remove, list, pause, resume and run the schedules in the database.

A change notifies every running scheduler. Mistakes in a schedule raise HorsiesError; database errors
and refusals are returned as Err.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias, TypeVar

from horsies.config.schedules import AnySchedule
from horsies.db.statement import Script, Statement, Step
from horsies.db.statements.schedules import (
    ScheduleName,
    ScheduleRecord,
    ScheduleRun,
    ScheduleState,
    add_schedule,
    list_schedule_runs,
    list_schedules,
    pause_schedule,
    read_schedule_records,
    remove_schedule,
    resume_schedule,
    run_schedule,
    start_schedule,
)
from horsies.errors import HorsiesError, ValidationReport, raise_collected
from horsies.result import Err, Ok, Result
from horsies.scheduler.edit import (
    ATTEMPTS_MAX,
    Edit,
    NewTiming,
    edit_script,
    new_timing,
    original_timing,
    preview_script,
)
from horsies.scheduler.entry import (
    Application,
    Definitions,
    Entry,
    build_errors,
    definition_json,
    read_definition,
    schedule_error,
)
from horsies.scheduler.targets import RunPlan, Work, traced_work, work_for_now
from horsies.scheduler.timing import Timing
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker
from horsies.tasks.handle import TaskHandle
from horsies.tasks.recording import Action, Switched, perform_action, perform_action_async
from horsies.tasks.send import Producer
from horsies.timetable.patterns import SchedulePattern
from horsies.words import listed
from horsies.workflow.definition import BuildsSpecs
from horsies.workflow.run.handle import WorkflowHandle
from horsies.workflow.run.results import DeclaredTypes

T = TypeVar("T")

# Schedules has a method named list, which hides the built-in type.
States: TypeAlias = list[ScheduleState]
Slots: TypeAlias = list[datetime]
Runs: TypeAlias = list[ScheduleRun]
RunHandle: TypeAlias = TaskHandle[Any] | WorkflowHandle[Any]
Switch: TypeAlias = Statement[[str], ScheduleName]

_WORKING = BrokerErrorCode.SCHEDULE_OPERATION_FAILED
_SUPPRESSED = BrokerOperationError(
    _WORKING, "Changes to schedules are suppressed while modules are imported, as sends are."
)


class EditedSchedule(NamedTuple):
    """A schedule's state and the edit of its timing; the edit is None if a reset had nothing to undo."""

    state: ScheduleState
    edit: Edit | None


@dataclass(frozen=True, slots=True)
class Schedules:
    """The schedules in the database; each method has an ``..._async`` version for use in event loops.

    Example:
        app.schedules.add(
            TaskSchedule(name="digest-17", task_name="send_digest", kwargs={"user": 17},
                         pattern=DailySchedule(time=time(8)), timezone="Asia/Tokyo")
        ).unwrap()
    """

    producer: Producer
    definitions: Callable[[], Definitions]
    app: BuildsSpecs

    def add(self, schedule: AnySchedule, *, replace: bool = False) -> BrokerResult[ScheduleState]:
        """Store a schedule in addition to the configured ones; running schedulers pick it up immediately.

        Adding an identical schedule again changes nothing, and an edit of its timing stays. A different
        schedule with the same name results in Err(SCHEDULE_EXISTS), unless ``replace`` is set. A
        configured schedule is never replaced; use ``edit`` to change its timing. The first slot is the
        next one after now. Raises HorsiesError for a schedule that cannot be served.
        """
        script = self._add_script(schedule, replace)
        return self._change("add_schedule", schedule.name, script)

    async def add_async(
        self, schedule: AnySchedule, *, replace: bool = False
    ) -> BrokerResult[ScheduleState]:
        script = self._add_script(schedule, replace)
        return await self._change_async("add_schedule", schedule.name, script)

    def remove(self, name: str) -> BrokerResult[None]:
        """Remove a schedule that was added at run time; its tasks and runs are kept."""
        return self._change("remove_schedule", name, _remove_script(name))

    async def remove_async(self, name: str) -> BrokerResult[None]:
        return await self._change_async("remove_schedule", name, _remove_script(name))

    def edit(
        self,
        name: str,
        *,
        pattern: SchedulePattern | str | None = None,
        timezone: str | None = None,
        reason: str | None = None,
    ) -> BrokerResult[ScheduleState]:
        """Change when a schedule fires, until ``reset``; configured schedules can be edited too.

        The edit outlives restarts and deployments. It does not change the task or its arguments. A slot
        that is due now is still sent. The pattern may be text, such as "every day at 03:00" or a cron
        expression. Raises HorsiesError for invalid text.
        """
        script = edited_script(name, new_timing(pattern, timezone))
        return self._change("edit_schedule", name, script, reason).map(_edited_state)

    async def edit_async(
        self,
        name: str,
        *,
        pattern: SchedulePattern | str | None = None,
        timezone: str | None = None,
        reason: str | None = None,
    ) -> BrokerResult[ScheduleState]:
        script = edited_script(name, new_timing(pattern, timezone))
        return (await self._change_async("edit_schedule", name, script, reason)).map(_edited_state)

    def reset(self, name: str, *, reason: str | None = None) -> BrokerResult[ScheduleState]:
        """Undo an edit: the schedule fires again as defined by the configuration, or by the program that
        added it.
        """
        script = edited_script(name, original_timing)
        return self._change("reset_schedule", name, script, reason).map(_edited_state)

    async def reset_async(
        self, name: str, *, reason: str | None = None
    ) -> BrokerResult[ScheduleState]:
        script = edited_script(name, original_timing)
        return (await self._change_async("reset_schedule", name, script, reason)).map(_edited_state)

    def list(self) -> BrokerResult[States]:
        """Return all stored schedules, by name. A scheduler stores the configured schedules when it
        starts.
        """
        return self._read(list_script())

    async def list_async(self) -> BrokerResult[States]:
        return await self._read_async(list_script())

    def pause(self, name: str, *, reason: str | None = None) -> BrokerResult[ScheduleState]:
        """Stop sending the slots of a schedule, on all schedulers, until it is resumed."""
        script = switch_script(name, pause_schedule)
        return self._change("pause_schedule", name, script, reason).map(_state)

    async def pause_async(
        self, name: str, *, reason: str | None = None
    ) -> BrokerResult[ScheduleState]:
        script = switch_script(name, pause_schedule)
        return (await self._change_async("pause_schedule", name, script, reason)).map(_state)

    def resume(self, name: str) -> BrokerResult[ScheduleState]:
        """Resume a paused schedule. Slots missed during the pause fire only if the schedule catches up
        missed slots.
        """
        script = switch_script(name, resume_schedule)
        return self._change("resume_schedule", name, script).map(_state)

    async def resume_async(self, name: str) -> BrokerResult[ScheduleState]:
        script = switch_script(name, resume_schedule)
        return (await self._change_async("resume_schedule", name, script)).map(_state)

    def run(self, name: str) -> BrokerResult[RunHandle]:
        """Send a schedule's task, or start its workflow, once and immediately.

        The timetable does not change. Returns the handle of the task or workflow run.
        """
        done: BrokerResult[Work] = self._change("run_schedule", name, self._run_script(name))
        return done.map(self._handle)

    async def run_async(self, name: str) -> BrokerResult[RunHandle]:
        script: Script[BrokerResult[Work]] = self._run_script(name)
        return (await self._change_async("run_schedule", name, script)).map(self._handle)

    def next_runs(self, name: str, count: int = 10) -> BrokerResult[Slots]:
        """Return the next slots of a stored schedule, in UTC."""
        return self._read(next_script(name, count))

    async def next_runs_async(self, name: str, count: int = 10) -> BrokerResult[Slots]:
        return await self._read_async(next_script(name, count))

    def runs(self, name: str, limit: int = 20) -> BrokerResult[Runs]:
        """Return the newest of a schedule's tasks or workflow runs that retention has not deleted yet."""
        return self._read(runs_script(name, limit))

    async def runs_async(self, name: str, limit: int = 20) -> BrokerResult[Runs]:
        return await self._read_async(runs_script(name, limit))

    def _read(self, script: Script[BrokerResult[T]]) -> BrokerResult[T]:
        return perform(self.producer.get_broker(), script)

    async def _read_async(self, script: Script[BrokerResult[T]]) -> BrokerResult[T]:
        done = await self.producer.get_broker().perform_async(_WORKING, script)
        return done.and_then(lambda result: result)

    def _change(
        self, verb: str, name: str, script: Script[BrokerResult[T]], reason: str | None = None
    ) -> BrokerResult[T]:
        if self.producer.are_sends_suppressed():
            return Err(_SUPPRESSED)
        action = Action(verb, f"schedule {name}", reason)
        return change(self.producer.get_broker(), action, script)

    async def _change_async(
        self, verb: str, name: str, script: Script[BrokerResult[T]], reason: str | None = None
    ) -> BrokerResult[T]:
        if self.producer.are_sends_suppressed():
            return Err(_SUPPRESSED)
        action = Action(verb, f"schedule {name}", reason)
        return await change_async(self.producer.get_broker(), action, script)

    def _add_script(
        self, schedule: AnySchedule, replace: bool
    ) -> Script[BrokerResult[ScheduleState]]:
        """Check the schedule immediately, to raise errors here; return the script that stores it."""
        if not schedule.enabled:
            raise schedule_error(schedule, "enabled is off; add it and pause it instead")
        entry = Entry.of(self._application(), schedule)
        raise_collected(ValidationReport("schedule", list(build_errors(entry))))
        is_configured = schedule.name in self._configured()
        return _add_script(entry, definition_json(entry), replace, is_configured)

    def _run_script(self, name: str) -> Script[BrokerResult[Work]]:
        (record,) = yield read_schedule_records([name])
        try:
            entry = self._entry(record)
        except (HorsiesError, ValueError, LookupError, TypeError) as problem:
            reason = problem.message if isinstance(problem, HorsiesError) else str(problem)
            return Err(BrokerOperationError(_WORKING, reason, exception=problem))
        if entry is None:
            return (yield from _unknown_script(name, self._configured()))
        match work_for_now(entry.target, record.looked_at.astimezone(UTC)):
            case Err(reason):
                return Err(BrokerOperationError(_WORKING, reason))
            case Ok(made):
                work, sending = traced_work(entry.target, made)
                yield _run_step(name, work)
                if sending is not None:
                    sending.end()
                return Ok(work)

    def _entry(self, record: ScheduleRecord) -> Entry | None:
        if record.definition is not None:
            return read_definition(self._application(), record.definition)
        schedule = self._configured().get(record.name)
        return None if schedule is None else Entry.of(self._application(), schedule)

    def _application(self) -> Application:
        return Application(self.producer.config, self.definitions(), self.app)

    def _configured(self) -> dict[str, AnySchedule]:
        config = self.producer.config.schedule
        return {} if config is None else {one.name: one for one in config.schedules}

    def _handle(self, work: Work) -> RunHandle:
        broker = self.producer.get_broker()
        if isinstance(work, RunPlan):
            return WorkflowHandle(work.id, broker, types=DeclaredTypes(work.nodes))
        return TaskHandle(work.id, broker, self.definitions()[work.task_name].results)


def perform(broker: PostgresBroker, script: Script[BrokerResult[T]]) -> BrokerResult[T]:
    """Run one of the scripts below; return its Err like an Err of the broker."""
    return broker.perform(_WORKING, script).and_then(lambda result: result)


def change(
    broker: PostgresBroker, action: Action, script: Script[BrokerResult[T]]
) -> BrokerResult[T]:
    """Run a script that changes a schedule, and record the change in the same transaction."""
    return perform_action(broker, _WORKING, action, script).and_then(lambda result: result)


async def change_async(
    broker: PostgresBroker, action: Action, script: Script[BrokerResult[T]]
) -> BrokerResult[T]:
    done = await perform_action_async(broker, _WORKING, action, script)
    return done.and_then(lambda result: result)


def list_script() -> Script[BrokerResult[list[ScheduleState]]]:
    states: list[ScheduleState] = yield list_schedules(None)
    return Ok(states)


def _state_script(name: str) -> Script[BrokerResult[ScheduleState]]:
    states: list[ScheduleState] = yield list_schedules(str(name))  # None: all
    return Ok(states[0]) if states else (yield from _unknown_script(name))


def switch_script(name: str, switch: Switch) -> Script[BrokerResult[Switched[ScheduleState]]]:
    """Pause or resume a schedule and read its new state."""
    if isinstance(before := (yield from _state_script(name)), Err):
        return before
    yield switch(name)
    was_paused = before.ok_value.is_paused
    after = yield from _state_script(name)
    return after.map(lambda state: Switched(state, state.is_paused != was_paused))


def edited_script(name: str, new: NewTiming) -> Script[BrokerResult[Switched[EditedSchedule]]]:
    """Store another timing and read the schedule's new state. A reset of an unedited schedule changes
    nothing.
    """
    found: Result[Edit | None, str] = yield from edit_script(name, new)
    if isinstance(found, Err):
        return Err(BrokerOperationError(_WORKING, found.err_value))
    if isinstance(state := (yield from _state_script(name)), Err):
        return state
    edit = found.ok_value
    is_changed = edit is not None and edit.is_changed
    words = edit.words if edit is not None and is_changed else None
    return Ok(Switched(EditedSchedule(state.ok_value, edit), is_changed, words))


def previewed_script(name: str, new: NewTiming) -> Script[BrokerResult[EditedSchedule]]:
    """Compute an edit and read the schedule's state, without changing anything."""
    found: Result[Edit | None, str] = yield from preview_script(name, new)
    if isinstance(found, Err):
        return Err(BrokerOperationError(_WORKING, found.err_value))
    state = yield from _state_script(name)
    return state.map(lambda stored: EditedSchedule(stored, found.ok_value))


def edit_document(found: EditedSchedule, *, is_stored: bool) -> dict[str, Any]:
    """Return an edit, or its preview, as a JSON object."""
    state, edit = found
    timing = state.timing if edit is None else edit.new_timing
    return {
        "name": state.name,
        "changed": is_stored and edit is not None and edit.is_changed,
        "timing": json.loads(timing or "null"),
        "original_timing": json.loads(state.original_timing or "null"),
        "slots": [] if edit is None else edit.new_slots,
    }


def _edited_state(switched: Switched[EditedSchedule]) -> ScheduleState:
    return switched.state.state


def _state(switched: Switched[ScheduleState]) -> ScheduleState:
    return switched.state


def next_script(name: str, count: int) -> Script[BrokerResult[list[datetime]]]:
    """Compute the next slots of a schedule from its stored timing."""
    state = yield from _state_script(name)
    return state.and_then(lambda found: _next_slots(found, count))


def _next_slots(state: ScheduleState, count: int) -> BrokerResult[list[datetime]]:
    if state.next_run_at is None:
        return Ok([])
    try:
        timing = Timing.read(state.timing or "")
    except ValueError:
        message = f"The timing of schedule {state.name!r} cannot be read by this release."
        return Err(BrokerOperationError(_WORKING, message))
    slots = timing.slots_from(state.next_run_at.astimezone(UTC))
    return Ok([slot for _, slot in zip(range(count), slots, strict=False)])


def runs_script(name: str, limit: int) -> Script[BrokerResult[list[ScheduleRun]]]:
    """Read the newest runs of a schedule."""
    runs: list[ScheduleRun] = yield list_schedule_runs(name, limit)
    if runs:
        return Ok(runs)
    return (yield from _state_script(name)).map(lambda _: [])


def _remove_script(name: str) -> Script[BrokerResult[None]]:
    if (yield remove_schedule(name)):
        return Ok(None)
    if isinstance(state := (yield from _state_script(name)), Err):
        return state
    message = f"Schedule {name!r} belongs to a configuration; remove it there, or pause it."
    return Err(BrokerOperationError(BrokerErrorCode.UNKNOWN_SCHEDULE, message))


def _add_script(
    entry: Entry, definition: str, replace: bool, is_configured: bool
) -> Script[BrokerResult[ScheduleState]]:
    name = entry.schedule.name
    if is_configured:
        return _is_taken(name, by_configuration=True)
    (record,) = yield read_schedule_records([name])
    for _ in range(ATTEMPTS_MAX):
        if (yield _addition(entry, definition, replace, record)):
            return (yield from _state_script(name))
        before = record
        (record,) = yield read_schedule_records([name])
        if record.stored_definition == before.stored_definition and before.is_stored:
            break
        # Another program has stored a schedule with this name after the first read; the two may be
        # identical.
    return _is_taken(name, by_configuration=record.is_stored and record.definition is None)


def _addition(entry: Entry, definition: str, replace: bool, record: ScheduleRecord) -> Step:
    return add_schedule(
        name=entry.schedule.name,
        next_run_at=entry.timing.first_after(record.looked_at.astimezone(UTC)),
        hash=entry.hash,
        timing=entry.timing_text,
        task_name=entry.task_name,
        definition_key=entry.definition_key,
        definition=definition,
        replace=replace,
        same_as=record.stored_definition if record.definition == definition else None,
    )


def _is_taken(name: str, *, by_configuration: bool) -> Err[BrokerOperationError]:
    if by_configuration:
        message = (
            f"Schedule {name!r} belongs to a configuration; change it there, or change its timing with "
            f"app.schedules.edit or `horsies schedules edit`."
        )
    else:
        message = f"There is another schedule {name!r} already; choose a new name, or replace=True."
    return Err(BrokerOperationError(BrokerErrorCode.SCHEDULE_EXISTS, message))


def _unknown_script(name: str, configured: Iterable[str] = ()) -> Script[Err[BrokerOperationError]]:
    """Reject an unknown name with a message that lists the first known names."""
    stored: list[ScheduleState] = yield list_schedules(None)
    names = sorted({*configured, *(state.name for state in stored)})
    known = f"the known ones are {listed(names)}; " if names else ""
    message = f"There is no schedule {name!r}; {known}run `horsies schedules` to see all of them."
    return Err(BrokerOperationError(BrokerErrorCode.UNKNOWN_SCHEDULE, message))


def _run_step(name: str, work: Work) -> Step:
    if isinstance(work, RunPlan):
        return start_schedule(work.id, work.plan, name)
    return run_schedule(
        id=work.id,
        task_name=work.task_name,
        queue_name=work.queue_name,
        priority=work.priority,
        kwargs=work.kwargs,
        sent_at=work.sent_at,
        good_until=work.good_until,
        max_retries=work.max_retries,
        task_options=work.task_options,
        timeout_ms=work.timeout_ms,
        retention_seconds=work.retention_seconds,
        enqueue_sha=work.enqueue_sha,
        lane_key=work.lane_key,
        lane=work.lane,
        schedule_name=name,
    )
