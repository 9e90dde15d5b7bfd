"""Known tasks: which tasks this worker's version of the application can run, and which it leaves to other
workers.

During a deployment two releases of an application share the queues. A worker registers the names of its tasks
and sub-workflows, each with a fingerprint of its parameters. If a worker claims a task that it does not know,
or whose stored call does not fit, it releases the task without counting an attempt, and excludes it from
later claims. If the name is unknown, claims exclude all tasks with that name; otherwise they exclude only
this task, because another call with the same name may fit. Such a refusal is stored with the fingerprint, so
that workers with the same parameters skip the task without claiming it. The task fails if no worker has taken
it during the grace period. The run of a durable function does not fail in this way if its name is unknown or
if it has recorded a step: it waits for a worker that can continue it.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema, from_json

from horsies.app import Horsies
from horsies.codec.calls import CallSignature
from horsies.codec.results import encode_task_error
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.blocked import find_due
from horsies.db.statements.refusals import (
    DAMAGED,
    KEY_REFUSAL,
    UNREACHABLE,
    RefusedTask,
    Taker,
    find_takers,
    refuse_tasks,
)
from horsies.db.statements.turn import ClaimedTask, ClaimUnresolvable, claim_unresolvable
from horsies.error_codes import OperationalErrorCode
from horsies.logs import as_event, headers_to_log
from horsies.task_result import TaskError
from horsies.tasks.blocked import Blocked, Change
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.options import NO_OPTIONS, retention_seconds
from horsies.tasks.outcome import Failure, Outcome, outcome_of_error
from horsies.tasks.request import max_retries
from horsies.words import first_sentence
from horsies.worker.agenda import NEVER
from horsies.worker.child.builtin_tasks import BUILTIN_TASKS, expansion_request
from horsies.workflow.build.plan import EXPAND_TASK
from horsies.workflow.definition import AnyDefinition, definition_by_key, definition_keys
from horsies.workflow.expand import missing_definition

logger = logging.getLogger("horsies.worker")

# The longest time for which claims exclude a refused task that has waited for longer than the grace
# period.
PAUSE_SECONDS = 60.0
UNRESOLVABLE_BATCH = 100

_FINGERPRINT_CHARACTERS = 12
# The largest bigint.
_NO_LIMIT = 2**63 - 1
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Wanted(NamedTuple):
    """The requirement of a task: a kind ("tasks", "workflows" or "keys"), a name, and the fingerprint of this
    worker's version.
    """

    kind: str
    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class KnownTasks:
    """An application's tasks and sub-workflows, each with the fingerprint of its parameters, and its keys."""

    tasks: Mapping[str, str] = field(default_factory=dict)
    workflows: Mapping[str, str] = field(default_factory=dict)
    # The ids of the keys and stores with which the application reads payload.
    keys: Sequence[str] = ()

    @classmethod
    def of(cls, app: Horsies) -> KnownTasks:
        tasks = {name: fingerprint(one.signature) for name, one in app.definitions().items()}
        workflows = {
            key: _build_fingerprint(definition)
            for key in definition_keys()
            if (definition := definition_by_key(key)) is not None
        }
        payloads = app.get_broker().database.payloads
        keys = () if payloads is None else sorted(payloads.key_ids)
        return cls(tasks | dict.fromkeys(BUILTIN_TASKS, fingerprint(None)), workflows, keys)

    def as_json(self) -> str:
        known = {"tasks": self.tasks, "workflows": self.workflows}
        return json.dumps(known | ({"keys": self.keys} if self.keys else {}))

    def wanted_by(self, task: ClaimedTask) -> Wanted:
        """Return the requirement of a task: for an expansion its sub-workflow, otherwise the task function;
        without a fingerprint if it is unknown.
        """
        if task.task_name == EXPAND_TASK and (key := _definition_key(task.kwargs or "")):
            return Wanted("workflows", key, self.workflows.get(key, ""))
        return Wanted("tasks", task.task_name, self.tasks.get(task.task_name, ""))


def task_defaults(app: Horsies) -> str:
    """Return the settings in the application's task decorators as JSON, for sends from SQL and for
    signals.
    """
    config = app.config
    queues = {
        queue.name: {
            "priority": queue.priority,
            "retention_seconds": retention_seconds(config, queue.name, NO_OPTIONS),
        }
        for queue in config.queues()
    }
    limit = config.payload.reject_bytes
    return json.dumps(
        [
            {
                "task_name": name,
                "queue_name": task.queue_name,
                "queues": queues,
                "retry_policy": task.retry_policy.to_json() if task.retry_policy else None,
                "max_retries": max_retries(task),
                "timeout_ms": task.timeout_ms,
                "is_async": task.may_share_process,
                "burst": task.burst,
                "key_parameter": task.key.parameter or None if task.key else None,
                "computes_key": task.key is not None and task.key.function is not None,
                "fixed_key": task.key.fixed if task.key else None,
                "is_durable": task.durable is not None,
                "signals": _declared_signals(task),
                "encrypts": config.broker.codec is not None,
                "reject_bytes": _NO_LIMIT if limit is None else limit,
            }
            for name, task in sorted(app.definitions().items())
        ]
    )


def _declared_signals(task: TaskDefinition) -> list[str] | None:
    declared = task.durable.signals if task.durable is not None else None
    return None if declared is None else list(declared)


def _definition_key(kwargs_json: str) -> str | None:
    """Return the definition's key in a stored expansion; None if the text is malformed, which the child
    reports.
    """
    request = expansion_request(kwargs_json)
    key: Any = None if request is None else request[0]
    return key if isinstance(key, str) and key.isprintable() else None


def fingerprint(signature: CallSignature | None) -> str:
    """Return a short hash of the parameters that a call may pass, and of their types."""
    parts = None if signature is None else (signature.names, _types(signature))
    return sha256(repr(parts).encode()).hexdigest()[:_FINGERPRINT_CHARACTERS]


def _build_fingerprint(definition: AnyDefinition) -> str:
    try:
        return fingerprint(definition.build_signature())
    except ValueError:  # the child that expands the sub-workflow reports the annotation
        return "unreadable"


def _types(signature: CallSignature) -> list[tuple[str, str]]:
    annotated = sorted(signature.annotations.items())
    return [(name, _type_text(one)) for name, one in annotated if name != "return"]


class _WithoutDefaults(GenerateJsonSchema):
    """Return a type's schema without the values of defaults, which may differ between processes.

    Otherwise workers of the same release would have different fingerprints, and a call that fits none of them
    would never fail. The schema includes whether a field has a default.
    """

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def _type_text(annotation: Any) -> str:
    """Return a type as text, which is the same in every process and changes when a model's fields change."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schema = TypeAdapter(annotation).json_schema(schema_generator=_WithoutDefaults)
            return json.dumps(schema, sort_keys=True)
    except Exception:  # not every type has a JSON schema
        return _ADDRESS.sub("", repr(annotation))


class Exclusions(NamedTuple):
    """Tasks that a claim excludes: by name, or by the fingerprints that refused them."""

    names: Sequence[str] = ()
    refused_by: Sequence[str] = ()


NO_EXCLUSIONS = Exclusions()
# Claimed tasks that were not called, each with the outcome to record if it is not left to other workers.
Uncalled: TypeAlias = Sequence[tuple[ClaimedTask, Outcome]]


class UnknownTasks:
    """Keeps track of the tasks that this worker has claimed but cannot run. It does no I/O."""

    def __init__(self, known: KnownTasks, grace_seconds: float, check_seconds: float) -> None:
        self.known = known
        self._grace_seconds = grace_seconds
        self._check_seconds = min(check_seconds, grace_seconds)
        self._pause_seconds = min(PAUSE_SECONDS, grace_seconds)
        self._check_at = NEVER
        # For each unknown name, when this worker first claimed a task with it. Claims exclude the name
        # permanently.
        self._met_at: dict[str, float] = {}
        # For each fingerprint, until when the last refused task is excluded, and when to claim refused tasks
        # again.
        self._refused: dict[str, tuple[float, float]] = {}
        # What this worker has warned of. As long as this is empty, nothing is excluded and nothing is to be
        # checked; callers that handle every claim look here first.
        self.warned: set[Wanted] = set()
        # Returns whether names alone show that all of these tasks are known. It is a method of a set, because
        # every claim calls it.
        self.knows_names: Callable[[Iterable[str]], bool] = (
            known.tasks.keys() - {EXPAND_TASK}
        ).issuperset

    @property
    def has_exclusions(self) -> bool:
        """Whether claims exclude any task."""
        return bool(self._met_at or self._refused)

    def exclusions(self) -> Exclusions:
        if not self.has_exclusions:
            return NO_EXCLUSIONS
        return Exclusions(list(self._met_at), list(self._refused))

    def is_unknown(self, task: ClaimedTask) -> bool:
        """Return whether this worker has no task or sub-workflow with that name."""
        name = task.task_name
        if name not in self.known.tasks:
            return True
        return name == EXPAND_TASK and not self.known.wanted_by(task).fingerprint

    def note_unknown(self, task: ClaimedTask, now: float) -> Outcome | None:
        """Note that this worker has claimed a task that it does not know. For an expansion, return the
        outcome to record if no other worker knows the sub-workflow either.
        """
        wanted = self.known.wanted_by(task)
        if wanted.kind == "workflows":
            code = OperationalErrorCode.SUBWORKFLOW_LOAD_FAILED
            return _failure(task, code, missing_definition(wanted.name))
        self._warn(wanted, task)
        self._met_at.setdefault(wanted.name, now)
        self._check_at = min(self._check_at, now + self._grace_seconds)
        return None

    def refusal(self, worker_id: str, uncalled: Uncalled) -> tuple[Step, Step]:
        """Return statements that store the refusal of these tasks and find workers that may run them."""
        tasks = list({task.id: (task, outcome) for task, outcome in uncalled}.values())
        wanted = [self._wanted(task, outcome) for task, outcome in tasks]
        ids = [task.id for task, _ in tasks]
        refuse = refuse_tasks(
            worker_id,
            self._grace_seconds,
            self._pause_seconds,
            ids,
            [one.fingerprint for one in wanted],
            [_storable(outcome.error_message or "") for _, outcome in tasks],
        )
        kinds, names = [one.kind for one in wanted], [one.name for one in wanted]
        queues = [task.queue_name for task, _ in tasks]
        return refuse, find_takers(self._grace_seconds, ids, kinds, names, queues)

    def _wanted(self, task: ClaimedTask, outcome: Outcome) -> Wanted:
        """Return what this worker lacks for the task: the key of its payload, or parameters that fit the
        call.
        """
        key_id = _missing_key(outcome)
        if key_id is None:
            return self.known.wanted_by(task)
        return Wanted("keys", key_id, f"{KEY_REFUSAL}{key_id}")

    def left(
        self,
        uncalled: Uncalled,
        refused: Iterable[RefusedTask],
        takers: Sequence[Taker],
        now: float,
    ) -> set[str]:
        """Return the tasks to leave to other workers; the other tasks fail.

        A task is left to other workers while one of them may take it, and for the grace period after that. A
        prefetched task is always left, because only a started task can fail. A task without a query result is
        left too, because its refusal could not be stored. Tasks whose encryption key is missing and runs with
        recorded steps never fail.
        """
        asked = {one.id for one in takers}
        left = {one.id for one in takers if one.is_known or one.is_recent or one.has_record}
        left |= {task.id for task, _ in uncalled if task.worker_pid is None or task.id not in asked}
        left |= {task.id for task, outcome in uncalled if _missing_key(outcome) is not None}
        for task, outcome in uncalled:
            if task.id in left:
                self._warn(self._wanted(task, outcome), task, outcome.error_message or "")
        for one in refused:
            if one.id in left:
                until, look_at = self._refused.get(one.fingerprint, (0.0, NEVER))
                ends_at = now + one.seconds
                self._refused[one.fingerprint] = max(until, ends_at), min(look_at, ends_at)
        return left

    def next_at(self) -> float:
        """Return when to check refused tasks again, or to search for tasks that no worker knows."""
        if not self.warned:
            return NEVER
        return min([self._check_at, *(look_at for _, look_at in self._refused.values())])

    def forget_old(self, now: float) -> bool:
        """Forget expired exclusions; return True if claims may therefore return refused tasks again."""
        looks = [one for one, (_, look_at) in self._refused.items() if look_at <= now]
        for one in looks:
            until, _ = self._refused.pop(one)
            if until > now:
                self._refused[one] = until, min(until, now + self._check_seconds)
        return bool(looks)

    def check(
        self, worker_id: str, hostname: str, queues: Sequence[str], now: float
    ) -> ClaimUnresolvable | None:
        """Return the parameters of the statement that claims tasks unknown to every worker; None if it is
        too early.
        """
        if now < self._check_at:
            return None
        self._check_at = now + self._check_seconds
        names = [
            name for name, met_at in self._met_at.items() if now - met_at >= self._grace_seconds
        ]
        if not names:
            return None
        return ClaimUnresolvable(
            worker_id, hostname, queues, names, self._grace_seconds, UNRESOLVABLE_BATCH
        )

    def check_again(self) -> None:
        """Note that there may be more tasks that no worker knows."""
        self._check_at = 0.0

    def outcome(self, task: ClaimedTask) -> Outcome:
        """Return the failure of a task that no worker has known during the grace period."""
        text = (
            f"No worker of queue {task.queue_name!r} has had a task {task.task_name!r} for "
            f"{self._grace_seconds:g} s (unknown_task_grace_ms); add its module to discover_tasks, "
            "or send it to a queue of workers that have it."
        )
        about = {"task_id": task.id, "task_name": task.task_name}
        logger.error("%s", text, extra=about | headers_to_log(task.task_options))
        return _failure(task, OperationalErrorCode.WORKER_RESOLUTION_ERROR, text)

    def _warn(self, wanted: Wanted, task: ClaimedTask, message: str = "") -> None:
        """Log once that tasks like this one are left to other workers; the message explains why a call does
        not fit.
        """
        if wanted in self.warned:
            return
        self.warned.add(wanted)
        queue_name = task.queue_name
        what = "workflow with the definition key" if wanted.kind == "workflows" else "task"
        one = f"{what} {wanted.name!r} on queue {queue_name!r}"
        if wanted.kind == "keys":
            text = (
                f"this worker holds tasks on queue {queue_name!r} (PAYLOAD_UNREADABLE): {message}"
            )
        elif wanted.fingerprint:
            text = (
                f"this worker cannot call {one} as it was sent and leaves it to other workers: "
                f"{first_sentence(message)}; deploy the same release to every worker of the queue"
            )
        else:
            text = (
                f"this worker has no {one} and leaves it to other workers; add its module to "
                "discover_tasks, deploy the same release to every worker, or use a queue of its own"
            )
        event = as_event("unknown_task", task_name=wanted.name, queue=queue_name, task_id=task.id)
        logger.warning("%s", text, extra=event | headers_to_log(task.task_options))


def claim_unknown(
    pipeline: Pipeline, claim: ClaimUnresolvable, blocked: Blocked
) -> list[ClaimedTask]:
    """Claim tasks that no worker knows: all in one transaction or, after the database refused this, each in
    its own transaction.
    """
    claim = claim._replace(excluded=blocked.excluded())
    return blocked.isolated(
        pipeline,
        "start",
        lambda: pipeline.run([(claim_unresolvable, claim)])[0],
        lambda: _claim_unknown_one_by_one(pipeline, claim, blocked),
        "unknown tasks",
    )


def _claim_unknown_one_by_one(
    pipeline: Pipeline, claim: ClaimUnresolvable, blocked: Blocked
) -> list[ClaimedTask]:
    find = find_due(
        claim.queues, claim.excluded, (), claim.limit, (), claim.names, claim.grace_seconds
    )
    (found,) = pipeline.run([find])
    claimed: list[ClaimedTask] = []
    for due in found:
        step = claim_unresolvable, claim._replace(only=[due.id])
        # The action is not named "claim", because after a refused "claim" the worker would claim known tasks
        # one by one too.
        answers = blocked.attempt(pipeline, Change("start", due.id, due.workflow_id), [step])
        claimed += answers[0] if answers else ()
    return claimed


def _failure(task: ClaimedTask, code: OperationalErrorCode, message: str) -> Outcome:
    """Return the outcome for a child's report of this error: a retry if the policy lists the code."""
    result = encode_task_error(TaskError(error_code=code, message=message))
    return outcome_of_error(task, Failure(code.value, message, result))


def _missing_key(outcome: Outcome) -> str | None:
    """Return the id of the key or store that a child lacks for its task's payload, or that failed to
    return it.
    """
    if outcome.error_code != OperationalErrorCode.PAYLOAD_UNREADABLE:
        return None
    data = from_json(outcome.result)["err"]["data"]
    if data.get("is_unreachable"):
        return f"{data['key_id']}{UNREACHABLE}"
    return f"{data['key_id']}{DAMAGED if data.get('is_damaged') else ''}"


def _storable(text: str) -> str:
    """Escape a message so that every database encoding accepts it; the message may contain names chosen by
    users.
    """
    return text.encode("ascii", "backslashreplace").decode()
