"""The target that is a workflow: a slot becomes the plan of a run.

The definition is built anew for every slot, in the scheduler's own process, and told the slot when its
``build_with`` asks for it. The id is made as that of a task. What the definition raises is an answer
here, so that one broken workflow does not keep other schedules back.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from horsies.codec import CallSignature
from horsies.errors import HorsiesError
from horsies.ids import new_id
from horsies.raised import exception_text
from horsies.result import Err, Ok, Result
from horsies.schedule.target import (
    SCHEDULED_FOR,
    ArgumentProblem,
    RunPlan,
    Work,
    jitter_share,
    run_id,
)
from horsies.timetable.settings import WorkflowSchedule
from horsies.workflow.definition import BuildsSpecs, WorkflowDefinition, build_child
from horsies.workflow.plan import plan
from horsies.workflow.spec import WorkflowSpec

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
