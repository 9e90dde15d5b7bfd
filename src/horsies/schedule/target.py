"""The target of a schedule: what a slot sends, a task here, a run of a workflow in ``runs.py``.

Through the same path as a send: a row made here has the task's retry policy, queue, priority, time
limit and expiry, and an id that is always the same for the same schedule and slot. First station of the
line producer -> SQL -> turn -> child -> report -> result, with the scheduler as the producer; nothing
here talks to the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeAlias
from uuid import UUID

from horsies.config import AppConfig, PayloadConfig
from horsies.db.tasks import InsertTask
from horsies.definition import TaskDefinition, choose_queue
from horsies.ids import fixed_id, new_id
from horsies.request import UNSET, SendOptions, Stamp, prepare
from horsies.result import Result
from horsies.timetable.settings import TaskSchedule
from horsies.workflow.nodes import AnyNode

SCHEDULED_FOR = "scheduled_for"

_JITTER_STEPS = 1_000_003


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run of a workflow to start: its plan as JSON text, and for how long its first tasks wait."""

    id: str
    sent_at: datetime
    delay_seconds: float
    text: str = field(repr=False)
    nodes: tuple[AnyNode, ...] = field(repr=False)


Work: TypeAlias = InsertTask | RunPlan


class Target(Protocol):
    """What a schedule stands for: asked for a slot, it says what to put into the database."""

    def for_slot(self, slot: datetime) -> Result[Work, str]:
        """Return the task or run of this slot, always the same one, or why there can be none."""

    def by_order(self, moment: datetime) -> Result[Work, str]:
        """Return the task or run that somebody ordered at this moment."""


def run_id(schedule_name: str, slot: datetime) -> str:
    """Return the id of a schedule's task or run for a slot; whoever computes it gets the same.

    In the order of slots, as other ids are in the order of sending: a digest alone would put what
    a schedule sends anywhere among the others, in lists and in the index.
    """
    return fixed_id(slot, f"{schedule_name}\0{slot.astimezone(UTC).isoformat()}")


class ArgumentProblem(ValueError):
    """Why the arguments of a schedule cannot be passed to its task or workflow."""


@dataclass(frozen=True, slots=True)
class TaskTarget:
    """A task to send, with its arguments by name and the schedule's queue and options."""

    schedule: TaskSchedule
    definition: TaskDefinition
    kwargs: Mapping[str, Any]
    limits: PayloadConfig

    @classmethod
    def of(
        cls, config: AppConfig, definition: TaskDefinition, schedule: TaskSchedule
    ) -> TaskTarget:
        """Bind the schedule's arguments to the task; ArgumentProblem when they do not fit."""
        kwargs = bound_by_name(definition, schedule.args, schedule.kwargs)
        if schedule.queue_name is not None:
            queue = choose_queue(config, schedule.queue_name, None)
            definition = replace(definition, queue_name=queue.name, priority=queue.priority)
        return cls(schedule, definition, kwargs, config.payload)

    def for_slot(self, slot: datetime) -> Result[Work, str]:
        """Return the row of this slot; its delay is the slot's share of the jitter."""
        stamp = Stamp(run_id(self.schedule.name, slot), slot)
        return self._row(stamp, self.schedule.jitter_seconds * jitter_share(stamp.task_id))

    def by_order(self, moment: datetime) -> Result[Work, str]:
        """Return the row of a run that somebody ordered at this moment, under an id of its own."""
        return self._row(Stamp(new_id(), moment), 0)

    def _row(self, stamp: Stamp, delay_seconds: float) -> Result[Work, str]:
        kwargs = dict(self.kwargs)
        if takes_slot(self.definition):
            kwargs[SCHEDULED_FOR] = stamp.sent_at
        options = SendOptions(self._good_until(stamp.sent_at), priority=self.schedule.priority)
        prepared = prepare(
            self.limits, self.definition, options, (), kwargs, delay_seconds or UNSET, stamp
        )
        return prepared.map(lambda request: request.row).map_err(lambda error: error.message)

    def _good_until(self, moment: datetime) -> datetime | None:
        seconds = self.schedule.good_for_seconds
        return None if seconds is None else moment + timedelta(seconds=seconds)


def takes_slot(definition: TaskDefinition) -> bool:
    """Tell whether the task declares a parameter for the slot it was sent for."""
    return SCHEDULED_FOR in definition.signature.names.spots


def jitter_share(task_id: str) -> float:
    """Return a number from 0 to 1 that is scattered over slots and fixed for each."""
    return UUID(task_id).int % _JITTER_STEPS / _JITTER_STEPS


def bound_by_name(
    definition: TaskDefinition, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments by name; whether they suffice is asked when a row is made of them."""
    names = definition.signature.names
    if len(args) > len(names.positional):
        raise ArgumentProblem(
            f"{len(args)} positional arguments are too many; the parameters are {names.shown}"
        )
    by_position = dict(zip(names.positional, args, strict=False))
    for name in by_position:
        if name not in names.spots:
            raise ArgumentProblem(f"parameter {name!r} cannot be passed by name, as schedules do")
        if name in kwargs:
            raise ArgumentProblem(f"argument {name!r} is given twice")
    together = by_position | dict(kwargs)
    if SCHEDULED_FOR in together and takes_slot(definition):
        raise ArgumentProblem(f"{SCHEDULED_FOR!r} is filled in by the scheduler; leave it out")
    for name in together.keys() & definition.signature.injected:
        raise ArgumentProblem(f"{name!r} is filled in by workflows; leave it out")
    return together
