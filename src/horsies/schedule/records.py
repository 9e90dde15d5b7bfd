"""What can be asked and ordered of the schedules on record, with a database and nothing else.

Scripts, shared by `app.schedules` and the operator's commands. An order for a schedule that is not
there is refused as a value.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import TypeAlias, TypeVar

from horsies.broker import BrokerErrorCode, BrokerOperationError, BrokerResult
from horsies.db.query import Script, Statement
from horsies.db.schedules import (
    ListRuns,
    ScheduleFilter,
    ScheduleName,
    ScheduleRun,
    ScheduleState,
    list_schedule_runs,
    list_schedules,
    remove_schedule,
)
from horsies.result import Err, Ok
from horsies.timetable.timing import Timing

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
