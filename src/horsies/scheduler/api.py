"""`app.schedules`: the schedules in the database, added, removed, listed, held back and run by programs.

What is stored takes effect on every running scheduler at once: a notification wakes it. Mistakes in a
schedule are raised as HorsiesError; what the database has to say comes back as a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from horsies.config.schedules import AnySchedule
from horsies.db.statement import Script, Statement, Step
from horsies.db.statements.schedules import (
    AddSchedule,
    ListRuns,
    RunSchedule,
    ScheduleDefinition,
    ScheduleFilter,
    ScheduleName,
    ScheduleNames,
    ScheduleRun,
    ScheduleState,
    StartSchedule,
    add_schedule,
    list_schedule_runs,
    list_schedules,
    pause_schedule,
    read_schedule_definition,
    read_schedule_standings,
    remove_schedule,
    resume_schedule,
    run_schedule,
    start_schedule,
)
from horsies.db.statements.tasks import InsertTask
from horsies.errors import HorsiesError, ValidationReport, raise_collected
from horsies.result import Err, Ok
from horsies.scheduler.entry import (
    Definitions,
    Entry,
    Known,
    build_errors,
    definition_json,
    read_definition,
    schedule_error,
)
from horsies.scheduler.targets import RunPlan, Work
from horsies.scheduler.timing import Timing
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult
from horsies.tasks.handle import TaskHandle
from horsies.tasks.send import Producer
from horsies.workflow.definition import BuildsSpecs
from horsies.workflow.run.handle import WorkflowHandle
from horsies.workflow.run.results import DeclaredTypes

T = TypeVar("T")

# What a script gives back: an answer, or why there is none.
Told: TypeAlias = T | BrokerOperationError
Switch: TypeAlias = Statement[ScheduleName, ScheduleName]

WORKING = BrokerErrorCode.SCHEDULE_OPERATION_FAILED


def told(done: BrokerResult[Told[T]]) -> BrokerResult[T]:
    """Return a refusal as the Err it is."""
    if isinstance(done, Err):
        return Err(done.err_value)
    answer = done.ok_value
    return Err(answer) if isinstance(answer, BrokerOperationError) else Ok(answer)


def unknown(name: str) -> BrokerOperationError:
    """Return the refusal of an order for a schedule that is not there."""
    message = f"There is no schedule {name!r} on record."
    return BrokerOperationError(BrokerErrorCode.UNKNOWN_SCHEDULE, message)


def list_script() -> Script[list[ScheduleState]]:
    """Read every schedule on record."""
    states: list[ScheduleState] = yield list_schedules, ScheduleFilter(None)
    return states


def state_script(name: str) -> Script[Told[ScheduleState]]:
    """Read one schedule."""
    states: list[ScheduleState] = yield list_schedules, ScheduleFilter(name)
    return states[0] if states else unknown(name)


def switch_script(name: str, switch: Switch) -> Script[Told[ScheduleState]]:
    """Pause or resume a schedule and read how it stands then."""
    done = yield switch, ScheduleName(name)
    return (yield from state_script(name)) if done else unknown(name)


def remove_script(name: str) -> Script[BrokerOperationError | None]:
    """Forget a schedule that was added at run time."""
    if (yield remove_schedule, ScheduleName(name)):
        return None
    stays = yield from state_script(name)
    if isinstance(stays, BrokerOperationError):
        return stays
    message = f"Schedule {name!r} belongs to a configuration; take it out there."
    return BrokerOperationError(BrokerErrorCode.UNKNOWN_SCHEDULE, message)


def next_script(name: str, count: int) -> Script[Told[list[datetime]]]:
    """Tell the next slots of a schedule, from the timing on record."""
    state = yield from state_script(name)
    if isinstance(state, BrokerOperationError) or state.next_run_at is None:
        return state if isinstance(state, BrokerOperationError) else []
    try:
        timing = Timing.read(state.timing or "")
    except ValueError:
        message = f"The timing of schedule {name!r} cannot be read by this release."
        return BrokerOperationError(WORKING, message)
    return list(islice(timing.slots_from(state.next_run_at.astimezone(UTC)), count))


def runs_script(name: str, limit: int) -> Script[Told[list[ScheduleRun]]]:
    """Read the newest runs of a schedule."""
    runs: list[ScheduleRun] = yield list_schedule_runs, ListRuns(name, limit)
    if runs:
        return runs
    state = yield from state_script(name)
    return state if isinstance(state, BrokerOperationError) else []


# The class below has a method named list.
States: TypeAlias = list[ScheduleState]
Moments: TypeAlias = list[datetime]
Runs: TypeAlias = list[ScheduleRun]
RunHandle: TypeAlias = TaskHandle[Any] | WorkflowHandle[Any]
_Stored: TypeAlias = list[ScheduleDefinition]

_SUPPRESSED = BrokerOperationError(
    WORKING, "Sends are suppressed while modules are imported, and so are changes to schedules."
)


@dataclass(frozen=True, slots=True)
class Schedules:
    """The schedules in the database; every method has a twin for event loops, named ``..._async``.

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
        """Store a schedule next to those of the configuration; schedulers serve it at once.

        Adding the very same again changes nothing. Another one of that name is Err(SCHEDULE_EXISTS)
        unless ``replace`` is set; names of the configuration are never given away. The first slot is
        the next one after now. Raises HorsiesError for a schedule that cannot be served.
        """
        return self._change(self._add_script(schedule, replace))

    async def add_async(
        self, schedule: AnySchedule, *, replace: bool = False
    ) -> BrokerResult[ScheduleState]:
        """``add`` without blocking the event loop."""
        return await self._change_async(self._add_script(schedule, replace))

    def remove(self, name: str) -> BrokerResult[None]:
        """Forget a schedule that was added; its tasks and runs stay."""
        return self._change(remove_script(name))

    async def remove_async(self, name: str) -> BrokerResult[None]:
        """``remove`` without blocking the event loop."""
        return await self._change_async(remove_script(name))

    def list(self) -> BrokerResult[States]:
        """Return every schedule on record, by name; those of the configuration are on record once a
        scheduler has started.
        """
        return self._ask(list_script())

    async def list_async(self) -> BrokerResult[States]:
        """``list`` without blocking the event loop."""
        return await self._ask_async(list_script())

    def pause(self, name: str) -> BrokerResult[ScheduleState]:
        """Let the slots of a schedule pass, from now on and for all schedulers."""
        return self._change(switch_script(name, pause_schedule))

    async def pause_async(self, name: str) -> BrokerResult[ScheduleState]:
        """``pause`` without blocking the event loop."""
        return await self._change_async(switch_script(name, pause_schedule))

    def resume(self, name: str) -> BrokerResult[ScheduleState]:
        """Let a schedule fire again. Slots of the pause are over, unless it catches up missed ones."""
        return self._change(switch_script(name, resume_schedule))

    async def resume_async(self, name: str) -> BrokerResult[ScheduleState]:
        """``resume`` without blocking the event loop."""
        return await self._change_async(switch_script(name, resume_schedule))

    def run(self, name: str) -> BrokerResult[RunHandle]:
        """Send the task of a schedule now, or start its workflow, once; its timetable goes on as it
        was. The handle is that of the task or of the run.
        """
        ordered: BrokerResult[Work] = self._change(self._run_script(name))
        return ordered.map(self._handle)

    async def run_async(self, name: str) -> BrokerResult[RunHandle]:
        """``run`` without blocking the event loop."""
        ordered: BrokerResult[Work] = await self._change_async(self._run_script(name))
        return ordered.map(self._handle)

    def next_runs(self, name: str, count: int = 10) -> BrokerResult[Moments]:
        """Return the next slots of a schedule on record, in UTC."""
        return self._ask(next_script(name, count))

    async def next_runs_async(self, name: str, count: int = 10) -> BrokerResult[Moments]:
        """``next_runs`` without blocking the event loop."""
        return await self._ask_async(next_script(name, count))

    def runs(self, name: str, limit: int = 20) -> BrokerResult[Runs]:
        """Return the newest tasks or runs of a schedule, as long as they are kept."""
        return self._ask(runs_script(name, limit))

    async def runs_async(self, name: str, limit: int = 20) -> BrokerResult[Runs]:
        """``runs`` without blocking the event loop."""
        return await self._ask_async(runs_script(name, limit))

    def _ask(self, script: Script[Told[T]]) -> BrokerResult[T]:
        return told(self.producer.get_broker().perform(WORKING, script))

    async def _ask_async(self, script: Script[Told[T]]) -> BrokerResult[T]:
        return told(await self.producer.get_broker().perform_async(WORKING, script))

    def _change(self, script: Script[Told[T]]) -> BrokerResult[T]:
        return Err(_SUPPRESSED) if self.producer.are_sends_suppressed() else self._ask(script)

    async def _change_async(self, script: Script[Told[T]]) -> BrokerResult[T]:
        if self.producer.are_sends_suppressed():
            return Err(_SUPPRESSED)
        return await self._ask_async(script)

    def _add_script(self, schedule: AnySchedule, replace: bool) -> Script[Told[ScheduleState]]:
        """Check the schedule now, where mistakes are raised, and return what stores it."""
        if not schedule.enabled:
            raise schedule_error(schedule, "enabled is off; add it and pause it instead")
        entry = Entry.of(self._known(), schedule)
        raise_collected(ValidationReport("schedule", list(build_errors(entry))))
        is_configured = schedule.name in self._configured()
        return _add_script(entry, definition_json(entry), replace, is_configured)

    def _known(self) -> Known:
        return Known(self.producer.config, self.definitions(), self.app)

    def _configured(self) -> dict[str, AnySchedule]:
        config = self.producer.config.schedule
        return {} if config is None else {one.name: one for one in config.schedules}

    def _run_script(self, name: str) -> Script[Told[Work]]:
        stored: _Stored = yield read_schedule_definition, ScheduleName(name)
        try:
            entry = self._entry(name, stored[0].definition if stored else None)
        except (HorsiesError, ValueError, LookupError, TypeError) as problem:
            reason = problem.message if isinstance(problem, HorsiesError) else str(problem)
            return BrokerOperationError(WORKING, reason, exception=problem)
        if entry is None:
            return unknown(name)
        (standing,) = yield read_schedule_standings, ScheduleNames([name])
        match entry.target.by_order(standing.looked_at.astimezone(UTC)):
            case Err(reason):
                return BrokerOperationError(WORKING, reason)
            case Ok(work):
                yield _order(name, work)
                return work

    def _entry(self, name: str, definition: str | None) -> Entry | None:
        if definition is not None:
            return read_definition(self._known(), definition)
        schedule = self._configured().get(name)
        return None if schedule is None else Entry.of(self._known(), schedule)

    def _handle(self, work: Work) -> RunHandle:
        broker = self.producer.get_broker()
        if isinstance(work, RunPlan):
            return WorkflowHandle(work.id, broker, types=DeclaredTypes(work.nodes))
        return TaskHandle(work.id, broker, self.definitions()[work.task_name].results)


def _add_script(
    entry: Entry, text: str, replace: bool, is_configured: bool
) -> Script[Told[ScheduleState]]:
    schedule = entry.schedule
    if is_configured:
        return _taken(schedule.name)
    (standing,) = yield read_schedule_standings, ScheduleNames([schedule.name])
    order = AddSchedule(
        name=schedule.name,
        next_run_at=entry.timing.first_after(standing.looked_at.astimezone(UTC)),
        hash=entry.hash,
        timing=entry.timing_text,
        task_name=entry.task_name,
        definition_key=entry.definition_key,
        definition=text,
        replace=replace,
    )
    added = yield add_schedule, order
    return (yield from state_script(schedule.name)) if added else _taken(schedule.name)


def _taken(name: str) -> BrokerOperationError:
    message = f"There is another schedule {name!r} already; choose a new name, or replace=True."
    return BrokerOperationError(BrokerErrorCode.SCHEDULE_EXISTS, message)


def _order(name: str, work: Work) -> Step:
    if isinstance(work, RunPlan):
        return start_schedule, StartSchedule(work.id, work.text, name)
    return run_schedule, _run_params(name, work)


def _run_params(name: str, row: InsertTask) -> RunSchedule:
    return RunSchedule(
        id=row.id,
        task_name=row.task_name,
        queue_name=row.queue_name,
        priority=row.priority,
        kwargs=row.kwargs,
        sent_at=row.sent_at,
        good_until=row.good_until,
        max_retries=row.max_retries,
        task_options=row.task_options,
        timeout_ms=row.timeout_ms,
        enqueue_sha=row.enqueue_sha,
        schedule_name=name,
    )
