"""A schedule's target: the task that a slot sends, or the workflow that it starts.

A task created here has its task's retry policy, queue, priority, time limit and expiry, like a sent
task. Its id depends only on the schedule and the slot. Nothing here uses the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

from horsies.codec.calls import CallSignature
from horsies.config.app import AppConfig
from horsies.config.schedules import TaskSchedule, WorkflowSchedule
from horsies.config.tracing import TracingConfig
from horsies.db.statements.tasks import InsertTask
from horsies.errors import HorsiesError
from horsies.ids import fixed_id, new_id
from horsies.result import Err, Ok, Result
from horsies.task_result import exception_text
from horsies.tasks.definition import TaskDefinition, choose_queue
from horsies.tasks.options import UNSET, SendOptions
from horsies.tasks.request import Stamp, prepare
from horsies.tracing import Sending, with_carrier
from horsies.workflow.build.plan import plan, with_trace
from horsies.workflow.definition import AnyDefinition, BuildsSpecs
from horsies.workflow.nodes.nodes import AnyNode
from horsies.workflow.spec import WorkflowSpec

SCHEDULED_FOR = "scheduled_for"
# Stands in for a real slot when arguments are checked.
SAMPLE_SLOT = datetime(2026, 1, 1, tzinfo=UTC)

_JITTER_STEPS = 1_000_003


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A workflow run to start: its plan as JSON text, and the delay before its first tasks."""

    id: str
    sent_at: datetime
    delay_seconds: float
    plan: str = field(repr=False)
    nodes: tuple[AnyNode, ...] = field(repr=False)
    tracing: TracingConfig | None = None


Work: TypeAlias = InsertTask | RunPlan
# The target of a schedule. It creates a task or run with a given id and time, or returns the reason
# why it cannot.
Target: TypeAlias = "TaskTarget | WorkflowTarget"


def work_for_slot(target: Target, slot: datetime) -> Result[Work, str]:
    """Return the task or run for this slot. Its id and its share of the jitter are the same on every
    call.
    """
    stamp = Stamp(run_id(target.schedule.name, slot), slot)
    return target.make(stamp, target.schedule.jitter_seconds * jitter_share(stamp.task_id))


def traced_work(target: Target, work: Work) -> tuple[Work, Sending | None]:
    """Return the task or run with the context of a new root span if the application uses tracing.

    The caller ends the span once the task or run is stored.
    """
    tracing = work.tracing if isinstance(work, RunPlan) else None
    if isinstance(target, TaskTarget):
        tracing = target.config.tracing
    if tracing is None:
        return work, None
    name = target.schedule.name
    attributes: dict[str, str | int] = {"horsies.schedule.name": name}
    if isinstance(work, RunPlan):
        attributes["horsies.workflow.id"] = work.id
        sending = Sending(tracing, f"start {name}", attributes, is_later=True, is_root=True)
        return replace(work, plan=with_trace(work.plan, sending.carrier)), sending
    attributes |= {"messaging.message.id": work.id, "messaging.destination.name": work.queue_name}
    title = f"send {work.task_name}"
    sending = Sending(tracing, title, attributes, is_later=True, is_root=True)
    return work._replace(task_options=with_carrier(work.task_options, sending.carrier)), sending


def work_for_now(target: Target, now: datetime) -> Result[Work, str]:
    """Return a task or run with a new id, outside the timetable."""
    return target.make(Stamp(new_id(), now), 0)


class ArgumentProblem(ValueError):
    """The reason why a schedule's arguments or queue do not fit its task or workflow."""


def run_id(schedule_name: str, slot: datetime) -> str:
    """Return the id of a schedule's task or run for a slot; every scheduler computes the same id.

    The ids sort by slot, as other ids sort by the time of the send. Plain digests would scatter a
    schedule's tasks over lists and indexes.
    """
    return fixed_id(slot, f"{schedule_name}\0{slot.astimezone(UTC).isoformat()}")


def jitter_share(task_id: str) -> float:
    """Return a number from 0 to 1 that depends only on the slot."""
    return UUID(task_id).int % _JITTER_STEPS / _JITTER_STEPS


def _takes_slot(signature: CallSignature) -> bool:
    return SCHEDULED_FOR in signature.names.spots


def _refuse_injected(signature: CallSignature, kwargs: Mapping[str, Any]) -> None:
    if SCHEDULED_FOR in kwargs and _takes_slot(signature):
        raise ArgumentProblem(f"{SCHEDULED_FOR!r} is filled in by the scheduler; leave it out")
    for name in kwargs.keys() & signature.injected:
        raise ArgumentProblem(f"{name!r} is filled in by workflows or workers; leave it out")


@dataclass(frozen=True, slots=True)
class TaskTarget:
    """A task to send, with its arguments by name, and the schedule's queue and options."""

    schedule: TaskSchedule
    definition: TaskDefinition
    kwargs: Mapping[str, Any]
    config: AppConfig

    @classmethod
    def of(
        cls, config: AppConfig, definition: TaskDefinition, schedule: TaskSchedule
    ) -> TaskTarget:
        """Apply the schedule's queue and arguments to the task; raise ArgumentProblem if they do not fit."""
        if schedule.queue_name is not None:
            try:
                queue = choose_queue(config, schedule.queue_name, None)
            except HorsiesError as error:
                raise ArgumentProblem(error.message.rstrip(".")) from error
            definition = replace(definition, queue_name=queue.name, priority=queue.priority)
        kwargs = bound_by_name(definition.signature, schedule.args, schedule.kwargs)
        target = cls(schedule, definition, kwargs, config)
        if isinstance(refused := work_for_slot(target, SAMPLE_SLOT), Err):
            raise ArgumentProblem(refused.err_value.rstrip("."))
        return target

    def make(self, stamp: Stamp, delay_seconds: float) -> Result[Work, str]:
        kwargs = dict(self.kwargs)
        if _takes_slot(self.definition.signature):
            kwargs[SCHEDULED_FOR] = stamp.sent_at
        seconds = self.schedule.good_for_seconds
        good_until = None if seconds is None else stamp.sent_at + timedelta(seconds=seconds)
        options = SendOptions(good_until, priority=self.schedule.priority)
        prepared = prepare(
            self.config,
            self.definition,
            options,
            (),
            kwargs,
            delay_seconds=delay_seconds or UNSET,
            stamp=stamp,
        )
        return prepared.map(lambda request: request.row).map_err(lambda error: error.message)


def bound_by_name(
    signature: CallSignature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments by name. Missing arguments are detected later, when a row is created."""
    names = signature.names
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
    by_name = by_position | dict(kwargs)
    _refuse_injected(signature, by_name)
    return by_name


@dataclass(frozen=True, slots=True)
class WorkflowTarget:
    """A workflow to start, with its definition's parameters as JSON text.

    The parameters are decoded again for every run, so that one run cannot change the parameters of the
    next.
    """

    schedule: WorkflowSchedule
    definition: AnyDefinition
    signature: CallSignature | None
    kwargs_json: str
    app: BuildsSpecs

    @classmethod
    def of(
        cls, app: BuildsSpecs, definition: AnyDefinition, schedule: WorkflowSchedule
    ) -> WorkflowTarget:
        """Bind the schedule's arguments to ``build_with``; raise ArgumentProblem if they do not fit."""
        try:
            signature = definition.build_signature()
        except ValueError as error:
            problem = f"{definition.__name__}.build_with cannot be called: {error}"
            raise ArgumentProblem(problem) from error
        kwargs_json = _encode_kwargs(definition, signature, schedule.kwargs)
        return cls(schedule, definition, signature, kwargs_json, app)

    def build(self, scheduled_for: datetime) -> WorkflowSpec[Any]:
        """Build the specification; exceptions raised by the definition propagate."""
        if self.signature is None:
            return self.definition.build(self.app)
        kwargs = self.signature.decode_keywords(self.kwargs_json).unwrap()
        if _takes_slot(self.signature):
            kwargs[SCHEDULED_FOR] = scheduled_for
        return self.definition.build_with(self.app, **kwargs)

    def make(self, stamp: Stamp, delay_seconds: float) -> Result[Work, str]:
        try:
            spec = self.build(stamp.sent_at)
            text = plan(spec, stamp.task_id, sent_at=stamp.sent_at)
        except HorsiesError as error:
            return Err(f"Workflow {self.definition.__name__} was not started: {error.message}")
        except Exception as error:  # the user's build_with may raise anything
            reason = f"{type(error).__name__}: {exception_text(error)}"
            return Err(f"Workflow {self.definition.__name__} could not be built: {reason}")
        producer = spec.graph.producer
        tracing = producer.config.tracing if producer else None
        return Ok(RunPlan(stamp.task_id, stamp.sent_at, delay_seconds, text, spec.tasks, tracing))


def _encode_kwargs(
    definition: AnyDefinition, signature: CallSignature | None, kwargs: dict[str, Any]
) -> str:
    if signature is None:
        if kwargs:
            raise ArgumentProblem(f"{definition.__name__} has no build_with to take kwargs")
        return "{}"
    _refuse_injected(signature, kwargs)
    slot = {SCHEDULED_FOR: SAMPLE_SLOT} if _takes_slot(signature) else {}
    if isinstance(refused := signature.encode_call((), kwargs | slot), Err):
        message = refused.err_value.message.rstrip(".")
        raise ArgumentProblem(f"{definition.__name__} cannot be built: {message}")
    return signature.encode_keywords(kwargs).unwrap()
