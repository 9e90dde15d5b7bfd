"""The target of a schedule: what a slot sends, a task here, a run of a workflow in ``runs.py``.

Through the same path as a send: a row made here has the task's retry policy, queue, priority, time
limit and expiry, and an id that is always the same for the same schedule and slot. First station of the
line producer -> SQL -> turn -> child -> report -> result, with the scheduler as the producer; nothing
here talks to the database.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeAlias
from uuid import UUID

from horsies.codec.calls import CallSignature
from horsies.config.app import AppConfig, PayloadConfig
from horsies.config.schedules import TaskSchedule, WorkflowSchedule
from horsies.db.statements.tasks import InsertTask
from horsies.errors import HorsiesError
from horsies.ids import fixed_id, new_id
from horsies.result import Err, Ok, Result
from horsies.task_result import exception_text
from horsies.tasks.definition import TaskDefinition, choose_queue
from horsies.tasks.request import UNSET, SendOptions, Stamp, prepare
from horsies.workflow.build.plan import plan
from horsies.workflow.definition import BuildsSpecs, WorkflowDefinition, build_child
from horsies.workflow.nodes.nodes import AnyNode
from horsies.workflow.spec import WorkflowSpec

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
    pipeline = by_position | dict(kwargs)
    if SCHEDULED_FOR in pipeline and takes_slot(definition):
        raise ArgumentProblem(f"{SCHEDULED_FOR!r} is filled in by the scheduler; leave it out")
    for name in pipeline.keys() & definition.signature.injected:
        raise ArgumentProblem(f"{name!r} is filled in by workflows; leave it out")
    return pipeline


AnyDefinition = type[WorkflowDefinition[Any]]


@dataclass(frozen=True, slots=True)
class WorkflowTarget:
    """A workflow to start, with the parameters of its definition as JSON text.

    They are read again for every run, so that no run can change those of the next.
    """

    schedule: WorkflowSchedule
    definition: AnyDefinition
    signature: CallSignature | None
    kwargs_json: str
    app: BuildsSpecs

    @classmethod
    def of(
        cls,
        app: BuildsSpecs,
        definition: AnyDefinition,
        schedule: WorkflowSchedule,
        some_slot: datetime,
    ) -> WorkflowTarget:
        """Bind the schedule's arguments to ``build_with``; ArgumentProblem when they do not fit."""
        signature = _signature(definition)
        kwargs_json = _kwargs_json(definition, signature, schedule, some_slot)
        return cls(schedule, definition, signature, kwargs_json, app)

    def for_slot(self, slot: datetime) -> Result[Work, str]:
        """Return the run of this slot; its first tasks wait for the slot's share of the jitter."""
        workflow_id = run_id(self.schedule.name, slot)
        delay_seconds = self.schedule.jitter_seconds * jitter_share(workflow_id)
        return self._run(workflow_id, slot, delay_seconds)

    def by_order(self, moment: datetime) -> Result[Work, str]:
        """Return the run that somebody ordered at this moment, under an id of its own."""
        return self._run(new_id(), moment, 0)

    def build(self, moment: datetime) -> WorkflowSpec[Any]:
        """Make the specification for a slot or an order; whatever the definition raises passes."""
        if self.signature is None:
            return self.definition.build(self.app)
        kwargs = self.signature.decode_keywords(self.kwargs_json).unwrap()
        if _takes_slot(self.signature):
            kwargs[SCHEDULED_FOR] = moment
        return build_child(self.app, self.definition, kwargs)

    def _run(self, workflow_id: str, moment: datetime, delay_seconds: float) -> Result[Work, str]:
        try:
            spec = self.build(moment)
            text = plan(spec, workflow_id, sent_at=moment)
        except HorsiesError as error:
            return Err(f"Workflow {self.definition.__name__} was not started: {error.message}")
        except Exception as error:  # the user's build_with may raise anything
            reason = f"{type(error).__name__}: {exception_text(error)}"
            return Err(f"Workflow {self.definition.__name__} could not be built: {reason}")
        return Ok(RunPlan(workflow_id, moment, delay_seconds, text, spec.tasks))


def _signature(definition: AnyDefinition) -> CallSignature | None:
    try:
        return definition.build_signature()
    except ValueError as error:
        problem = f"{definition.__name__}.build_with cannot be called: {error}"
        raise ArgumentProblem(problem) from error


def _kwargs_json(
    definition: AnyDefinition,
    signature: CallSignature | None,
    schedule: WorkflowSchedule,
    some_slot: datetime,
) -> str:
    if signature is None:
        if schedule.kwargs:
            raise ArgumentProblem(f"{definition.__name__} has no build_with to take kwargs")
        return "{}"
    if SCHEDULED_FOR in schedule.kwargs and _takes_slot(signature):
        raise ArgumentProblem(f"{SCHEDULED_FOR!r} is filled in by the scheduler; leave it out")
    for name in schedule.kwargs.keys() & signature.injected:
        raise ArgumentProblem(f"{name!r} is filled in by workflows; leave it out")
    slot = {SCHEDULED_FOR: some_slot} if _takes_slot(signature) else {}
    if isinstance(refused := signature.encode_call((), schedule.kwargs | slot), Err):
        message = refused.err_value.message.rstrip(".")
        raise ArgumentProblem(f"{definition.__name__} cannot be built: {message}")
    return signature.encode_keywords(schedule.kwargs).unwrap()


def _takes_slot(signature: CallSignature) -> bool:
    return SCHEDULED_FOR in signature.names.spots


def as_definition(candidate: object) -> AnyDefinition | None:
    """Return a class as the workflow definition it is, or None when it is something else."""
    is_class = inspect.isclass(candidate) and issubclass(candidate, WorkflowDefinition)
    return candidate if is_class else None  # type: ignore[return-value]
